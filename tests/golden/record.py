"""Golden outputs: what the commands and `loopformer.load` give for small inputs, so that no change goes unseen.

    python tests/golden/record.py            # write expected.json
    python tests/golden/record.py --diff     # print where this version differs from expected.json, path by path
    python tests/golden/record.py --noise 1e-5   # the same, with weights moved by so much of their size

On the CPU in fp32, plain path, one thread; about half a minute. Only what users call is called. The models whose
tokens are recorded have weights by a rule, spread so that no choice hangs on rounding: --noise shows it.
"""

import argparse
import csv
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, chdir, redirect_stderr, redirect_stdout
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from differences import compare, dumped, without
from safetensors.torch import load_file, save_file
from texts import PROMPTS, TASKS, write_tasks, write_texts
from torch import Tensor

# All that is used of the package, in one place: names may move, what they do may not.
from loopformer import LoopedLM, ModelConfig, Trajectory, load
from loopformer.cli import main

EXPECTED = Path(__file__).with_name("expected.json")
# What differs from one run or machine to the next.
_PASSING = {"seconds", "tokens_per_second", "ms_per_token", "tflops_per_device", "mfu", "peak_memory_gib"}
_PASSING |= {"date", "machine", "python", "torch", "numpy", "matplotlib", "lm_eval", "harness", "loopformer"}

_NET = {"blocks": 1, "loops": 4, "positions": "rotary"}
_OTHER = {"blocks": 2, "loops": 3, "positions": "learned", "conditioning": "time"}
_SIZES = {"width": 32, "heads": 4, "ffn": 64, "context": 96, "vocab": 300}  # the embedding has 320 rows
_SEEDS = (10, 11)  # with these the two best logits are 0.01 or more apart wherever greedy text is recorded


def record(noise: float = 0.0) -> dict[str, Any]:
    """All golden outputs, made in a temporary folder."""
    sections: dict[str, Callable[[], Any]] = {
        "prepare": _prepare,
        "train": _train,
        "generate": _generate,
        "engine": _engine,
        "score": _score,
        "command": _command_generate,
        "eval": _eval,
        "search": _search,
        "analyze": _analyze,
        "report": _report,
        "export": _export,
        "info": _info,
    }
    torch.set_num_threads(1)
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory() as folder, chdir(folder), patch.dict(os.environ, offline):
        write_texts(Path())
        write_tasks(Path("tasks"))
        found: dict[str, Any] = {"made_with": _machine(), "prepare": sections.pop("prepare")()}
        _write_model(Path("net"), {**_SIZES, **_NET}, _SEEDS[0], noise)
        _write_model(Path("other"), {**_SIZES, **_OTHER}, _SEEDS[1], noise)
        found |= {name: section() for name, section in sections.items()}
    plain: dict[str, Any] = json.loads(json.dumps(found))
    return plain


# The sections.


def _prepare() -> Any:
    words = ("--train-tokenizer", "300", "--val-fraction", "0.1", "--workers", "1")
    said = _run("prepare", "book.txt=1", "news.jsonl=2", "--out", "prepared", *words)
    files = {path.name: _sha256(path.read_bytes()) for path in sorted(Path("prepared").iterdir())}
    del files["index.json"]  # its content is here
    del files["sources.json"]  # it has times
    return {"said": said, "index": _read_json("prepared/index.json"), "files": files}


