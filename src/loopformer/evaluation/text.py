"""Text to evaluate on, as tokens: whatever `loopformer prepare` reads, and the folders it has prepared.

    text = read_text("news.jsonl.zst", tokenizer)            # every document of it
    text = read_text("data/demo", tokenizer)                 # the validation split of a prepared folder
    text = read_text("fineweb-edu", tokenizer)               # the held-out part of a preset
    text.tokens, text.sha256

Named sources (stdlib, pile, fineweb-edu, openwebtext) are trained on as well, so only their held-out part is read:
the documents that `prepare` puts into the validation split, up to the token count of the preset (data/corpus.py).

How a text is cut into rows for a model, so that every token is scored once.

    cut = windows(text, Protocol(stride=64), context=128)
    cut.rows, cut.tokens, cut.bytes

**Documents apart** (the default). Each document is read after one end token: its first token is scored given that
end token, every other token given those before it. All tokens of a document are scored and no others, so the bytes
are those of the documents. The end token itself is never scored.

**Joined** (`join`). Documents follow one another with an end token between two, as in training; attention goes
across. End tokens are scored too, but count neither in the bytes nor in bits per byte. The first token of the
stream has nothing before it and is not scored, nor are its bytes counted. Without a stride these are the windows
of training's own validation, and the tail that is shorter than a window.

**Windows.** A row holds at most `window` inputs. Without a stride, rows follow one another: the last token of a row
is the first input of the next, and all that it has before it there. With a stride of S, each row begins S tokens
after the one before and scores only the tokens that are new in it, so each has at least window - S before it.

Perplexity and bits per byte of a model on a text, at any budgets and trajectories.

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

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from loopformer.config import load_run
from loopformer.data.corpus import PRESETS, Position, Source, parse_sources
from loopformer.data.formats import Meter
from loopformer.data.shards import SourceData, TokenData, is_prepared
from loopformer.data.splits import documents, survey
from loopformer.data.tokenizer import Tokenizer
from loopformer.errors import FileProblem, nearest, require
from loopformer.evaluation.score import BATCH_TOKENS, Walker, fitting
from loopformer.evaluation.store import Piece, Store, weights_hash
from loopformer.inference.decode import padded
from loopformer.loading.folder import SETTINGS, data_folder, run_of
from loopformer.model import LoopedLM
from loopformer.model.looped import TrajectoryLike
from loopformer.trajectory import Trajectory

NAMED = ("stdlib", *PRESETS)


_BATCH = 4 << 20  # characters tokenized at a time


Ids = npt.NDArray[np.int64]


Report = Callable[[str, int, int | None], None]  # what is done, how much of it, of how much (None: not known)


@dataclass(frozen=True)
class Text:
    """Documents as token ids, without end tokens, and the hash of their text."""

    name: str  # as the user wrote it
    part: str  # which part of the source this is, in words
    documents: tuple[Ids, ...]
    sha256: str  # of the documents' UTF-8, a zero byte between two; for one file of text, that of the file
    tokenizer: Tokenizer

    @property
    def tokens(self) -> int:
        return sum(map(len, self.documents))


def read_text(
    given: str,
    tokenizer: Tokenizer,
    field: str = "text",
    max_tokens: int | None = None,
    report: Report | None = None,
) -> Text:
    """Read a source to its end, or until there are more than `max_tokens` tokens."""
    require(max_tokens is None or max_tokens >= 1, f"--max-tokens must be 1 or more, got {max_tokens}.")
    if is_prepared(given):
        part, limit, found = "validation split", None, _prepared(Path(given), tokenizer)
    else:
        source = _source(given, field)
        limit = source.val_tokens
        part = _part(source) if given in NAMED else "all of it"
        found = _reachable(source, _encoded(_texts(source, field), tokenizer))
    digest, kept, tokens = hashlib.sha256(), list[Ids](), 0
    for text, ids in found:
        if limit is not None and tokens + len(kept) + len(ids) > limit:  # a preset counts documents' ends as well
            ids = ids[: limit - tokens - len(kept)]
            text = tokenizer.decode(ids.tolist())
        digest.update(b"\0" * bool(kept) + text.encode())
        kept.append(ids)
        tokens += len(ids)
        if report:
            report(f"reading {given}", tokens, max_tokens or limit)
        if (max_tokens is not None and tokens > max_tokens) or (limit is not None and tokens + len(kept) >= limit):
            break
    require(tokens > 0, f"{given} holds no text; check the path and the field.")
    return Text(given, part, tuple(kept), digest.hexdigest(), tokenizer)


def default_text(model: str | Path) -> str | None:
    """The data folder of a run, or of a checkpoint's run; None where there is none or it cannot be found."""
    if (run := run_of(model)) is None:
        return None
    folder = data_folder(run, load_run(run / SETTINGS)[0].data.path)
    if folder is None:
        return None
    here = Path.cwd()
    return str(folder.relative_to(here) if folder.is_relative_to(here) else folder)


