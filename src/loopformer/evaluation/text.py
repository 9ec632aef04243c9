"""Perplexity and bits per byte of a model on held-out text, at any budgets and trajectories.

    lm = load("runs/demo/elastic")
    text = read_text("data/demo", lm.need_tokenizer())       # or a file, or a preset such as fineweb-edu
    rows = perplexity(lm.model, text, [1, 2, "3-1", None], store=Store.beside("runs/demo/elastic"))
    rows[0]["perplexity"], rows[0]["bits_per_byte"], rows[0]["tokens"]
    perplexity(lm.model, text, [4], certainty=0.9)           # with early exit: also rows[0]["mean_passes"]

**Text** is any source that `loopformer prepare` reads, or the validation split of a folder it has prepared. Named
sources (stdlib, pile, fineweb-edu, openwebtext) are trained on as well, so only their held-out part is read: the
documents that `prepare` puts into the validation split, up to the token count of the preset.

**Separate documents** (the default). Each document is run on its own after one end token, so no token attends to
another document. Every token of a document is scored, the end token is not. The bytes are those of the documents.

**Joined documents** (`join`). Documents follow one another with an end token between two, as in training, and
attention crosses them. End tokens are scored too, but count neither in the bytes nor in bits per byte. The first
token of the stream has no context and is not scored, nor are its bytes counted. Without a stride these are the
windows of training's validation, plus the last window, which may be shorter.

**Windows.** A window holds at most `window` inputs. Without a stride, windows do not overlap: the last target of a
window is the first input of the next, where it is the only context of the first target. With a stride of S each
window begins S tokens after the previous one and scores only its new tokens, which then have at least window - S
tokens of context.

Perplexity is exp of the mean negative log-likelihood of all scored tokens (scoring.py). Bits per byte leave out end
tokens, which stand for no text. The result of each (text, trajectory) is stored as soon as it is complete, so an
interrupted or extended evaluation computes only what is missing.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

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
from loopformer.scoring import BATCH_TOKENS, BatchScores, Span, score_spans
from loopformer.trajectory import Trajectory

NAMED_SOURCES = ("stdlib", *PRESETS)
Ids = npt.NDArray[np.int64]

_MAX_BATCH_CHARACTERS = 4 << 20  # of text tokenized in one call


@dataclass(frozen=True)
class Text:
    """Documents as token ids, without end tokens, and the hash of their text."""

    name: str  # as the user wrote it
    part: str  # which part of the source was read, for people
    documents: tuple[Ids, ...]
    sha256: str  # of the documents' UTF-8, joined by zero bytes; for a single plain file, the hash of the file
    tokenizer: Tokenizer

    @property
    def tokens(self) -> int:
        return sum(map(len, self.documents))


def read_text(
    name: str,
    tokenizer: Tokenizer,
    field: str = "text",
    max_tokens: int | None = None,
    report: ReportProgress | None = None,
) -> Text:
    """Read a source to its end, or until there are more than `max_tokens` tokens."""
    require(max_tokens is None or max_tokens >= 1, f"--max-tokens must be 1 or more, got {max_tokens}.")
    part, limit = "all of it", None
    if is_prepared(name):
        part, encoded = "validation split", _read_prepared(Path(name), tokenizer)
    else:
        has_pattern = any(mark in name for mark in "*?[=")
        if not (name in NAMED_SOURCES or name.startswith("hf:") or has_pattern or Path(name).exists()):
            known = f"named texts are {', '.join(NAMED_SOURCES)}."
            is_path = any(mark in name for mark in "./\\")  # so it is no misspelt name
            hint = f"check the path; {known}" if is_path else nearest(name, list(NAMED_SOURCES), otherwise=known)
            raise FileProblem(f"There is no file, folder or text {name}; {hint}")
        (source,) = parse_sources([name], field)
        require(source.weight is None, f"A weight, as in {name!r}, is for training; leave it out here.")
        if name in NAMED_SOURCES:
            part = f"held out: {source.val_fraction:.1%} of the documents, by hash"
            part += f"; the first {source.val_tokens:,} tokens" if source.val_tokens else ""
        limit = source.val_tokens
        encoded = _encode_in_batches(_source_texts(source, field), tokenizer)
    digest = hashlib.sha256()
    read, tokens = list[Ids](), 0
    for text, ids in encoded:
        # The limit of a preset also counts one end token per document: `len(read)` so far.
        if limit is not None and tokens + len(read) + len(ids) > limit:
            ids = ids[: limit - tokens - len(read)]
            text = tokenizer.decode(ids.tolist())
        digest.update(b"\0" * bool(read) + text.encode())
        read.append(ids)
        tokens += len(ids)
        if report:
            report(f"reading {name}", tokens, max_tokens or limit)
        if (max_tokens is not None and tokens > max_tokens) or (limit is not None and tokens + len(read) >= limit):
            break
    require(tokens > 0, f"{name} holds no text; check the path and the field.")
    return Text(name, part, tuple(read), digest.hexdigest(), tokenizer)


def _source_texts(source: Source, field: str) -> Iterator[str]:
    """The documents of a source; of a named source only the held-out ones."""

    def read() -> Iterator[str]:
        return (document for _, text in source.texts(field) for document in documents(text))

    if source.given not in NAMED_SOURCES:
        return read()
    splitter = make_splitter(read, source.val_fraction, source.given)
    return (piece for text in read() for split, piece in splitter.split(text) if split == "val")


def _encode_in_batches(texts: Iterable[str], tokenizer: Tokenizer) -> Iterator[tuple[str, Ids]]:
    """Each text with its token ids. Texts without tokens are left out."""
    batch, size, texts = list[str](), 0, iter(texts)
    while (text := next(texts, None)) is not None or batch:
        if text is not None:
            batch.append(text)
            size += len(text)
        if text is None or size >= _MAX_BATCH_CHARACTERS:
            for encoded, ids in zip(batch, tokenizer.encode_batch(batch), strict=True):
                if ids:
                    yield encoded, np.array(ids, np.int64)
            batch, size = [], 0


def _read_prepared(folder: Path, tokenizer: Tokenizer) -> Iterator[tuple[str, Ids]]:
    """The held-out documents of a prepared folder, tokenized again if the model has another tokenizer."""
    data = TokenData.open(folder, "val")
    for source in data.sources:
        require(source.flags is None, f"{folder} holds supervised examples; give the plain text to evaluate on.")
        stream = source.ids.read(0, len(source.ids)).astype(np.int64)
        data.check_ids(stream, source.name)
        pieces = (piece[piece != data.eot] for piece in np.split(stream, np.flatnonzero(stream == data.eot)))
        pairs = ((data.tokenizer.decode(ids.tolist()), ids) for ids in pieces if len(ids) > 0)
        is_same = data.tokenizer.hash == tokenizer.hash
        yield from pairs if is_same else _encode_in_batches((text for text, _ in pairs), tokenizer)


def default_text(model: str | Path) -> str | None:
    """The held-out text in a model's folder, or the data of its run; None if there is neither."""
    if (held_out := resolve_model_path(model) / HELD_OUT).is_file():
        return str(held_out)
    if (run := run_folder_of(model)) is None:
        return None
    data = load_run(run / SETTINGS)[0].data
    folder = None if data.is_generated else data_folder(run, data.path)
    if folder is None:
        return None
    here = Path.cwd()
    return str(folder.relative_to(here) if folder.is_relative_to(here) else folder)


