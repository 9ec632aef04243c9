"""Geometry, CKA and the logit lens: known values, invariances, and agreement with the definitions written out."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from loopformer import LM
from loopformer.analysis.metrics import LinearCKA, anisotropy, curvature, lens, movement, prompt_entropy

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


def slow_entropy(z: Tensor) -> float:
    z = z - z.mean(0)
    z = torch.stack([row / math.sqrt(float(row @ row)) for row in z])
    squares = [float(value) ** 2 for value in torch.linalg.svdvals(z)]
    shares = [square / sum(squares) for square in squares]
    return -sum(p * math.log(p) for p in shares if p > 0) / min(math.log(z.shape[0]), math.log(z.shape[1]))


@given(shapes)
def test_they_equal_their_definitions(shape: tuple[int, int, int]) -> None:
    z = gaussian(*shape)
    assert float(curvature(z)) == pytest.approx(slow_curvature(z), abs=1e-8)
    assert float(anisotropy(z)) == pytest.approx(slow_anisotropy(z), abs=1e-8)
    assert float(prompt_entropy(z)) == pytest.approx(slow_entropy(z), abs=1e-8)
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
    for scale in (1e-9, 1.0, 1e9):  # a token that differs from the mean by rounding alone has no direction
        with_mean = scale * torch.cat([gaussian(5, 8), gaussian(5, 8).mean(0, keepdim=True)])
        twice = scale * torch.cat([gaussian(5, 8), gaussian(5, 8)])
        expected = prompt_entropy(twice) * math.log(8) / math.log(6)
        assert float(prompt_entropy(with_mean)) == pytest.approx(float(expected), abs=1e-9)
    assert math.isnan(float(curvature(equal)))


def test_an_isotropic_gaussian() -> None:
    z = gaussian(64, 512, mean=0.0)
    assert float(anisotropy(z)) == pytest.approx(0, abs=0.01)
    assert float(curvature(z)) == pytest.approx(2 * math.pi / 3, abs=0.02)  # differences of independent tokens
    assert float(curvature(z.cumsum(0))) == pytest.approx(math.pi / 2, abs=0.02)  # a random walk


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


def cka(*states: Tensor, sizes: list[int] | None = None, debiased: bool = False) -> Tensor:
    stacked = torch.stack(states)
    found = LinearCKA(len(states), stacked.shape[-1])
    for part in stacked.split(sizes or [stacked.shape[1]], dim=1):  # type: ignore[no-untyped-call]
        found.add(part)
    return found.matrix(debiased)


def slow_plain(x: Tensor, y: Tensor) -> float:
    x, y = x - x.mean(0), y - y.mean(0)
    cross, own_x, own_y = (float(torch.linalg.matrix_norm(m)) for m in (y.T @ x, x.T @ x, y.T @ y))
    return cross**2 / (own_x * own_y)


def slow_debiased(x: Tensor, y: Tensor) -> float:
    def hsic(a: Tensor, b: Tensor) -> float:
        n = len(a)
        k, m = a @ a.T, b @ b.T
        k.fill_diagonal_(0)
        m.fill_diagonal_(0)
        one = torch.ones(n, dtype=torch.float64)
        total = (k @ m).trace() + (one @ k @ one) * (one @ m @ one) / ((n - 1) * (n - 2))
        return float(total - 2 * (one @ k @ m @ one) / (n - 2)) / (n * (n - 3))

    return hsic(x, y) / math.sqrt(hsic(x, x) * hsic(y, y))


@given(st.integers(8, 30), st.integers(2, 6), st.integers(0, 2**31))
def test_cka_equals_its_definitions(tokens: int, width: int, seed: int) -> None:
    x = gaussian(tokens, width, seed=seed) + 2
    y = x @ gaussian(width, width, seed=seed + 1) + gaussian(tokens, width, seed=seed + 2)
    assert float(cka(x, y)[0, 1]) == pytest.approx(slow_plain(x, y), abs=1e-8)
    assert float(cka(x, y, debiased=True)[1, 0]) == pytest.approx(slow_debiased(x, y), abs=1e-8)


@given(st.lists(st.integers(1, 20), min_size=2, max_size=5), st.booleans())
def test_batches_do_not_matter_to_cka(sizes: list[int], debiased: bool) -> None:
    states = [gaussian(sum(sizes) + 4, 5, seed=seed) + seed for seed in range(3)]
    whole = cka(*states, debiased=debiased)
    torch.testing.assert_close(cka(*states, sizes=[*sizes, 4], debiased=debiased), whole, rtol=0, atol=1e-10)
    torch.testing.assert_close(whole, whole.T, rtol=0, atol=0)


@pytest.mark.parametrize("debiased", [False, True])
def test_rotation_scale_and_shift_change_no_cka(debiased: bool) -> None:
    x, y = gaussian(40, 6), gaussian(40, 6, seed=1) + gaussian(40, 6)
    turned = 1e3 * x @ torch.linalg.qr(gaussian(6, 6, seed=2)).Q + 1e4
    found = cka(x, turned, y, debiased=debiased)
    torch.testing.assert_close(found[0, 1], torch.ones((), dtype=torch.float64), rtol=0, atol=1e-8)
    torch.testing.assert_close(found[0, 2], found[1, 2], rtol=0, atol=1e-8)
    torch.testing.assert_close(found.diag(), torch.ones(3, dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(cka(1e-4 * x, turned, y, debiased=debiased), found, rtol=0, atol=1e-8)


def test_unrelated_and_rank_one_states() -> None:
    signals = torch.linalg.qr(gaussian(32, 5) - gaussian(32, 5).mean(0)).Q  # orthonormal columns of mean zero
    one, other = signals[:, :2], signals[:, 2:4]
    assert float(cka(one, other)[0, 1]) == pytest.approx(0, abs=1e-12)
    mixed = 0.6 * signals[:, :1] + 0.8 * signals[:, 1:2]  # correlation 0.6 with the first
    along, across = gaussian(1, 4, seed=3), gaussian(1, 4, seed=4)
    assert float(cka(signals[:, :1] * along, mixed * across)[0, 1]) == pytest.approx(0.36, abs=1e-12)


def test_with_few_tokens_only_the_debiased_one_tells_chance_from_likeness() -> None:
    x, y = gaussian(60, 300), gaussian(60, 300, seed=1)
    assert float(cka(x, y)[0, 1]) > 0.8
    assert abs(float(cka(x, y, debiased=True)[0, 1])) < 0.1


def test_a_state_that_never_changes_has_no_cka() -> None:
    found = cka(torch.ones(9, 3, dtype=torch.float64), gaussian(9, 3))
    assert found[0].isnan().all()
    assert found[:, 0].isnan().all()
    assert float(found[1, 1]) == pytest.approx(1)


class _Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most numbers any tensor has that is made inside."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.numbers = max(self.numbers, made.numel())
        return made


def test_the_lens_equals_the_distributions_written_out(lm: LM) -> None:
    model, vocab = lm.model, lm.model.config.vocab
    states = torch.randn(3, 11, 24)
    divergence, agreement = lens(model, states, chunk=4)
    chances = model.head(model.final_norm(states))[..., :vocab].double().softmax(-1)  # [S, n, V]
    direct = (chances[-1] * (chances[-1] / chances).log()).sum(-1)
    torch.testing.assert_close(divergence.double(), direct, rtol=1e-4, atol=1e-5)
    assert torch.equal(agreement.bool(), chances.argmax(-1) == chances[-1].argmax(-1))
    assert not divergence[-1].any()
    assert agreement[-1].all()


def test_chunks_of_the_lens_do_not_matter_and_bound_the_memory(lm: LM) -> None:
    states = torch.randn(5, 100, 24)
    whole = lens(lm.model, states)
    with _Largest() as largest:  # type: ignore[no-untyped-call]
        chunked = lens(lm.model, states, chunk=10)
    torch.testing.assert_close(chunked, whole)
    assert largest.numbers <= max(lm.model.tokens.weight.numel(), states.numel())  # all logits would be 28,000