def _train() -> Any:
    """A few steps of the demo as it was when this was recorded, and of the paper's recipe in a small size."""
    shared = ["data.path=prepared", "training.steps=6", "training.save_every=3", "training.validate_every=3"]
    shared += ["training.log_every=1", "training.warmup=2", "training.threads=1", "training.device=cpu"]
    small = [f"model.{name}={value}" for name, value in _SIZES.items() if name != "vocab"]
    small += [
        "training.batch=4",
        "training.micro_batch=2",
        "training.dtype=float32",
        "objective.trajectory_groups=2",
    ]
    before = ["model.time_scale=30", "model.inject=none", "model.start=embedding", "training.optimizer=adamw"]
    pair = "[{budget: full}, {budget: short, sampler: compositions, weight: 0.1, match: 0.5}]"
    before += [f"objective.trajectories={pair}", "training.batch=4"]
    before += ["objective.consistency=distribution", "training.weight_decay=0.2"]
    runs = {
        "demo": _trained("demo", [*shared, *before, "data.prepare=null"]),
        "paper": _trained("paper/loopformer", [*shared, *small, "data.documents=true"]),
    }
    own = without(_run("eval", "text", "--model", "demo"), {"weights"})
    _run("report", "demo", "--out", "demo-report", "--skip", "search,analysis")
    report = _plain(without(_read_json("demo-report/report.json"), {"weights"}))
    return {"runs": runs, "eval_on_own_data": own, "report": report}


def _trained(preset: str, settings: list[str]) -> Any:
    out = Path(preset.partition("/")[0])
    said = _run("train", preset, *settings, "--out", str(out))
    metrics = [_plain(json.loads(line)) for line in (out / "metrics.jsonl").read_text().splitlines()]
    weights = load_file(out / "checkpoints" / "step-00000006" / "model.safetensors")
    return {"said": said, "metrics": metrics, "weights": {name: _summary(one) for name, one in weights.items()}}


def _generate() -> Any:
    lm, other = load("net"), load("other")
    sampled: dict[str, Any] = {"max_tokens": 24, "temperature": 3.0}
    stop = lm.generate(PROMPTS[0], max_tokens=12).text[4:7]
    return {
        "greedy": {
            asked: _results(lm.generate(list(PROMPTS), trajectory=asked, max_tokens=24))
            for asked in ("1", "2", "4", "2-1-1", "1/4,3/4", "cosine:3")
        },
        "default": _results([lm.generate(PROMPTS[1], max_tokens=24)]),
        "mixed_budgets": _results(lm.generate(list(PROMPTS), budget=[1, 2, 3, 4], max_tokens=24)),
        "mixed_schedules": _results(
            lm.generate(list(PROMPTS), trajectory=["1-3", Trajectory.uniform(1), "2-1-1", "4"], max_tokens=24)
        ),
        "sampled": {
            str(seed): _results(lm.generate(list(PROMPTS), budget=2, seed=seed, **sampled)) for seed in range(3)
        },
        "top_k": _results(lm.generate(list(PROMPTS), budget=2, seed=9, top_k=20, **sampled)),
        "top_p": _results(lm.generate(list(PROMPTS), budget=3, seed=4, top_p=0.8, **sampled)),
        "min_p": _results(lm.generate(list(PROMPTS), budget=4, seed=5, min_p=0.05, **sampled)),
        "repetition_penalty": _results(lm.generate(list(PROMPTS), max_tokens=24, repetition_penalty=1.5)),
        "stops": _results([lm.generate(PROMPTS[0], max_tokens=24, stops=["never there", stop])]),
        "until_the_context_is_full": _results([lm.generate(PROMPTS[2], budget=1, max_tokens=500)]),
        "stream": list(lm.stream(PROMPTS[3], budget=2, max_tokens=24)),
        "other_model": _results(other.generate(list(PROMPTS), budget=[1, 2, 3, 3], max_tokens=24)),
    }


def _engine() -> Any:
    """Fewer rows than requests, prompts that share a beginning, greedy and sampled, and one that is cancelled."""
    lm = load("net")
    engine = lm.engine(rows=3, queue=16)
    prompts = [*PROMPTS, PROMPTS[1] + " than the long one", PROMPTS[1] + " than"]
    tickets = []
    for number, prompt in enumerate(prompts):
        options: dict[str, Any] = {"temperature": 2.0, "top_p": 0.9} if number % 2 else {}
        asked = lm.requests([prompt], budget=1 + number % 4, max_tokens=10 + number, seed=number, **options)
        tickets.append(engine.submit(asked[0]))
    engine.cancel(tickets[3])
    events = list(engine.run())
    results = {str(event.ticket): _result(event.result) for event in events if event.result is not None}
    pieces = {ticket: [event.piece for event in events if str(event.ticket) == ticket] for ticket in results}
    return {"results": results, "pieces": pieces}