@dataclass(frozen=True)
class Protocol:
    """How perplexity is measured. The window defaults to the model's context, the stride to the window."""

    window: int | None = None
    stride: int | None = None
    join: bool = False
    max_tokens: int | None = None  # score only the first tokens, up to this many

    def sizes(self, context: int) -> tuple[int, int]:
        """The window and the stride for a model of this context."""
        window = context if self.window is None else self.window
        require(1 <= window <= context, f"--window must be 1 to the model's context of {context}, got {window}.")
        stride = window if self.stride is None else self.stride
        require(1 <= stride <= window, f"--stride must be 1 to the window of {window}, got {stride}.")
        return window, stride


@dataclass(frozen=True)
class CutText:
    """The windows of a text, and the counts that perplexity and bits per byte divide by."""

    text: Text
    protocol: Protocol
    windows: tuple[Span, ...]
    window: int
    stride: int
    documents: int
    tokens: int  # scored tokens, end tokens included
    ends: int  # scored end tokens
    bytes: int  # of the scored tokens other than end tokens, as text

    @property
    def facts(self) -> JsonDict:
        """The text and the protocol as plain data."""
        limited = self.protocol.max_tokens == self.tokens
        return {
            "text": self.text.name,
            "part": f"{self.text.part}, up to {self.tokens:,} tokens" if limited else self.text.part,
            "sha256": self.text.sha256,
            "documents": self.documents,
            "tokens": self.tokens,
            "end_tokens": self.ends,
            "bytes": self.bytes,
            "window": self.window,
            "stride": self.stride,
            "joined": self.protocol.join,
            "max_tokens": self.protocol.max_tokens,
            "forward_tokens": sum(len(span.inputs) for span in self.windows),
        }

    def key(self, kind: str, model: LoopedLM, weights: str, trajectory: Trajectory) -> JsonDict:
        """The key of a stored result: everything that its numbers depend on."""
        return {
            "kind": kind,
            "weights": weights,
            "text": self.text.sha256,
            "tokenizer": self.text.tokenizer.hash,
            "window": self.window,
            "stride": self.stride,
            "joined": self.protocol.join,
            "tokens": self.tokens,
            "trajectory": str(trajectory),
            **device_and_dtype(model),
        }


