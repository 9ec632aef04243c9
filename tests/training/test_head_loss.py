import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from loopformer.data.loader import NO_LOSS
from loopformer.training.head_loss import LossWeights, Match, head_losses

WEIGHTS = [LossWeights(0.5), LossWeights(0.3), LossWeights(0.2)]
MATCHED = [LossWeights(0.5), LossWeights(0.3, 2.0), LossWeights(0.2, 0.7)]


def plain(
    weight: Tensor, hidden: list[Tensor], targets: Tensor, weights: list[LossWeights], match: Match | None = None
) -> Tensor:
    """The same sum with all logits at once."""
    logits, counted = [one @ weight.T for one in hidden], targets != NO_LOSS
    total = torch.zeros((), device=weight.device)
    for own, one in zip(weights, logits, strict=False):
        total = total + own.cross_entropy * F.cross_entropy(one, targets, reduction="sum")
        if match is not None and match.kind == "logits":
            total = total + own.match * ((one - logits[0].detach()).square().mean(-1) * counted).sum()
        elif match is not None:
            soft = -(logits[0].detach().softmax(-1) * one.log_softmax(-1)).sum(-1)
            total = total + own.match * (soft * counted).sum()
    return total


def made(count: int, device: str = "cpu", vocab: int = 50, tokens: int = 13) -> tuple[list[Tensor], Tensor]:
    """The head and the hidden states of some trajectories, and targets."""
    tensors = [torch.randn(rows, 16, device=device, requires_grad=True) for rows in [vocab, *[tokens] * count]]
    targets = torch.randint(vocab, (tokens,), device=device)
    targets[[2, 5]] = NO_LOSS
    return tensors, targets


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
@pytest.mark.parametrize("match", [None, Match("logits"), Match("distribution")], ids=["ce", "logits", "kl"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_chunks_equal_the_plain_loss_and_its_gradients(chunk: int, match: Match | None, count: int) -> None:
    tensors, targets = made(count)
    weights = (MATCHED if match else WEIGHTS)[:count]
    expected = plain(tensors[0], tensors[1:], targets, weights, match)
    wanted = torch.autograd.grad(3 * expected, tensors)
    got = head_losses(tensors[0], tensors[1:], targets, weights, match, chunk)
    torch.testing.assert_close(got.total, expected)
    for mine, theirs in zip(torch.autograd.grad(3 * got.total, tensors), wanted, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


def test_no_gradients_without_need_and_all_ignored_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, full = torch.randn(50, 8, requires_grad=True), torch.randn(4, 8, requires_grad=True)
    assert (
        float(head_losses(weight, [full], torch.full((4,), NO_LOSS), [LossWeights()], None, 2).cross_entropy) == 0
    )
    monkeypatch.setattr(torch.autograd, "grad", None)  # calling it would fail
    with torch.no_grad():
        sums = head_losses(weight, [full], torch.randint(50, (4,)), [LossWeights()], None, 2)
    assert not sums.total.requires_grad


def test_autocast_products_are_bf16_and_losses_fp32() -> None:
    weight, full = torch.randn(50, 8, requires_grad=True), torch.randn(6, 8, requires_grad=True)
    targets = torch.randint(50, (6,))
    expected = plain(weight, [full], targets, [LossWeights()])
    with torch.autocast("cpu", torch.bfloat16):
        sums = head_losses(weight, [full], targets, [LossWeights()], None, 4)
    assert sums.total.dtype == torch.float32
    torch.testing.assert_close(sums.total, expected, rtol=0.02, atol=0.1)
    torch.autograd.backward(sums.total)
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_fused_kernel_equals_the_plain_loss(count: int) -> None:
    pytest.importorskip("triton")
    torch.set_float32_matmul_precision("highest")
    tensors, targets = made(count, "cuda", vocab=1003, tokens=50)
    expected = plain(tensors[0], tensors[1:], targets, WEIGHTS[:count])
    wanted = torch.autograd.grad(3 * expected, tensors)
    got = head_losses(tensors[0], tensors[1:], targets, WEIGHTS[:count], None, 3)
    torch.testing.assert_close(got.total, expected)
    for mine, theirs in zip(torch.autograd.grad(3 * got.total, tensors), wanted, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
