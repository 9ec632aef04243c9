"""A report's plain data, made up: numbers that follow from the budgets, so that they can be checked."""

from dataclasses import asdict
from typing import Any

from loopformer import ModelConfig
from loopformer.analysis.dynamics import DEFINITIONS
from loopformer.analysis.report import ReportData
from loopformer.evaluation.tasks import TASKS
from loopformer.model.cost import Cost
from loopformer.trajectory import Trajectory

Piece = dict[str, Any]
_METRICS = ("curvature", "anisotropy", "prompt_entropy", "movement", "lens_divergence", "lens_agreement")


def make_report(*models: Piece, tasks: Piece | None = None) -> Piece:
    """What `collect` returns."""
    return {
        "made": {
            "date": "2026-01-02T03:04:05+00:00",
            "device": "cpu (1 threads)",
            "machine": "x86_64",
            "dtype": "float32",
            **dict.fromkeys(("python", "loopformer", "torch", "lm_eval", "matplotlib"), "1.0"),
        },
        "asked": {
            "texts": [{"name": "news", "source": "news.jsonl"}, {"name": "a | b", "source": "b.txt"}],
            "tasks": "paper",
            "data": "eval",
            "limit": 50,
            "budgets": None,
            "search": None,
            "search_tasks": False,
            "prompts": 8,
            "skip": [],
            "max_tokens": None,
            "field": "text",
            "device": "cpu",
            "dtype": "float32",
        },
        "tasks": tasks or task_facts(),
        "models": list(models),
    }


def make_data(*models: Piece) -> ReportData:
    """The same, as tables and pages are made of it."""
    return ReportData(make_report(*models))


def make_model(name: str, blocks: int = 1, loops: int = 4, level: float = 40.0, **parts: Any) -> Piece:
    """A model with everything measured at M = 1 and L; `parts` replace some of it."""
    config = ModelConfig(blocks=blocks, loops=loops, width=32, heads=4, ffn=80, context=32, vocab=96)
    cost = Cost(config)
    sizes = cost.parameters
    budgets = sorted({1, loops})
    return {
        "name": name,
        "source": f"runs/{name}",
        "shape": f"{blocks}⊗{loops}",
        "settings": asdict(config),
        "weights": "a" * 64,
        "tokenizer": "b" * 64,
        "dtype": "float32",
        "device": "cpu",
        "parameters": {name: getattr(sizes, name) for name in ("total", "embeddings", "stack", "conditioning")},
        "flops_per_token": {str(budget): cost.forward_flops(budget) for budget in range(1, loops + 1)},
        "training_overhead": cost.training_overhead(),
        "io_flops": 2 * cost.head_matmul_params,
        "loop_flops": cost.loop_flops(),
        "training": make_training(),
        "perplexity": [_scored(text, budget, level) for text in ("news", "a | b") for budget in budgets],
        "tasks": [make_run(budget, 0.3 + 0.01 * budget) for budget in budgets],
        "search": _searched(loops) if loops > 2 else None,
        "analysis": _dynamics(name, f"{blocks}⊗{loops}", loops),
        "missing": {},
        **parts,
    }


def make_training(elastic: bool = True) -> Piece:
    return {
        "elastic": elastic,
        "short_fraction": 1.0,
        "step": 10,
        "steps": 10,
        "tokens": 1280,
        "seed": 0,
        "fixed_flops_per_token": 100.0,
        "flops_per_token": 150.0 if elastic else 100.0,
        "flops": 192_000.0 if elastic else 128_000.0,
        "tokens_per_second": 1000.0 if elastic else 1300.0,
        "records": 3,
        "data": "c" * 64,
    }


def task_facts() -> Piece:
    data = {"file": "x.jsonl", "sha256": "d" * 64}
    facts = {"version": 1, "examples": 50, "of": 100, "data": data, "note": None, "requests": 100}
    return {
        "names": ["paper"],
        "limit": 50,
        "harness": "0.4.13",
        "tasks": {name: {**facts, "requests_sha256": "e" * 64} for name in TASKS},
        "notes": ["sciq is a stand-in: the validation split instead of test."],
    }


def make_run(budget: int, value: float, error: float = 0.05) -> Piece:
    """One trajectory on the paper's tasks, all with the same score but ARC's, which are apart."""
    apart = {"arc_easy": value + 0.1, "arc_challenge": value - 0.1}
    tasks = {
        name: {
            "metric": task.metric,
            "value": apart.get(name, value),
            "stderr": error,
            "examples": 50,
            "seconds": 1.0,
            "tokens": 100,
            "cut": 3,
            "metrics": {},
        }
        for name, task in TASKS.items()
    }
    return {
        "trajectory": str(budget),
        "budget": budget,
        "flops_per_token": 1.0,
        "seconds": 1.0,
        "tasks": tasks,
        "groups": {},
        "paper": {"average": value},
    }


def _scored(text: str, budget: int, level: float) -> Piece:
    return {
        "text": text,
        "part": "all of it",
        "sha256": "f" * 64,
        "documents": 3,
        "tokens": 500,
        "bytes": 2000,
        "window": 32,
        "budget": budget,
        "trajectory": str(budget),
        "perplexity": level - budget,
        "bits_per_byte": 2.0 - budget / 100,
        "seconds": 0.5,
        "tokens_per_second": 1000.0,
        "dtype": "float32",
        "device": "cpu",
        "reused": False,
    }


def _searched(loops: int) -> Piece:
    trajectories = list(Trajectory.enumerate(loops, 2))
    rows = [
        {
            "rank": rank,
            "schedule": str(trajectory),
            "trajectory": str(trajectory),
            "steps": [float(step) for step in trajectory.steps],
            "perplexity": 40.0 + rank,
            "bits_per_byte": 2.0,
        }
        for rank, trajectory in enumerate(trajectories, 1)
    ]
    return {
        "loops": loops,
        "budget": 2,
        "by": "perplexity",
        "method": "all",
        "measured": len(rows),
        "on_grid": len(rows),
        "text": {"text": "news", "tokens": 500},
        "rank_correlation": None,
        "schedules": rows,
        "best": rows[0],
        "worst": rows[-1],
        "uniform": rows[1],
    }


def _dynamics(name: str, shape: str, loops: int) -> Piece:
    assert set(_METRICS) < set(DEFINITIONS)
    values = [0.5 + 0.1 * i for i in range(loops + 1)]
    square = [[1.0 - 0.1 * abs(i - j) for j in range(loops + 1)] for i in range(loops + 1)]
    return {
        "model": name,
        "shape": shape,
        "weights": "a" * 64,
        "trajectory": str(loops),
        "depth": [i / loops for i in range(loops + 1)],
        "states": "before",
        "text": "news",
        "part": "all of it",
        "prompts": 8,
        "documents": 8,
        "length": 16,
        "tokens": 128,
        "tokens_sha256": "a" * 64,
        "seed": None,
        "device": "cpu",
        "dtype": "float32",
        "seconds": 1.0,
        "metrics": {metric: {"mean": values, "std": [0.1] * (loops + 1)} for metric in _METRICS},
        "cka": square,
        "cka_debiased": square,
    }
