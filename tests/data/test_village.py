"""The village: an independent replay of the text, hops by hand, and stories that contradict themselves."""

from collections.abc import Mapping

import pytest

from loopformer.data.states import TRAIN
from loopformer.data.stories import World
from loopformer.data.village import Village, VillageState


@pytest.fixture(scope="module")
def world() -> World:
    return World.open("village")


class Replay:
    """A village without provenance: who and what is where, by the plainest rules."""

    def __init__(self) -> None:
        self.place: dict[str, str] = {}
        self.was: dict[str, str] = {}
        self.spot: dict[str, str] = {}
        self.givers: dict[tuple[str, str], str] = {}

    def go(self, person: str, place: str) -> None:
        if person in self.place:
            self.was[person] = self.place[person]
        self.place[person] = place

    def holding(self, person: str) -> list[str]:
        return [item for item, spot in self.spot.items() if spot == person]

    def happen(self, section: str, f: Mapping[str, str]) -> None:
        a, b, item, box, place = (f.get(slot, "") for slot in ("a", "b", "thing", "box", "place"))
        if section in ("be", "go"):
            self.go(a, place)
        elif section == "follow":
            self.go(a, self.place[b])
        elif section in ("have", "take", "find", "unpack"):
            self.spot[item] = a
        elif section in ("contain", "put"):
            self.spot[item] = box
        elif section in ("lie", "drop", "hide"):
            self.spot[item] = place or self.place[a]
        elif section in ("give", "lend", "hand"):
            (item,) = [item] if item else self.holding(a)
            self.spot[item], self.givers[item, b] = b, a
        elif section == "swap":
            (ours,), (theirs,) = self.holding(a), self.holding(b)
            self.spot[ours], self.spot[theirs] = b, a

    def find(self, item: str) -> str:
        spot = self.spot[item]
        return self.place[spot] if spot in self.place else self.find(spot) if spot in self.spot else spot

    def answer(self, section: str, f: Mapping[str, str]) -> str:
        a, item, box, place = (f.get(slot, "") for slot in ("a", "thing", "box", "place"))
        match section:
            case "where":
                return self.find(item)
            case "where_person":
                return self.place[a]
            case "before":
                return self.was[a]
            case "who":
                return self.spot[item]
            case "gave":
                return self.givers[item, a]
            case "count":
                return ["none", "one", "two", "three"][len(self.holding(a))]
            case "is_in":
                return "yes" if self.find(item) == place else "no"
            case "is_with":
                return "yes" if self.spot[item] == a else "no"
        (box,) = self.holding(a) if section == "carried" else [box]
        (inside,) = self.holding(box)
        return inside


def test_answers_are_those_of_a_replay_of_the_text(world: World) -> None:
    asked = set[str]()
    for hops in range(1, world.hops + 1):
        for story in world.stories(seed=5, stream=TRAIN, numbers=range(150), hops=hops):
            *events, question = (reading.event for reading in world.read(story.ids))
            replay = Replay()
            for event in events:
                assert event is not None
                replay.happen(*event)
            assert question is not None
            assert replay.answer(*question) == world.tokenizer.decode([story.answer]), world.text(story)
            asked.add(question[0])
    assert asked == Village.questions


def test_hops_are_the_sentences_that_an_answer_follows_from() -> None:
    state, events = VillageState({"basket"}), [
        ("be", {"a": "Mia", "place": "barn"}),
        ("be", {"a": "Ben", "place": "tower"}),
        ("have", {"a": "Mia", "thing": "basket"}),
        ("contain", {"thing": "ball", "box": "basket"}),
        ("follow", {"a": "Mia", "b": "Ben"}),
        ("hand", {"a": "Mia", "b": "Ben"}),
        ("weather", {}),
        ("go", {"a": "Ben", "place": "attic"}),
    ]  # fmt: skip
    for number, (section, fillers) in enumerate(events):
        assert state.apply(section, fillers, 1 << number)
    # The ball is in the basket (3), which Mia had (2) and gave (5) to Ben, who is in the attic (7).
    assert state.find("ball") == ("attic", 0b10101100)
    assert (state.place["Mia"], state.place_why["Mia"]) == ("tower", 0b00010010)
    assert state.earlier["Mia"] == ("barn", 0b1)
    assert state.gifts["basket", "Ben"] == ("Mia", 0b00100100)


def test_what_continues_an_opening_is_read_up_to_a_question(world: World) -> None:
    encode = world.tokenizer.encode
    opening = encode("Mia is in the barn. The ball is in the barn. Ben is in the attic.")
    whole = encode(
        "Mia takes the ball. Mia takes the ball. The ball the. A leaf falls from a tree. Where is Mia? barn"
    )
    assert world.opening([*opening, *whole]) == len(opening)
    readings = world.read_on(opening, whole)
    assert [reading.is_possible for reading in readings] == [True, False, False, True]
    assert [reading.event is None for reading in readings] == [False, False, True, False]
    assert len(world.read_on(opening, encode("Mia takes the ball. Mia takes the"))) == 1
    assert world.read_on(opening, []) == []


def test_a_story_with_another_actor_is_caught(world: World) -> None:
    """Where only its holder can put down or give away a thing, anybody else contradicts the state."""
    caught = 0
    for story in world.stories(8, TRAIN, range(60)):
        events = [reading.event for reading in world.read(story.ids)]
        for number, event in enumerate(events):
            if event is None or event[0] not in ("drop", "hide", "put", "give", "lend"):
                continue
            section, fillers = event
            people = {each[1]["a"] for each in events if each is not None and "a" in each[1]}
            for other in people - {fillers["a"], fillers.get("b", "")}:
                state = VillageState(set(world.words["box"]))
                applied = [state.apply(*each, why=1) for each in events[:number] if each is not None]
                assert all(applied)
                assert not state.apply(section, {**fillers, "a": other}, why=1)
                caught += 1
    assert caught > 50
