"""Text to evaluate on, as tokens: whatever `loopformer prepare` reads, and the folders it has prepared.

    text = read_text("news.jsonl.zst", tokenizer)            # every document of it
    text = read_text("data/demo", tokenizer)                 # the validation split of a prepared folder
    text = read_text("fineweb-edu", tokenizer)               # the held-out part of a preset
    text.tokens, text.sha256

Named sources (stdlib, pile, fineweb-edu, openwebtext) are trained on as well, so only their held-out part is read:
the documents that `prepare` puts into the validation split, up to the token count of the preset (data/corpus.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from loopformer.config import load_run
from loopformer.data.corpus import PRESETS, Position, Source, parse_sources
from loopformer.data.formats import Meter
from loopformer.data.shards import SourceData, TokenData, is_prepared
from loopformer.data.splits import documents, survey
from loopformer.data.tokenizer import Tokenizer
from loopformer.errors import FileProblem, nearest, require
from loopformer.loading.folder import SETTINGS, is_run_folder

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
    """The data folder of a run, where it is still there."""
    if not is_run_folder(model):
        return None
    path = load_run(str(Path(model) / SETTINGS))[0].data.path
    return path if is_prepared(path) else None


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
