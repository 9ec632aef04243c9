"""The models of the paper's main table at 3⊗8, trained small and alike, and measured at 24×, 12× and 6× and M = 1.

    python benchmarks/paper_claims.py prepare CORPUS EVAL --inputs data/claims       # texts, tokens, requests
    python benchmarks/paper_claims.py run --inputs data/claims --runs runs/claims    # train and measure, on a GPU
    python benchmarks/paper_claims.py collect EVAL --runs runs/claims                # into results/paper_claims
    python benchmarks/paper_claims.py judge docs/paper-claims.md                     # its tables, from these
    python benchmarks/paper_claims.py report                                         # pages and pictures, too

`prepare` and `collect` need lm-evaluation-harness, `run` does not. QUEUE is what `run` works through, `--workers`
models at a time, or only the models named; a model that is done is left out, one that was stopped goes on from its
last checkpoint. SIGTERM stops all of them in order. CORPUS has the files of SOURCES and, in `heldout`, of TEXTS, as
.zst; EVAL those of docs/benchmarks.md.

The objective, the starting weights and AdamW are those of the presets `paper/…`; SETTINGS are all that differs, and
DIFFERENCES say it in words. All models see the same samples in the same order.
"""

import argparse
import io
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from paper_judge import TEXTS as TITLES_OF_TEXTS
from paper_judge import TITLES, Results, fill
from queueing import RAW, add_run_options, passed_on, rounded, trained, work_through

from loopformer.analysis.dynamics import analyze, read_prompts
from loopformer.analysis.report.collect import VERSION, ReportRequest, facts_of_run, size_facts
from loopformer.analysis.report.page import write_report
from loopformer.analysis.results import REPORT_FORMAT, TextSource
from loopformer.config import load_run
from loopformer.config.run import run_from_mapping
from loopformer.data.prepare import prepare as prepare_data
from loopformer.evaluation.benchmarks import LoadedModel, ask, collect, model_facts
from loopformer.evaluation.schedules import search
from loopformer.evaluation.tasks import Answers, read_answers, read_requests, write_answers, write_requests
from loopformer.evaluation.text import Protocol, perplexity, read_text
from loopformer.files import write_atomic

if TYPE_CHECKING:
    from loopformer.evaluation.harness import Suite

