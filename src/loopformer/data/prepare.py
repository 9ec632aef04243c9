"""Text → token shards: what `loopformer prepare` does.

    index = prepare(["stdlib"], "data/stdlib", train_tokenizer=4096)
    index = prepare(["news.jsonl.zst=2", "books/=1"], "data/mix", tokenizer="gpt2")

The folder gets `tokenizer.json`, shards of token ids for each source and split, and at the end `index.json` with
counts, checksums and settings. Every document is followed by the end token.

What is written depends only on the settings and the text. After a crash at any moment the same call continues at
the last commit and ends with the same bytes: the ledger on disk (`prepare.state.json`) is replaced whole, and
only when what it describes is safe, so it is always true; whatever the shards hold beyond it is cut off when the
work goes on. Reading and splitting run in a thread beside tokenizing, which the `tokenizers` library spreads over
the cores; only a few batches of text are in memory, and of these only some megabytes are being tokenized. A record
that cannot be used ends the work with one sentence, or with `on_bad="skip"` is counted and left out.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from loopformer.data.corpus import Position, Source, mark_files, parse_sources, rewritten
from loopformer.data.formats import BadRecord, Meter, need
from loopformer.data.loader import Prefetcher
from loopformer.data.shards import INDEX_FILE, STATE_FILE, Shard, ShardWriter, damaged_folder, read_index
from loopformer.data.splits import SPLITS, Split, Splitter, agree, check_fraction, documents, fits, survey
from loopformer.data.tokenizer import FILE as TOKENIZER_FILE
from loopformer.data.tokenizer import (
    Example,
    Tokenizer,
    check_vocab_size,
    encode_examples,
    example_key,
    example_text,
    parse_example,
    training_pieces,
    within_memory,
)
from loopformer.errors import FileProblem, LoopformerError
from loopformer.files import check_writable, json_bytes, locked, sync_folder, write_json

DEFAULT_VOCAB = 4096  # of the tokenizer trained on the spot when none is asked for
_TOKENIZER_TEXT = 256 << 20  # characters a tokenizer is trained on, at most
_AT_ONCE = 2 << 20  # bytes tokenized at a time; each may become a token, which takes the library some 100 bytes
_BAD_LISTED = 20  # bad records that are told one by one

Item = str | Example
OnBad = Literal["stop", "skip"]
Encoded = tuple[npt.NDArray[Any], npt.NDArray[np.uint8] | None]  # ids, and flags of supervised examples


@dataclass(frozen=True)
class PrepareProgress:
    """How far one source is, for a display."""

    source: str
    text_bytes: int
    tokens: int
    fraction: float | None  # of the source; None where its length is unknown
    phase: str = "tokenizing"


def prepare(
    sources: Sequence[str],
    out: Path | str,
    *,
    tokenizer: str | None = None,
    train_tokenizer: int | None = None,
    val_fraction: float | None = None,
    train_tokens: int | None = None,
    val_tokens: int | None = None,
    field: str = "text",
    supervised: bool = False,
    on_bad: OnBad = "stop",
    shard_tokens: int = 1 << 27,
    workers: int | None = None,
    batch_chars: int = 4 << 20,
    commit_seconds: float = 2.0,
    report: Callable[[PrepareProgress], None] | None = None,
) -> dict[str, Any]:
    """Turn sources into token shards under `out` and return the index; started again, it continues.

    The tokenizer is `tokenizer` (gpt2 or a path), or one trained on the sources with `train_tokenizer` ids;
    with neither, GPT-2's where text comes from the Hub and a trained one of 4096 ids elsewhere.
    `val_fraction`, `train_tokens` and `val_tokens` hold for each source and overrule its preset; a split ends
    after exactly so many tokens. With `on_bad="skip"` the index counts the records that cannot be used and names
    the first of them, which otherwise end the work. `workers` (cores for tokenizing), `batch_chars`,
    `commit_seconds` and `report` do not influence the result.
    """
    if tokenizer is not None and train_tokenizer is not None:
        raise LoopformerError("Choose --tokenizer or --train-tokenizer, not both.")
    for name, number in (("train-tokens", train_tokens), ("val-tokens", val_tokens), ("workers", workers)):
        if number is not None and number < 1:
            raise LoopformerError(f"--{name} must be 1 or more, got {number}.")
    if on_bad not in get_args(OnBad):
        raise LoopformerError(f"--on-bad is {' or '.join(get_args(OnBad))}, got {on_bad!r}.")
    if val_fraction is not None:
        check_fraction(val_fraction)
    if train_tokenizer is not None:
        check_vocab_size(train_tokenizer)
    if workers is not None:
        os.environ["RAYON_NUM_THREADS"] = str(workers)  # the library's only way; read when it first tokenizes
    limits = {"val_fraction": val_fraction, "train_tokens": train_tokens, "val_tokens": val_tokens}
    overrides: dict[str, Any] = {name: value for name, value in limits.items() if value is not None}
    parsed = parse_sources(sources, field, supervised=supervised)
    parsed = tuple(dataclasses.replace(source, **overrides) for source in parsed)
    if any(source.remote for source in parsed):
        need("datasets", "A dataset of the Hub")
    if tokenizer is None and train_tokenizer is None:
        tokenizer = "gpt2" if any(source.remote for source in parsed) else None
        train_tokenizer = None if tokenizer else DEFAULT_VOCAB
    ready = Tokenizer.find(tokenizer) if tokenizer is not None else None
    settings = {
        "version": 1,
        "tokenizer": {"sha256": ready.hash} if ready else {"trained": train_tokenizer},
        "field": field,
        "supervised": supervised,
        "shard_tokens": shard_tokens,
        "sources": [_describe(source) for source in parsed],
    }
    reader = _Reader(field, supervised, on_bad == "skip")

    def announce(name: str, phase: str) -> None:
        if report:
            report(PrepareProgress(name, 0, 0, None, phase))

    with locked(Path(out)):
        ledger = Ledger(Path(out), settings, parsed)
        if (index := ledger.begin()) is not None:
            return index
        check_writable(ledger.folder)
        if not ledger.sources:
            surveys = []
            for source in parsed:
                announce(source.name, "looking through")
                surveys.append(reader.survey(source))
            ledger.sources = [SourceState(splitter) for splitter in agree(surveys)]
        if (ledger.folder / TOKENIZER_FILE).exists():
            ready = Tokenizer.load(ledger.folder)
        elif ready is None:
            announce("tokenizer", f"training, {train_tokenizer} ids")
            wanted = train_tokenizer or 0
            ready = Tokenizer.train_apart(reader.training_texts(parsed, ledger.sources), wanted)
            if ready.vocab_size < wanted:
                announce(
                    "tokenizer", f"the text gave {ready.vocab_size} ids instead of {wanted}, it has no more pairs"
                )
        # Only now, so that a wrong field or a missing file leaves no folder and not half a job.
        ledger.commit()
        ready.save(ledger.folder)
        for source, state in zip(parsed, ledger.sources, strict=True):
            if not state.done:
                _tokenize(ledger, source, state, reader, ready, batch_chars, commit_seconds, report)
        return ledger.finish(_index(parsed, ledger.sources, ready))


@dataclass
class Written:
    """What one split of one source has on disk; `masks` lie parallel to `shards` for supervised examples."""

    tokens: int = 0
    documents: int = 0
    text_bytes: int = 0
    shards: list[Shard] = field(default_factory=list)
    masks: list[Shard] = field(default_factory=list)


@dataclass
class SourceState:
    """How far one source has come."""

    splitter: Splitter
    position: Position = field(default_factory=Position)
    done: bool = False
    bad: int = 0  # records that could not be used
    bad_first: list[str] = field(default_factory=list)  # what was wrong with the first of them
    splits: dict[Split, Written] = field(default_factory=lambda: {split: Written() for split in SPLITS})


@dataclass
class Ledger:
    """The settings of a folder, what it is made of, and the state of each source that was begun."""

    folder: Path
    settings: dict[str, Any]
    given: Sequence[Source]
    sources: list[SourceState] = field(default_factory=list)

    @property
    def changed(self) -> list[dict[str, int | None]]:
        """Of each source: when each of its files was last written to."""
        return [{part.name: part.changed for part in source.parts} for source in self.given]

    def begin(self) -> dict[str, Any] | None:
        """Begin or go on: the index if the folder is finished, else None and `sources` as they were."""
        index, state = self.folder / INDEX_FILE, self.folder / STATE_FILE
        if index.exists():
            finished = read_index(index)
            self._compare(finished.get("settings"))
            for name in rewritten(self.given, self.folder):
                raise self._changed(name, "made of")
            state.unlink(missing_ok=True)
            return finished
        if state.exists():
            unfinished = read_index(state)
            self._compare(unfinished.get("settings"))
            try:
                self._compare_files(unfinished.get("changed", self.changed))
                self.sources = [_source_state(source) for source in unfinished["sources"]]
            except FileProblem:
                raise
            except (KeyError, TypeError, ValueError) as error:
                raise damaged_folder(state) from error
            return None
        if any(path.name != f"{STATE_FILE}.tmp" for path in self.folder.iterdir()):
            raise FileProblem(
                f"{self.folder} is not empty and was not made by prepare; choose another --out folder."
            )
        return None

    def commit(self) -> None:
        """Record how far the work has come; the shards must be on disk by now."""
        sources = [dataclasses.asdict(source) for source in self.sources]
        state = {"settings": self.settings, "changed": self.changed, "sources": sources}
        write_json(self.folder / STATE_FILE, state)

    def finish(self, index: dict[str, Any]) -> dict[str, Any]:
        """Write the index, after which the folder can be used."""
        mark_files(self.given, self.folder)
        write_json(self.folder / INDEX_FILE, {"settings": self.settings, **index})
        (self.folder / STATE_FILE).unlink()
        sync_folder(self.folder)
        return read_index(self.folder / INDEX_FILE)

    def _compare(self, earlier: Any) -> None:
        now = json.loads(json_bytes(self.settings))
        if earlier != now:
            earlier = earlier if isinstance(earlier, dict) else {}
            changed = ", ".join(name for name in now if earlier.get(name) != now[name])
            raise FileProblem(
                f"{self.folder} was begun with other settings or files ({changed}); "
                "use the same ones, choose another --out folder, or delete it."
            )

    def _compare_files(self, earlier: list[dict[str, int | None]]) -> None:
        for then, now in zip(earlier, self.changed, strict=True):
            if differ := [name for name, changed in now.items() if then[name] != changed]:
                raise self._changed(differ[0], "begun with")

    def _changed(self, name: str, how: str) -> FileProblem:
        return FileProblem(
            f"{name} has changed since {self.folder} was {how} it; put the old file back, "
            f"or delete {self.folder} and start again."
        )


def _source_state(saved: dict[str, Any]) -> SourceState:
    splitter, splits = saved["splitter"], {}
    for split in SPLITS:
        written = saved["splits"][split]
        shards, masks = ([Shard(**shard) for shard in written[kind]] for kind in ("shards", "masks"))
        splits[split] = Written(written["tokens"], written["documents"], written["text_bytes"], shards, masks)
    return SourceState(
        Splitter(splitter["fraction"], splitter["piece"], tuple(splitter["held"]), tuple(splitter["kept"])),
        Position(*saved["position"]),
        saved["done"],
        saved.get("bad", 0),
        saved.get("bad_first", []),
        splits,
    )


@dataclass(frozen=True)
class _Document:
    """A document or an example to tokenize, and the position after it."""

    split: Split
    item: Item
    position: Position


@dataclass(frozen=True)
class _TextBatch:
    """Documents to tokenize, what was wrong with records between them, and how far the source has been read."""

    documents: list[_Document]
    bad: list[str]
    position: Position
    read: int  # bytes from disk


@dataclass(frozen=True)
class _Reader:
    """Sources as documents or supervised examples, and their splits."""

    field: str
    supervised: bool
    skip_bad: bool

    def items(self, source: Source, start: Position, meter: Meter) -> Iterator[tuple[Position, Item]]:
        """Each document that can be used, with the position after it."""
        for position, item in self.all_items(source, start, meter):
            if not isinstance(item, BadRecord):
                yield position, item

    def all_items(
        self, source: Source, start: Position, meter: Meter
    ) -> Iterator[tuple[Position, Item | BadRecord]]:
        """The same, and what is wrong with a record in its place, or raised."""
        read = self._examples if self.supervised else self._documents
        for position, item in read(source, start, meter):
            if isinstance(item, BadRecord) and not self.skip_bad:
                raise item
            yield position, item

    def _documents(
        self, source: Source, start: Position, meter: Meter
    ) -> Iterator[tuple[Position, Item | BadRecord]]:
        for after, text in source.read(self.field, start, meter):
            pieces: Sequence[Item | BadRecord] = [text] if isinstance(text, BadRecord) else documents(text)
            begun = (start.part, start.record + 1) == after[:2]  # the record that an earlier process was in
            for number, piece in enumerate(pieces, 1):
                if not begun or number > start.piece:
                    inside = number < len(pieces)
                    yield Position(after.part, after.record - 1, number) if inside else after, piece

    def _examples(
        self, source: Source, start: Position, meter: Meter
    ) -> Iterator[tuple[Position, Item | BadRecord]]:
        for position, record in source.records(start, meter):
            if isinstance(record, BadRecord):
                yield position, record
                continue
            where = source.where(position)
            try:
                example = parse_example(record, where)
            except LoopformerError as error:
                yield position, BadRecord(str(error))
                continue
            if fits(example_text(example)):
                yield position, example
            else:
                yield position, BadRecord(f"{where} has more than a million characters, too many for one example.")

    def split(self, splitter: Splitter, item: Item) -> Sequence[tuple[Split, Item]]:
        return splitter.split(item) if isinstance(item, str) else [(splitter.choose(example_key(item)), item)]

    def survey(self, source: Source) -> Splitter:
        def texts() -> Iterator[str]:
            for _, item in self.items(source, Position(), Meter()):
                yield item if isinstance(item, str) else example_key(item)

        return survey(texts, source.val_fraction, source.given, whole=self.supervised)

    def training_texts(self, sources: Sequence[Source], states: Sequence[SourceState]) -> Iterator[str]:
        """Pieces of the training documents of each source, up to its share of what a tokenizer learns from."""
        for source, state in zip(sources, states, strict=True):
            yield from within_memory(self._training_pieces(source, state, len(sources)), len(sources))

    def _training_pieces(self, source: Source, state: SourceState, shares: int) -> Iterator[str]:
        left = _TOKENIZER_TEXT // shares
        for _, item in self.items(source, Position(), Meter()):
            for split, part in self.split(state.splitter, item):
                if split == "train":
                    left -= len(_text(part))
                    yield from training_pieces(_text(part))
            if left <= 0:
                return

    def batches(self, source: Source, state: SourceState, meter: Meter, batch_chars: int) -> Iterator[_TextBatch]:
        """Batches of about `batch_chars` characters."""
        batch = _TextBatch([], [], state.position, meter.read)
        size = 0
        for after, item in self.all_items(source, state.position, meter):
            if size >= batch_chars:
                yield batch
                batch, size = _TextBatch([], [], batch.position, meter.read), 0
            if isinstance(item, BadRecord):
                batch.bad.append(str(item))  # the error itself holds on to the text of its line
                size += len(batch.bad[-1])
            else:
                pieces = self.split(state.splitter, item)
                batch.documents.extend(_Document(split, piece, after) for split, piece in pieces)
                size += len(_text(item))
            batch = dataclasses.replace(batch, position=after, read=meter.read)
        yield batch


class _Output:
    """The shards of one split of one source, up to its limit; masks too where there are flags."""

    def __init__(
        self, ledger: Ledger, name: str, dtype: npt.DTypeLike, written: Written, limit: int | None
    ) -> None:
        self._written, self._limit = written, limit
        size, done = ledger.settings["shard_tokens"], written.tokens
        self._tokens = ShardWriter(ledger.folder, name, ".bin", dtype, size, done, written.shards)
        self._masks: ShardWriter | None = None
        if ledger.settings["supervised"]:
            self._masks = ShardWriter(ledger.folder, name, ".mask", np.uint8, size, done, written.masks)
        self._writers = [writer for writer in (self._tokens, self._masks) if writer]

    @property
    def full(self) -> bool:
        return self._limit is not None and self._written.tokens >= self._limit

    def append(self, items: list[Item], documents: list[Encoded]) -> None:
        left = None if self._limit is None else self._limit - self._written.tokens
        if left is not None:
            starts = np.cumsum([0, *(len(ids) for ids, _ in documents)])[:-1]
            documents = documents[: int(np.searchsorted(starts, left))]
        if documents:
            for writer, columns in zip(self._writers, zip(*documents, strict=True), strict=False):
                writer.append(np.concatenate(columns)[:left])
            self._written.documents += len(documents)
            self._written.text_bytes += sum(len(_text(item).encode()) for item in items[: len(documents)])
            self._note()

    def flush(self) -> None:
        for writer in self._writers:
            writer.flush()

    def finish(self) -> int:
        """Finish the last shard; the tokens of all."""
        for writer in self._writers:
            writer.finish()
        self._note()
        return self._written.tokens

    def close(self) -> None:
        for writer in self._writers:
            writer.close()

    def _note(self) -> None:
        self._written.tokens, self._written.shards = self._tokens.items, self._tokens.shards
        self._written.masks = self._masks.shards if self._masks else []


def _tokenize(
    ledger: Ledger,
    source: Source,
    state: SourceState,
    reader: _Reader,
    tokenizer: Tokenizer,
    batch_chars: int,
    commit_seconds: float,
    report: Callable[[PrepareProgress], None] | None,
) -> None:
    """Tokenize the rest of one source."""
    meter = Meter(sum(part.size or 0 for part in source.parts[: state.position.part]))
    limits: dict[Split, int | None] = {"train": source.train_tokens, "val": source.val_tokens}
    committed = time.monotonic()
    if report:
        report(_progress(source, state, 0))  # a display counts its speed from here
    with ExitStack() as stack:
        outputs: dict[Split, _Output] = {}
        for split in SPLITS:
            name = f"{source.name}-{split}"
            output = _Output(ledger, name, _dtype(tokenizer), state.splits[split], limits[split])
            outputs[split] = stack.enter_context(closing(output))
        batches = stack.enter_context(closing(Prefetcher(reader.batches(source, state, meter, batch_chars))))
        for batch in batches:
            problems = _write(batch.documents, source, tokenizer, outputs)
            if problems and not reader.skip_bad:
                raise problems[0]
            bad = [*batch.bad, *map(str, problems)]
            state.bad += len(bad)
            state.bad_first = [*state.bad_first, *bad][:_BAD_LISTED]
            state.position = batch.position
            if report:
                report(_progress(source, state, batch.read))
            if all(output.full for output in outputs.values()):
                break
            if time.monotonic() - committed >= commit_seconds:
                for output in outputs.values():
                    output.flush()
                ledger.commit()
                committed = time.monotonic()
        for split, output in outputs.items():
            if not output.finish() and (split == "train" or source.val_fraction):
                raise LoopformerError(
                    f"{source.given} left nothing for the {split} split; change --val-fraction or add text."
                )
    state.done = True
    ledger.commit()


def _write(
    documents: list[_Document], source: Source, tokenizer: Tokenizer, outputs: dict[Split, _Output]
) -> list[BadRecord]:
    """Tokenize documents into their splits that are not full; what the tokenizer could not use."""
    problems: list[BadRecord] = []
    for group in _groups(documents):
        wanted = [document for document in group if not outputs[document.split].full]
        encoded = _encode_named(tokenizer, wanted, source)
        problems += [problem for problem in encoded if isinstance(problem, BadRecord)]
        for split, output in outputs.items():
            own = [
                (document.item, ids)
                for document, ids in zip(wanted, encoded, strict=True)
                if document.split == split and not isinstance(ids, BadRecord)
            ]
            output.append([item for item, _ in own], [ids for _, ids in own])
    return problems


def _groups(documents: list[_Document]) -> Iterator[list[_Document]]:
    """The documents, as many at a time as may be tokenized together."""
    group: list[_Document] = []
    size = 0
    for document in documents:
        more = len(_text(document.item).encode())
        if group and size + more > _AT_ONCE:
            yield group
            group, size = [], 0
        group.append(document)
        size += more
    if group:
        yield group


def _encode_named(tokenizer: Tokenizer, documents: list[_Document], source: Source) -> list[Encoded | BadRecord]:
    """The ids of each document, or why the tokenizer cannot give them."""
    try:
        return list(_encode(tokenizer, [document.item for document in documents]))
    except LoopformerError as error:
        if len(documents) == 1:
            return [BadRecord(f"{source.where(documents[0].position)} cannot be used: {error}")]
        return [encoded for document in documents for encoded in _encode_named(tokenizer, [document], source)]


def _encode(tokenizer: Tokenizer, items: list[Item]) -> list[Encoded]:
    """Ids with the end token at the end of each document, in the same order."""
    texts = [item for item in items if isinstance(item, str)]
    if len(texts) < len(items):
        return list(encode_examples(tokenizer, [item for item in items if not isinstance(item, str)]))
    dtype = _dtype(tokenizer)
    return [(np.array([*ids, tokenizer.eot], dtype), None) for ids in tokenizer.encode_batch(texts)]


def _text(item: Item) -> str:
    return item if isinstance(item, str) else example_text(item)


def _dtype(tokenizer: Tokenizer) -> np.dtype[Any]:
    return np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)


def _progress(source: Source, state: SourceState, read: int) -> PrepareProgress:
    tokens = sum(written.tokens for written in state.splits.values())
    fractions = []
    if source.size:
        fractions.append(read / source.size)
    if source.train_tokens:
        fractions.append(state.splits["train"].tokens / source.train_tokens)
    fraction = min(1.0, max(fractions)) if fractions else None
    size = sum(written.text_bytes for written in state.splits.values())
    return PrepareProgress(source.name, size, tokens, fraction)


def _describe(source: Source) -> dict[str, Any]:
    """What must be the same for an interrupted job to continue."""
    return {
        "given": source.given,
        "name": source.name,
        "weight": source.weight,
        "val_fraction": source.val_fraction,
        "train_tokens": source.train_tokens,
        "val_tokens": source.val_tokens,
        "parts": [{"name": part.name, "size": part.size} for part in source.parts],
    }


def _index(sources: Sequence[Source], states: Sequence[SourceState], tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "tokenizer": {"sha256": tokenizer.hash, "vocab_size": tokenizer.vocab_size, "end": tokenizer.eot},
        "dtype": _dtype(tokenizer).name,
        "tokens": {split: sum(state.splits[split].tokens for state in states) for split in SPLITS},
        "sources": [
            {
                "name": source.name,
                "weight": source.weight,
                "splitter": dataclasses.asdict(state.splitter),
                "splits": {
                    split: dataclasses.asdict(state.splits[split]) for split in SPLITS if state.splits[split].tokens
                },
                **({"bad": state.bad, "bad_first": state.bad_first} if state.bad else {}),
            }
            for source, state in zip(sources, states, strict=True)
        ],
    }
