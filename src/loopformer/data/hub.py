"""Hugging Face datasets as a stream of records, in an order that a broken connection does not disturb.

read_dataset("HuggingFaceFW/fineweb-edu", "sample-10BT", "train", skip=0)

The same code reads a local dataset folder. When the connection breaks, the stream is opened again at the
record it had reached, so nothing is lost and nothing comes twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from loopformer.data.files import Record, need
from loopformer.errors import FileProblem, LoopformerError

T = TypeVar("T")

_WAITS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)  # seconds before each new attempt
_NETWORK = ("httpx", "httpx2", "httpcore", "aiohttp", "requests", "urllib3", "fsspec", "huggingface_hub")


@dataclass(frozen=True)
class Preset:
    """A well-known dataset with its training and held-out parts.

    A document is held out when its hash says so (`val_fraction` of all). Each part then ends after exactly
    so many tokens, the end token of each document counted; so the counts hold by definition for the
    tokenizer in use, GPT-2's unless another is asked for.
    """

    dataset: str
    config: str
    val_fraction: float
    train_tokens: int
    val_tokens: int = 10_000_000


PRESETS = {
    "pile": Preset("EleutherAI/the_pile_deduplicated", "", 0.001, 25_000_000_000),
    "fineweb-edu": Preset("HuggingFaceFW/fineweb-edu", "sample-10BT", 0.002, 9_500_000_000),
    "openwebtext": Preset("Skylion007/openwebtext", "", 0.002, 8_900_000_000),
}


def read_dataset(dataset: str, config: str, split: str, skip: int = 0) -> Iterator[Record]:
    """The records of a dataset by id, or of a local dataset folder, from number `skip` on."""
    return reconnecting(lambda done: _open(dataset, config, split, done), skip, f"hf:{dataset}")


def reconnecting(
    open_at: Callable[[int], Iterator[T]],
    skip: int,
    name: str,
    waits: tuple[float, ...] = _WAITS,
) -> Iterator[T]:
    """The items of `open_at(skip)`; when the network fails, opened again at the item after the last one.

    Where not even the first item comes there is nothing to wait for, and that is an error at once.
    """
    attempt, reached = 0, False
    while True:
        try:
            for item in open_at(skip):
                yield item
                skip += 1
                attempt, reached = 0, True
            return
        except Exception as error:
            if not _is_network(error):
                raise
            if not reached or attempt == len(waits):
                raise FileProblem(
                    f"{name} cannot be reached ({_first_line(error)}); "
                    "start again when the connection is back, it continues."
                ) from error
            time.sleep(waits[attempt])
            attempt += 1


def _open(dataset: str, config: str, split: str, skip: int) -> Iterator[Record]:
    datasets = need("datasets", "A Hugging Face dataset")
    try:
        stream = _stream(datasets, dataset, config, split)
    except datasets.exceptions.DatasetNotFoundError as error:
        raise LoopformerError(f"There is no dataset {dataset!r} that you may read; check its id.") from error
    except (ValueError, KeyError, FileNotFoundError) as error:
        raise LoopformerError(f"hf:{dataset} cannot be opened: {_first_line(error)}") from error
    yield from (stream.skip(skip) if skip else stream)


def _stream(datasets: Any, dataset: str, config: str, split: str) -> Any:
    folder = Path(dataset)
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():  # by save_to_disk
        saved = datasets.load_from_disk(dataset)
        return (saved[split] if isinstance(saved, dict) else saved).to_iterable_dataset()
    return datasets.load_dataset(dataset, config or None, split=split, streaming=True)


def _is_network(error: BaseException) -> bool:
    if isinstance(error, FileNotFoundError | PermissionError | LoopformerError):
        return False
    return isinstance(error, OSError) or type(error).__module__.partition(".")[0] in _NETWORK


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
