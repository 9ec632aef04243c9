"""Turn text into token shards, as `loopformer prepare` does.

    index = prepare(["stdlib"], "data/stdlib", train_tokenizer=4096)
    index = prepare(["news.jsonl.zst=2", "books/=1"], "data/mix", tokenizer="gpt2")

The folder gets `tokenizer.json`, shards of token ids for each source and split, and at the end `index.json` with
counts, checksums and settings. An end token follows every document.

The output depends only on the settings and the text. After a crash at any moment the same call continues at the
last commit and ends with the same bytes. The ledger (`prepare.state.json`) is replaced atomically, and only after
the shards that it describes are on disk. So it never claims more than there is. A resumed call truncates shards to
what the ledger claims. Reading and splitting run in a thread, while the `tokenizers` library uses all cores. Only a
few batches of text are in memory. A record that cannot be used is an error. With `on_bad="skip"` it is counted and
left out.
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

from loopformer.data.corpus import Position, Source, parse_sources
from loopformer.data.formats import BadRecord, Meter, Record
from loopformer.data.loader import Prefetcher
from loopformer.data.shards import INDEX_FILE, STATE_FILE, Shard, ShardWriter, damaged_folder_error, read_index
from loopformer.data.splits import (
    SPLITS,
    Split,
    Splitter,
    check_fraction,
    documents,
    fits,
    make_splitter,
    reconcile,
)
from loopformer.data.tokenizer import TOKENIZER_FILE as TOKENIZER_FILE
from loopformer.data.tokenizer import (
    Encoded,
    Example,
    Segment,
    Tokenizer,
    check_vocab_size,
    encode_examples,
    example_key,
    example_text,
    parse_example,
    training_pieces,
)
from loopformer.errors import FileProblem, LoopformerError, import_optional, require
from loopformer.files import (
    DamagedFile,
    check_writable,
    json_bytes,
    lock_folder,
    read_json,
    sync_folder,
    write_json,
)

DEFAULT_VOCAB = 4096  # ids of the tokenizer that is trained by default
FINGERPRINTS_FILE = "sources.json"  # modification time and checksum of each source file
_MAX_LISTED = 20  # error messages of bad records in the index

OnBad = Literal["stop", "skip"]
Item = Example | BadRecord


@dataclass(frozen=True)
class PrepareProgress:
    """Progress on one source, for display."""

    source: str
    text_bytes: int  # bytes of text; in the phase "checksums", bytes of files
    tokens: int
    fraction: float | None  # share of the source that is done; None if its length is unknown
    phase: str = "tokenizing"


Report = Callable[[PrepareProgress], None]


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
    batch_bytes: int = 2 << 20,
    commit_seconds: float = 2.0,
    report: Report | None = None,
) -> dict[str, Any]:
    """Turn sources into token shards under `out` and return the index. An interrupted call continues when repeated.

    The tokenizer is `tokenizer` (gpt2 or a path), or one trained on the sources with `train_tokenizer` ids. With
    neither it is GPT-2's if text comes from the Hub, else a trained one of 4096 ids. `val_fraction`, `train_tokens`
    and `val_tokens` apply to each source and override its preset. A split ends after exactly that many tokens. With
    `on_bad="skip"` unusable records are left out: the index has their number and the first error messages.
    `workers` (cores for tokenizing), `batch_bytes` (UTF-8 bytes tokenized at a time), `commit_seconds` and `report`
    do not change the result.
    """
    require(tokenizer is None or train_tokenizer is None, "Choose --tokenizer or --train-tokenizer, not both.")
    for name, number in (("train-tokens", train_tokens), ("val-tokens", val_tokens), ("workers", workers)):
        require(number is None or number >= 1, f"--{name} must be 1 or more, got {number}.")
    require(on_bad in get_args(OnBad), f"--on-bad is {' or '.join(get_args(OnBad))}, got {on_bad!r}.")
    if val_fraction is not None:
        check_fraction(val_fraction)
    if train_tokenizer is not None:
        check_vocab_size(train_tokenizer)
    if workers is not None:
        os.environ["RAYON_NUM_THREADS"] = str(workers)  # read when the library first tokenizes
    limits = {"val_fraction": val_fraction, "train_tokens": train_tokens, "val_tokens": val_tokens}
    overrides: dict[str, Any] = {name: value for name, value in limits.items() if value is not None}
    parsed = [dataclasses.replace(source, **overrides) for source in parse_sources(sources, field, supervised)]
    if any(source.remote for source in parsed):
        import_optional("datasets", "A dataset of the Hub", "data")
    if tokenizer is None and train_tokenizer is None:
        tokenizer = "gpt2" if any(source.remote for source in parsed) else None
    vocab_size = train_tokenizer or DEFAULT_VOCAB
    chosen = Tokenizer.find(tokenizer) if tokenizer is not None else None
    settings = {
        "version": 1,
        "tokenizer": {"sha256": chosen.hash} if chosen else {"trained": vocab_size},
        "field": field,
        "supervised": supervised,
        "shard_tokens": shard_tokens,
        "sources": [_describe(source) for source in parsed],
    }
    reader = _Reader(field, supervised, on_bad == "skip")
    show = report or (lambda progress: None)

    def announce(name: str, phase: str) -> None:
        show(PrepareProgress(name, 0, 0, None, phase))

    with lock_folder(Path(out)):
        ledger = Ledger(Path(out), settings, parsed, show)
        if (index := ledger.begin()) is not None:
            return index
        check_writable(ledger.folder)
        if not ledger.states:
            splitters = []
            for source in parsed:
                announce(source.name, "looking through")
                splitters.append(reader.make_splitter(source))
            ledger.states = [SourceState(splitter) for splitter in reconcile(splitters)]
        if (ledger.folder / TOKENIZER_FILE).exists():
            chosen = Tokenizer.load(ledger.folder)
        elif chosen is None:
            announce("tokenizer", f"training, {vocab_size} ids")
            chosen = Tokenizer.train_in_subprocess(reader.training_texts(parsed, ledger.states), vocab_size)
            if (trained := chosen.vocab_size) < vocab_size:
                announce("tokenizer", f"{trained} ids instead of {vocab_size}, the text has no more pairs to merge")
        # Write nothing before this line, so that a wrong field or a missing file leaves no folder. Write the ledger
        # before the tokenizer, because a repeated call refuses a folder that has files but no ledger.
        ledger.commit()
        chosen.save(ledger.folder)
        for source, state in zip(parsed, ledger.states, strict=True):
            if not state.done:
                _tokenize(ledger, source, state, reader, chosen, batch_bytes, commit_seconds)
        return ledger.finish(chosen)


@dataclass
class SplitState:
    """What one split of one source has on disk. Supervised data has a mask for each shard."""

    tokens: int = 0
    documents: int = 0
    text_bytes: int = 0
    shards: list[Shard] = field(default_factory=list)
    masks: list[Shard] = field(default_factory=list)


@dataclass
class SourceState:
    """Progress on one source, as the ledger stores it."""

    splitter: Splitter
    position: Position = field(default_factory=Position)
    done: bool = False
    bad: int = 0  # unusable records
    bad_first: list[str] = field(default_factory=list)  # the error messages of the first ones
    splits: dict[Split, SplitState] = field(default_factory=lambda: {split: SplitState() for split in SPLITS})

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> SourceState:
        splits: dict[Split, SplitState] = {}
        for split in SPLITS:
            written = saved["splits"][split]
            shards = {kind: [Shard(**shard) for shard in written[kind]] for kind in ("shards", "masks")}
            splits[split] = SplitState(**written | shards)
        splitter, position = Splitter(**saved["splitter"]), Position(*saved["position"])
        return cls(**saved | {"splitter": splitter, "position": position, "splits": splits})


@dataclass
class Ledger:
    """The settings and sources of a folder, and the progress on each source."""

    folder: Path
    settings: dict[str, Any]
    sources: Sequence[Source]
    report: Report
    states: list[SourceState] = field(default_factory=list)  # one per source, once they are known

    def begin(self) -> dict[str, Any] | None:
        """The index of a finished folder. Otherwise None, with `states` as of the last commit, if there is one."""
        index, state = self.folder / INDEX_FILE, self.folder / STATE_FILE
        if index.exists():
            finished = read_index(index)
            self._compare_settings(finished.get("settings"))
            self._compare_files()
            state.unlink(missing_ok=True)
            return finished
        if state.exists():
            unfinished = read_index(state)
            self._compare_settings(unfinished.get("settings"))
            try:
                files = zip(unfinished.get("changed", self._modified_times), self._modified_times, strict=True)
                changed = [name for then, now in files for name in now if then[name] != now[name]]
                self.states = [SourceState.from_json(source) for source in unfinished["sources"]]
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise damaged_folder_error(state) from error
            if changed:
                raise self._changed_file_error(changed[0], "begun with")
        elif any(path.name != f"{STATE_FILE}.tmp" for path in self.folder.iterdir()):
            raise FileProblem(
                f"{self.folder} is not empty and was not made by prepare; choose another --out folder."
            )
        return None

    def commit(self) -> None:
        """Record the progress. Flush the shards before, because the ledger may only claim what survives a crash."""
        sources = [dataclasses.asdict(state) for state in self.states]
        ledger = {"settings": self.settings, "changed": self._modified_times, "sources": sources}
        write_json(self.folder / STATE_FILE, ledger)

    def finish(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """Write the index, which makes the folder usable, and return it."""
        if fingerprints := dict(pair for source in self.sources for pair in self._fingerprints(source)):
            write_json(self.folder / FINGERPRINTS_FILE, fingerprints)
        sources = []
        for source, state in zip(self.sources, self.states, strict=True):
            splits = {
                split: dataclasses.asdict(state.splits[split]) for split in SPLITS if state.splits[split].tokens
            }
            described = {
                "name": source.name,
                "weight": source.weight,
                "splitter": dataclasses.asdict(state.splitter),
                "splits": splits,
            }
            sources.append(described | ({"bad": state.bad, "bad_first": state.bad_first} if state.bad else {}))
        index = {
            "settings": self.settings,
            "tokenizer": {"sha256": tokenizer.hash, "vocab_size": tokenizer.vocab_size, "end": tokenizer.eot},
            "dtype": _dtype(tokenizer).name,
            "tokens": {split: sum(state.splits[split].tokens for state in self.states) for split in SPLITS},
            "sources": sources,
        }
        # Delete the ledger last: after a crash in between, `begin` finds a finished folder.
        write_json(self.folder / INDEX_FILE, index)
        (self.folder / STATE_FILE).unlink()
        sync_folder(self.folder)
        return read_index(self.folder / INDEX_FILE)

    @property
    def _modified_times(self) -> list[dict[str, int | None]]:
        """For each source, the modification time of each of its files."""
        return [{part.name: part.modified_ns for part in source.parts} for source in self.sources]

    def _compare_settings(self, earlier: Any) -> None:
        now = json.loads(json_bytes(self.settings))
        if earlier != now:
            earlier = earlier if isinstance(earlier, dict) else {}
            changed = ", ".join(name for name in now if earlier.get(name) != now[name])
            raise FileProblem(
                f"{self.folder} was begun with other settings or files ({changed}); "
                "use the same ones, choose another --out folder, or delete it."
            )

    def _compare_files(self) -> None:
        """Refuse a folder if a source file has changed since. A new time with the same checksum is no change."""
        path = self.folder / FINGERPRINTS_FILE
        fingerprints = read_json(path) if path.exists() else {}  # folders of earlier versions have none
        for source in self.sources:
            for part in source.parts:
                # A file without a fingerprint counts as unchanged.
                match fingerprints.get(f"{source.name}/{part.name}", [part.modified_ns, None]):
                    case [changed, digest]:
                        if changed != part.modified_ns and (digest is None or digest != part.checksum()):
                            raise self._changed_file_error(part.name, "made of")
                    case _:
                        raise DamagedFile(f"{path} is damaged; delete it, or prepare the folder again.")

    def _changed_file_error(self, name: str, how: str) -> FileProblem:
        return FileProblem(
            f"{name} has changed since {self.folder} was {how} it; put the old file back, "
            f"or delete {self.folder} and start again."
        )

    def _fingerprints(self, source: Source) -> Iterator[tuple[str, list[Any]]]:
        """The modification time and the checksum of each file, by its name."""
        bytes_read = 0

        def show(count: int) -> None:
            nonlocal bytes_read
            bytes_read += count
            fraction = min(1.0, bytes_read / source.size) if source.size else None
            self.report(PrepareProgress(source.name, bytes_read, 0, fraction, "checksums"))

        for part in source.parts:
            if part.path is not None:
                yield f"{source.name}/{part.name}", [part.modified_ns, part.checksum(show)]


@dataclass(frozen=True)
class _Document:
    """A document to tokenize."""

    split: Split
    segments: Example
    position: Position  # where reading continues after it


@dataclass
class _Batch:
    """Documents to tokenize together, the errors of bad records among them, and where reading continues."""

    position: Position
    bytes_read: int
    documents: list[_Document] = field(default_factory=list)
    bad: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Reader:
    """Reads sources as documents: texts of a single segment each, or supervised examples."""

    field: str
    supervised: bool
    skip_bad: bool

    def read(self, source: Source, start: Position, meter: Meter) -> Iterator[tuple[Position, Item]]:
        """Each document with the position after it. Raises a bad record, or yields it if `skip_bad` is set."""
        for after, record in source.records(start, meter):
            items: list[Item] = []
            if self.supervised:
                items.append(self._parse(record, source.where(after)))
            elif isinstance(text := source.text_of(record, self.field, after), BadRecord):
                items.append(text)
            elif text:
                items += [(Segment(piece, True),) for piece in documents(text)]
            # An earlier process may have stopped inside this record, after some of its documents.
            done = start.piece if (start.part, start.record + 1) == after[:2] else 0
            for number, item in enumerate(items[done:], done + 1):
                if isinstance(item, BadRecord) and not self.skip_bad:
                    raise item
                yield after if number == len(items) else Position(after.part, after.record - 1, number), item

    def _parse(self, record: Record | BadRecord, where: str) -> Item:
        """The supervised example of a record, or what is wrong with it."""
        if isinstance(record, BadRecord):
            return record
        try:
            example = parse_example(record, where)
        except LoopformerError as error:
            return BadRecord(str(error))
        if fits(example_text(example)):
            return example
        return BadRecord(f"{where} has more than a million characters, too many for one example.")

    def make_splitter(self, source: Source) -> Splitter:
        def keys() -> Iterator[str]:
            for _, item in self.read(source, Position(), Meter()):
                if not isinstance(item, BadRecord):
                    yield example_key(item) if self.supervised else example_text(item)

        return make_splitter(keys, source.val_fraction, source.given, can_cut=not self.supervised)

    def split(self, splitter: Splitter, example: Example) -> list[tuple[Split, Example]]:
        """The document with its split. A text may be cut into a part for each split."""
        if self.supervised:
            return [(splitter.choose(example_key(example)), example)]
        return [(split, (Segment(text, True),)) for split, text in splitter.split(example_text(example))]

    def training_texts(self, sources: Sequence[Source], states: Sequence[SourceState]) -> Iterator[str]:
        """Texts to train a tokenizer on: pieces of the training split, with an equal share for each source."""
        for source, state in zip(sources, states, strict=True):
            items = (item for _, item in self.read(source, Position(), Meter()) if not isinstance(item, BadRecord))
            split_items = (self.split(state.splitter, item) for item in items)
            texts = ([example_text(part) for split, part in parts if split == "train"] for parts in split_items)
            yield from training_pieces(texts, len(sources))

    def batches(self, source: Source, state: SourceState, max_bytes: int) -> Iterator[_Batch]:
        """Batches of at most `max_bytes` of text, unless a single document has more."""
        start = state.position
        meter = Meter(sum(part.size or 0 for part in source.parts[: start.part]))
        batch, size = _Batch(start, meter.bytes_read), 0
        for position, item in self.read(source, start, meter):
            item_bytes = len(str(item) if isinstance(item, BadRecord) else example_text(item).encode())
            if size and size + item_bytes > max_bytes:
                yield batch
                batch, size = _Batch(batch.position, meter.bytes_read), 0
            size += item_bytes
            if isinstance(item, BadRecord):
                batch.bad.append(str(item))  # as text, because the error would keep its record in memory
            else:
                pieces = self.split(state.splitter, item)
                batch.documents += [_Document(split, example, position) for split, example in pieces]
            batch.position, batch.bytes_read = position, meter.bytes_read
        yield batch


class _SplitWriter:
    """Writes the shards of one split of one source up to its limit, and their masks if it is supervised."""

    def __init__(
        self, ledger: Ledger, name: str, dtype: npt.DTypeLike, written: SplitState, limit: int | None
    ) -> None:
        self._written, self._limit = written, limit
        size, done = ledger.settings["shard_tokens"], written.tokens
        self.writers = [ShardWriter(ledger.folder, name, ".bin", dtype, size, done, written.shards)]
        if ledger.settings["supervised"]:
            self.writers.append(ShardWriter(ledger.folder, name, ".mask", np.uint8, size, done, written.masks))

    @property
    def is_full(self) -> bool:
        return self._limit is not None and self._written.tokens >= self._limit

    def append(self, example: Example, encoded: Encoded) -> None:
        """Append a document, cut to fit the limit. A full split ignores it."""
        if not self.is_full:
            left = None if self._limit is None else self._limit - self._written.tokens
            # Ids go to the first writer and flags to the second, which exists only for supervised data.
            for writer, values in zip(self.writers, encoded, strict=False):
                writer.append(values[:left])
            self._written.tokens = self.writers[0].items
            self._written.documents += 1
            self._written.text_bytes += len(example_text(example).encode())

    def close(self) -> None:
        for writer in self.writers:
            writer.close()


def _tokenize(
    ledger: Ledger,
    source: Source,
    state: SourceState,
    reader: _Reader,
    tokenizer: Tokenizer,
    max_bytes: int,
    commit_seconds: float,
) -> None:
    """Tokenize the rest of one source and commit at intervals."""
    limits: dict[Split, int | None] = {"train": source.train_tokens, "val": source.val_tokens}
    committed = time.monotonic()
    ledger.report(_progress(source, state, 0))  # a display measures speed from this report
    with ExitStack() as stack:
        outputs: dict[Split, _SplitWriter] = {}
        for split, written in state.splits.items():
            output = _SplitWriter(ledger, f"{source.name}-{split}", _dtype(tokenizer), written, limits[split])
            outputs[split] = stack.enter_context(closing(output))
        batches = stack.enter_context(closing(Prefetcher(reader.batches(source, state, max_bytes))))
        for batch in batches:
            wanted = [document for document in batch.documents if not outputs[document.split].is_full]
            bad = batch.bad
            for document, encoded in zip(wanted, _encode(tokenizer, wanted, source), strict=True):
                if not isinstance(encoded, BadRecord):
                    outputs[document.split].append(document.segments, encoded)
                elif reader.skip_bad:
                    bad.append(str(encoded))
                else:
                    raise encoded
            state.bad += len(bad)
            state.bad_first = [*state.bad_first, *bad][:_MAX_LISTED]
            state.position = batch.position
            ledger.report(_progress(source, state, batch.bytes_read))
            if all(output.is_full for output in outputs.values()):
                break
            if time.monotonic() - committed >= commit_seconds:
                # Flush before the commit: the ledger may only claim what survives a crash.
                for output in outputs.values():
                    for writer in output.writers:
                        writer.flush()
                ledger.commit()
                committed = time.monotonic()
        for split, output in outputs.items():
            for writer in output.writers:
                writer.finish()
            if not state.splits[split].tokens and (split == "train" or source.val_fraction):
                raise LoopformerError(
                    f"{source.given} left nothing for the {split} split; change --val-fraction or add text."
                )
    state.done = True
    ledger.commit()


def _encode(tokenizer: Tokenizer, wanted: list[_Document], source: Source) -> list[Encoded | BadRecord]:
    """The ids and flags of each document, or the reason why it cannot be tokenized.

    If a batch fails, each document is tried alone to find the bad ones.
    """
    try:
        return list(encode_examples(tokenizer, [document.segments for document in wanted]))
    except LoopformerError as error:
        if len(wanted) == 1:
            return [BadRecord(f"{source.where(wanted[0].position)} cannot be used: {error}")]
        return [encoded for document in wanted for encoded in _encode(tokenizer, [document], source)]


def _dtype(tokenizer: Tokenizer) -> np.dtype[Any]:
    return np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)


def _progress(source: Source, state: SourceState, bytes_read: int) -> PrepareProgress:
    fractions = [bytes_read / source.size] if source.size else []
    if source.train_tokens:
        fractions.append(state.splits["train"].tokens / source.train_tokens)
    tokens = sum(written.tokens for written in state.splits.values())
    text_bytes = sum(written.text_bytes for written in state.splits.values())
    return PrepareProgress(source.name, text_bytes, tokens, min(1.0, max(fractions)) if fractions else None)


def _describe(source: Source) -> dict[str, Any]:
    """The settings of a source that must be the same for an interrupted call to continue."""
    names = ("given", "name", "weight", "val_fraction", "train_tokens", "val_tokens")
    parts = [{"name": part.name, "size": part.size} for part in source.parts]
    return {name: getattr(source, name) for name in names} | {"parts": parts}
