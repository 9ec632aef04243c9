"""Perplexity and bits per byte of a model on a text, at any budgets and trajectories.

    lm = load("runs/demo/elastic")
    text = read_text("data/demo", lm.need_tokenizer())
    rows = perplexity(lm.model, text, [1, 2, "3-1", None], store=Store.beside("runs/demo/elastic"))
    rows[0]["perplexity"], rows[0]["bits_per_byte"], rows[0]["tokens"]

Which token is scored given what is said in windows.py. Perplexity is exp of the mean negative log-likelihood of
all scored tokens; bits per byte leaves out end tokens, which stand for no text. The softmax is over the tokenizer's
ids, without the rows that only pad the vocabulary. Sums are in float64.

Rows are sorted by length and batched. A finished (text, trajectory) is kept in the store at once, so an interrupted
or extended evaluation computes only what is new.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from loopformer.errors import require
from loopformer.evaluation.loglikelihood import BATCH_TOKENS, fitting
from loopformer.evaluation.store import Piece, Store, weights_hash
from loopformer.evaluation.text import Report, Text
from loopformer.evaluation.walk import Walker
from loopformer.evaluation.windows import Cut, Protocol, Row, windows
from loopformer.inference.padding import padded
from loopformer.model import LoopedLM
from loopformer.model.looped import Route
from loopformer.trajectory import Trajectory

_LOGITS = 1 << 24  # numbers in a chunk of logits


@dataclass
class Likelihood:
    """Negative log-likelihoods in nats, summed."""

    nats: float = 0.0  # of all scored tokens
    end_nats: float = 0.0  # of the end tokens among them


def perplexity(
    model: LoopedLM,
    text: Text,
    routes: Sequence[Route],
    protocol: Protocol | None = None,
    *,
    weights: str | None = None,
    store: Store | None = None,
    batch_tokens: int = BATCH_TOKENS,
    report: Report | None = None,
) -> list[Piece]:
    """One plain row of results per trajectory, in the order given.

    `weights` is the hash the results are kept under, that of the model as it is by default; a caller that casts the
    model to another dtype gives that of the model as it was loaded.
    """
    protocol, store = protocol or Protocol(), store or Store(None)
    cut = windows(text, protocol, model.config.context)
    wanted = [model.route(route) for route in routes]
    weights = weights or weights_hash(model)
    rows = []
    for route in wanted:
        key = piece_key("perplexity", model, weights, text, protocol, cut, route)
        kept = store.get(key)
        value = kept or store.put(key, _timed(model, text, cut, route, batch_tokens, report))
        rows.append({**_facts(model, text, protocol, cut, route), **value, "reused": kept is not None})
    return rows


def piece_key(
    kind: str, model: LoopedLM, weights: str, text: Text, protocol: Protocol, cut: Cut, route: Trajectory
) -> dict[str, Any]:
    """Everything that a number depends on."""
    return {
        "kind": kind,
        "weights": weights,
        "text": text.sha256,
        "tokenizer": text.tokenizer.hash,
        "window": cut.window,
        "stride": cut.stride,
        "joined": protocol.join,
        "tokens": cut.tokens,
        "trajectory": str(route),
        **_where(model),
    }


def summary(likelihood: Likelihood, cut: Cut) -> dict[str, float | None]:
    """Perplexity and bits per byte of summed likelihoods; None where the model's output is no number."""
    if not math.isfinite(likelihood.nats):
        return {"nats": None, "perplexity": None, "bits_per_byte": None}
    bits = (likelihood.nats - likelihood.end_nats) / math.log(2)
    return {
        "nats": likelihood.nats,
        "perplexity": math.exp(min(likelihood.nats / cut.tokens, 700.0)),
        "bits_per_byte": bits / cut.bytes if cut.bytes else None,
    }


@torch.no_grad()
def likelihoods(
    model: LoopedLM,
    cut: Cut,
    end: int,
    routes: Sequence[Trajectory],
    batch_tokens: int = BATCH_TOKENS,
    report: Report | None = None,
    doing: str = "",
) -> dict[Trajectory, Likelihood]:
    """Sums over all rows along each trajectory; equal first steps are computed once for all of them."""
    largest = max(int(row.ids.max()) for row in cut.rows)
    require(
        largest < model.config.vocab,
        f"The text has token ids up to {largest} but the model knows {model.config.vocab}; "
        "is this the model's own tokenizer?",
    )
    walker = Walker(model, routes)
    sums = {route: Likelihood() for route in walker.routes}
    done = 0
    for rows in _batches(cut.rows, batch_tokens):
        with fitting(batch_tokens):
            done += _add(sums, walker, rows, end)
        if report:
            report(doing, done, cut.tokens)
    return sums


