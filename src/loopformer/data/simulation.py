"""What happens in a story, before it is told in words: the protocol of a simulation, and the shell game.

    cups = Cups(words, HeldOutPairs(people, cups, share=0.1), distractors=0.15)
    cups.draw(random.Random(0), hops=3)          # Draft(events=[("begin", {"cup": "left"}), …], answer="right", …)

A simulation draws events and a question whose answer follows from a wanted number of them, its hops. It knows
nothing about wordings.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import cycle
from typing import ClassVar, NamedTuple, Protocol

from loopformer.data.phrasebook import PERSON, Words, WorldEvent
from loopformer.errors import require


class Draft(NamedTuple):
    """Events, a question about them, its answer, and the chance that a guess among the named words of its kind is
    right."""

    events: list[WorldEvent]
    question: WorldEvent
    answer: str
    kind: str
    chance: float


class HeldOutPairs:
    """Pairs of a person and another word that training stories keep apart."""

    def __init__(self, people: Sequence[str], words: Iterable[str], share: float) -> None:
        order, count = list(people), round(share * len(people))
        random.Random("held-out pairs").shuffle(order)
        turns = cycle(order)  # so that everybody has about as many pairs
        self.pairs = frozenset((next(turns), word) for word in words for _ in range(count))

    def allows(self, person: str, word: str) -> bool:
        return (person, word) not in self.pairs


class WorldState(Protocol):
    """What is the case after some events."""

    def apply(self, section: str, fillers: Mapping[str, str], why: int) -> bool:
        """Change the state as an event says; False, and no change, if it contradicts the state.

        `why` is the set of sentences that say so, as bits.
        """


class Simulation(Protocol):
    """Draws what happens."""

    slots: ClassVar[Mapping[str, str]]  # the kinds of words that each slot of a template stands for
    sections: ClassVar[Mapping[str, str]]  # the slots that each section must have and, after a bar, may have
    answers: ClassVar[Sequence[str]]  # the kinds of answers that no sentence names, such as yes and no
    openings: ClassVar[Set[str]]  # the sections that begin a story
    questions: ClassVar[Set[str]]  # the sections that end it
    fewest: ClassVar[Mapping[str, int]]  # how many words of each kind there must be

    def __init__(self, words: Words, pairs: HeldOutPairs, distractors: float) -> None: ...

    def draw(self, rng: random.Random, hops: int, free: bool = False) -> Draft | None:
        """A draft with this many hops, or None if this attempt has no such question.

        Held-out pairs are kept apart unless the draft is `free`.
        """

    def state(self) -> WorldState:
        """The state before any event, to check sentences that are read back."""


class CupsState:
    """Under which cup the ball is, or nothing before a story has begun."""

    def __init__(self, cups: Sequence[str]) -> None:
        self._cups, self.ball = cups, ""

    def apply(self, section: str, fillers: Mapping[str, str], why: int) -> bool:
        if section == "begin" and not self.ball:
            self.ball = fillers["cup"]
            return True
        if section not in ("begin", "exclude", "swap"):
            return True
        one, two = fillers.get("one"), fillers.get("two")
        if section == "exclude" and not self.ball and one != two:
            others = [cup for cup in self._cups if cup not in (one, two)]
            self.ball = others[0]
            return len(others) == 1
        if section == "swap" and self.ball and one and two and one != two:
            self.ball = {one: two, two: one}.get(self.ball, self.ball)
            return True
        return False


class Cups:
    """The shell game: a ball under one of the cups, and swaps of two cups. A hop is a swap."""

    slots: ClassVar[Mapping[str, str]] = {"a": PERSON, "b": PERSON, "cup": "cup", "one": "cup", "two": "cup"}
    sections: ClassVar[Mapping[str, str]] = {
        "begin": "cup | a b",
        "exclude": "one two | a b",
        "swap": "one two | a b",
        "glance": "cup | a b",
        "chatter": "| a b",
        "where": "| a b",
    }
    answers: ClassVar[Sequence[str]] = ()
    openings: ClassVar[Set[str]] = {"begin", "exclude"}
    questions: ClassVar[Set[str]] = {"where"}
    fewest: ClassVar[Mapping[str, int]] = {PERSON: 2, "cup": 2}
    exclude_rate: ClassVar[float] = 0.2  # of beginnings that say where the ball is not

    def __init__(self, words: Words, pairs: HeldOutPairs, distractors: float) -> None:
        self._cups, self._people, self._distractors = words["cup"], words[PERSON], distractors
        self._swaps = [(one, two) for one in self._cups for two in self._cups if one != two]
        self._allowed = {
            cups: [name for name in self._people if all(pairs.allows(name, cup) for cup in cups)]
            for cups in [*self._swaps, *((cup,) for cup in self._cups)]
        }
        has_two = min(map(len, self._allowed.values())) >= 2
        require(has_two, "held_out leaves fewer than two people for some cups; lower it, or add people.")

    def draw(self, rng: random.Random, hops: int, free: bool = False) -> Draft | None:
        draw, cups, swaps = rng.random, self._cups, self._swaps

        def event(section: str, *named: str, **slots: str) -> WorldEvent:
            """An event with two people who may be named together with these cups."""
            people = self._people if free or not named else self._allowed[named]
            first, second = int(draw() * len(people)), int(draw() * (len(people) - 1))
            return section, {"a": people[first], "b": people[second + (second >= first)], **slots}

        def distract() -> None:
            if draw() < self._distractors:
                if draw() < 0.5:
                    events.append(event("chatter"))
                else:
                    cup = cups[int(draw() * len(cups))]
                    events.append(event("glance", cup, cup=cup))

        ball = cups[int(draw() * len(cups))]
        if draw() < self.exclude_rate and len(cups) == 3:
            one, two = (cup for cup in cups if cup != ball)
            events = [event("exclude", one, two, one=one, two=two)]
        else:
            events = [event("begin", ball, cup=ball)]
        distract()
        for _ in range(hops):
            one, two = swaps[int(draw() * len(swaps))]
            ball = two if ball == one else one if ball == two else ball
            events.append(event("swap", one, two, one=one, two=two))
            distract()
        return Draft(events, event("where", ball), ball, "cup", 1 / len(cups))

    def state(self) -> CupsState:
        return CupsState(self._cups)
