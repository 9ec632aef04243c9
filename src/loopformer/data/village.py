"""A village: people go about, take, give and hide things, and every fact remembers the sentences it follows from.

    state = VillageState(boxes={"basket"})
    state.apply("be", {"a": "Mia", "place": "barn"}, why=0b01)      # True: this is possible
    state.apply("have", {"a": "Mia", "thing": "ball"}, why=0b10)
    state.find("ball")                                              # ("barn", 0b11): two facts must be chained

A fact is stored with a set of sentences as bits. What follows from another fact takes over its sentences. Whoever
follows Mia is where Mia is, so the hops of their place are those of Mia's and one more. An item is in a place,
with a person, or in a box, which may be with a person. The same `apply` generates stories and checks sentences that
are read back.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import ClassVar, NamedTuple

from loopformer.data.phrasebook import PERSON, Words, WorldEvent
from loopformer.data.simulation import Draft, HeldOutPairs

Fillers = Mapping[str, str]
Question = tuple[
    str, dict[str, str], str, str, int
]  # section, fillers, answer, its kind, the sentences it follows from

SYNONYMS = {
    "hide": "drop",
    "find": "take",
    "lend": "give",
}  # sections with wordings of their own, and what they mean
# What people do, and how often it is tried. Much of it fails: nobody gives away what they do not have.
ACTIONS = {
    "go": 6,
    "follow": 16,
    "take": 6,
    "find": 4,
    "drop": 3,
    "hide": 3,
    "put": 14,
    "unpack": 3,
    "give": 3,
    "lend": 2,
    "hand": 20,
    "swap": 16,
}


# What is asked, and how often it is chosen if a story allows it.
QUESTIONS = {
    "where": 6,
    "where_person": 2,
    "before": 3,
    "who": 3,
    "gave": 4,
    "inside": 6,
    "carried": 8,
    "count": 1,
    "is_in": 1,
    "is_with": 1,
}


class VillageState:
    """Who and what is where, and which sentences say so."""

    def __init__(self, boxes: Set[str]) -> None:
        self._boxes = boxes
        self.place: dict[str, str] = {}  # of each person
        self.place_why: dict[str, int] = {}
        self.earlier: dict[str, tuple[str, int]] = {}  # the place before, and the sentences that say so
        self.where: dict[str, str] = {}  # of each item: a person, a box or a place
        self.why: dict[str, int] = {}
        self.held: dict[str, list[str]] = {}  # the items of each person, without what is in boxes
        self.held_why: dict[str, int] = {}  # the sentences that changed how many there are
        self.gifts: dict[tuple[str, str], tuple[str, int] | None] = {}  # the only giver of an item to a person

    def apply(self, section: str, fillers: Fillers, why: int) -> bool:
        """Change the state as the event says; False, and no change, if it contradicts the state."""
        change = self._changes.get(SYNONYMS.get(section, section))
        return change is None or change(self, fillers, why)

    def find(self, item: str) -> tuple[str, int]:
        """The place of an item, and the sentences it follows from."""
        spot, why = self.where[item], self.why[item]
        while spot in self.where:  # in a box
            spot, why = self.where[spot], why | self.why[spot]
        return (self.place[spot], why | self.place_why[spot]) if spot in self.place else (spot, why)

    def inside(self, box: str) -> list[str]:
        return [item for item, spot in self.where.items() if spot == box]

    def reaches(self, person: str, item: str) -> bool:
        """Whether the item is in this person's hands, or lies where the person is."""
        return item in self.where and self.where[item] in (person, self.place.get(person))

    def _settle(self, person: str, place: str, why: int) -> bool:
        if person in self.place:
            self.earlier[person] = self.place[person], self.place_why[person]
        self.place[person], self.place_why[person] = place, why
        self.held.setdefault(person, [])
        return True

    def _move(self, item: str, to: str, why: int, event: int) -> bool:
        """Put an item somewhere else; `event` changes how many things its old and new holders have."""
        for person in (self.where.get(item), to):
            if person in self.held:
                self.held_why[person] = self.held_why.get(person, 0) | event
        if (before := self.where.get(item)) in self.held:
            self.held[before].remove(item)
        if to in self.held:
            self.held[to].append(item)
        self.where[item], self.why[item] = to, why
        return True

    def _be(self, f: Fillers, why: int) -> bool:
        return f["a"] not in self.place and self._settle(f["a"], f["place"], why)

    def _have(self, f: Fillers, why: int) -> bool:
        is_new = f["thing"] not in self.where and f["a"] in self.place
        return is_new and self._move(f["thing"], f["a"], why, why)

    def _contain(self, f: Fillers, why: int) -> bool:
        is_new = f["thing"] not in self.where and f["thing"] not in self._boxes and f["box"] in self.where
        return is_new and self._move(f["thing"], f["box"], why, why)

    def _lie(self, f: Fillers, why: int) -> bool:
        return f["thing"] not in self.where and self._move(f["thing"], f["place"], why, why)

    def _go(self, f: Fillers, why: int) -> bool:
        is_elsewhere = f["a"] in self.place and self.place[f["a"]] != f["place"]
        return is_elsewhere and self._settle(f["a"], f["place"], why)

    def _follow(self, f: Fillers, why: int) -> bool:
        a, b = f["a"], f["b"]
        is_apart = a in self.place and b in self.place and self.place[a] != self.place[b]
        return is_apart and self._settle(a, self.place[b], why | self.place_why[b])

    def _take(self, f: Fillers, why: int) -> bool:
        a, item = f["a"], f["thing"]
        lies_here = a in self.place and self.where.get(item) == self.place[a]
        return lies_here and self._move(item, a, why, why)

    def _drop(self, f: Fillers, why: int) -> bool:
        a, item = f["a"], f["thing"]
        is_held = self.where.get(item) == a
        return is_held and self._move(item, self.place[a], why | self.place_why[a], why)

    def _put(self, f: Fillers, why: int) -> bool:
        a, item, box = f["a"], f["thing"], f["box"]
        is_possible = self.where.get(item) == a and item not in self._boxes and self.reaches(a, box)
        return is_possible and self._move(item, box, why, why)

    def _unpack(self, f: Fillers, why: int) -> bool:
        a, item, box = f["a"], f["thing"], f["box"]
        return self.where.get(item) == box and self.reaches(a, box) and self._move(item, a, why, why)

    def _meet(self, a: str, b: str) -> bool:
        return a != b and a in self.place and self.place[a] == self.place.get(b)

    def _pass(self, item: str, giver: str, taker: str, why: int, event: int) -> bool:
        self.gifts[item, taker] = None if (item, taker) in self.gifts else (giver, why)
        return self._move(item, taker, why, event)

    def _give(self, f: Fillers, why: int) -> bool:
        a, b, item = f["a"], f["b"], f["thing"]
        return self._meet(a, b) and self.where.get(item) == a and self._pass(item, a, b, why, why)

    def _hand(self, f: Fillers, why: int) -> bool:
        """Give away the only thing one has, which is not named."""
        a, b = f["a"], f["b"]
        if not self._meet(a, b) or len(self.held[a]) != 1:
            return False
        (item,) = self.held[a]
        return self._pass(item, a, b, why | self.why[item], why)

    def _swap(self, f: Fillers, why: int) -> bool:
        """Two people exchange the only things they have, which are not named."""
        a, b = f["a"], f["b"]
        if not self._meet(a, b) or len(self.held[a]) != 1 or len(self.held[b]) != 1:
            return False
        (one,), (two,) = self.held[a], self.held[b]
        self.gifts[one, b] = self.gifts[two, a] = None  # nobody gave anything
        self._move(one, b, why | self.why[one], 0)
        return self._move(two, a, why | self.why[two], 0)

    _changes: ClassVar[dict[str, Callable[[VillageState, Fillers, int], bool]]] = {
        "be": _be,
        "have": _have,
        "lie": _lie,
        "contain": _contain,
        "go": _go,
        "follow": _follow,
        "take": _take,
        "drop": _drop,
        "put": _put,
        "unpack": _unpack,
        "give": _give,
        "hand": _hand,
        "swap": _swap,
    }