SEQUENTIAL = "[{budget: full}, {budget: short, sampler: sequential, weight: 0.1, match: 0.1}]"
QUEUE: dict[str, tuple[str, dict[str, Any]]] = {  # a preset and what differs from SETTINGS, the most telling first
    "loopformer": ("paper/loopformer", {}),
    "base-loop": ("paper/base-loop", {}),
    "tmlt-ee": ("paper/tmlt-ee", {}),
    "base-loop-ee-cons": ("paper/base-loop-ee-cons", {}),
    "base-24": ("paper/base-24x1", {}),
    "tmlt": ("paper/tmlt", {}),
    "base-loop-ee": ("paper/base-loop-ee", {}),
    "base-3": ("paper/base-3x1", {}),
    "loopformer-sequential": ("paper/loopformer", {"objective.trajectories": SEQUENTIAL}),  # the authors' sampler
    "tmlt-ee-s1": ("paper/tmlt-ee", {"training.seed": 1}),
    "loopformer-s1": ("paper/loopformer", {"training.seed": 1}),
    "base-12": ("paper/base-12x1", {}),
    "base-6": ("paper/base-6x1", {}),
    "recurrent-depth": ("paper/recurrent-depth", {}),
    "loopformer-34k": ("paper/loopformer", {"training.steps": 1020}),  # 34/50 of the steps, as in the paper
}
SETTINGS = {
    "model.width": 512,
    "model.heads": 8,
    "model.ffn": 1280,
    "model.context": 512,
    "objective.chunk": 8192,
    "training.steps": 1500,
    "training.batch": 64,
    "training.micro_batch": 64,
    "training.warmup": 120,
    "training.learning_rate": 1e-3,
    "training.min_learning_rate": 1e-4,
    "training.save_every": 500,
    "training.keep": 1,
    "training.validate_every": 500,
}
ELASTIC = {"objective.route_draws": 4, "training.micro_batch": 16}  # for the models with a short trajectory
SOURCES = {  # megabytes of text, whole documents in the order of the file
    "gutenberg_books_0": 25,
    "gutenberg_books_1": 25,
    "gutenberg_books_2": 25,
    "wikipedia_en": 35,
    "imdb_reviews": 28,
    "frus_documents": 18,
    "mdn_web_docs": 12,
    "race_train_articles": 25,
    "openstax_textbooks": 15,
}
TEXTS = ("wikitext2_raw_test.txt", "gutenberg_books.jsonl", "imdb_reviews.jsonl")  # held out
DIFFERENCES = {  # here, in the paper
    "width, heads, FFN": ["512, 8, 1280", "2048, 32, 5120"],
    "context": [512, 1024],
    "vocabulary": ["byte-level BPE of 16,384 ids, trained on the text", "GPT-2's 50,257"],
    "training text": ["books, Wikipedia, reviews, diplomacy, web manuals, school texts", "the Pile, deduplicated"],
    "tokens": ["49.2 M: 1,500 steps of 64 × 512", "25 B: 50,000 steps of 480 × 1024"],
    "learning rate": ["1e-3 to 1e-4, 120 steps of warmup", "6e-4 to 6e-5, 4,000 steps of warmup"],
    "short routes drawn in a step": ["4, one per 16 rows", "40, one per 12 rows, as the presets have it"],
    "task examples": ["HellaSwag: 1,000 of 10,042; SciQ: validation instead of test", "all"],
}
SCORED = 300_000  # tokens of each held-out text, at most
PROMPTS, PROMPT_TOKENS = 64, 128  # for the representation metrics, of the last text
BATCH_TOKENS = 32768
RESULTS = Path("results/paper_claims")
# Trained on these texts at commit 7536208, which cut them into other pieces than later ones do.
TOKENIZER = RESULTS / "tokenizer/tokenizer.json"
TEXT, DATA, REQUESTS, ANSWERS = "text", "data", "requests.jsonl", "answers.jsonl"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    corpus, tasks, inputs = (argparse.ArgumentParser(add_help=False) for _ in range(3))
    corpus.add_argument("corpus", type=Path)
    tasks.add_argument("eval", type=Path)
    inputs.add_argument("--inputs", type=Path, required=True)
    verbs.add_parser("prepare", parents=[corpus, tasks, inputs])
    for verb in ("run", "model"):
        one = verbs.add_parser(verb, parents=[inputs])
        add_run_options(one, workers=3)
        one.add_argument("models", nargs="*", choices=[*QUEUE, []], metavar="MODEL", help=", ".join(QUEUE))
    one = verbs.add_parser("collect", parents=[tasks])
    one.add_argument("--runs", type=Path, required=True)
    one.add_argument("--out", type=Path, default=RESULTS)
    one = verbs.add_parser("judge", help="fill the tables of Markdown files")
    one.add_argument("documents", type=Path, nargs="+")
    one.add_argument("--results", type=Path, default=RESULTS)
    one = verbs.add_parser("report", help="write what `loopformer report` would of the models themselves")
    one.add_argument("--results", type=Path, default=RESULTS)
    one.add_argument("--out", type=Path, default=RESULTS / "report")
    asked = parser.parse_args()
    if asked.verb == "prepare":
        prepare(asked.corpus, asked.eval, asked.inputs)
    elif asked.verb == "run":
        shared = ["--inputs", str(asked.inputs), *passed_on(asked)]
        start = [sys.executable, __file__, "model"]
        commands = {name: [*start, name, *shared] for name in asked.models or QUEUE}
        work_through(commands, asked.runs, asked.workers)
    elif asked.verb == "model":
        (name,) = asked.models
        train_and_measure(name, asked.inputs, asked.runs / name, asked.commit, asked.set)
    elif asked.verb == "judge":
        for document in asked.documents:
            fill(document, Results(asked.results))
    elif asked.verb == "report":
        print(write_report(reported(Results(asked.results)), asked.out)[0])
    else:
        suite = tasks_of(asked.eval)
        asked.out.mkdir(parents=True, exist_ok=True)
        for raw in sorted(asked.runs.glob(f"*/{RAW}")):
            publish(raw.parent, suite, asked.out)


