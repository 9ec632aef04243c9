"""Noise that follows from where it is used."""

import torch

from loopformer.model.noise import normal_noise


def test_noise_is_normal_and_its_rows_and_places_have_nothing_in_common() -> None:
    noise = normal_noise(torch.tensor([0, 1]), torch.arange(64)[None], 512)  # [2, 64, 512]
    assert noise.isfinite().all()
    assert abs(float(noise.mean())) < 0.02
    assert abs(float(noise.std()) - 1) < 0.02
    assert abs(float((noise**4).mean()) - 3) < 0.2
    among = torch.corrcoef(noise.flatten(0, 1))  # [128, 128]
    assert float((among - torch.eye(128)).abs().max()) < 0.3


def test_noise_follows_from_key_and_position_alone() -> None:
    keys, positions = torch.tensor([3, 4, 3]), torch.tensor([[0, 5, 9], [0, 5, 9], [5, 0, 7]])
    noise = normal_noise(keys, positions, 8)
    assert torch.equal(noise[0, [0, 1]], noise[2, [1, 0]])
    assert torch.equal(normal_noise(keys[:1], torch.arange(10)[None], 8)[0, [0, 5, 9]], noise[0])
    assert not torch.isclose(noise[0], noise[1]).any()
