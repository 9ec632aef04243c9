from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from loopformer import LM
from loopformer.analysis.metrics import lens


class _Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most numbers any tensor has that is made inside."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.numbers = max(self.numbers, made.numel())
        return made


def test_it_equals_the_distributions_written_out(lm: LM) -> None:
    model, vocab = lm.model, lm.model.config.vocab
    states = torch.randn(3, 11, 24)
    divergence, agreement = lens(model, states, chunk=4)
    chances = model.head(model.final_norm(states))[..., :vocab].double().softmax(-1)  # [S, n, V]
    direct = (chances[-1] * (chances[-1] / chances).log()).sum(-1)
    torch.testing.assert_close(divergence.double(), direct, rtol=1e-4, atol=1e-5)
    assert torch.equal(agreement.bool(), chances.argmax(-1) == chances[-1].argmax(-1))
    assert not divergence[-1].any()
    assert agreement[-1].all()


def test_chunks_do_not_matter_and_bound_the_memory(lm: LM) -> None:
    states = torch.randn(5, 100, 24)
    whole = lens(lm.model, states)
    with _Largest() as largest:  # type: ignore[no-untyped-call]
        chunked = lens(lm.model, states, chunk=10)
    torch.testing.assert_close(chunked, whole)
    assert largest.numbers <= max(lm.model.tokens.weight.numel(), states.numel())  # all logits would be 28,000