def cut_text(text: Text, protocol: Protocol, context: int) -> CutText:
    """Cut a text into windows that score every token once, for a model of this context."""
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
    counted = f"{tokens} token{'s' * (tokens != 1)}"
    require(tokens >= 2, f"{text.name} has {counted} to score, and a perplexity needs 2 or more; give more text.")
    window = min(window, tokens)  # of a short text, so that its FLOPs are counted in a window of its length
    stride = min(stride, window)
    ends = sum(span.targets.count(end) for span in spans)
    return CutText(
        text,
        protocol,
        windows=tuple(part for span in spans for part in span.windows(window, stride)),
        window=window,
        stride=stride,
        # Joined, `spans` is one stream: it has a document more than end tokens, unless it was cut right after one.
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
    loops: Counter[int] = field(default_factory=Counter)  # with early exit: positions per number of loops
    windows: Counter[int] = field(default_factory=Counter)  # nats of each window, by its index

    def summarize(self, cut: CutText) -> JsonDict:
        """Perplexity and bits per byte, None where the model's output is not a number."""
        if not math.isfinite(self.nats):
            return {"nats": None, "perplexity": None, "bits_per_byte": None}
        bits = (self.nats - self.end_nats) / math.log(2)
        return {
            "nats": self.nats,
            "perplexity": math.exp(min(self.nats / cut.tokens, 700.0)),
            "bits_per_byte": bits / cut.bytes if cut.bytes else None,
        }


def sum_likelihoods(
    batches: Iterable[BatchScores], cut: CutText, report: ReportProgress | None, status: str
) -> dict[Trajectory, Likelihood]:
    """The sums over all windows along each trajectory."""
    sums, done = defaultdict[Trajectory, Likelihood](Likelihood), 0
    for batch in batches:
        is_end = batch.targets == cut.text.tokenizer.eot  # [N]
        for trajectory, (logprobs, _) in batch.along.items():
            nats = -logprobs.double()  # [N]
            sums[trajectory].nats += float(nats.sum())
            sums[trajectory].end_nats += float(nats[is_end].sum())
            sums[trajectory].loops.update(batch.loops)
            of_windows = [float(part.sum()) for part in torch.split(nats, batch.sizes)]
            sums[trajectory].windows.update(dict(zip(batch.spans, of_windows, strict=True)))
        done += len(batch.targets)
        if report:
            report(status, done, cut.tokens)
    return sums


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
    """One row of results, as plain data, for each trajectory in order.

    `certainty` is the threshold of early exit (early_exit.py). With it, `passes` counts the positions that took
    each number of loops from 1 to M, and the FLOPs are those of a decoder with early exit.

    `weights` is the hash that results are stored under, by default that of `model`. A caller that has cast the
    model to another dtype passes the hash from before the cast, so that all dtypes share one hash.
    """
    if certainty is not None:
        check_threshold(certainty)
    cut = cut_text(text, protocol or Protocol(), model.config.context)
    resolved = [model.resolve(trajectory) for trajectory in trajectories]
    weights, store = weights or weights_hash(model), store or Store(None)
    facts, rows = cut.facts, []
    for trajectory in resolved:
        key = cut.key("perplexity", model, weights, trajectory)
        key |= {} if certainty is None else {"certainty": certainty}
        counts = range(1, trajectory.budget + 1)  # of loops that a position can take
        value = stored = store.get(key)
        if value is None:
            status = f"{text.name} {trajectory.label}"
            started = time.perf_counter()
            if certainty is None:
                batches = score_spans(model, cut.windows, [trajectory], batch_tokens, share=False)
            else:
                status += f" above {certainty:g}"
                batches = score_with_early_exit(model, cut.windows, certainty, trajectory, batch_tokens)
            likelihood = sum_likelihoods(batches, cut, report, status)[trajectory]
            seconds = time.perf_counter() - started
            value = {"seconds": seconds, "tokens_per_second": cut.tokens / seconds, **likelihood.summarize(cut)}
            if certainty is not None:
                value |= {"certainty": certainty, "passes": [likelihood.loops[taken] for taken in counts]}
            store.put(key, value)
        row = {**facts, **value, **device_and_dtype(model), "reused": stored is not None}
        flops = model.cost.forward_flops(trajectory.budget, cut.window)
        if certainty is not None:
            costs = [early_exit_flops(model.cost, taken, trajectory.budget, cut.window) for taken in counts]
            row["mean_passes"] = float(np.average(counts, weights=value["passes"]))
            flops = float(np.average(costs, weights=value["passes"]))
        row |= {"budget": trajectory.budget, "trajectory": str(trajectory), "flops_per_token": flops}
        row["flops_per_scored_token"] = flops * facts["forward_tokens"] / cut.tokens
        rows.append(row)
    return rows
