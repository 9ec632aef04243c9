"""Known values, invariances, and agreement with the definitions written out."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from loopformer import LoopformerError
from loopformer.analysis.metrics import anisotropy, curvature, movement, prompt_entropy

METRICS = (curvature, anisotropy, prompt_entropy)
shapes = st.tuples(st.integers(3, 12), st.integers(2, 9), st.integers(0, 2**31))


def gaussian(tokens: int, width: int, seed: int = 0, mean: float = 0.3) -> Tensor:
    return torch.randn(tokens, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) + mean


def rotation(width: int) -> Tensor:
    found: Tensor = torch.linalg.qr(gaussian(width, width, 7, 0.0)).Q
    return found


def slow_curvature(z: Tensor) -> float:
    angles = []
    for t in range(len(z) - 2):
        v, w = z[t + 1] - z[t], z[t + 2] - z[t + 1]
        angles.append(math.acos(max(-1.0, min(1.0, float(v @ w) / math.sqrt(float(v @ v) * float(w @ w))))))
    return sum(angles) / len(angles)


def slow_anisotropy(z: Tensor) -> float:
    pairs = [(i, j) for i in range(len(z)) for j in range(len(z)) if i != j]
    return sum(float(torch.cosine_similarity(z[i], z[j], dim=0)) for i, j in pairs) / len(pairs)


def slow_entropy(z: Tensor, centre: bool, unit_rows: bool) -> float:
    if centre:
        z = z - z.mean(0)
    if unit_rows:
        z = torch.stack([row / math.sqrt(float(row @ row)) for row in z])
    squares = [float(value) ** 2 for value in torch.linalg.svdvals(z)]
    shares = [square / sum(squares) for square in squares]
    return -sum(p * math.log(p) for p in shares if p > 0) / min(math.log(z.shape[0]), math.log(z.shape[1]))


@given(shapes)
def test_they_equal_their_definitions(shape: tuple[int, int, int]) -> None:
    z = gaussian(*shape)
    assert float(curvature(z)) == pytest.approx(slow_curvature(z), abs=1e-8)
    assert float(anisotropy(z)) == pytest.approx(slow_anisotropy(z), abs=1e-8)
    for centre in (True, False):
        for unit_rows in (True, False):
            found = float(prompt_entropy(z, centre=centre, unit_rows=unit_rows))
            assert found == pytest.approx(slow_entropy(z, centre, unit_rows), abs=1e-8)
    other = gaussian(shape[0], shape[1], shape[2] + 1)
    each = [math.sqrt(float((b - a) @ (b - a)) / float(a @ a)) for a, b in zip(z, other, strict=True)]
    assert float(movement(z, other)) == pytest.approx(sum(each) / len(each), abs=1e-8)


@given(shapes, st.floats(1e-3, 1e3))
def test_rotation_and_scale_change_nothing(shape: tuple[int, int, int], scale: float) -> None:
    z = gaussian(*shape)
    turned = scale * z @ rotation(shape[1])
    for metric in METRICS:
        torch.testing.assert_close(metric(turned), metric(z), rtol=0, atol=1e-9)
    other = gaussian(shape[0], shape[1], shape[2] + 1)
    moved = movement(turned, scale * other @ rotation(shape[1]))
    torch.testing.assert_close(moved, movement(z, other), rtol=1e-9, atol=0)
    torch.testing.assert_close(curvature(z + 5), curvature(z), rtol=0, atol=1e-9)  # nor does a shift


def test_prompts_are_measured_one_by_one() -> None:
    z = torch.stack([torch.stack([gaussian(6, 5, 10 * i + j) for j in range(3)]) for i in range(2)])
    for metric in METRICS:
        assert metric(z).shape == (2, 3)
        torch.testing.assert_close(metric(z)[1, 2], metric(z[1, 2]))


def test_a_line() -> None:
    line = torch.arange(1.0, 9.0)[:, None] * gaussian(1, 5)
    assert float(curvature(line)) == pytest.approx(0, abs=1e-12)
    assert float(anisotropy(line)) == pytest.approx(1, abs=1e-12)
    assert float(prompt_entropy(line)) == pytest.approx(0, abs=1e-12)
    there_and_back = line * torch.tensor([1.0, 2.0] * 4)[:, None] / torch.arange(1.0, 9.0)[:, None]
    assert float(curvature(there_and_back)) == pytest.approx(math.pi, abs=1e-12)


def test_a_square_turns_by_right_angles() -> None:
    square = torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 1.0], [0.0, 0.0]])
    assert float(curvature(square)) == pytest.approx(math.pi / 2, abs=1e-12)


@pytest.mark.parametrize("tokens", [3, 8])
def test_orthogonal_tokens(tokens: int) -> None:
    z = 3 * rotation(8)[:tokens]
    assert float(anisotropy(z)) == pytest.approx(0, abs=1e-12)
    assert float(prompt_entropy(z, centre=False)) == pytest.approx(1, abs=1e-12)
    # Centred they are the corners of a simplex: one dimension less, all of them equal.
    assert float(prompt_entropy(z)) == pytest.approx(math.log(tokens - 1) / math.log(tokens), abs=1e-12)
    assert float(curvature(z)) == pytest.approx(math.acos(-1 / 2), abs=1e-12)


def test_rank_one_and_equal_tokens() -> None:
    signs = torch.tensor([1.0, -1.0, 1.0, -1.0])[:, None] * gaussian(1, 6)
    assert float(prompt_entropy(signs)) == pytest.approx(0, abs=1e-12)
    assert float(anisotropy(signs)) == pytest.approx(-1 / 3, abs=1e-12)
    equal = gaussian(1, 6).repeat(5, 1) * 0.1
    assert float(anisotropy(equal)) == pytest.approx(1, abs=1e-12)
    assert float(prompt_entropy(equal)) == 0
    assert math.isnan(float(curvature(equal)))


def test_an_isotropic_gaussian() -> None:
    z = gaussian(64, 512, mean=0.0)
    assert float(anisotropy(z)) == pytest.approx(0, abs=0.01)
    assert float(curvature(z)) == pytest.approx(2 * math.pi / 3, abs=0.02)  # differences of independent tokens
    assert float(curvature(z.cumsum(0))) == pytest.approx(math.pi / 2, abs=0.02)  # a random walk
    page = (math.log(64) - 64 / (2 * 512)) / math.log(64)  # the entropy of a random state, after Page
    assert float(prompt_entropy(z, centre=False, unit_rows=False)) == pytest.approx(page, abs=2e-3)


def test_what_has_no_direction_is_left_out() -> None:
    z = gaussian(6, 4)
    doubled = torch.cat([z, z[-1:]])  # the last difference is zero
    torch.testing.assert_close(curvature(doubled), curvature(z))
    torch.testing.assert_close(anisotropy(torch.cat([z, torch.zeros(1, 4)])), anisotropy(z))
    before, after = torch.cat([z, torch.zeros(1, 4)]), torch.cat([2 * z, torch.ones(1, 4)])
    assert float(movement(before, after)) == pytest.approx(1)
    assert math.isnan(float(anisotropy(torch.zeros(3, 4))))


def test_float32_states_are_measured_in_float64() -> None:
    z = gaussian(9, 5).float()
    for metric in METRICS:
        assert metric(z).dtype == torch.float64
        torch.testing.assert_close(metric(z), metric(z.double()), rtol=0, atol=0)


def test_too_few_tokens_are_refused() -> None:
    with pytest.raises(LoopformerError, match=r"Curvature needs states .* of 3 tokens or more"):
        curvature(torch.ones(2, 4))
    with pytest.raises(LoopformerError, match="2 dimensions"):
        prompt_entropy(torch.ones(4, 1))
