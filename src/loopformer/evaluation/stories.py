"""Stories: how many facts a model can chain at each budget.

    trajectories = [Trajectory.uniform(m) for m in (1, 2, 4, 6)]
    answers = answer_stories(loaded.lm, World.open("cups"), trajectories)
    answers["trajectories"][0]["accuracy"]           # by number of hops along the first trajectory
    answers["trajectories"][0]["held_out_accuracy"]  # the same on stories with a held-out pair
    continue_stories(loaded.lm, World.open("cups"), …) # do continuations contradict themselves?

Test stories come from random streams that training never sees (data/stories.py). Every number of hops has as many
stories. They are told in the tokens of the model. Its answer is the most likely token after the question, which is
right if the answer begins with it. Right answers are counted, so that standard errors can be computed:
√(p(1-p)/stories) for an accuracy p.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from loopformer.data.states import TEST
from loopformer.data.stories import HELD_OUT, Story, StoryWindows, World
from loopformer.errors import require
from loopformer.evaluation.states import is_most_likely, trained_on, trajectory_label
from loopformer.evaluation.store import ReportProgress, device_and_dtype
from loopformer.lm import LM, GenerateOptions
from loopformer.plots import grid_figure
from loopformer.scoring import BATCH_TOKENS, TrajectoryTree
from loopformer.trajectory import Trajectory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STORIES = 500  # for each number of hops


def trained_world(model: str | Path) -> str | None:
    """The world whose stories a run, or a checkpoint of one, was trained on; None for any other model."""
    data = trained_on(model)
    return None if data is None else data.stories


def answer_stories(
    lm: LM,
    world: World,
    trajectories: Sequence[Trajectory],
    stories: int = STORIES,
    seed: int = 0,
    batch_tokens: int = BATCH_TOKENS,
    report: ReportProgress | None = None,
) -> dict[str, Any]:
    """Right answers and accuracy by number of hops along each trajectory, and by kind of answer."""
    model = lm.model
    require(stories >= 1, f"--stories must be 1 or more, got {stories}.")
    require(seed >= 0, f"--seed must be 0 or more, got {seed}.")
    streams = {"": TEST, "held_out_": HELD_OUT} if world.held_out.pairs else {"": TEST}
    # Stories of all hops take turns, so the answers of a stream lie in a grid [stories, hops].
    shape = (stories, world.hops)
    count = stories * world.hops
    drawn = {
        name: StoryWindows(world, model.config.context, count, seed, stream).stories(0, count)
        for name, stream in streams.items()
    }
    found = {
        name: _right_answers(lm, world, trajectories, each, shape, name, batch_tokens, report)
        for name, each in drawn.items()
    }
    chance = np.reshape([story.chance for story in drawn[""]], shape)
    kinds = np.array([story.kind for story in drawn[""]])
    return {
        "world": world.source,
        "stories": stories,
        "hops": list(range(1, world.hops + 1)),
        "chance": chance.mean(0).tolist(),
        "kinds": {kind: int((kinds == kind).sum()) for kind in dict.fromkeys(kinds.tolist())},
        "held_out_pairs": len(world.held_out.pairs),
        "seed": seed,
        **device_and_dtype(model),
        "trajectories": [
            {
                "budget": trajectory.budget,
                "trajectory": str(trajectory),
                "flops_per_token": model.cost.forward_flops(trajectory.budget, model.config.context),
                "mean_accuracy": float(found[""][trajectory].mean()),
                **{f"{name}right": right[trajectory].sum(0).tolist() for name, right in found.items()},
                **{f"{name}accuracy": right[trajectory].mean(0).tolist() for name, right in found.items()},
                "right_by_kind": {
                    kind: int(found[""][trajectory].ravel()[kinds == kind].sum())
                    for kind in dict.fromkeys(kinds.tolist())
                },
            }
            for trajectory in trajectories
        ],
    }


@torch.no_grad()
def _right_answers(
    lm: LM,
    world: World,
    trajectories: Sequence[Trajectory],
    stories: Sequence[Story],
    shape: tuple[int, int],
    stream: str,
    batch_tokens: int,
    report: ReportProgress | None,
) -> dict[Trajectory, np.ndarray[Any, np.dtype[np.bool_]]]:
    """Whether the model answers each story of a stream correctly along each trajectory, [stories, hops]."""
    model, tokenizer = lm.model, lm.need_tokenizer()
    tree, context = TrajectoryTree(model, trajectories), model.config.context
    correct = {trajectory: np.zeros(len(stories), bool) for trajectory in tree.trajectories}
    rows, answer_of = max(1, batch_tokens // context), dict[int, int]()  # the answer that begins with a token
    for start in range(0, len(stories), rows):
        asked = stories[start : start + rows]
        told = world.encode(asked, tokenizer)
        for story, encoded in zip(asked, told, strict=True):
            same = story.answer == answer_of.setdefault(encoded.answer[0], story.answer)
            require(
                same, "Two answers begin with the same token of this model; measure a model with another tokenizer."
            )
        longest = max(len(story.ids) for story in told)
        require(
            longest <= context, f"A story has {longest} tokens but the context is {context}; choose another world."
        )
        ids = np.full((len(told), longest), tokenizer.eot)
        for row, encoded in enumerate(told):
            ids[row, : len(encoded.ids)] = encoded.ids
        ends = [len(encoded.ids) - 1 for encoded in told]  # the last tokens of the questions
        answers = torch.tensor([encoded.answer[0] for encoded in told], device=model.device)
        part = slice(start, start + len(told))
        for trajectory, hidden in tree.run(torch.from_numpy(ids).to(model.device)):
            logits = model.head(hidden[range(len(told)), ends])[:, : model.config.vocab]
            correct[trajectory][part] = is_most_likely(logits, answers)
        if report:
            name = "held-out pairs" if stream else "stories"
            report(f"{name} of {world.source}", part.stop, len(stories))
    return {trajectory: right.reshape(shape) for trajectory, right in correct.items()}


def continue_stories(
    lm: LM, world: World, trajectories: Sequence[Trajectory], stories: int, seed: int = 0
) -> list[dict[str, Any]]:
    """How many sentences contradict the story so far, when the model continues test stories along each trajectory.

    Each test story is cut after its opening and continued with random draws up to a question. Sentences are read
    back by the templates of the world, and those of no template are counted apart. Only a model trained with
    data.loss=text can tell stories.
    """
    require(stories >= 1, f"--generate must be 1 or more, got {stories}.")
    is_own = lm.need_tokenizer().hash == world.tokenizer.hash
    require(is_own, f"--generate needs a model whose tokens are the words of {world.source}, trained without text.")
    context = lm.model.config.context
    told = StoryWindows(world, context, stories, seed, TEST).stories(0, stories)
    openings = [story.ids[: world.opening(story.ids)] for story in told]
    prompts = [world.tokenizer.decode(ids) for ids in openings]
    rows = []
    for trajectory in trajectories:
        options: GenerateOptions = {
            "max_tokens": context - max(map(len, openings)),
            "temperature": 1.0,
            "seed": seed,
        }
        results = lm.generate(prompts, trajectory=trajectory, **options)
        counts = Counter[str]()
        for opening, result in zip(openings, results, strict=True):
            for reading in world.read_on(opening, result.ids):
                counts["sentences"] += 1
                counts["unreadable"] += reading.event is None
                counts["contradictions"] += reading.event is not None and not reading.is_possible
        row = {"budget": trajectory.budget, "trajectory": str(trajectory), "stories": stories}
        rows.append(row | {name: counts[name] for name in ("sentences", "unreadable", "contradictions")})
    return rows


def story_figure(answers: dict[str, Any]) -> Figure:
    """Accuracy by number of hops, a row for chance and one for each trajectory."""
    rows = {"chance": answers["chance"]}
    rows |= {trajectory_label(row): row["accuracy"] for row in answers["trajectories"]}
    title = f"Stories of {answers['world']}, {answers['stories']:,} for each number of hops"
    return grid_figure(rows, label="accuracy", xlabel="hops", title=title)