def _source(given: str, field: str) -> Source:
    (source,) = parse_sources([_known(given)], field)
    require(source.weight is None, f"A weight, as in {given!r}, is for training; leave it out here.")
    return source


def _known(given: str) -> str:
    """A source as it is, unless it is nothing: then the nearest name there is."""
    if given in NAMED or given.startswith("hf:") or any(mark in given for mark in "*?[=") or Path(given).exists():
        return given
    hint = nearest(given, list(NAMED), otherwise=f"named texts are {', '.join(NAMED)}.")
    raise FileProblem(f"There is no file, folder or text {given}; {hint}")


def _part(source: Source) -> str:
    share = f"held out: {source.val_fraction:.1%} of the documents, by hash"
    return f"{share}; the first {source.val_tokens:,} tokens" if source.val_tokens else share


def _texts(source: Source, field: str) -> Iterator[str]:
    """The documents of a source, of a named one only those that are held out."""

    def read() -> Iterator[str]:
        for _, text in source.texts(field, Position(), Meter()):
            yield from documents(text)

    if source.given not in NAMED:
        yield from read()
        return
    splitter = survey(read, source.val_fraction, source.given)
    for text in read():
        yield from (piece for split, piece in splitter.split(text) if split == "val")


def _encoded(texts: Iterator[str], tokenizer: Tokenizer) -> Iterator[tuple[str, Ids]]:
    """Texts with their tokens, some megabytes at a time."""
    batch, size = list[str](), 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= _BATCH:
            yield from _encode(batch, tokenizer)
            batch, size = [], 0
    yield from _encode(batch, tokenizer)


def _encode(texts: Sequence[str], tokenizer: Tokenizer) -> Iterator[tuple[str, Ids]]:
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        if ids:
            yield text, np.array(ids, np.int64)


def _prepared(folder: Path, tokenizer: Tokenizer) -> Iterator[tuple[str, Ids]]:
    """The held-out documents of a prepared folder; tokenized again where the model has another tokenizer."""
    data = TokenData.open(folder, "val")
    for source in data.sources:
        require(source.flags is None, f"{folder} holds supervised examples; give the plain text to evaluate on.")
        pairs = ((data.tokenizer.decode(ids.tolist()), ids) for ids in _between_ends(source, data.eot))
        if data.tokenizer.hash == tokenizer.hash:
            yield from pairs
        else:
            yield from _encoded((text for text, _ in pairs), tokenizer)


def _between_ends(source: SourceData, end: int) -> Iterator[Ids]:
    ids = source.ids.read(0, len(source.ids)).astype(np.int64)
    starts = [0, *(np.flatnonzero(ids == end) + 1).tolist()]
    for start, stop in zip(starts, [*starts[1:], len(ids) + 1], strict=True):
        if stop - 1 > start:
            yield ids[start : stop - 1]


def _reachable(source: Source, found: Iterator[tuple[str, Ids]]) -> Iterator[tuple[str, Ids]]:
    """The same; where a remote source fails, a sentence about evaluation."""
    try:
        yield from found
    except FileProblem as error:
        if not source.remote:
            raise
        first, _, _ = str(error).partition(";")
        raise FileProblem(
            f"{first.rstrip('.')}; connect, or give a file or a folder prepared from {source.given} elsewhere."
        ) from error


@dataclass(frozen=True)
class Protocol:
    """How perplexity is measured; None for `window` is the model's context, for `stride` the window."""

    window: int | None = None
    stride: int | None = None
    join: bool = False
    max_tokens: int | None = None  # score only the first so many

    def sizes(self, context: int) -> tuple[int, int]:
        """Window and stride for a model of this context."""
        window = context if self.window is None else self.window
        require(1 <= window <= context, f"--window must be 1 to the model's context of {context}, got {window}.")
        stride = window if self.stride is None else self.stride
        require(1 <= stride <= window, f"--stride must be 1 to the window of {window}, got {stride}.")
        return window, stride


class Row(NamedTuple):
    """Consecutive tokens: all but the last go in, and of all but the first the last `scored` are scored."""

    ids: Ids
    scored: int


