"""Perplexity and bits per byte of a model on held-out text, at any budgets and trajectories.

    lm = load("runs/demo/elastic")
    text = read_text("data/demo", lm.need_tokenizer())       # or a file, or a preset such as fineweb-edu
    rows = perplexity(lm.model, text, [1, 2, "3-1", None], store=Store.beside("runs/demo/elastic"))
    rows[0]["perplexity"], rows[0]["bits_per_byte"], rows[0]["tokens"]
    perplexity(lm.model, text, [4], certainty=0.9)           # with early exit: also rows[0]["mean_passes"]

**Text** is whatever `loopformer prepare` reads, or the validation split of a folder that it has prepared. Named
sources (stdlib, pile, fineweb-edu, openwebtext) are trained on as well, so only their held-out part is read: the
documents that `prepare` puts into the validation split, up to the token count of the preset.

**Documents apart** (the default). Each document follows one end token. Its first token is scored given that end
token, every other token given those before it. All tokens of a document are scored and no others, so the bytes are
those of the documents. The end token itself is never scored.

**Joined** (`join`). Documents follow one another with an end token between two, as in training, and attention
crosses them. End tokens are scored too, but count neither in the bytes nor in bits per byte. The first token of the
stream has no context and is not scored, nor are its bytes counted. Without a stride these are the windows of
training's own validation, and also the last window, which may be shorter.

**Windows.** A window holds at most `window` inputs. Without a stride windows do not overlap: the last token of a
window is the first input of the next, and the only context of that window's first target. With a stride of S each
window begins S tokens after the last and scores only its new tokens, so each has at least window - S tokens of
context.

Perplexity is exp of the mean negative log-likelihood of all scored tokens (scoring.py). Bits per byte leave out end
tokens, which stand for no text. The result of each (text, trajectory) is stored as soon as it is complete, so an
interrupted or extended evaluation computes only what is missing.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from loopformer.config import load_run
from loopformer.data.corpus import PRESETS, Source, parse_sources
from loopformer.data.shards import TokenData, is_prepared
from loopformer.data.splits import documents, make_splitter
from loopformer.data.tokenizer import Tokenizer
from loopformer.errors import FileProblem, nearest, require
from loopformer.evaluation.early_exit import check_threshold, early_exit_flops, score_with_early_exit
from loopformer.evaluation.store import JsonDict, ReportProgress, Store, device_and_dtype, weights_hash
from loopformer.loading.folder import HELD_OUT, SETTINGS, data_folder, resolve_model_path, run_folder_of
from loopformer.model import LoopedLM
from loopformer.model.looped import TrajectoryLike
from loopformer.scoring import BATCH_TOKENS, Span, score_spans
from loopformer.trajectory import Trajectory

NAMED_SOURCES = ("stdlib", *PRESETS)
Ids = npt.NDArray[np.int64]

_CHARACTERS = 4 << 20  # tokenized at a time


@dataclass(frozen=True)
class Text:
    """Documents as token ids, without end tokens, and the hash of their text."""

    name: str  # as the user wrote it
    part: str  # the part of the source that this is, in words
    documents: tuple[Ids, ...]
    sha256: str  # of the documents' UTF-8, joined by zero bytes; for a single plain file, the hash of the file
    tokenizer: Tokenizer

    @property
    def tokens(self) -> int:
        return sum(map(len, self.documents))


def read_text(
    given: str,
    tokenizer: Tokenizer,
    field: str = "text",
    max_tokens: int | None = None,
    report: ReportProgress | None = None,
) -> Text:
    """Read a source to its end, or until there are more than `max_tokens` tokens."""
    require(max_tokens is None or max_tokens >= 1, f"--max-tokens must be 1 or more, got {max_tokens}.")
    part, limit = "all of it", None
    if is_prepared(given):
        part, encoded = "validation split", _prepared_documents(Path(given), tokenizer)
    else:
        source = _source(given, field)
        if given in NAMED_SOURCES:
            part = f"held out: {source.val_fraction:.1%} of the documents, by hash"
            part += f"; the first {source.val_tokens:,} tokens" if source.val_tokens else ""
        limit = source.val_tokens
        encoded = _encoded(_source_texts(source, field), tokenizer)
    digest, read, tokens = hashlib.sha256(), list[Ids](), 0
    for text, ids in encoded:
        # The limit of a preset counts the end tokens of documents as well.
        if limit is not None and tokens + len(read) + len(ids) > limit:
            ids = ids[: limit - tokens - len(read)]
            text = tokenizer.decode(ids.tolist())
        digest.update(b"\0" * bool(read) + text.encode())
        read.append(ids)
        tokens += len(ids)
        if report:
            report(f"reading {given}", tokens, max_tokens or limit)
        if (max_tokens is not None and tokens > max_tokens) or (limit is not None and tokens + len(read) >= limit):
            break
    require(tokens > 0, f"{given} holds no text; check the path and the field.")
    return Text(given, part, tuple(read), digest.hexdigest(), tokenizer)


def default_text(model: str | Path) -> str | None:
    """The held-out text in a model's folder, or the data of its run; None where neither is found."""
    if (held_out := resolve_model_path(model) / HELD_OUT).is_file():
        return str(held_out)
    if (run := run_folder_of(model)) is None:
        return None
    data = load_run(run / SETTINGS)[0].data
    folder = data_folder(run, data.path) if data.states is None else None
    if folder is None:
        return None
    here = Path.cwd()
    return str(folder.relative_to(here) if folder.is_relative_to(here) else folder)


