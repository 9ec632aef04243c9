"""What elastic depth is, in minutes on two CPU cores: text at four budgets, then a task on which depth pays.

    python examples/demo.py [--steps 3000] [--out runs/demo] [--results results/demo/demo.json]

First the model in the box continues a prompt at four budgets. Then one elastic model is trained to multiply in the
group S3, and beside it specialists, each of one budget alone; all of them are asked for the product at every place
of new words, and the accuracy is drawn by place and budget. Started again, it goes on where it was stopped.
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
    """The model in the box at four budgets, from one seed."""
    lm = loopformer.load("box")
    config, parameters = lm.model.config, lm.model.cost.parameters.total
    print(
        f"The model in the box: {config.blocks}⊗{config.loops}, {parameters / 1e6:.1f} M parameters. {PROMPT!r} …"
    )
    rows = []
    for budget in BUDGETS:
        started = time.perf_counter()
        made = lm.generate(PROMPT, budget=budget, max_tokens=NEW_TOKENS, temperature=0.8, top_p=0.95, seed=0)
        milliseconds = (time.perf_counter() - started) / len(made.ids) * 1e3
        mflops = lm.model.cost.forward_flops(budget) / 1e6
        rows.append({"budget": budget, "mflops_per_token": mflops, "ms_per_token": milliseconds, "text": made.text})
        print(
            f"\nM = {budget}, {mflops:.0f} MFLOP and {milliseconds:.1f} ms per token:\n  …{made.text}", flush=True
        )
    return rows


def train(out: Path, steps: int) -> None:
    """The elastic model, and the specialists beside it and after it, one core each; what is done is kept."""
    settings = [f"training.steps={steps}", "training.device=cpu", "training.threads=1"]
    print(f"\ntraining on words over {GROUP}, {steps} steps each; shown is the elastic model", flush=True)
    left = iter(SPECIALISTS)  # whichever core is free takes the next

    def train_specialists() -> None:
        for budget in left:
            train_specialist(out, budget, settings)

    with ThreadPoolExecutor(1) as beside:
        other_core = beside.submit(train_specialists)
        launch(PRESET, settings, out / "elastic", resume=True)
        train_specialists()
        other_core.result()


def train_specialist(out: Path, budget: int, settings: list[str]) -> None:
    """The same network, trained on as many words at one budget alone; in a process of its own."""
    own = ["objective.trajectories=[{budget: full}]", f"model.loops={budget}"]
    words = ["train", PRESET, *settings, *own, "--out", str(out / f"specialist-{budget}"), "--resume", "--json"]
    subprocess.run([sys.executable, "-m", "loopformer", *words], check=True, stdout=subprocess.DEVNULL)


def accuracy(run: Path, budgets: Iterable[int]) -> dict[int, dict[str, Any]]:
    """How often a model is right at each place of new words, by budget."""
    model = loopformer.load(run).model
    found = track_states(model, Group.named(GROUP), [Trajectory.uniform(m) for m in budgets], thresholds=())
    return {one["budget"]: one for one in found["trajectories"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"))
    parser.add_argument("--results", type=Path, help="also write the figures as JSON")
    asked = parser.parse_args()

    started = time.perf_counter()
    texts = write_text()
    train(asked.out, asked.steps)
    elastic = accuracy(asked.out / "elastic", range(1, LOOPS + 1))
    specialists = {m: accuracy(asked.out / f"specialist-{m}", [m])[m] for m in SPECIALISTS}
    print(f"\nproducts over {GROUP}: accuracy in percent over words of {len(elastic[1]['accuracy'])}")
    print("passes  one elastic model  a specialist of these passes")
    for budget, one in elastic.items():
        other = f"{100 * specialists[budget]['mean_accuracy']:.1f}" if budget in specialists else "not trained"
        print(f"{budget:6d}  {100 * one['mean_accuracy']:17.1f}  {other:>28}")
    rows = {f"specialist, M = {m}": specialists[m]["accuracy"] for m in sorted(specialists)}
    rows |= {f"elastic, M = {m}": one["accuracy"] for m, one in elastic.items()}
    picture = asked.out / "accuracy.png"
    save(grid_figure(rows, label="accuracy", xlabel="place in the word", title=f"Products over {GROUP}"), picture)
    seconds = time.perf_counter() - started
    print(f"\n{picture} drawn; {seconds:.0f} s in all")
    if asked.results:
        report = {
            "command": f"python examples/demo.py --steps {asked.steps}",
            "hardware": f"{platform.processor() or platform.machine()}, one thread per model",
            "torch": torch.__version__,
            "seed": 0,
            "seconds": seconds,
            "texts": texts,
            "elastic": list(elastic.values()),
            "specialists": list(specialists.values()),
        }
        asked.results.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
