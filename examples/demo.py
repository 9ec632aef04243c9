"""Elastic depth in minutes on two CPU cores: text at four budgets, then a task on which depth pays.

    python examples/demo.py [--steps 3000] [--out runs/demo] [--results results/demo/demo.json]

First the bundled model continues a prompt at four budgets. Then an elastic model is trained to multiply in the
group S3, and next to it specialists, each for a single budget. All of them predict the product at every position of
new words, and the accuracy is drawn by position and budget. A stopped demo resumes when it is started again.
"""

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

import loopformer
from loopformer.data.states import Group
from loopformer.evaluation.states import track_states
from loopformer.plots import grid_figure, save
from loopformer.training.launch import launch
from loopformer.trajectory import Trajectory

PROMPT, BUDGETS, NEW_TOKENS = "The history of the city begins", (1, 2, 4, 8), 48
PRESET, GROUP, LOOPS = "states", "S3", 5
SPECIALISTS = (5, 3, 1)  # the longest to train first


def write_text() -> list[dict[str, Any]]:
    """Print and return the text of the bundled model at four budgets, from the same seed."""
    lm = loopformer.load("box")
    config, parameters = lm.model.config, lm.model.cost.parameters.total
    print(f"The bundled model: {config.blocks}⊗{config.loops}, {parameters / 1e6:.1f} M parameters. {PROMPT!r} …")
    rows = []
    for budget in BUDGETS:
        started = time.perf_counter()
        result = lm.generate(PROMPT, budget=budget, max_tokens=NEW_TOKENS, temperature=0.8, top_p=0.95, seed=0)
        milliseconds = (time.perf_counter() - started) / len(result.ids) * 1e3
        mflops = lm.model.cost.forward_flops(budget) / 1e6
        rows.append(
            {"budget": budget, "mflops_per_token": mflops, "ms_per_token": milliseconds, "text": result.text}
        )
        print(
            f"\nM = {budget}, {mflops:.0f} MFLOP and {milliseconds:.1f} ms per token:\n  …{result.text}", flush=True
        )
    return rows


def train(out: Path, steps: int) -> None:
    """Train the elastic model on one core and the specialists on the other. Finished runs are skipped."""
    settings = [f"training.steps={steps}", "training.device=cpu", "training.threads=1"]
    print(f"\ntraining on words over {GROUP}, {steps} steps each; shown is the elastic model", flush=True)
    left = iter(SPECIALISTS)  # a free core takes the next

    def train_specialists() -> None:
        for budget in left:
            train_specialist(out, budget, settings)

    with ThreadPoolExecutor(1) as beside:
        second_core = beside.submit(train_specialists)
        launch(PRESET, settings, out / "elastic", resume=True)
        train_specialists()
        second_core.result()


def train_specialist(out: Path, budget: int, settings: list[str]) -> None:
    """Train the same network on as many words at a single budget, in a process of its own."""
    settings = [*settings, "objective.trajectories=[{budget: full}]", f"model.loops={budget}"]
    command = ["train", PRESET, *settings, "--out", str(out / f"specialist-{budget}"), "--resume", "--json"]
    subprocess.run([sys.executable, "-m", "loopformer", *command], check=True, stdout=subprocess.DEVNULL)


def accuracy(run: Path, budgets: Iterable[int]) -> dict[int, dict[str, Any]]:
    """How often a model is right at each position of new words, by budget."""
    model = loopformer.load(run).model
    found = track_states(model, Group.named(GROUP), [Trajectory.uniform(m) for m in budgets], thresholds=())
    return {one["budget"]: one for one in found["trajectories"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"))
    parser.add_argument("--results", type=Path, help="also write the figures as JSON")
    args = parser.parse_args()

    started = time.perf_counter()
    texts = write_text()
    train(args.out, args.steps)
    elastic = accuracy(args.out / "elastic", range(1, LOOPS + 1))
    specialists = {m: accuracy(args.out / f"specialist-{m}", [m])[m] for m in SPECIALISTS}
    print(f"\nproducts over {GROUP}: accuracy in percent over words of {len(elastic[1]['accuracy'])}")
    print(" loops  one elastic model  a specialist of these loops")
    for budget, row in elastic.items():
        specialist = f"{100 * specialists[budget]['mean_accuracy']:.1f}" if budget in specialists else "not trained"
        print(f"{budget:6d}  {100 * row['mean_accuracy']:17.1f}  {specialist:>27}")
    rows = {f"specialist, M = {m}": specialists[m]["accuracy"] for m in sorted(specialists)}
    rows |= {f"elastic, M = {m}": row["accuracy"] for m, row in elastic.items()}
    picture = args.out / "accuracy.png"
    save(grid_figure(rows, label="accuracy", xlabel="place in the word", title=f"Products over {GROUP}"), picture)
    seconds = time.perf_counter() - started
    print(f"\n{picture} drawn; {seconds:.0f} s in all")
    if args.results:
        report = {
            "command": f"python examples/demo.py --steps {args.steps}",
            "hardware": f"{platform.processor() or platform.machine()}, one thread per model",
            "torch": torch.__version__,
            "seed": 0,
            "seconds": seconds,
            "texts": texts,
            "elastic": list(elastic.values()),
            "specialists": list(specialists.values()),
        }
        args.results.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