def _source(given: str, field: str) -> Source:
    """The source that a user names; refused if it does not exist."""
    pattern = any(mark in given for mark in "*?[=")
    if not (given in NAMED_SOURCES or given.startswith("hf:") or pattern or Path(given).exists()):
        hint = nearest(given, list(NAMED_SOURCES), otherwise=f"named texts are {', '.join(NAMED_SOURCES)}.")
        raise FileProblem(f"There is no file, folder or text {given}; {hint}")
    (source,) = parse_sources([given], field)
    require(source.weight is None, f"A weight, as in {given!r}, is for training; leave it out here.")
    return source


def _source_texts(source: Source, field: str) -> Iterator[str]:
    """The documents of a source; of a named source only the held-out ones."""

    def read() -> Iterator[str]:
        for _, text in source.texts(field):
            yield from documents(text)

    try:
        if source.given not in NAMED_SOURCES:
            yield from read()
            return
        splitter = make_splitter(read, source.val_fraction, source.given)
        for text in read():
            yield from (piece for split, piece in splitter.split(text) if split == "val")
    except FileProblem as error:
        if not source.remote:
            raise
        problem = str(error).partition(";")[0].rstrip(".")  # its remedy is one for training
        raise FileProblem(
            f"{problem}; connect, or give a file or a folder prepared from {source.given} elsewhere."
        ) from error


def _encoded(texts: Iterator[str], tokenizer: Tokenizer) -> Iterator[tuple[str, Ids]]:
    """Texts with their tokens, a few megabytes at a time, without texts that have no tokens."""

    def encode(batch: Sequence[str]) -> Iterator[tuple[str, Ids]]:
        for text, ids in zip(batch, tokenizer.encode_batch(batch), strict=True):
            if ids:
                yield text, np.array(ids, np.int64)

    batch, size = list[str](), 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= _CHARACTERS:
            yield from encode(batch)
            batch, size = [], 0
    yield from encode(batch)


def _prepared_documents(folder: Path, tokenizer: Tokenizer) -> Iterator[tuple[str, Ids]]:
    """The held-out documents of a prepared folder, tokenized again where the model has another tokenizer."""
    data = TokenData.open(folder, "val")
    for source in data.sources:
        require(source.flags is None, f"{folder} holds supervised examples; give the plain text to evaluate on.")
        stream = source.ids.read(0, len(source.ids)).astype(np.int64)
        data.check_ids(stream, source.name)
        pieces = (piece[piece != data.eot] for piece in np.split(stream, np.flatnonzero(stream == data.eot)))
        pairs = ((data.tokenizer.decode(ids.tolist()), ids) for ids in pieces if len(ids) > 0)
        if data.tokenizer.hash == tokenizer.hash:
            yield from pairs
        else:
            yield from _encoded((text for text, _ in pairs), tokenizer)


