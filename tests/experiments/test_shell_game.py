"""experiments/shell_game.py: no shortcut answers its stories, and every word has a token."""

import random
import re
import runpy
from collections import Counter
from pathlib import Path

import pytest
import torch

GAME = runpy.run_path(str(Path(__file__).parents[2] / "experiments" / "shell_game.py"))
STORIES = 600


@pytest.mark.parametrize("swaps", range(1, 7))
def test_no_cup_is_right_for_where_it_is_named(swaps: int) -> None:
    """Neither the cup that is named first, nor the last one, nor the one that is named most, nor a fixed one."""
    rng = random.Random(swaps)
    stories = [GAME["tell"](rng, swaps) for _ in range(STORIES)]
    right = Counter[str]()
    for story, answer in stories:
        named = re.findall("|".join(GAME["CUPS"]), story)
        guesses = {"first": named[0], "last": named[-1], "most": Counter(named).most_common(1)[0][0]}
        right.update(way for way, cup in {**guesses, **{cup: cup for cup in GAME["CUPS"]}}.items() if cup == answer)
    assert max(right.values()) < 0.48 * STORIES


def test_a_story_ends_where_its_answer_is_learned() -> None:
    rng = random.Random(0)
    stories = [GAME["tell"](rng, swaps) for swaps in (1, 6)]
    inputs, targets = GAME["encode"](stories)
    names = {number: word for word, number in GAME["VOCAB"].items()}
    for row, (story, answer) in enumerate(stories):
        (end,) = torch.nonzero(targets[row] >= 0).flatten().tolist()
        assert names[int(targets[row, end])] == answer
        words = [names[token] for token in inputs[row, : end + 1].tolist()]
        assert words == re.findall(r"\w+|[^\w\s]", story)
        assert not inputs[row, end + 1 :].any()


def test_two_swaps_of_the_same_cups_bring_the_ball_back() -> None:
    class Fixed(random.Random):
        def choice(self, items):  # type: ignore[no-untyped-def]
            return items[0]

    found = [GAME["tell"](Fixed(0), swaps)[1] for swaps in (0, 1, 2, 3)]
    assert found == ["left", "middle", "left", "middle"]