@dataclass(frozen=True)
class Cut:
    """The rows of a text and what their scored tokens stand for."""

    rows: tuple[Row, ...]
    window: int
    stride: int
    documents: int
    tokens: int  # scored, `ends` included
    ends: int  # end tokens among them
    bytes: int  # of text that the others stand for


def windows(text: Text, protocol: Protocol, context: int) -> Cut:
    """Cut a text for a model of this context."""
    window, stride = protocol.sizes(context)
    sequences = _sequences(text, protocol)
    tokens = sum(len(sequence) - 1 for sequence in sequences)
    require(
        tokens >= window,
        f"{text.name} has {tokens} tokens to score, fewer than one window of {window}; "
        "give more text or a smaller --window.",
    )
    end = text.tokenizer.eot
    rows = tuple(row for sequence in sequences for row in _rows(sequence, window, stride))
    ends = sum(int((sequence[1:] == end).sum()) for sequence in sequences)
    documents = len(sequences) + ends - sum(int(sequence[-1] == end) for sequence in sequences)
    size = sum(text.tokenizer.byte_count(sequence[1:].tolist()) for sequence in sequences)
    return Cut(rows, window, stride, documents, tokens, ends, size)


def _sequences(text: Text, protocol: Protocol) -> list[Ids]:
    """Tokens of which all but the first are scored: one sequence per document, or one for all."""
    end = np.array([text.tokenizer.eot])
    if protocol.join:
        stream = np.concatenate([part for ids in text.documents for part in (end, ids)])[1:]
        return [stream if protocol.max_tokens is None else stream[: protocol.max_tokens + 1]]
    sequences, left = [], text.tokens if protocol.max_tokens is None else protocol.max_tokens
    for ids in text.documents:
        if left > 0:
            sequences.append(np.concatenate([end, ids[:left]]))
            left -= len(ids)
    return sequences


def _rows(sequence: Ids, window: int, stride: int) -> list[Row]:
    rows, done, start = list[Row](), 0, 0  # `done` tokens after the first are scored
    while done < len(sequence) - 1:
        stop = min(start + window, len(sequence) - 1)
        rows.append(Row(sequence[start : stop + 1], stop - done))
        start, done = start + stride, stop
    return rows


_LOGITS = 1 << 24  # numbers in a chunk of logits


@dataclass
class Likelihood:
    """Negative log-likelihoods in nats, summed."""

    nats: float = 0.0  # of all scored tokens
    end_nats: float = 0.0  # of the end tokens among them


def perplexity(
    model: LoopedLM,
    text: Text,
    trajectories: Sequence[TrajectoryLike],
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
    wanted = [model.resolve(trajectory) for trajectory in trajectories]
    weights = weights or weights_hash(model)
    rows = []
    for trajectory in wanted:
        key = piece_key("perplexity", model, weights, text, protocol, cut, trajectory)
        kept = store.get(key)
        value = kept or store.put(key, _timed(model, text, cut, trajectory, batch_tokens, report))
        rows.append({**_facts(model, text, protocol, cut, trajectory), **value, "reused": kept is not None})
    return rows


def piece_key(
    kind: str, model: LoopedLM, weights: str, text: Text, protocol: Protocol, cut: Cut, trajectory: Trajectory
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
        "trajectory": str(trajectory),
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
    trajectories: Sequence[Trajectory],
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
    walker = Walker(model, trajectories)
    sums = {trajectory: Likelihood() for trajectory in walker.trajectories}
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
    for trajectory, hidden in walker.walk(filled[:, :-1]):
        nats = _nats(walker.model, hidden[scored], targets).cpu().double()
        sums[trajectory].nats += float(nats.sum())
        sums[trajectory].end_nats += float(nats[ends].sum())
    return len(targets)


def _timed(
    model: LoopedLM, text: Text, cut: Cut, trajectory: Trajectory, batch_tokens: int, report: Report | None
) -> Piece:
    doing = f"{text.name} M={trajectory.budget}" if trajectory.is_uniform else f"{text.name} {trajectory}"
    started = time.perf_counter()
    sums = likelihoods(model, cut, text.tokenizer.eot, [trajectory], batch_tokens, report, doing)
    seconds = time.perf_counter() - started
    return {**summary(sums[trajectory], cut), "seconds": seconds, "tokens_per_second": cut.tokens / seconds}


def _facts(model: LoopedLM, text: Text, protocol: Protocol, cut: Cut, trajectory: Trajectory) -> Piece:
    """What was measured, beside the numbers."""
    facts, flops = text_facts(text, protocol, cut), model.cost.forward_flops(trajectory.budget, cut.window)
    return {
        **facts,
        "budget": trajectory.budget,
        "trajectory": str(trajectory),
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