@dataclass(frozen=True)
class Protocol:
    """How perplexity is measured. By default the window is the model's context, and the stride the window."""

    window: int | None = None
    stride: int | None = None
    join: bool = False
    max_tokens: int | None = None  # score only the first tokens, up to this many

    def sizes(self, context: int) -> tuple[int, int]:
        """Window and stride for a model of this context."""
        window = context if self.window is None else self.window
        require(1 <= window <= context, f"--window must be 1 to the model's context of {context}, got {window}.")
        stride = window if self.stride is None else self.stride
        require(1 <= stride <= window, f"--stride must be 1 to the window of {window}, got {stride}.")
        return window, stride


@dataclass(frozen=True)
class CutText:
    """The windows of a text, and how much text their scored tokens stand for."""

    windows: tuple[Span, ...]
    window: int
    stride: int
    documents: int
    tokens: int  # scored tokens, end tokens included
    ends: int  # scored end tokens
    bytes: int  # of the text that the other scored tokens stand for


def cut_text(text: Text, protocol: Protocol, context: int) -> CutText:
    """The windows of a text for a model of this context, in which every token is scored once."""
    window, stride = protocol.sizes(context)
    end, limit = text.tokenizer.eot, protocol.max_tokens
    spans: list[Span] = []
    if protocol.join:
        stream = [token for ids in text.documents for token in (end, *ids.tolist())][1:]
        stream = stream if limit is None else stream[: limit + 1]
        spans.append(Span(tuple(stream), len(stream) - 1))
    else:
        remaining = text.tokens if limit is None else limit
        for ids in text.documents:
            if remaining > 0:
                spans.append(Span.text(ids[:remaining].tolist(), end))
                remaining -= len(ids)
    tokens = sum(span.scored for span in spans)
    require(
        tokens >= window,
        f"{text.name} has {tokens} tokens to score, fewer than one window of {window}; "
        "give more text or a smaller --window.",
    )
    ends = sum(span.targets.count(end) for span in spans)
    return CutText(
        windows=tuple(part for span in spans for part in span.windows(window, stride)),
        window=window,
        stride=stride,
        documents=len(spans) + ends - sum(span.tokens[-1] == end for span in spans),
        tokens=tokens,
        ends=ends,
        bytes=sum(text.tokenizer.byte_count(span.targets) for span in spans),
    )


@dataclass
class Likelihood:
    """Negative log-likelihoods in nats, summed."""

    nats: float = 0.0  # of all scored tokens
    end_nats: float = 0.0  # of the end tokens among them

    def add(self, logprobs: torch.Tensor, ends: torch.Tensor) -> None:
        """Add the log-probabilities [N] of some tokens; `ends` [N] says which of them are end tokens."""
        nats = -logprobs.double()
        self.nats += float(nats.sum())
        self.end_nats += float(nats[ends].sum())


def perplexity(
    model: LoopedLM,
    text: Text,
    trajectories: Sequence[TrajectoryLike],
    protocol: Protocol | None = None,
    *,
    certainty: float | None = None,
    weights: str | None = None,
    store: Store | None = None,
    batch_tokens: int = BATCH_TOKENS,
    report: ReportProgress | None = None,
) -> list[JsonDict]:
    """One plain row of results per trajectory, in the order given.

    With `certainty`, the threshold of early exit (early_exit.py), `passes` counts the positions that took 1…M
    loops, and FLOPs are those of a decoder with early exit.

    `weights` is the hash the results are kept under, that of the model as it is by default; a caller that casts the
    model to another dtype gives that of the model as it was loaded.
    """
    if certainty is not None:
        check_threshold(certainty)
    protocol, store = protocol or Protocol(), store or Store(None)
    cut = cut_text(text, protocol, model.config.context)
    resolved = [model.resolve(trajectory) for trajectory in trajectories]
    weights = weights or weights_hash(model)
    facts = text_facts(text, protocol, cut)
    rows = []
    for trajectory in resolved:
        key = result_key("perplexity", model, weights, text, protocol, cut, trajectory)
        key |= {} if certainty is None else {"certainty": certainty}
        value = kept = store.get(key)
        if value is None:
            doing = f"{text.name} M={trajectory.budget}" if trajectory.is_uniform else f"{text.name} {trajectory}"
            doing += "" if certainty is None else f" above {certainty:g}"
            started = time.perf_counter()
            end = text.tokenizer.eot
            exits: JsonDict = {}
            if certainty is None:
                sums = sum_likelihoods(model, cut, end, [trajectory], batch_tokens, report, doing)[trajectory]
            else:
                sums, loops = _with_early_exit(model, cut, end, trajectory, certainty, batch_tokens, report, doing)
                exits = {"certainty": certainty, "passes": loops}
            seconds = time.perf_counter() - started
            took = {"seconds": seconds, "tokens_per_second": cut.tokens / seconds}
            value = store.put(key, {**summary(sums, cut), **took, **exits})
        flops = model.cost.forward_flops(trajectory.budget, cut.window)
        measured: JsonDict = {}
        if certainty is not None:
            depths = range(1, trajectory.budget + 1)
            each = [early_exit_flops(model.cost, depth, trajectory.budget, cut.window) for depth in depths]
            measured["mean_passes"] = float(np.average(depths, weights=value["passes"]))
            flops = float(np.average(each, weights=value["passes"]))
        measured |= {
            "budget": trajectory.budget,
            "trajectory": str(trajectory),
            "flops_per_token": flops,
            "flops_per_scored_token": flops * facts["forward_tokens"] / cut.tokens,
            **device_and_dtype(model),
        }
        rows.append({**facts, **measured, **value, "reused": kept is not None})
    return rows


