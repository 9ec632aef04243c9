"""Early exit: each position leaves the loop as soon as the model is sure of its next token.

    out = early_exit(model, ids, threshold=0.9)      # ids [B, T], whole sequences
    out.loops                                        # loops taken by each position [B, T]
    model.head(out.hidden)                           # the logits where they exited [B, T, V]

After every loop the head reads each position that has not exited. A position exits once the probability of its
top token exceeds the threshold. Its state then stays as it is, and in the remaining loops later positions attend to
keys and values of that frozen state. No retraining is needed.

This measures what early exit would do, on whole sequences and outside of decoding. Every loop runs all positions,
so it saves no time. `early_exit_flops` counts what a decoder with early exit would compute.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from loopformer.errors import LoopformerError
from loopformer.model import LoopedLM
from loopformer.model.cost import Cost
from loopformer.model.looped import TrajectoryLike
from loopformer.scoring import BatchScores, Span, explain_memory, head_chunks, plan_batches, token_logprobs
from loopformer.trajectory import Trajectory


@dataclass(frozen=True)
class EarlyExit:
    """Where each position left the loop, and its state there."""

    loops: Tensor  # [B, T], from 1 to the budget
    hidden: Tensor  # [B, T, D], after the final norm: `model.head(hidden)` are the logits


@torch.no_grad()
def early_exit(
    model: LoopedLM, ids: Tensor, threshold: float, trajectory: TrajectoryLike = None, beyond: bool = False
) -> EarlyExit:
    """Run ids [B, T] along one trajectory, the full one by default, with early exit above `threshold`.

    At a threshold of 1 no position exits early. `beyond` allows more loops than the model was trained for.
    """
    check_threshold(threshold)
    model.check(ids)
    trajectory = model.resolve(trajectory, beyond)
    embedded, rotary, mask, x = model.embed(ids)  # embedded and x: [B, T, D]
    exited = torch.zeros(ids.shape, dtype=torch.bool, device=ids.device)
    loops = torch.zeros(ids.shape, dtype=torch.int64, device=ids.device)

    for loop, condition in enumerate(model.plan_loops(trajectory, len(ids)).conditions):
        loops += ~exited
        # An exited position goes through each block as well: its frozen state gives the keys and values that later
        # positions attend to in this loop. Only its output is dropped, after every block and after the loop.
        state = model.inject(x, embedded, condition, loop)
        for block_index, block in enumerate(model.stack.typed_blocks()):
            modulation = None if condition.modulation is None else condition.modulation[:, block_index]
            state = torch.where(exited[..., None], state, block(state, modulation, rotary, mask, None))
        x = torch.where(exited[..., None], x, state)

        active_rows, active_positions = (~exited).nonzero(as_tuple=True)  # [N] each
        hidden = model.final_norm(x[active_rows, active_positions])  # [N, D]
        for chunk, logits in head_chunks(model, hidden):
            top_logprob = logits.amax(-1) - logits.logsumexp(-1)  # [N]
            exited[active_rows[chunk], active_positions[chunk]] = top_logprob.exp() > threshold
        if bool(exited.all()):
            break
    return EarlyExit(loops, model.final_norm(x))


def check_threshold(threshold: object) -> None:
    """Raise unless the threshold is a number above 0 and at most 1."""
    if not (isinstance(threshold, Real) and 0 < threshold <= 1):  # type: ignore[operator]
        raise LoopformerError(f"certainty must lie in (0, 1], got {threshold!r}.")


@torch.no_grad()
def score_with_early_exit(
    model: LoopedLM, spans: Sequence[Span], threshold: float, trajectory: Trajectory, batch_tokens: int
) -> Iterator[BatchScores]:
    """Score spans as `score_spans` does, batch by batch, with early exit along one trajectory."""
    for batch in plan_batches(spans, model.config.context, batch_tokens, share=False):
        rows = [torch.tensor(pack.rows[0]) for pack in batch.packs]
        # Rows are padded at the end. Attention is causal, so no token of a row attends to its padding.
        numbers = [number for number, _, _ in batch.spans]
        targets = torch.tensor([token for number in numbers for token in spans[number].targets])  # [N]
        with explain_memory(batch_tokens):
            out = early_exit(model, pad_sequence(rows, batch_first=True).to(model.device), threshold, trajectory)
            parts = [out.hidden[row, end - spans[number].scored : end] for number, row, end in batch.spans]
            logprobs, greedy = token_logprobs(model, torch.cat(parts), targets.to(model.device))
        loops = torch.cat([out.loops[index, : len(row)] for index, row in enumerate(rows)]).tolist()
        sizes = [spans[number].scored for number in numbers]
        yield BatchScores(
            numbers, sizes, targets, {trajectory: (logprobs.cpu(), greedy.cpu())}, batch.tokens, loops
        )


def early_exit_flops(
    cost: Cost, taken: int, budget: int | None = None, context: int | None = None, causal: bool = True
) -> float:
    """The FLOPs, from embedding to logits, of a position that exits after `taken` loops of its budget.

    The sum has three parts: a forward pass of the loops it takes, the head once more after each of them to check
    for an exit (not after the last loop of the budget), and in the remaining loops only keys and values, with the
    adapter's matmul where the model has one.
    """
    config = cost.config
    loops = config.loops if budget is None else budget
    exit_checks = min(taken, loops - 1) * 2 * cost.head_matmul_params
    keys_and_values = config.blocks * 2 * (2 * config.width**2) + 2 * cost.adapter_matmul_params
    return cost.forward_flops(taken, context, causal) + exit_checks + (loops - taken) * keys_and_values
