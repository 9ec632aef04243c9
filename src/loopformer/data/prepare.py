"""Text → token shards: what `loopformer prepare` does.

    index = prepare(["stdlib"], "data/stdlib", train_tokenizer=4096)
    index = prepare(["news.jsonl.zst=2", "books/=1"], "data/mix", tokenizer="gpt2")

The folder gets `tokenizer.json`, shards of token ids for each source and split, and at the end `index.json` with
counts, checksums and settings. Every document is followed by the end token.

What is written depends only on the settings and the text. After a crash at any moment the same call continues at
the last commit and ends with the same bytes: the ledger on disk (`prepare.state.json`) is replaced whole, and
only when what it describes is safe, so it is always true; whatever the shards hold beyond it is cut off when the
work goes on. Reading and splitting run in a thread beside tokenizing, which the `tokenizers` library spreads over
the cores; only a few batches of text are in memory.
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
from typing import Any

import numpy as np
import numpy.typing as npt

from loopformer.data.corpus import Position, Source, parse_sources
from loopformer.data.formats import Meter, need
from loopformer.data.loader import Prefetcher
from loopformer.data.shards import INDEX_FILE, STATE_FILE, Shard, ShardWriter, damaged_folder, read_index
from loopformer.data.splits import SPLITS, Split, Splitter, agree, documents, survey
from loopformer.data.supervised import Example, encode_examples, example_key, example_text, parse_example
from loopformer.data.tokenizer import FILE as TOKENIZER_FILE
from loopformer.data.tokenizer import Tokenizer
from loopformer.errors import FileProblem, LoopformerError
from loopformer.files import locked, sync_folder, write_atomic

DEFAULT_VOCAB = 4096  # of the tokenizer trained on the spot when none is asked for
_TOKENIZER_TEXT = 256 << 20  # characters a tokenizer is trained on, at most

Item = str | Example
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
    after exactly so many tokens. `workers` (cores for tokenizing), `batch_chars`, `commit_seconds` and
    `report` do not influence the result.
    """
    if tokenizer is not None and train_tokenizer is not None:
        raise LoopformerError("Choose --tokenizer or --train-tokenizer, not both.")
    for name, number in (("train-tokens", train_tokens), ("val-tokens", val_tokens), ("workers", workers)):
        if number is not None and number < 1:
            raise LoopformerError(f"--{name} must be 1 or more, got {number}.")
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
    reader = _Reader(field, supervised)

    def announce(name: str, phase: str) -> None:
        if report:
            report(PrepareProgress(name, 0, 0, None, phase))

    with locked(Path(out)):
        ledger = Ledger(Path(out), settings)
        if (index := ledger.begin()) is not None:
            return index
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
            ready = Tokenizer.train(reader.training_texts(parsed, ledger.sources), train_tokenizer or 0)
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
    splits: dict[Split, Written] = field(default_factory=lambda: {split: Written() for split in SPLITS})


@dataclass
class Ledger:
    """The settings of a folder and the state of each source that was begun."""

    folder: Path
    settings: dict[str, Any]
    sources: list[SourceState] = field(default_factory=list)

    def begin(self) -> dict[str, Any] | None:
        """Begin or go on: the index if the folder is finished, else None and `sources` as they were."""
        index, state = self.folder / INDEX_FILE, self.folder / STATE_FILE
        if index.exists():
            finished = read_index(index)
            self._compare(finished.get("settings"))
            state.unlink(missing_ok=True)
            return finished
        if state.exists():
            unfinished = read_index(state)
            self._compare(unfinished.get("settings"))
            try:
                self.sources = [_source_state(source) for source in unfinished["sources"]]
            except (KeyError, TypeError) as error:
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
        write_atomic(self.folder / STATE_FILE, _json({"settings": self.settings, "sources": sources}))

    def finish(self, index: dict[str, Any]) -> dict[str, Any]:
        """Write the index, after which the folder can be used."""
        write_atomic(self.folder / INDEX_FILE, _json({"settings": self.settings, **index}))
        (self.folder / STATE_FILE).unlink()
        sync_folder(self.folder)
        return read_index(self.folder / INDEX_FILE)

    def _compare(self, earlier: Any) -> None:
        now = json.loads(_json(self.settings))
        if earlier != now:
            earlier = earlier if isinstance(earlier, dict) else {}
            changed = ", ".join(name for name in now if earlier.get(name) != now[name])
            raise FileProblem(
                f"{self.folder} was begun with other settings or files ({changed}); "
                "use the same ones, choose another --out folder, or delete it."
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
        splits,
    )


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()


@dataclass(frozen=True)
class _TextBatch:
    """Documents to tokenize, and how far the source has been read after them."""

    items: list[tuple[Split, Item]]
    position: Position
    read: int  # bytes from disk


@dataclass(frozen=True)
class _Reader:
    """Sources as documents or supervised examples, and their splits."""

    field: str
    supervised: bool

    def items(self, source: Source, start: Position, meter: Meter) -> Iterator[tuple[Position, Item]]:
        """Each document, with the position after its record."""
        if self.supervised:
            for position, record in source.records(start, meter):
                where = f"{source.parts[position.part].name} record {position.record}"
                yield position, parse_example(record, where)
        else:
            for position, text in source.texts(self.field, start, meter):
                for piece in documents(text):
                    yield position, piece

    def split(self, splitter: Splitter, item: Item) -> Sequence[tuple[Split, Item]]:
        return splitter.split(item) if isinstance(item, str) else [(splitter.choose(example_key(item)), item)]

    def survey(self, source: Source) -> Splitter:
        def texts() -> Iterator[str]:
            for _, item in self.items(source, Position(), Meter()):
                yield item if isinstance(item, str) else example_key(item)

        return survey(texts, source.val_fraction, source.given, whole=self.supervised)

    def training_texts(self, sources: Sequence[Source], states: Sequence[SourceState]) -> Iterator[str]:
        """The training documents of each source, up to its share of what a tokenizer learns from."""
        for source, state in zip(sources, states, strict=True):
            left = _TOKENIZER_TEXT // len(sources)
            for _, item in self.items(source, Position(), Meter()):
                for split, part in self.split(state.splitter, item):
                    if split == "train":
                        left -= len(_text(part))
                        yield _text(part)
                if left <= 0:
                    break

    def batches(self, source: Source, state: SourceState, meter: Meter, batch_chars: int) -> Iterator[_TextBatch]:
        """Batches of about `batch_chars` characters; a batch ends only where a record does."""
        items: list[tuple[Split, Item]] = []
        position, size = state.position, 0
        for after, item in self.items(source, position, meter):
            if size >= batch_chars and after != position:
                yield _TextBatch(items, position, meter.read)
                items, size = [], 0
            items += self.split(state.splitter, item)
            size += len(_text(item))
            position = after
        yield _TextBatch(items, position, meter.read)


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
            wanted = [(split, item) for split, item in batch.items if not outputs[split].full]
            encoded = _encode(tokenizer, [item for _, item in wanted])
            for split, output in outputs.items():
                own = [number for number, (chosen, _) in enumerate(wanted) if chosen == split]
                output.append([wanted[number][1] for number in own], [encoded[number] for number in own])
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
            }
            for source, state in zip(sources, states, strict=True)
        ],
    }
