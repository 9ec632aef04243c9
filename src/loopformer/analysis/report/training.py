"""What training a model took, from its run: FLOPs by formula, tokens per second as recorded, and a fair comparison.

    facts = training_facts("runs/elastic")            # None for a model without a run
    slowdown(facts, [training_facts("runs/fixed")])   # (1.52, "fixed") or (None, why there is none)

Elastic training takes a short route beside the full one. Its cost in FLOPs follows from the sizes; its cost in time
is the ratio of tokens per second of two runs that differ in the objective alone.
"""

import statistics
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from loopformer.analysis.report.numbers import listed
from loopformer.config import load_run
from loopformer.files import read_json
from loopformer.loading.folder import SETTINGS, STATE, is_run_folder, newest_model, step_of
from loopformer.model.cost import Cost
from loopformer.training.plan import training_flops_per_token
from loopformer.training.reporting import read_metrics

# Of two runs whose speeds are compared, these have to be equal; the machine is not recorded.
_SAME = ("batch", "dtype", "device", "fused", "compile", "checkpoint_loops", "strategy")
_SAME_STATE = ("micro_batch", "world", "threads")

Facts = dict[str, Any]


def training_facts(source: str | Path) -> Facts | None:
    """Everything about the training of a run, in plain data; None for a model that is no run."""
    if not is_run_folder(source):
        return None
    folder = Path(source)
    run, _ = load_run(str(folder / SETTINGS))
    checkpoint = newest_model(folder, lambda _: None)
    state = read_json(checkpoint / STATE) if (checkpoint / STATE).is_file() else {}
    cost, step = Cost(run.model), step_of(checkpoint)
    tokens = step * run.training.batch * run.model.context
    speeds = [
        record["tokens_per_second"]
        for record in read_metrics(folder)
        if record.get("kind") == "train" and record.get("tokens_per_second")
    ]
    per_token = training_flops_per_token(run)
    return {
        "elastic": run.objective.elastic,
        "short_fraction": run.objective.short_fraction if run.objective.elastic else 0.0,
        "step": step,
        "steps": run.training.steps,
        "tokens": tokens,
        "seed": run.training.seed,
        "fixed_flops_per_token": cost.training_flops(),
        "flops_per_token": per_token,
        "flops": per_token * tokens,
        "tokens_per_second": statistics.median(speeds) if speeds else None,
        "records": len(speeds),
        "data": state.get("data"),
        "model": asdict(run.model),
        "same": {name: getattr(run.training, name) for name in _SAME}
        | {name: state.get(name) for name in _SAME_STATE},
    }


def slowdown(elastic: Facts, others: Mapping[str, Facts | None]) -> tuple[float | None, str]:
    """How many times slower than a fixed-depth run of the same settings, and which; or why that is not known."""
    fixed = {name: facts for name, facts in others.items() if facts is not None and not facts["elastic"]}
    if not fixed:
        return None, "there is no fixed-depth run beside it"
    differences = {name: _differences(elastic, facts) for name, facts in fixed.items()}
    twin = next((name for name, found in differences.items() if not found), None)
    if twin is None:
        name, found = min(differences.items(), key=lambda pair: len(pair[1]))
        return None, f"{name} differs in {listed(found)}"
    if not (elastic["tokens_per_second"] and fixed[twin]["tokens_per_second"]):
        return None, "no speed was recorded"
    return fixed[twin]["tokens_per_second"] / elastic["tokens_per_second"], twin


def _differences(one: Facts, other: Facts) -> list[str]:
    found = [f"model.{name}" for name, value in one["model"].items() if other["model"].get(name) != value]
    return found + [name for name, value in one["same"].items() if other["same"].get(name) != value]
