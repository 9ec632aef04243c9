"""Linear CKA: the definitions written out, what does not change it, and sums over batches."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from loopformer import LoopformerError
from loopformer.analysis.metrics import LinearCKA


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


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
def test_it_equals_the_definitions(tokens: int, width: int, seed: int) -> None:
    x = gaussian(tokens, width, seed=seed) + 2
    y = x @ gaussian(width, width, seed=seed + 1) + gaussian(tokens, width, seed=seed + 2)
    assert float(cka(x, y)[0, 1]) == pytest.approx(slow_plain(x, y), abs=1e-8)
    assert float(cka(x, y, debiased=True)[1, 0]) == pytest.approx(slow_debiased(x, y), abs=1e-8)


@given(st.lists(st.integers(1, 20), min_size=2, max_size=5), st.booleans())
def test_batches_do_not_matter(sizes: list[int], debiased: bool) -> None:
    states = [gaussian(sum(sizes) + 4, 5, seed=seed) + seed for seed in range(3)]
    whole = cka(*states, debiased=debiased)
    torch.testing.assert_close(cka(*states, sizes=[*sizes, 4], debiased=debiased), whole, rtol=0, atol=1e-10)
    torch.testing.assert_close(whole, whole.T, rtol=0, atol=0)


@pytest.mark.parametrize("debiased", [False, True])
def test_rotation_scale_and_shift_change_nothing(debiased: bool) -> None:
    x, y = gaussian(40, 6), gaussian(40, 6, seed=1) + gaussian(40, 6)
    turned = 1e3 * x @ torch.linalg.qr(gaussian(6, 6, seed=2)).Q + 1e4
    found = cka(x, turned, y, debiased=debiased)
    torch.testing.assert_close(found[0, 1], torch.ones((), dtype=torch.float64), rtol=0, atol=1e-8)
    torch.testing.assert_close(found[0, 2], found[1, 2], rtol=0, atol=1e-8)
    torch.testing.assert_close(found.diag(), torch.ones(3, dtype=torch.float64), rtol=0, atol=1e-12)


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


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(LoopformerError, match="cannot take"):
        LinearCKA(2, 3).add(torch.ones(2, 5, 4))
    with pytest.raises(LoopformerError, match="CKA of 3 tokens"):
        cka(gaussian(3, 2), gaussian(3, 2, seed=1), debiased=True)
