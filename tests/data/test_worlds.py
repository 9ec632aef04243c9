"""Worlds: settings files of one's own, and one clear sentence for each that is wrong."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from loopformer.config import DataConfig
from loopformer.data.generated import open_data
from loopformer.data.states import TRAIN
from loopformer.data.stories import FOLDER, StoryLoader, StoryWindows, World
from loopformer.errors import LoopformerError


def test_wrong_names_and_sizes() -> None:
    with pytest.raises(LoopformerError, match=r"There is no world 'cubs'; did you mean cups\?"):
        World.open("cubs")
    with pytest.raises(
        LoopformerError, match=r"There is no settings file mine\.yaml; check the path, or choose cups"
    ):
        World.open("mine.yaml")
    with pytest.raises(
        LoopformerError, match=r"model\.context is 100, too short for data\.stories=cups; set it to 1"
    ):
        StoryLoader(World.open("cups"), 100, 4)
    with pytest.raises(LoopformerError, match="1 story or more, got 0"):
        StoryWindows(World.open("cups"), 160, 0)


def changed(path: Path, *keys: str, to: object) -> str:
    """A settings file in which one setting of cups is another; None takes it away."""
    settings: Any = yaml.safe_load((FOLDER / "cups.yaml").read_text(encoding="utf-8"))
    section = settings
    for key in keys[:-1]:
        section = section[key]
    section[keys[-1]] = to
    if to is None:
        del section[keys[-1]]
    path.write_text(yaml.safe_dump(settings, allow_unicode=True), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("keys", "to", "sentence"),
    [
        (["kind"], "village green", "kind must be one of"),
        (["hops"], 0, "hops must be 1 or more"),
        (["swaps"], 3, "Unknown setting .*swaps"),
        (["words"], None, "words must be a mapping with person, cup"),
        (["words", "cup"], None, "words lacks cup; add what is missing"),
        (["words", "cup"], ["left", "far right"], r"words\.cup must be a list of single words"),
        (["words", "cup"], ["left"], r"words\.cup needs 2 words or more"),
        (["held_out"], 0.9, "held_out leaves fewer than two people"),
        (["words", "cup"], ["left", "Mia"], "the word 'Mia' stands twice"),
        (["words", "person"], ["Mia", "Ben"], r"words\.person must be lists of names by pronoun"),
        (["templates", "swap"], None, "templates lacks swap; add what is missing"),
        (["templates", "swap"], [], r"templates\.swap must be a list of sentences"),
        (["templates", "swap"], ["{a} swaps {one}."], "of swap lacks {two}"),
        (["templates", "glance"], ["{a} sees the {cup} and the {one} cup."], "of glance has {one}, which nothing"),
        (["templates", "glance"], ["{a} sees the {cop} cup."], "unknown slot {cop}; did you mean cup"),
        (
            ["templates", "glance"],
            ["{a} sees {a.theirs} {cup} cup."],
            "unknown form {a.theirs}; did you mean their",
        ),
        (["templates", "glance"], ["the {cup} cup shines."], "begins with a small letter"),
        (["templates", "glance"], ["The {cup} cup shines"], "does not end like a sentence"),
    ],
)
def test_a_wrong_settings_file_is_one_sentence(tmp_path: Path, keys: list[str], to: object, sentence: str) -> None:
    with pytest.raises(LoopformerError, match=sentence):
        World.open(changed(tmp_path / "mine.yaml", *keys, to=to))


def test_a_world_of_ones_own(tmp_path: Path) -> None:
    cups = ["north", "south", "east", "west"]
    world = World.open(changed(tmp_path / "mine.yaml", "words", "cup", to=cups))
    stories = world.stories(0, TRAIN, range(100), hops=3)
    assert {world.tokenizer.decode([story.answer]) for story in stories} == set(cups)
    assert {story.chance for story in stories} == {0.25}
    assert world.index_hash != World.open("cups").index_hash
    data = open_data(DataConfig(stories=str(tmp_path / "mine.yaml")))
    assert isinstance(data, World)
    assert data.index_hash == world.index_hash
