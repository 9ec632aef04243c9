"""The shell game in English: how many swaps can a model follow at each number of loops?

    python experiments/shell_game.py full --out results/state_tracking/shell-game-full-seed0.json

A story says under which of three cups a ball lies, then which cups are swapped, in many wordings, and asks where
the ball is. Every swap is one more step that depends on the step before. Only the answer has a loss. Chance is a
third.

The model is `full` (1⊗6, trained at six loops only), `elastic` (1⊗6, trained at fewer loops as well from half of
its steps on), or `plain-M` (M blocks of the same width, no loops). All have the same stories in the same order. The
number of swaps grows, up to six from 40 % of the steps on. Accuracy is measured on stories drawn with another seed.
"""

import argparse
import json
import random
import re
import subprocess
import sys
import time
from itertools import permutations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from loopformer import LoopedLM, Trajectory
from loopformer.config import ModelConfig, ObjectiveConfig, RunConfig, TrainingConfig
from loopformer.config.run import TrainedTrajectory
from loopformer.data.loader import IGNORE_INDEX
from loopformer.device import device_name
from loopformer.files import write_json
from loopformer.training.objective import Objective
from loopformer.training.optimizer import ModelOptimizer, learning_rate
from loopformer.training.packing import pack_rows
from loopformer.training.plan import plan_step

LOOPS, MAX_SWAPS, CONTEXT = 6, 6, 160
TEST_STORIES, TEST_SEED = 500, 10**6  # per number of swaps
CUPS = ("left", "middle", "right")
NAMES = ("Mia", "Ben", "Zoe", "Tom", "Ana", "Leo", "Eva", "Max")
BEGINNINGS = (
    "The ball is under the {cup} cup.",
    "{name} hides a ball under the {cup} cup.",
    "{name} has a ball. The ball goes under the {cup} cup.",
    "A ball lies under the {cup} cup.",
    "There are three cups. Under the {cup} one is a ball.",
)
SWAPS = (
    "{name} swaps the {one} cup and the {two} cup.",
    "{name} swaps {one} and {two}.",
    "The {one} cup and the {two} cup change places.",
    "Then {name} trades the {one} cup for the {two} one.",
    "{name} moves {one} to where {two} is, and {two} to where {one} was.",
    "Now {one} and {two} change places.",
    "{name} puts the {one} cup in place of the {two} cup and the {two} cup in place of the {one} one.",
    '"Swap {one} and {two}!" says {other}, and {name} does.',
    "After that, {name} exchanges {one} with {two}.",
)
DISTRACTIONS = (
    "{name} smiles.",
    "{name} looks out of the window.",
    "{name} and {other} laugh.",
    "A dog barks.",
    "{name} drinks some milk.",
    "The sun shines.",
)
QUESTIONS = ("Where is the ball?", "Which cup hides the ball?", "Under which cup is the ball now?")
DISTRACTION_RATE = 0.15  # after each swap
WORD = re.compile(r"\w+|[^\w\s]")
TEMPLATES = (*BEGINNINGS, *SWAPS, *DISTRACTIONS, *QUESTIONS)
WORDS = sorted({word for template in TEMPLATES for word in WORD.findall(re.sub(r"{\w+}", "", template))})
VOCAB = {word: number for number, word in enumerate((*CUPS, *NAMES, *WORDS), start=1)}  # 0 is padding


def tell(rng: random.Random, swaps: int) -> tuple[str, str]:
    """A story with this many swaps, ending in a question, and the answer."""
    ball = rng.choice(CUPS)
    name, other = rng.sample(NAMES, 2)
    sentences = [rng.choice(BEGINNINGS).format(cup=ball, name=name)]
    for _ in range(swaps):
        one, two = rng.choice(list(permutations(CUPS, 2)))
        ball = {one: two, two: one}.get(ball, ball)
        name, other = rng.sample(NAMES, 2)
        sentences.append(rng.choice(SWAPS).format(one=one, two=two, name=name, other=other))
        if rng.random() < DISTRACTION_RATE:
            name, other = rng.sample(NAMES, 2)
            sentences.append(rng.choice(DISTRACTIONS).format(name=name, other=other))
    return " ".join([*sentences, rng.choice(QUESTIONS)]), ball


def encode(stories: list[tuple[str, str]]) -> tuple[Tensor, Tensor]:
    """Inputs [B, T], padded at the end, and targets [B, T]: the answer after the last token of the question."""
    rows = [[VOCAB[word] for word in WORD.findall(story)] for story, _ in stories]
    inputs = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    targets = torch.full_like(inputs, IGNORE_INDEX)
    for number, (row, (_, answer)) in enumerate(zip(rows, stories, strict=True)):
        inputs[number, : len(row)] = torch.tensor(row)
        targets[number, len(row) - 1] = VOCAB[answer]
    return inputs, targets