def _score() -> Any:
    texts = [*PROMPTS, " ".join(PROMPTS)]
    scores: dict[str, Any] = {
        "net": load("net").score(texts, trajectory=["1", "2", "2-1-1", "4", "1-3"]),
        "other": load("other").score(texts),
    }
    return {
        name: [{"ids": one.ids, "logprobs": one.logprobs, "perplexity": one.perplexity} for one in some]
        for name, some in scores.items()
    }


def _command_generate() -> Any:
    """`loopformer generate` in its ways; `search` has not been here yet, so there is no best schedule."""
    shared = ("generate", PROMPTS[1], "--model", "net", "--max-tokens", "16", "--top-p", "1", "--temperature", "0")
    return {
        "budget": _run(*shared, "--budget", "3"),
        "flops": _run(*shared, "--max-flops", "70000"),
        "compare": _run(*shared, "--compare", "1,4"),
        "sampled": _run(*shared, "--temperature", "3", "--top-k", "40", "--seed", "1", "--budget", "1"),
    }


def _eval() -> Any:
    shared = ("eval", "text", "net")
    routes = ("--budgets", "1,2,4", "--trajectory", "2-1-1")
    return {
        "documents": _run(*shared, "--text", "new.jsonl", *routes),
        "again": _run(*shared, "--text", "new.jsonl", *routes),
        "strided": _run(*shared, "--text", "new.jsonl", "--window", "64", "--stride", "16", "--budgets", "2"),
        "joined": _run(*shared, "--text", "prepared", "--join", "--max-tokens", "700", "--budgets", "2"),
        "tasks": _run("eval", "tasks", "net", "--tasks", TASKS, "--data", "tasks", *routes),
    }


def _search() -> Any:
    shared = ("search", "--model", "net", "--text", "new.jsonl", "--max-tokens", "400")
    tasks = ("--tasks", TASKS, "--data", "tasks", "--by", "both")
    found = {"all": _run(*shared, "--budget", "2"), "tasks": _run(*shared, "--budget", "3", *tasks)}
    found["saved"] = _read_json("net/schedules.json")
    best = ("--budget", "2", "--schedule", "best", "--temperature", "0")
    found["generate_best"] = _run("generate", PROMPTS[1], "--model", "net", *best, "--max-tokens", "16")
    return found


def _analyze() -> Any:
    models = ("--model", "net", "--model", "other", "--prompts", "4", "--length", "16")
    return _run("analyze", *models, "--text", "new.jsonl", "--trajectory", "2-1", "--budgets", "3")


def _report() -> Any:
    """The numbers, the tables as CSV, and the words of the page with its numbers masked."""
    shared = ("--text", "new=new.jsonl", "--max-tokens", "400", "--prompts", "4")
    tasks = ("--tasks", TASKS, "--data", "tasks", "--budgets", "1,2")
    files = _run("report", "net", "other", "--out", "report", *shared, *tasks)
    tables = {path.stem: list(_rows(path)) for path in sorted(Path("report/tables").glob("*.csv"))}
    page = Path("report/report.md").read_text(encoding="utf-8").splitlines()
    words = [_masked(line) for line in page if line.strip() and not line.startswith("Made ")]
    return {"files": files, "results": _plain(_read_json("report/report.json")), "tables": tables, "page": words}


def _export() -> Any:
    said = _run("export", "net", "exported", "--self-contained", "--trajectory", "2-1-1")
    said["files"] = [name for name in said["files"] if not name.endswith(".py")]  # follow the package's own names
    names = ("config.json", "generation_config.json", "tokenizer_config.json")
    lm = load("exported")
    return {
        "said": said,
        "files": {name: without(_read_json(f"exported/{name}"), {"transformers_version"}) for name in names},
        "generate": _results([lm.generate(PROMPTS[0], max_tokens=16)]),
    }