class Cast(NamedTuple):
    """Who and what a story is about."""

    people: list[str]
    places: list[str]
    boxes: list[str]


class Village:
    """Stories of a village, each about a few people, places, things and boxes."""

    slots: ClassVar[Mapping[str, str]] = {
        "a": PERSON,
        "b": PERSON,
        "place": "place",
        "thing": "thing box",
        "box": "box",
    }
    answers: ClassVar[Sequence[str]] = ("number", "truth")
    sections: ClassVar[Mapping[str, str]] = {
        "be": "a place",
        "have": "a thing",
        "lie": "thing place",
        "contain": "thing box",
        "go": "a place",
        "follow": "a b",
        "take": "a thing",
        "find": "a thing",
        "drop": "a thing",
        "hide": "a thing",
        "put": "a thing box",
        "unpack": "a thing box",
        "give": "a b thing",
        "lend": "a b thing",
        "hand": "a b",
        "swap": "a b",
        "mood": "a",
        "talk": "a b",
        "weather": "",
        "where": "thing",
        "where_person": "a",
        "before": "a",
        "who": "thing",
        "gave": "thing a",
        "inside": "box",
        "carried": "a",
        "count": "a",
        "is_in": "thing place",
        "is_with": "a thing",
    }
    openings: ClassVar[Set[str]] = {"be", "have", "lie", "contain"}
    questions: ClassVar[Set[str]] = set(QUESTIONS)
    people, places = 4, 4  # in a story
    fewest: ClassVar[Mapping[str, int]] = {PERSON: 4, "place": 4, "thing": 3, "box": 2, "number": 3, "truth": 2}

    def __init__(self, words: Words, pairs: HeldOutPairs, distractors: float) -> None:
        self._words, self._pairs, self._distractors = words, pairs.pairs, distractors
        self._actions = [section for section, weight in ACTIONS.items() for _ in range(weight)]

    def draw(self, rng: random.Random, hops: int, free: bool = False) -> Draft | None:
        draw, words = rng.random, self._words
        cast = Cast(
            rng.sample(words[PERSON], self.people),
            rng.sample(words["place"], self.places),
            rng.sample(words["box"], 1 + (draw() < 0.5)),
        )
        people, places, boxes = cast
        items = [*boxes, *rng.sample(words["thing"], 2 + (draw() < 0.5))]
        state, events = VillageState(set(boxes)), list[WorldEvent]()

        def happen(section: str, fillers: dict[str, str]) -> bool:
            is_allowed = free or not self._names_held_out(state, section, fillers)
            if not is_allowed or not state.apply(section, fillers, 1 << len(events)):
                return False
            events.append((section, fillers))
            if draw() < self._distractors:
                events.append(self._distractor(draw, state, people))
            return True

        for person in people:
            # Half of them begin where another is, or people would hardly meet.
            known = list(state.place.values())
            options = known if known and draw() < 0.5 else places
            if not happen("be", {"a": person, "place": options[int(draw() * len(options))]}):
                return None
        for item in items:
            holder, chosen = people[int(draw() * len(people))], draw()
            if chosen < 0.3 and item not in boxes:
                happen("contain", {"thing": item, "box": boxes[int(draw() * len(boxes))]})
            elif chosen < 0.4 or not happen("have", {"a": holder, "thing": item}):
                happen("lie", {"thing": item, "place": places[int(draw() * len(places))]})
        end = len(events) + 2 + 3 * hops // 2 + int(draw() * 3)
        last = end + 3  # the story goes on for a while if there is no question with this many hops yet
        for _ in range(12 * hops + 60):
            if len(events) >= end:
                draft = self._ask(rng, state, events, hops, cast, free)
                if draft is not None or len(events) >= last:
                    return draft
                end = len(events) + 1
            section = self._actions[int(draw() * len(self._actions))]
            actor = people[int(draw() * len(people))]
            fillers = self._propose(draw, state, section, actor, cast)
            if fillers is not None:
                happen(section, fillers)
        return None

    def state(self) -> VillageState:
        return VillageState(set(self._words["box"]))

    def _propose(
        self,
        draw: Callable[[], float],
        state: VillageState,
        section: str,
        actor: str,
        cast: Cast,
    ) -> dict[str, str] | None:
        """The slots of something that the actor might do, or None if there is nothing."""
        people, places, boxes = cast
        action = SYNONYMS.get(section, section)
        here, held = state.place[actor], state.held[actor]
        if action == "go":
            return {"a": actor, "place": places[int(draw() * len(places))]}
        if action in ("follow", "hand", "swap", "give"):
            wants_same, options = action != "follow", held
            others = [name for name in people if name != actor and (state.place[name] == here) is wants_same]
            if not others or (wants_same and not held):
                return None
            fillers = {"a": actor, "b": others[int(draw() * len(others))]}
            return {**fillers, "thing": held[int(draw() * len(held))]} if action == "give" else fillers
        near = [box for box in boxes if state.reaches(actor, box)] if action in ("put", "unpack") else []
        box = near[int(draw() * len(near))] if near else ""
        options = state.inside({"take": here, "unpack": box}[action]) if action in ("take", "unpack") else held
        if not options or (action == "put" and not box):
            return None
        fillers = {"a": actor, "thing": options[int(draw() * len(options))]}
        return {**fillers, "box": box} if action in ("put", "unpack") else fillers

    def _names_held_out(self, state: VillageState, section: str, fillers: Fillers) -> bool:
        """Whether the event brings together a person and a word that training keeps apart."""
        pairs, a, b = self._pairs, fillers.get("a", ""), fillers.get("b", "")
        if section == "follow":
            return (a, state.place[b]) in pairs
        if section in ("hand", "swap"):
            ours, theirs = state.held[a], state.held[b] if section == "swap" else []
            return any((b, item) in pairs for item in ours) or any((a, item) in pairs for item in theirs)
        named = [word for slot, word in fillers.items() if slot not in ("a", "b")]
        return any((a, word) in pairs or (b, word) in pairs for word in named)

    def _distractor(self, draw: Callable[[], float], state: VillageState, people: Sequence[str]) -> WorldEvent:
        """A feeling, some talk between people who are together, or the weather."""
        chosen, person = draw(), people[int(draw() * len(people))]
        others = [name for name in people if name != person and state.place.get(name) == state.place.get(person)]
        if chosen < 0.4 and person in state.place and others:
            return "talk", {"a": person, "b": others[int(draw() * len(others))]}
        return ("mood", {"a": person}) if chosen < 0.8 else ("weather", {})

    def _ask(
        self,
        rng: random.Random,
        state: VillageState,
        events: list[WorldEvent],
        hops: int,
        cast: Cast,
        free: bool,
    ) -> Draft | None:
        """A question with this many hops, or None."""
        named = {word for _, slots in events for word in slots.values()}
        asked = self._questions(rng, state, cast.people, [place for place in cast.places if place in named])
        fitting = [question for question in asked if question[4].bit_count() == hops]
        if not fitting:
            return None
        (chosen,) = rng.choices(fitting, [QUESTIONS[question[0]] for question in fitting])
        section, fillers, answer, kind, _ = chosen
        person = fillers.get("a", "")
        if not free and any((person, word) in self._pairs for word in (*fillers.values(), answer)):
            return None
        possible = self._words[kind] if kind in self.answers else named.intersection(self._words[kind])
        return Draft(events, (section, fillers), answer, kind, 1 / len(possible))

    def _questions(
        self, rng: random.Random, state: VillageState, people: Sequence[str], places: Sequence[str]
    ) -> Iterator[Question]:
        """All that can be asked about the state."""
        draw, words = rng.random, self._words
        yes, no = words["truth"][:2]
        for item, spot in state.where.items():
            place, why = state.find(item)
            yield "where", {"thing": item}, place, "place", why
            asked = place if draw() < 0.5 else places[int(draw() * len(places))]
            yield "is_in", {"thing": item, "place": asked}, yes if asked == place else no, "truth", why
            if spot in state.held:
                yield "who", {"thing": item}, spot, PERSON, state.why[item]
                asked = spot if draw() < 0.5 else people[int(draw() * len(people))]
                answer = yes if asked == spot else no
                yield "is_with", {"a": asked, "thing": item}, answer, "truth", state.why[item]
            elif spot in state.where and len(state.inside(spot)) == 1 and item in words["thing"]:
                yield "inside", {"box": spot}, item, "thing", state.why[item]
                holder = state.where[spot]
                if state.held.get(holder) == [spot]:
                    yield "carried", {"a": holder}, item, "thing", state.why[item] | state.why[spot]
        for person in people:
            yield "where_person", {"a": person}, state.place[person], "place", state.place_why[person]
            if person in state.earlier:
                place, why = state.earlier[person]
                yield "before", {"a": person}, place, "place", why | state.place_why[person]
            held = state.held[person]
            if len(held) < len(words["number"]) and not any(map(state.inside, held)):
                yield "count", {"a": person}, words["number"][len(held)], "number", state.held_why.get(person, 0)
        for (item, taker), gift in state.gifts.items():
            if gift is not None:
                yield "gave", {"thing": item, "a": taker}, gift[0], PERSON, gift[1]