def prepare(corpus: Path, tasks: Path, out: Path) -> None:
    """What a machine without corpus and harness needs: tokens, held-out texts, requests."""
    write_texts(corpus, out / TEXT, SOURCES)
    prepare_data([str(out / TEXT)], out / DATA, tokenizer=str(TOKENIZER))
    for name in TEXTS:
        (out / name).write_text("".join(lines(corpus / "heldout" / f"{name}.zst")), encoding="utf-8")
    write_requests(out / REQUESTS, tasks_of(tasks).requests)


def write_texts(corpus: Path, out: Path, sources: Mapping[str, int]) -> None:
    """The first megabytes of each source, whole documents, as JSON lines."""
    out.mkdir(parents=True, exist_ok=True)
    for name, megabytes in sources.items():
        left = megabytes * 1_000_000
        with (out / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            for record in map(json.loads, lines(corpus / f"{name}.jsonl.zst")):
                size = len(record["text"].encode())
                if size <= left and not record.get("sciq_overlap"):
                    file.write(json.dumps({"text": record["text"]}, ensure_ascii=False) + "\n")
                    left -= size


def tasks_of(folder: Path) -> "Suite":
    from loopformer.evaluation.harness import Suite  # needs the harness

    return Suite.load(["paper"], data=folder)


def lines(path: Path) -> Iterator[str]:
    import zstandard  # not where the models are trained

    with path.open("rb") as file:
        unpacked = zstandard.ZstdDecompressor(max_window_size=2**27).stream_reader(file)
        yield from io.TextIOWrapper(unpacked, encoding="utf-8", newline="")


def train_and_measure(name: str, inputs: Path, run: Path, commit: str, trial: Sequence[str]) -> None:
    """One model: its run folder, the answers to all requests, and everything else in one file."""
    preset, own = QUEUE[name]
    elastic = load_run(preset)[0].objective.elastic
    settings = SETTINGS | (ELASTIC if elastic else {}) | own | {"data.path": inputs / DATA}
    facts = trained(preset, settings, trial, run, commit)
    torch.set_float32_matmul_precision("high")  # TF32 matmuls: far faster, and far finer than bf16
    loaded = LoadedModel.open(str(run))
    trajectories = list(reversed(loaded.trajectories()))
    kept: Mapping[str, Any] = {"weights": loaded.weights, "store": loaded.store, "batch_tokens": BATCH_TOKENS}
    protocol, tokenizer = Protocol(max_tokens=SCORED), loaded.lm.need_tokenizer()
    texts = [read_text(str(inputs / text), tokenizer, max_tokens=SCORED) for text in TEXTS]
    found: dict[str, Any] = {
        "model": name,
        **facts,
        "hardware": f"one {torch.cuda.get_device_name()}, several runs at a time"
        if torch.cuda.is_available()
        else "CPU",
        "seed": facts["settings"]["training"]["seed"],
        "differences": DIFFERENCES,
        "weights": loaded.weights,
        "evaluated_in": f"{loaded.model.dtype_name} with TF32 matmuls",
        "perplexity": [
            row for text in texts for row in perplexity(loaded.model, text, trajectories, protocol, **kept)
        ],
    }
    requests = read_requests(inputs / REQUESTS)
    runs = ask(loaded, requests.queries, trajectories, BATCH_TOKENS, together=True)
    write_answers(run / ANSWERS, Answers(requests.facts, model_facts(loaded, runs), runs))
    prompts = read_prompts(str(inputs / TEXTS[-1]), tokenizer, PROMPTS, PROMPT_TOKENS)
    found["analysis"] = [analyze(loaded.model, prompts, name, one).to_json() for one in trajectories]
    if loaded.model.config.conditioning == "trajectory":
        found["schedules"] = [search(loaded.model, 4, text=text, protocol=protocol, **kept) for text in texts]
    write_atomic(run / RAW, json.dumps(found).encode())


def publish(run: Path, suite: "Suite", out: Path) -> None:
    """The results of one model, with the tasks' numbers and which examples were right, in one compact file."""
    found, answers = json.loads((run / RAW).read_text("utf-8")), read_answers(run / ANSWERS)
    found["tasks"] = collect(suite, answers)
    found["outcomes"] = {
        "meaning": "of each trajectory and task, 1 or 0 per example in the order of the data, by the task's metric",
        **{
            trajectory: {task: outcomes(suite, task, one.values) for task, one in answered.items()}
            for trajectory, answered in answers.runs.items()
        },
    }
    found["training"] = table(found["training"])
    (out / f"{found['model']}.json").write_text(rounded(found) + "\n", encoding="utf-8")
    print(f"{found['model']}: {out / found['model']}.json")


def reported(results: Results) -> dict[str, Any]:
    """The stored results of each model of the whole training, of its first seed, as a report.json has them."""
    runs = {title: results.runs(name)[0] for name, title in TITLES.items() if name != "loopformer-34k"}
    first = next(iter(runs.values()))
    return {
        "format": REPORT_FORMAT,
        "version": VERSION,
        "made": {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "device": first["plan"]["device"],
            "machine": "one GPU, several runs at a time",
            "dtype": first["evaluated_in"],
            "python": "3.12",
            "loopformer": f"commits {', '.join(sorted({run['commit'] for run in results.files.values()}))}",
            "torch": first["torch"],
            "lm_eval": first["tasks"]["harness"],
            "matplotlib": version("matplotlib"),
            "command": "python benchmarks/paper_claims.py report",
        },
        "asked": ReportRequest(
            tuple(run["tasks"]["model"]["path"] for run in runs.values()),
            tuple(map(TextSource, TITLES_OF_TEXTS, TEXTS)),
            data=Path("data/eval"),
            budgets=(1, 2, 4, 8),
            search=4,
            prompts=PROMPTS,
            max_tokens=SCORED,
            device="cuda",
        ).to_json(),
        "tasks": {name: first["tasks"][name] for name in ("harness", "limit", "tasks", "notes")},
        "models": [reported_model(title, run) for title, run in runs.items()],
    }


def reported_model(title: str, found: Mapping[str, Any]) -> dict[str, Any]:
    texts = {str(Path("data/claims", text)): name for text, name in zip(TEXTS, TITLES_OF_TEXTS, strict=True)}
    run = run_from_mapping(found["settings"])
    records, searches = found["training"]["train"], found.get("schedules", [])
    missing = {} if searches else {"search": "Only models that are told their steps were searched."}
    states = found["analysis"][0] if run.model.loops > 1 else None
    if states is None:
        missing["analysis"] = "A plain stack has one pass."
    training = facts_of_run(run, found["plan"]["steps"], records["tokens_per_second"], found["plan"])
    return {
        "name": title,
        "source": found["tasks"]["model"]["path"],
        "weights": found["weights"],
        "tokenizer": found["tasks"]["model"]["tokenizer"],
        "dtype": "float32",
        "device": "cuda",
        **size_facts(run.model),
        "training": asdict(training),
        "perplexity": [{**row, "text": texts[row["text"]]} for row in found["perplexity"]],
        "tasks": found["tasks"]["runs"],
        "search": {**searches[0], "text": {**searches[0]["text"], "text": TITLES_OF_TEXTS[0]}}
        if searches
        else None,
        "analysis": states and {**states, "model": title, "text": texts[states["text"]]},
        "missing": missing,
    }


def outcomes(suite: "Suite", task: str, values: Sequence[Any]) -> str:
    """Whether each example was right, by the harness's own rule."""
    definition, by_example = suite.tasks[task], dict[int, list[Any]]()
    for instance, value in zip(definition.instances, values, strict=True):
        by_example.setdefault(instance.doc_id, []).append((instance.doc, tuple(value)))
    right = []
    for pairs in by_example.values():
        results = definition.process_results(pairs[0][0], [value for _, value in pairs])
        right.append(str(int(results[suite.metric(task, results)])))
    return "".join(right)


def table(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Records of each kind as columns."""
    kinds: dict[str, dict[str, list[Any]]] = {}
    for record in records:
        for key, value in record.items():
            if key != "kind":
                kinds.setdefault(record["kind"], {}).setdefault(key, []).append(value)
    return kinds


if __name__ == "__main__":
    main()
