"""The speed of `loopformer prepare` beside the tokenizers library alone, on the same text, tokenizer and cores.

python benchmarks/prepare_throughput.py                                        # the embedded corpus, repeated
python benchmarks/prepare_throughput.py --text corpus.jsonl.zst --tokenizer gpt2

The library alone tokenizes text that is already in memory: with `encode_batch`, and with `encode_batch_fast`, which
leaves out offsets and is what prepare calls. Prepare reads, hashes, splits, tokenizes, writes, checksums and syncs.
They take turns, each in a process of its own, and the best turn counts. The last line is JSON, which also goes to
results/cpu/prepare_throughput.json. Nothing is random, so there is no seed.
"""

import argparse
import itertools
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import tokenizers

from loopformer.data.corpus import parse_sources
from loopformer.data.prepare import prepare
from loopformer.data.tokenizer import TOKENIZER_FILE, Tokenizer

RESULT = Path(__file__).parent.parent / "results" / "cpu" / "prepare_throughput.json"


def write_sample(source: str, path: Path, max_bytes: int) -> int:
    """Write up to `max_bytes` of the source as .jsonl, repeating a shorter source; return the bytes of text."""
    (parsed,) = parse_sources([source])
    size = rounds = 0
    with path.open("w", encoding="utf-8") as file:
        while size < max_bytes:
            for _, text in parsed.texts("text"):
                # A round's number makes every document of it new, as in a real corpus.
                text = f"{rounds}\n{text}" if rounds else text
                file.write(json.dumps({"text": text}) + "\n")
                size += len(text.encode())
                if size >= max_bytes:
                    break
            rounds += 1
    return size


def tokenizer_seconds(sample: Path, tokenizer: Path, method: str) -> float:
    """The seconds of the library's own `encode_batch` or `encode_batch_fast` on texts in memory."""
    with sample.open(encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in lines]
    encode = getattr(tokenizers.Tokenizer.from_file(str(tokenizer / TOKENIZER_FILE)), method)
    encode(texts[:10], add_special_tokens=False)
    # Batches of prepare's size: all encodings at once would measure the machine's memory instead.
    batches: list[list[str]] = [[]]
    for text in texts:
        if sum(map(len, batches[-1])) >= 4 << 20:
            batches.append([])
        batches[-1].append(text)
    started = time.perf_counter()
    for batch in batches:
        encode(batch, add_special_tokens=False)
    return time.perf_counter() - started


def prepare_seconds(sample: Path, tokenizer: Path) -> float:
    """The seconds of prepare, from the file to the synced shards."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        prepare([str(sample)], Path(folder) / "out", tokenizer=str(tokenizer))
        return time.perf_counter() - started


def measure(kind: str, sample: Path, tokenizer: Path) -> float:
    """Measure in a process of its own, so that no cache or heap carries over."""
    command = [sys.executable, __file__, "--measure", kind, str(sample), str(tokenizer)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", default="stdlib", help="any source of `loopformer prepare`")
    parser.add_argument("--tokenizer", help="gpt2 or a path; by default a BPE of 4096 trained on the text")
    parser.add_argument("--megabytes", type=float, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--measure", nargs=3, metavar=("KIND", "SAMPLE", "TOKENIZER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        kind, sample, tokenizer = args.measure
        paths = Path(sample), Path(tokenizer)
        print(prepare_seconds(*paths) if kind == "prepare" else tokenizer_seconds(*paths, kind))
        return

    with tempfile.TemporaryDirectory() as name:
        sample, folder = Path(name) / "sample.jsonl", Path(name)
        size = write_sample(args.text, sample, int(args.megabytes * 1e6))
        if args.tokenizer:
            chosen = Tokenizer.find(args.tokenizer)
        else:
            with sample.open(encoding="utf-8") as lines:
                chosen = Tokenizer.train((json.loads(line)["text"] for line in itertools.islice(lines, 1000)), 4096)
        chosen.save(folder)
        seconds: dict[str, list[float]] = {"encode_batch": [], "encode_batch_fast": [], "prepare": []}
        for _ in range(args.repeats):
            for kind, timings in seconds.items():
                timings.append(measure(kind, sample, folder))
    speed = {kind: size / min(timings) / 1e6 for kind, timings in seconds.items()}
    result = {
        "command": " ".join(["python", "benchmarks/prepare_throughput.py", *sys.argv[1:]]),
        "hardware": {"processor": processor(), "cores": len(os.sched_getaffinity(0))},
        "versions": {"python": platform.python_version(), "tokenizers": tokenizers.__version__},
        "seed": "nothing is random",
        "text": args.text,
        "text_megabytes": round(size / 1e6, 2),
        "vocab_size": chosen.vocab_size,
        "megabytes_per_second": {kind: round(value, 2) for kind, value in speed.items()},
        "ratio": round(speed["prepare"] / speed["encode_batch"], 3),
        "ratio_to_fast": round(speed["prepare"] / speed["encode_batch_fast"], 3),
        "seconds": {kind: [round(value, 2) for value in timings] for kind, timings in seconds.items()},
        "load_average": round(os.getloadavg()[0], 1),
    }
    print(f"{result['hardware']}, {size / 1e6:.1f} MB of {args.text}, vocabulary {chosen.vocab_size}")
    for kind, value in speed.items():
        print(f"{kind:18} {value:6.2f} MB/s, prepare is {speed['prepare'] / value:.3f} of it")
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
