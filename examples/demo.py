"""The main job on the embedded default: an elastic model against a fixed-depth one, in minutes on two CPU cores.

    python examples/demo.py [--steps 1500] [--out runs/demo] [--results results/demo.json]

Prepares the prose of the Python standard library, trains a small elastic model and a fixed-depth one on the same
tokens, evaluates both at every budget, draws perplexity against compute, and continues a prompt at three budgets.
"""

import argparse
import json
import math
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

import loopformer
from loopformer import LM
from loopformer.data.loader import Windows, validation_windows
from loopformer.data.prepare import prepare
from loopformer.data.shards import TokenData, is_prepared
from loopformer.training.launch import launch

DATA = "data/demo"
FIXED = ["objective.short_weight=0", "objective.consistency_weight=0"]
PROMPT = "Return a new list"


def train(out: Path, steps: int) -> dict[str, LM]:
    """Both models on the same tokens in the same order, side by side on one core each; a finished run is kept."""
    settings = [f"training.steps={steps}", "training.threads=1"]
    if not is_prepared(DATA):
        print(f"preparing the prose of the standard library into {DATA}", flush=True)
        prepare(["stdlib"], DATA, train_tokenizer=1024)
    print(f"training an elastic and a fixed-depth model, {steps} steps each; shown is the elastic one", flush=True)
    words = [sys.executable, "-m", "loopformer", "train", "demo", *settings, *FIXED]
    fixed = subprocess.Popen([*words, "--out", str(out / "fixed"), "--resume", "--json"], stdout=subprocess.DEVNULL)
    try:
        launch("demo", settings, out / "elastic", resume=True)
        if fixed.wait() != 0:
            raise SystemExit(f"the fixed-depth run failed; try again: {' '.join(words)}")
    finally:
        fixed.terminate()
    return {name: loopformer.load(out / name) for name in ("elastic", "fixed")}


@torch.no_grad()
def evaluate(lm: LM, windows: Windows) -> list[dict[str, float]]:
    """Perplexity, FLOPs and time per token at every budget, over all validation windows."""
    rows = []
    for budget in range(1, lm.model.config.loops + 1):
        loss, tokens, started = 0.0, 0, time.perf_counter()
        for start in range(0, len(windows), 16):
            batch = windows.batch(start, start + 16)
            logits = lm.model(batch.inputs, budget).logits
            loss += float(
                torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="sum")
            )
            tokens += batch.targets.numel()
        rows.append(
            {
                "budget": budget,
                "perplexity": math.exp(loss / tokens),
                "mflops_per_token": lm.model.cost.forward_flops(budget) / 1e6,
                "microseconds_per_token": (time.perf_counter() - started) / tokens * 1e6,
                "tokens": tokens,
            }
        )
    return rows


def draw(found: dict[str, list[dict[str, float]]], path: Path) -> None:
    """Perplexity against compute, one curve per model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(6, 4), constrained_layout=True)
    labels = {"elastic": "elastic (LoopFormer objective)", "fixed": "fixed depth, same tokens"}
    for name, rows in found.items():
        flops = [row["mflops_per_token"] for row in rows]
        axis.plot(flops, [row["perplexity"] for row in rows], marker="o", label=labels[name])
    for row in found["elastic"]:
        axis.annotate(
            f"M={row['budget']}", (row["mflops_per_token"], row["perplexity"]), (4, 6), textcoords="offset points"
        )
    axis.set(xlabel="MFLOP per token (forward)", ylabel="validation perplexity", title="One model, every budget")
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter("{x:.0f}")
    axis.yaxis.set_minor_formatter("{x:.0f}")
    axis.legend()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"))
    parser.add_argument("--results", type=Path, help="also write the figures as JSON")
    asked = parser.parse_args()

    started = time.perf_counter()
    models = train(asked.out, asked.steps)
    windows = validation_windows(TokenData.open(DATA, "val"), models["elastic"].model.config.context)
    found = {name: evaluate(lm, windows) for name, lm in models.items()}
    print("\nbudget  MFLOP/token  us/token   perplexity: elastic    fixed depth")
    for one, other in zip(found["elastic"], found["fixed"], strict=True):
        print(
            f"{one['budget']:6d}  {one['mflops_per_token']:11.2f}  {one['microseconds_per_token']:8.1f}"
            f"  {one['perplexity']:19.2f}  {other['perplexity']:13.2f}"
        )
    print(f"\n{PROMPT!r}, continued by the elastic model:")
    texts: dict[str, Any] = {}
    for budget in (1, 2, models["elastic"].model.config.loops):
        texts[str(budget)] = models["elastic"].generate(PROMPT, budget=budget, max_tokens=24).text
        print(f"  M={budget}: {texts[str(budget)]!r}")
    draw(found, asked.out / "budgets.png")
    seconds = time.perf_counter() - started
    print(f"\n{asked.out / 'budgets.png'} drawn; {seconds:.0f} s in all")
    if asked.results:
        report = {
            "command": f"python examples/demo.py --steps {asked.steps}",
            "hardware": f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads",
            "torch": torch.__version__,
            "seed": 0,
            "seconds": seconds,
            "models": found,
            "continuations": texts,
        }
        asked.results.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
