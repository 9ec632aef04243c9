"""Rows of tokens of different lengths as one tensor: padded at the end, where no earlier token can see it.

Generate text for a batch of requests, each with its own prompt, trajectory, sampling and limits.

for event in generate(model, tokenizer, [Request(ids, Trajectory.uniform(4))]): ...

Prefill all prompts, then one token at a time through the cache. A row that is done leaves the batch, and each row's
text is what it would be alone. The context limit ends a request with a stated reason; nothing slides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from loopformer.data.tokenizer import Tokenizer
from loopformer.inference.request import Event, Request, RowState
from loopformer.model import LoopedLM
from loopformer.model.cache import Cache
from loopformer.trajectory import Trajectory


def padded(model: LoopedLM, rows: Sequence[Sequence[int]]) -> tuple[Tensor, list[int]]:
    """ids [B, longest] on the model's device, and how many tokens of each row count."""
    counts = [len(row) for row in rows]
    filled = [[*row, *[0] * (max(counts) - len(row))] for row in rows]
    return torch.tensor(filled, dtype=torch.long, device=model.tokens.weight.device), counts


def ends(hidden: Tensor, counts: Sequence[int]) -> Tensor:
    """Of padded rows [B, T, D] the last one that counts, each [B, D]."""
    rows = torch.arange(len(counts), device=hidden.device)
    return hidden[rows, torch.tensor(counts, device=hidden.device) - 1]


@torch.no_grad()
def generate(model: LoopedLM, tokenizer: Tokenizer, requests: Sequence[Request]) -> Iterator[Event]:
    """Run requests together; events come as tokens do."""
    config = model.config
    rows = [RowState(number, request, tokenizer, config) for number, request in enumerate(requests)]
    cache, hidden = prefill(model, [row.request.prompt for row in rows], [row.request.trajectory for row in rows])
    while rows:
        events = take_all(rows, model.head(hidden)[:, : config.vocab])
        yield from events
        going = [place for place, event in enumerate(events) if event.result is None]
        if len(going) < len(rows):
            rows = [rows[place] for place in going]
            if not rows:
                return
            cache = cache.select(going)
        last = torch.tensor([[row.ids[-1]] for row in rows], device=hidden.device)
        hidden = model.extend(last, cache, check=False)[:, 0]


def take_all(rows: Sequence[RowState], logits: Tensor) -> list[Event]:
    """The next token of each row from logits [B, V]; where all are greedy, at once."""
    if not all(row.request.sampling.most_likely for row in rows):
        return [row.take(one) for row, one in zip(rows, logits, strict=True)]
    tokens = logits.argmax(-1)
    chosen = logits.float().log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    return [row.note(*one) for row, *one in zip(rows, tokens.tolist(), chosen.tolist(), strict=True)]


def prefill(
    model: LoopedLM, prompts: Sequence[Sequence[int]], trajectories: Sequence[Trajectory]
) -> tuple[Cache, Tensor]:
    """Run prompts of any lengths: their cache, and the hidden state [B, D] of each one's last token."""
    ids, counts = padded(model, prompts)
    cache = model.cache(list(trajectories), len(prompts))
    return cache, ends(model.extend(ids, cache, counts), counts)