def sum_likelihoods(
    model: LoopedLM,
    cut: CutText,
    end: int,
    trajectories: Sequence[Trajectory],
    batch_tokens: int = BATCH_TOKENS,
    report: ReportProgress | None = None,
    doing: str = "",
) -> dict[Trajectory, Likelihood]:
    """Sums over all windows along each trajectory; equal first steps are computed once for all of them."""
    sums = {trajectory: Likelihood() for trajectory in trajectories}
    done = 0
    for batch in score_spans(model, cut.windows, trajectories, batch_tokens, share=False):
        for trajectory, (logprobs, _) in batch.along.items():
            sums[trajectory].add(logprobs, batch.targets == end)
        done += len(batch.targets)
        if report:
            report(doing, done, cut.tokens)
    return sums


def _with_early_exit(
    model: LoopedLM,
    cut: CutText,
    end: int,
    trajectory: Trajectory,
    threshold: float,
    batch_tokens: int,
    report: ReportProgress | None,
    doing: str,
) -> tuple[Likelihood, list[int]]:
    """Sums over all windows along one trajectory with early exit, and how many positions took 1…M loops."""
    sums, loops, done = Likelihood(), np.zeros(trajectory.budget + 1, np.int64), 0
    for batch in score_with_early_exit(model, cut.windows, threshold, trajectory, batch_tokens):
        sums.add(batch.logprobs, batch.targets == end)
        loops += np.bincount(batch.loops.numpy(), minlength=len(loops))
        done += len(batch.targets)
        if report:
            report(doing, done, cut.tokens)
    return sums, loops[1:].tolist()


def summary(likelihood: Likelihood, cut: CutText) -> dict[str, float | None]:
    """Perplexity and bits per byte of summed likelihoods, None where the model's output is not a number."""
    if not math.isfinite(likelihood.nats):
        return {"nats": None, "perplexity": None, "bits_per_byte": None}
    bits = (likelihood.nats - likelihood.end_nats) / math.log(2)
    return {
        "nats": likelihood.nats,
        "perplexity": math.exp(min(likelihood.nats / cut.tokens, 700.0)),
        "bits_per_byte": bits / cut.bytes if cut.bytes else None,
    }


def result_key(
    kind: str, model: LoopedLM, weights: str, text: Text, protocol: Protocol, cut: CutText, trajectory: Trajectory
) -> dict[str, Any]:
    """The key of a stored result: everything that its numbers depend on."""
    return {
        "kind": kind,
        "weights": weights,
        "text": text.sha256,
        "tokenizer": text.tokenizer.hash,
        "window": cut.window,
        "stride": cut.stride,
        "joined": protocol.join,
        "tokens": cut.tokens,
        "trajectory": str(trajectory),
        **device_and_dtype(model),
    }


def text_facts(text: Text, protocol: Protocol, cut: CutText) -> JsonDict:
    """The text and the protocol as plain data."""
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
        "forward_tokens": sum(len(span.inputs) for span in cut.windows),
    }