def make_run(model: str, steps: int, batch: int, seed: int) -> RunConfig:
    """The settings of a model of this experiment."""
    kind, _, blocks = model.partition("-")
    shape: dict[str, Any] = {"blocks": 1, "loops": LOOPS, "conditioning": "trajectory", "inject": "gated"}
    if kind == "plain":
        shape = {"blocks": int(blocks), "loops": 1, "conditioning": "none"}
    else:
        shape |= {"modulator_start": "one", "time_scale": 10}
    config = ModelConfig(
        width=96,
        heads=4,
        ffn=240,
        context=CONTEXT,
        vocab=len(VOCAB) + 1,
        positions="rotary",
        start="normed",
        **shape,
    )
    entries = [TrainedTrajectory("full")]
    if kind == "elastic":
        late = (0.5, 1.0)
        entries = [
            TrainedTrajectory("full", active_range=(0.0, 0.5)),
            TrainedTrajectory("full", rows=0.5, active_range=late),
            TrainedTrajectory((3, 5), rows=0.25, weight=0.3, active_range=late),
            TrainedTrajectory(2, rows=0.125, weight=0.3, active_range=late),
            TrainedTrajectory(1, rows=0.125, weight=0.3, active_range=late),
        ]
    training = TrainingConfig(
        steps=steps,
        batch=batch,
        seed=seed,
        optimizer="muon",
        learning_rate=2e-3,
        min_learning_rate=1e-4,
        warmup=50,
        weight_decay=0.1,
        dtype="float32",
    )
    return RunConfig(config, objective=ObjectiveConfig(tuple(entries), draws="row"), training=training)


def train(run: RunConfig) -> LoopedLM:
    """Train a model on fresh stories."""
    steps, batch, seed = run.training.steps, run.training.batch, run.training.seed
    torch.manual_seed(seed)
    model = LoopedLM(run.model)
    objective, optimizer = Objective(model, run.objective), ModelOptimizer(model, run.training, fused=False)
    rng, started = random.Random(seed), time.perf_counter()
    for step in range(1, steps + 1):
        longest = min(MAX_SWAPS, 1 + int(2.5 * MAX_SWAPS * step / steps))
        inputs, targets = encode([tell(rng, rng.randint(1, longest)) for _ in range(batch)])
        (planned,) = plan_step(run, step, micro_batch=batch)
        optimizer.set_rate(learning_rate(step, run.training))
        divisors = [float(max(1, len(entry))) for entry in planned.trajectories]  # a target in each row
        packed = pack_rows(run.model, planned.trajectories)
        losses = objective(inputs[planned.rows], targets[planned.rows], None, packed, divisors)
        losses.total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), run.training.clip)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            loss = float(losses.terms[0].sum()) / batch
            print(
                f"step {step}/{steps}: {loss:.3f} with up to {longest} swaps, {time.perf_counter() - started:.0f} s"
            )
    return model


@torch.no_grad()
def measure(model: LoopedLM) -> dict[str, list[float]]:
    """The share of right answers by number of swaps, at each budget from one on."""
    rng = random.Random(TEST_SEED)
    accuracy: dict[str, list[float]] = {}
    for swaps in range(1, MAX_SWAPS + 1):
        inputs, targets = encode([tell(rng, swaps) for _ in range(TEST_STORIES)])
        is_answer = targets != IGNORE_INDEX
        accuracy[str(swaps)] = []
        for budget in range(1, model.config.loops + 1):
            logits = model(inputs, Trajectory.uniform(budget)).logits
            right = logits[is_answer].argmax(-1) == targets[is_answer]
            accuracy[str(swaps)].append(float(right.float().mean()))
    return accuracy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="full, elastic or plain-M")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    started = time.perf_counter()
    model = train(make_run(args.model, args.steps, args.batch, args.seed))
    report = {
        "command": " ".join(["python", *sys.argv]),
        "hardware": device_name(torch.device("cpu")),
        "seed": args.seed,
        "commit": commit.stdout.strip() or "unknown",
        "model": args.model,
        "parameters": model.cost.parameters.total,
        "stories": args.steps * args.batch,
        "test_stories": TEST_STORIES,
        "seconds": time.perf_counter() - started,
        "accuracy": measure(model),  # by number of swaps, at one loop and more
    }
    write_json(args.out, report)
    print(json.dumps(report["accuracy"]))


if __name__ == "__main__":
    main()