def _add(sums: dict[Trajectory, Likelihood], walker: Walker, rows: list[Row], end: int) -> int:
    """Score one batch along every trajectory; the number of tokens scored."""
    filled, lengths = padded(walker.model, [row.ids.tolist() for row in rows])  # [B, T + 1]
    place = torch.arange(filled.shape[1] - 1)[None]  # [1, T]
    last = torch.tensor(lengths)[:, None] - 1  # [B, 1]
    scored = (place < last) & (place >= last - torch.tensor([[row.scored] for row in rows]))  # [B, T]
    scored = scored.to(filled.device)
    targets = filled[:, 1:][scored]  # [N]
    ends = (targets == end).cpu()
    for route, hidden in walker.walk(filled[:, :-1]):
        nats = _nats(walker.model, hidden[scored], targets).cpu().double()
        sums[route].nats += float(nats.sum())
        sums[route].end_nats += float(nats[ends].sum())
    return len(targets)


def _timed(
    model: LoopedLM, text: Text, cut: Cut, route: Trajectory, batch_tokens: int, report: Report | None
) -> Piece:
    doing = f"{text.name} M={route.budget}" if route.is_uniform else f"{text.name} {route}"
    started = time.perf_counter()
    sums = likelihoods(model, cut, text.tokenizer.eot, [route], batch_tokens, report, doing)
    seconds = time.perf_counter() - started
    return {**summary(sums[route], cut), "seconds": seconds, "tokens_per_second": cut.tokens / seconds}


def _facts(model: LoopedLM, text: Text, protocol: Protocol, cut: Cut, route: Trajectory) -> Piece:
    """What was measured, beside the numbers."""
    facts, flops = text_facts(text, protocol, cut), model.cost.forward_flops(route.budget, cut.window)
    return {
        **facts,
        "budget": route.budget,
        "trajectory": str(route),
        "flops_per_token": flops,
        "flops_per_scored_token": flops * facts["forward_tokens"] / cut.tokens,
        **_where(model),
    }


def text_facts(text: Text, protocol: Protocol, cut: Cut) -> Piece:
    """The text and the protocol, in plain data."""
    limited = protocol.max_tokens == cut.tokens
    return {
        "text": text.name,
        "part": f"{text.part}, up to {cut.tokens:,} tokens" if limited else text.part,
        "sha256": text.sha256,
        "documents": cut.documents,
        "tokens": cut.tokens,
        "end_tokens": cut.ends,
        "bytes": cut.bytes,
        "window": cut.window,
        "stride": cut.stride,
        "joined": protocol.join,
        "max_tokens": protocol.max_tokens,
        "forward_tokens": sum(len(row.ids) - 1 for row in cut.rows),
    }


def _where(model: LoopedLM) -> Mapping[str, str]:
    return {"dtype": model.dtype_name, "device": model.tokens.weight.device.type}


def _batches(rows: Sequence[Row], batch_tokens: int) -> Iterator[list[Row]]:
    """Rows of about the same length together, the longest first, so that memory is tried at the start."""
    ordered = sorted(rows, key=lambda row: -len(row.ids))
    start = 0
    while start < len(ordered):
        count = max(1, batch_tokens // (len(ordered[start].ids) - 1))
        yield ordered[start : start + count]
        start += count


def _nats(model: LoopedLM, hidden: Tensor, targets: Tensor) -> Tensor:
    """-log p of targets [N] given hidden [N, D], in fp32; the head runs in chunks, so full logits never exist."""
    chunk = max(1, _LOGITS // model.config.vocab_rows)
    parts = []
    for states, wanted in zip(torch.split(hidden, chunk), torch.split(targets, chunk), strict=True):
        logits = model.head(states)[:, : model.config.vocab].float()
        parts.append(torch.nn.functional.cross_entropy(logits, wanted, reduction="none"))
    return torch.cat(parts)
