from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from loopformer.data.loader import NO_LOSS
from loopformer.training.head_loss import LossWeights, head_losses

WEIGHTS = LossWeights(full=0.5, short=0.3)


def plain(weight: Tensor, full: Tensor, targets: Tensor, short: Tensor | None, w: LossWeights) -> Tensor:
    """The same sum with all logits at once."""
    logits = full @ weight.T
    counted = targets != NO_LOSS
    total = w.full * F.cross_entropy(logits, targets, reduction="sum")
    if short is not None:
        brief = short @ weight.T
        total = total + w.short * F.cross_entropy(brief, targets, reduction="sum")
        total = total + w.logits * ((brief - logits.detach()).square().mean(-1) * counted).sum()
        soft = -(logits.detach().softmax(-1) * brief.log_softmax(-1)).sum(-1)
        total = total + w.distribution * (soft * counted).sum()
    return total


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
@pytest.mark.parametrize(
    "weights",
    [WEIGHTS, replace(WEIGHTS, logits=2.0), replace(WEIGHTS, distribution=0.7)],
    ids=["ce", "logits", "kl"],
)
@pytest.mark.parametrize("with_short", [False, True])
def test_chunks_equal_the_plain_loss_and_its_gradients(chunk: int, weights: LossWeights, with_short: bool) -> None:
    tensors = [torch.randn(50, 8, requires_grad=True), torch.randn(13, 8, requires_grad=True)]
    tensors += [torch.randn(13, 8, requires_grad=True)] if with_short else []
    targets = torch.randint(50, (13,))
    targets[[2, 5]] = NO_LOSS
    weight, full, short = tensors[0], tensors[1], tensors[2] if with_short else None
    expected = plain(weight, full, targets, short, weights)
    wanted = torch.autograd.grad(3 * expected, tensors)
    got = head_losses(weight, full, targets, short, weights, chunk)
    torch.testing.assert_close(got.total, expected)
    for mine, theirs in zip(torch.autograd.grad(3 * got.total, tensors), wanted, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


def test_no_gradients_without_need_and_all_ignored_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, full = torch.randn(50, 8, requires_grad=True), torch.randn(4, 8, requires_grad=True)
    assert float(head_losses(weight, full, torch.full((4,), NO_LOSS), None, LossWeights(), 2).full) == 0
    monkeypatch.setattr(torch.autograd, "grad", None)  # calling it would fail
    with torch.no_grad():
        sums = head_losses(weight, full, torch.randint(50, (4,)), None, LossWeights(), 2)
    assert not sums.total.requires_grad


def test_autocast_products_are_bf16_and_losses_fp32() -> None:
    weight, full = torch.randn(50, 8, requires_grad=True), torch.randn(6, 8, requires_grad=True)
    targets = torch.randint(50, (6,))
    expected = plain(weight, full, targets, None, LossWeights())
    with torch.autocast("cpu", torch.bfloat16):
        sums = head_losses(weight, full, targets, None, LossWeights(), 4)
    assert sums.total.dtype == torch.float32
    torch.testing.assert_close(sums.total, expected, rtol=0.02, atol=0.1)
    torch.autograd.backward(sums.total)
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("with_short", [False, True])
def test_the_fused_kernel_equals_the_plain_loss(with_short: bool) -> None:
    pytest.importorskip("triton")
    torch.set_float32_matmul_precision("highest")
    tensors = [torch.randn(rows, 16, device="cuda", requires_grad=True) for rows in (1003, 50, 50)]
    tensors = tensors if with_short else tensors[:2]
    targets = torch.randint(1003, (50,), device="cuda")
    targets[[2, 5]] = NO_LOSS
    weight, full, short = tensors[0], tensors[1], tensors[2] if with_short else None
    expected = plain(weight, full, targets, short, WEIGHTS)
    wanted = torch.autograd.grad(3 * expected, tensors)
    got = head_losses(weight, full, targets, short, WEIGHTS, 3)
    torch.testing.assert_close(got.total, expected)
    for mine, theirs in zip(torch.autograd.grad(3 * got.total, tensors), wanted, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