def _info() -> Any:
    return {name: _run("info", "--model", name) for name in ("net", "other", "demo", "paper/loopformer")}


# What they are made with.


def _write_model(folder: Path, settings: dict[str, Any], seed: int, noise: float) -> None:
    """A model folder with weights by a rule: large embeddings, for clear choices, and products that keep sizes."""
    config = ModelConfig(**settings)
    tensors: dict[str, Tensor] = {}
    for name, parameter in LoopedLM(config).state_dict().items():
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        values = rng.standard_normal(tuple(parameter.shape))
        if parameter.dim() == 2 and name != "tokens.weight":
            values /= np.sqrt(parameter.shape[1])
        values *= 1 + noise * rng.standard_normal(values.shape)
        tensors[name] = torch.from_numpy(values.astype(np.float32))
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    content = {"format": "loopformer-model", "version": 1, "model": asdict(config), "source": {}}
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    shutil.copy("prepared/tokenizer.json", folder)


def _run(*words: str) -> Any:
    """What `loopformer` prints as JSON, without what passes."""
    device = [] if words[0] in ("prepare", "train", "export", "info") else ["--device", "cpu"]
    out, error = StringIO(), StringIO()
    with ExitStack() as stack:
        stack.enter_context(patch.object(sys, "argv", ["loopformer", *words, *device, "--json"]))
        stack.enter_context(redirect_stdout(out))
        stack.enter_context(redirect_stderr(error))
        try:
            main()
        except SystemExit as left:
            if left.code:
                raise RuntimeError(f"loopformer {' '.join(words)}: {error.getvalue()}") from left
    torch.set_num_threads(1)
    return _plain(json.loads(out.getvalue()))


def _results(results: Iterable[Any]) -> list[Any]:
    return [_result(one) for one in results]


def _result(result: Any) -> dict[str, Any]:
    return {
        "text": result.text,
        "ids": list(result.ids),
        "logprob": sum(result.logprobs),
        "reason": result.reason,
        "prompt_tokens": result.prompt_tokens,
        "trajectory": str(result.trajectory),
    }


def _summary(tensor: Tensor) -> dict[str, Any]:
    """A tensor's hash and numbers that move with it, none of them a difference of large ones."""
    values = tensor.double().flatten()
    places = torch.linspace(0, 1, len(values), dtype=torch.float64)
    return {
        "sha256": _sha256(tensor.contiguous().numpy().tobytes()),
        "norm": float(values.norm()),
        "mean_size": float(values.abs().mean()),
        "mean_positive": float(values.clamp(min=0).mean()),
        "mean_size_by_place": float((values.abs() * places).mean()),
    }


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """A CSV file's rows, with numbers as numbers."""
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            yield _plain({name: _number(text) for name, text in row.items()})


def _number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text


def _masked(line: str) -> str:
    """A sentence or row with # for numbers and hashes, since rounded ones may end in another digit elsewhere."""
    line = re.sub(r"\b[0-9a-f]{16,}\b|\d[\d,.]*", "#", line)
    return re.sub(r"#[kMGT]?\b|-{2,}|\s+", lambda found: found[0][0], line)


def _machine() -> dict[str, str]:
    return {"torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability()}


def _plain(value: Any) -> Any:
    return without(value, _PASSING)


def _read_json(path: str) -> Any:
    return json.loads(Path(path).read_text(encoding="utf-8"))


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _main() -> None:
    parser = argparse.ArgumentParser(description="Record golden outputs, or compare with them.")
    parser.add_argument("--diff", action="store_true", help="print the differences instead of writing")
    parser.add_argument("--noise", type=float, default=0.0, help="move the weights, and print the differences")
    asked = parser.parse_args()
    found = record(asked.noise)
    if not asked.diff and not asked.noise:
        EXPECTED.write_text(dumped(found) + "\n", encoding="utf-8")
        return
    lines = compare(_read_json(str(EXPECTED)), found)
    print(*lines, f"{len(lines)} differences", sep="\n")


if __name__ == "__main__":
    _main()
