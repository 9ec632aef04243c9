"""The peak memory of `loopformer prepare` on text that was made to need much of it.

python benchmarks/prepare_memory.py                       # all of them
python benchmarks/prepare_memory.py --only newlines --seconds 60

Each input is written to a temporary folder and prepared by a process of its own, limited to `--seconds` and to an
address space of `--gigabytes`. The peak is the resident memory of that process and its children, read from /proc
ten times a second. The last line is JSON, which also goes to results/cpu/prepare_memory.json. What that file has of
an earlier version (`before`) stays. Random text is the same each time.
"""

import argparse
import base64
import gzip
import json
import os
import platform
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import tokenizers
import zstandard

RESULT = Path(__file__).parent.parent / "results" / "cpu" / "prepare_memory.json"
WORDS = "the loop runs again and time moves on while depth grows step by step until the text is read "


def long_record(path: Path) -> None:
    """A JSONL file whose second of three records has 100 MB of text."""
    noise = base64.b64encode(random.Random(0).randbytes(75_000_000)).decode()
    with path.open("w", encoding="utf-8") as file:
        for text in ("first " + WORDS * 9, noise, "last " + WORDS * 9):
            file.write(json.dumps({"text": text}) + "\n")


def gzip_bomb(path: Path) -> None:
    """3 GB of one letter in one record: 3 MB."""
    with gzip.open(path, "wb", compresslevel=9) as file:
        file.write(json.dumps({"text": "first " + WORDS * 9}).encode() + b'\n{"text": "')
        for _ in range(3000):
            file.write(b"a" * 1_000_000)
        file.write(b'"}\n')


def zstd_bomb(path: Path) -> None:
    """3 GB of one letter: 0.1 MB."""
    with path.open("wb") as file, zstandard.ZstdCompressor(level=19).stream_writer(file) as packed:
        packed.write(("first " + WORDS * 9).encode())
        for _ in range(3000):
            packed.write(b"a" * 1_000_000)


def newlines(path: Path) -> None:
    """A gigabyte of line breaks between two sentences."""
    with path.open("wb") as file:
        file.write((WORDS * 9).encode())
        for _ in range(1000):
            file.write(b"\n" * 1_000_000)
        file.write(("last " + WORDS * 9).encode())


def no_spaces(path: Path) -> None:
    """200 MB of characters of three bytes in words that hardly ever come twice."""
    characters = np.random.default_rng(0).integers(0x4E00, 0x4E00 + 3000, (33, 100_000, 20), np.uint16)
    with path.open("w", encoding="utf-8") as file:
        for block in characters:
            file.write("。".join(row.tobytes().decode("utf-16-le") for row in block) + "\n")


def structure_bomb(path: Path) -> None:
    """100 records of 8 MB that are lists of empty objects beside their text."""
    with path.open("w", encoding="utf-8") as file:
        for number in range(100):
            lists = ",".join(["{}"] * 2_700_000)
            file.write(f'{{"text": "record {number} {WORDS * 9}", "lists": [{lists}]}}\n')


def wide_characters(path: Path) -> None:
    """100 MB of characters of four bytes that no tokenizer of 4096 ids joins much."""
    characters = np.random.default_rng(0).integers(0x10400, 0x10400 + 60_000, (25, 1_000_000), np.uint32)
    with path.open("wb") as file:
        for block in characters:
            file.write(block.tobytes().decode("utf-32-le", "replace").encode() + b"\n")


INPUTS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "long_record": ("long.jsonl", long_record),
    "gzip_bomb": ("bomb.jsonl.gz", gzip_bomb),
    "zstd_bomb": ("bomb.txt.zst", zstd_bomb),
    "newlines": ("newlines.txt", newlines),
    "no_spaces": ("words.txt", no_spaces),
    "structure_bomb": ("lists.jsonl", structure_bomb),
    "wide_characters": ("wide.txt", wide_characters),
}


def measure(path: Path, out: Path, seconds: float, gigabytes: float, options: list[str]) -> dict[str, object]:
    """Prepare one file, and report how it ended and its peak memory."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (int(gigabytes * 1e9), int(gigabytes * 1e9)))

    command = [sys.executable, "-m", "loopformer", "prepare", str(path), "--out", str(out), *options]
    started, peak = time.monotonic(), 0
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, preexec_fn=limit, stdout=log, stderr=log)
        while process.poll() is None:
            peak = max(peak, sum(resident(number) for number in process_tree(process.pid)))
            if time.monotonic() - started > seconds:
                process.kill()
                process.wait()
                break
            time.sleep(0.1)
        log.seek(0)
        last = (log.read().strip().splitlines() or [""])[-1]
    outcome = "stopped by us" if process.returncode == -9 else f"exit code {process.returncode}"
    return {
        "file_megabytes": round(path.stat().st_size / 1e6, 2),
        "peak_gigabytes": round(peak / 1e9, 2),
        "seconds": round(time.monotonic() - started, 1),
        "ended": outcome,
        "last_line": last.replace(str(path.parent) + "/", "")[:200],
    }


def process_tree(process: int) -> Iterator[int]:
    """The process and its descendants."""
    yield process
    try:
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except OSError:
        return
    for child in children:
        yield from process_tree(int(child))


def resident(process: int) -> int:
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=INPUTS, help="a single input, and write no file")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--gigabytes", type=float, default=12)
    parser.add_argument("--options", default="--on-bad skip --train-tokens 2000000", help="of `loopformer prepare`")
    args = parser.parse_args()
    results = {}
    for name in [args.only] if args.only else INPUTS:
        with tempfile.TemporaryDirectory() as folder:
            file, make = INPUTS[name]
            make(Path(folder) / file)
            path = Path(folder) / file
            options = args.options.split()
            results[name] = measure(path, Path(folder) / "out", args.seconds, args.gigabytes, options)
        print(name, results[name], flush=True)
    result: dict[str, object] = {
        "command": " ".join(["python", "benchmarks/prepare_memory.py", *sys.argv[1:]]),
        "hardware": f"{len(os.sched_getaffinity(0))} CPU cores",
        "versions": {"python": platform.python_version(), "tokenizers": tokenizers.__version__},
        "seed": 0,
        "inputs": {name: (make.__doc__ or "").strip() for name, (_, make) in INPUTS.items()},
        "found": results,
    }
    if not args.only:
        result["before"] = json.loads(RESULT.read_text())["before"] if RESULT.exists() else None
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
