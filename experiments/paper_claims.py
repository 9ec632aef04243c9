"""The models of the paper's main table at 3⊗8, trained small and alike, and measured at 24×, 12× and 6× and M = 1.

    python experiments/paper_claims.py prepare CORPUS EVAL --inputs data/claims       # texts, tokens, requests
    python experiments/paper_claims.py run --inputs data/claims --runs runs/claims    # train and measure, on a GPU
    python experiments/paper_claims.py collect EVAL --runs runs/claims                # into results/paper_claims
    python experiments/paper_claims.py judge docs/paper-claims.md                     # its tables, from these

`prepare` and `collect` need lm-evaluation-harness, `run` does not. `run` works through QUEUE, or only through the
models named. CORPUS has the files of SOURCES and, in `heldout`, of TEXTS, as .zst. EVAL has those of
docs/tasks.md.

The objective, the starting weights and AdamW are those of the presets `paper/…`. SETTINGS are all that differs, and
DIFFERENCES say it in words. All models see the same samples in the same order.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from common import (
    DATA,
    RAW,
    TEXT,
    add_run_options,
    read_zst_lines,
    run_queue,
    to_json,
    train_run,
    write_texts,
)
from paper_judge import fill
from paper_results import Results

from loopformer.analysis.dynamics import analyze, read_prompts
from loopformer.config import load_run
from loopformer.data.prepare import prepare as prepare_data
from loopformer.evaluation.loaded import LoadedModel
from loopformer.evaluation.schedules import search
from loopformer.evaluation.tasks import (
    read_answers,
    read_requests,
    run_requests,
    write_answers,
    write_requests,
)
from loopformer.evaluation.text import Protocol, perplexity, read_text
from loopformer.files import write_atomic

if TYPE_CHECKING:
    from loopformer.lm_eval import Suite

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
ELASTIC = {"objective.trajectory_groups": 4, "training.micro_batch": 16}  # for the models with a short trajectory
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
REQUESTS, ANSWERS = "requests.jsonl", "answers.jsonl"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    corpus, tasks, inputs = (argparse.ArgumentParser(add_help=False) for _ in range(3))
    corpus.add_argument("corpus", type=Path)
    tasks.add_argument("eval", type=Path)
    inputs.add_argument("--inputs", type=Path, required=True)
    verbs.add_parser("prepare", parents=[corpus, tasks, inputs])
    run = verbs.add_parser("run", parents=[inputs])
    add_run_options(run)
    run.add_argument("models", nargs="*", choices=[*QUEUE, []], metavar="MODEL", help=", ".join(QUEUE))
    collecting = verbs.add_parser("collect", parents=[tasks])
    collecting.add_argument("--runs", type=Path, required=True)
    collecting.add_argument("--out", type=Path, default=RESULTS)
    judging = verbs.add_parser("judge", help="fill the tables of Markdown files")
    judging.add_argument("documents", type=Path, nargs="+")
    judging.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.verb == "prepare":
        prepare(args.corpus, args.eval, args.inputs)
    elif args.verb == "run" and args.single:
        train_and_measure(args.single, args.inputs, args.runs / args.single, args.commit, args.set)
    elif args.verb == "run":
        commands = {name: [sys.executable, *sys.argv, "--single", name] for name in args.models or QUEUE}
        run_queue(commands, args.runs, args.workers)
    elif args.verb == "judge":
        for document in args.documents:
            fill(document, Results(args.results))
    else:
        suite = load_tasks(args.eval)
        args.out.mkdir(parents=True, exist_ok=True)
        for raw in sorted(args.runs.glob(f"*/{RAW}")):
            publish(raw.parent, suite, args.out)


def prepare(corpus: Path, tasks: Path, out: Path) -> None:
    """What a machine without corpus and harness needs: tokens, held-out texts, requests."""
    write_texts(corpus, out / TEXT, SOURCES)
    prepare_data([str(out / TEXT)], out / DATA, tokenizer=str(TOKENIZER))
    for name in TEXTS:
        (out / name).write_text("".join(read_zst_lines(corpus / "heldout" / f"{name}.zst")), encoding="utf-8")
    write_requests(out / REQUESTS, load_tasks(tasks))


def load_tasks(folder: Path) -> "Suite":
    from loopformer.lm_eval import Suite  # needs the harness

    return Suite.load(["paper"], data=folder)


def train_and_measure(name: str, inputs: Path, run: Path, commit: str, changes: Sequence[str]) -> None:
    """Train one model, write its answers to all requests, and everything else that was measured into one file."""
    preset, model_settings = QUEUE[name]
    elastic = load_run(preset)[0].objective.is_elastic
    settings = SETTINGS | (ELASTIC if elastic else {}) | model_settings | {"data.path": inputs / DATA}
    facts = train_run(preset, settings, changes, run, commit)
    torch.set_float32_matmul_precision("high")  # TF32 matmuls: far faster, and far finer than bf16
    loaded = LoadedModel.open(str(run))
    trajectories = list(reversed(loaded.trajectories()))
    shared: Mapping[str, Any] = {"weights": loaded.weights, "store": loaded.store, "batch_tokens": BATCH_TOKENS}
    protocol, tokenizer = Protocol(max_tokens=SCORED), loaded.lm.need_tokenizer()
    texts = [read_text(str(inputs / text), tokenizer, max_tokens=SCORED) for text in TEXTS]
    result: dict[str, Any] = {
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
            row for text in texts for row in perplexity(loaded.model, text, trajectories, protocol, **shared)
        ],
    }
    requests = read_requests(inputs / REQUESTS)
    write_answers(run / ANSWERS, run_requests(loaded, requests, trajectories, BATCH_TOKENS, together=True))
    prompts = read_prompts(str(inputs / TEXTS[-1]), tokenizer, PROMPTS, PROMPT_TOKENS)
    result["analysis"] = [analyze(loaded.model, prompts, name, trajectory) for trajectory in trajectories]
    if loaded.model.config.conditioning == "trajectory":
        result["schedules"] = [search(loaded.model, 4, text=text, protocol=protocol, **shared) for text in texts]
    write_atomic(run / RAW, json.dumps(result).encode())


def publish(run: Path, suite: "Suite", out: Path) -> None:
    """Write the results of one model, the tasks' scores and which examples were right into one compact file."""
    result, answers = json.loads((run / RAW).read_text("utf-8")), read_answers(run / ANSWERS)
    result["tasks"] = suite.results(answers)
    result["outcomes"] = {
        "meaning": "of each trajectory and task, 1 or 0 per example in the order of the data, by the task's metric",
        **{
            trajectory: {task: outcomes(suite, task, answer.values) for task, answer in answered.items()}
            for trajectory, answered in answers.runs.items()
        },
    }
    result["training"] = table(result["training"])
    (out / f"{result['model']}.json").write_text(to_json(result) + "\n", encoding="utf-8")
    print(f"{result['model']}: {out / result['model']}.json")


def outcomes(suite: "Suite", task: str, values: Sequence[Any]) -> str:
    """Whether each example was right, by the harness's own rule."""
    definition, by_example = suite.tasks[task], dict[int, list[Any]]()
    for instance, value in zip(definition.instances, values, strict=True):
        by_example.setdefault(instance.doc_id, []).append((instance.doc, tuple(value)))
    right = []
    for pairs in by_example.values():
        results = definition.process_results(pairs[0][0], [value for _, value in pairs])
        right.append(str(int(results[suite.main_metric(task, results)])))
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
