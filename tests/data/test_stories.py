"""Stories: a replay of the shell game, guesses at chance, held-out pairs, the same stories for any cut."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise

import pytest
import torch

from loopformer.config import DataConfig
from loopformer.data.loader import IGNORE_INDEX
from loopformer.data.phrasebook import PERSON, Gap, Template
from loopformer.data.states import TEST, TRAIN, VALIDATION
from loopformer.data.stories import (
    GUESSES,
    HELD_OUT,
    PILOT,
    Story,
    StoryLoader,
    StoryWindows,
    World,
    world_names,
)
from loopformer.errors import LoopformerError, RunFailed

CONTEXTS = {"cups": 160, "village": 256}


opened = cache(World.open)  # balancing the guesses of a world takes seconds


@pytest.fixture(scope="module", params=world_names())
def world(request: pytest.FixtureRequest) -> World:
    return opened(request.param)


def sentences(world: World, story: Story) -> list[list[str]]:
    """The words of each sentence."""
    text = re.split(r"(?<=[.!?]) ", " ".join(world.tokenizer.decode([token]) for token in story.ids))
    return [sentence.split() for sentence in text]


def test_the_answer_of_the_shell_game_is_that_of_a_replay() -> None:
    world = opened("cups")
    cups = world.words["cup"]
    for story in world.stories(seed=5, stream=TRAIN, numbers=range(300)):
        ball, swaps = "", 0
        for words in sentences(world, story):
            named = [word for word in words if word in cups]
            if len(named) >= 2:
                one, two = dict.fromkeys(named)  # exactly two cups, however often they are named
                if not ball:  # where the ball is not
                    (ball,) = set(cups) - {one, two}
                    continue
                ball, swaps = {one: two, two: one}.get(ball, ball), swaps + 1
            elif named and not ball:
                (ball,) = named
        assert (ball, swaps) == (world.tokenizer.decode([story.answer]), story.hops), world.text(story)


def test_every_story_is_read_back_without_a_contradiction(world: World) -> None:
    for stream in (TRAIN, HELD_OUT):
        for story in world.stories(6, stream, range(100)):
            readings = world.read(story.ids)
            assert all(reading.is_possible for reading in readings), world.text(story)
            count = sum(token in world.book.stops for token in story.ids)
            assert story.hops < len(readings) <= count  # a template may be more than one sentence


@pytest.mark.parametrize(
    ("name", "text", "possible"),
    [
        ("cups", "The ball is under the left cup. Mia swaps left and right.", [True, True]),
        ("cups", "The ball is under the left cup. Mia swaps left and left.", [True, False]),
        ("cups", "Mia swaps left and right.", [False]),
        ("cups", "The ball is under the left cup. The ball is under the right cup.", [True, False]),
        ("cups", "The ball is under the left cup. Mia cup the. Mia smiles.", [True, False, True]),
        ("village", "Mia is in the barn. Then she goes to the tower.", [True, True]),
        ("village", "Mia is in the barn. Then he goes to the tower.", [True, False]),
        ("village", "Mia is in the barn. Mia goes to the barn.", [True, False]),
        ("village", "Mia is in the barn. Ben is in the barn. Mia takes the ball.", [True, True, False]),
        ("village", "Mia is in the barn. The ball is in the attic. Mia takes the ball.", [True, True, False]),
        ("village", "Mia is in the barn. The ball is in the barn. She takes the ball.", [True, True, False]),
        ("village", "Mia is in the barn. She has the ball. She gives what she has to Ben.", [True, True, False]),
        ("village", "Mia has the ball.", [False]),
    ],
)
def test_what_contradicts_the_state_is_noticed(name: str, text: str, possible: list[bool]) -> None:
    world = opened(name)
    assert [reading.is_possible for reading in world.read(world.tokenizer.encode(text))] == possible


def wordings(world: World, template: Template) -> Iterator[str]:
    """The template's sentence with each word of each slot at least once."""
    slots = [piece for piece in template.pieces if isinstance(piece, Gap)]
    for turn in range(max((len(slot.ids) for slot in slots), default=1)):
        ids = [
            piece
            if isinstance(piece, int)
            else list(piece.ids.values())[(turn + ord(piece.name[0])) % len(piece.ids)]
            for piece in template.pieces
        ]
        yield world.tokenizer.decode(ids)


def test_every_template_is_a_sentence_for_every_filler(world: World) -> None:
    starts, ends = re.compile(r"“?[A-Z]"), re.compile(r"[.!?]”?$")
    for templates in world.book.templates.values():
        for template in templates:
            assert len({each.text for each in templates}) == len(templates)
            for text in wordings(world, template):
                assert starts.match(text), text
                assert ends.search(text), text
                assert not re.search(r"[{}]|\ba [aeiou]|\ban [^aeiou]|  | [.,!?’]", text), text


def test_templates_do_not_name_candidates_themselves(world: World) -> None:
    """Or stories would name them where nothing is said about them."""
    templates = (template for section in world.book.templates.values() for template in section)
    literal = {piece for template in templates for piece in template.pieces if isinstance(piece, int)}
    candidates = {word for kind, words in world.words.items() if kind != "number" for word in words}
    assert not {word for word in candidates if world.book.vocab[word] in literal}


def test_stories_have_the_hops_that_were_asked_for(world: World) -> None:
    for hops in range(1, world.hops + 1):
        assert {story.hops for story in world.stories(1, TRAIN, range(20), hops=hops)} == {hops}
    windows = StoryWindows(world, CONTEXTS[world.source], 3 * world.hops)
    assert [story.hops for story in windows.stories(0, 99)] == 3 * list(range(1, world.hops + 1))


def test_guesses_from_the_surface_are_right_at_chance(world: World) -> None:
    count = 1500
    for hops in range(1, world.hops + 1):
        stories = world.stories(seed=9, stream=TRAIN, numbers=range(count), hops=hops)
        named = [story for story in stories if len(story.group) == 1 + len(GUESSES)]
        chance = sum(story.chance for story in named) / len(named)
        # The guesses are balanced on a sample of PILOT stories, which has a standard error of its own.
        noise = 4 * (chance * (1 - chance) * (1 / len(named) + 1 / PILOT)) ** 0.5
        for number, guess in enumerate(GUESSES, start=1):
            right = sum(bool(story.group[number]) for story in named) / len(named)
            assert right == pytest.approx(chance, abs=noise), (hops, guess)
        for kind in {story.kind for story in stories} - {story.kind for story in named}:
            answers = Counter(story.answer for story in stories if story.kind == kind)
            expected = answers.total() / len(answers)
            assert max(answers.values()) - expected < 5 * expected**0.5, (hops, kind)


def pairs_named(world: World, story: Story) -> set[tuple[str, str]]:
    found = set[tuple[str, str]]()
    for words in sentences(world, story):
        people = set(words) & set(world.words[PERSON])
        found |= {(person, word) for person in people for word in words}
    return found & world.held_out.pairs


def test_held_out_pairs_are_in_test_stories_only(world: World) -> None:
    people, share = len(world.words[PERSON]), world.settings.held_out
    held_out_words = Counter(word for _, word in world.held_out.pairs)
    assert set(held_out_words.values()) == {round(share * people)}
    for stream in (TRAIN, VALIDATION, TEST):
        assert not any(pairs_named(world, story) for story in world.stories(2, stream, range(400)))
    assert all(pairs_named(world, story) for story in world.stories(2, HELD_OUT, range(50)))


def test_rows_follow_from_seed_step_and_row(world: World) -> None:
    context = CONTEXTS[world.source]
    loader = StoryLoader(world, context, batch=12, seed=1)
    whole = loader.batch(step=5)
    for cuts in ([0, 12], [0, 4, 8, 12], [0, 1, 11, 12]):
        parts = [loader.batch(5, range(start, stop)) for start, stop in pairwise(cuts)]
        assert torch.equal(torch.cat([part.inputs for part in parts]), whole.inputs)
        assert torch.equal(torch.cat([part.targets for part in parts]), whole.targets)
    again = World.open(world.source) if world.source == "cups" else world  # balancing another village takes seconds
    assert again.index_hash == world.index_hash
    assert torch.equal(StoryLoader(again, context, 12, seed=1).batch(5).inputs, whole.inputs)
    others = [loader.batch(6), StoryLoader(world, context, 12, seed=2).batch(5)]
    others += [StoryWindows(world, context, 12, stream=stream).batch(0, 12) for stream in (VALIDATION, TEST)]
    seen = [whole.inputs, *(batch.inputs for batch in others)]
    assert len({tuple(row) for rows in seen for row in rows.tolist()}) == 5 * 12


def test_a_row_is_a_story_whose_answer_alone_has_a_loss(world: World) -> None:
    context = CONTEXTS[world.source]
    windows, end = StoryWindows(world, context, 10), world.tokenizer.eot
    batch = windows.batch(0, 10)
    assert batch.inputs.shape == batch.targets.shape == (10, context)
    for inputs, targets, story in zip(
        batch.inputs.tolist(), batch.targets.tolist(), windows.stories(0, 10), strict=True
    ):
        length = len(story.ids)
        assert inputs == [*story.ids, story.answer] + [end] * (context - length - 1)
        expected = {length - 1: story.answer, length: end}
        assert {place: target for place, target in enumerate(targets) if target != IGNORE_INDEX} == expected


def test_all_of_the_text_may_have_a_loss(world: World) -> None:
    context = CONTEXTS[world.source]
    batch = StoryLoader(world, context, batch=8, learns_text=True).batch(3)
    is_target = batch.targets != IGNORE_INDEX
    assert torch.equal(batch.targets[:, :-1][is_target[:, :-1]], batch.inputs[:, 1:][is_target[:, :-1]])
    assert is_target.sum(1).tolist() == (1 + (batch.inputs != world.tokenizer.eot).sum(1) - 1).tolist()


def test_text_and_ids_are_the_same_thing(world: World) -> None:
    for story in world.stories(4, TRAIN, range(50)):
        text = world.text(story)
        assert world.tokenizer.encode(text) == story.ids
        assert not re.search(r" [.,!?]|“ | ”|^ ", text)
        assert text[0] in "“" or text[0].isupper()
    assert world.vocab_size == world.tokenizer.vocab_size <= 1500
    assert world.tokenizer.eot == world.vocab_size - 1


def test_processes_draw_the_same_stories_and_a_dead_one_is_one_sentence() -> None:
    world = World.open("cups")
    alone, shared = (StoryLoader(world, 160, batch=9, seed=4, workers=workers) for workers in (0, 2))
    for rows in (None, [3, 8, 0], [5], []):
        one, two = alone.batch(6, rows), shared.batch(6, rows)
        assert torch.equal(one.inputs, two.inputs)
        assert torch.equal(one.targets, two.targets)
    pool = shared._draw._pool
    assert pool is not None
    for process in list(pool._processes.values()):
        process.kill()
        process.join()
    with pytest.raises(RunFailed, match=r"^A process that draws stories has died; .*lower data\.workers"):
        shared.batch(7)


def test_the_most_hops_grow_with_the_steps() -> None:
    world = opened("cups")
    loader = StoryLoader(world, 160, batch=64, steps=1000, curriculum=0.4)
    most = [loader.curriculum.most_hops(step) for step in range(1000)]
    assert most == sorted(most)
    assert [most.index(hops) for hops in range(1, 7)] == [0, 67, 134, 200, 267, 334]
    swaps = {step: _hops(world, loader, step) for step in (0, 210, 400)}
    assert [max(swaps[step]) for step in (0, 210, 400)] == [1, 4, 6]
    assert set(swaps[400]) == {1, 2, 3, 4, 5, 6}
    assert {StoryLoader(world, 160, 4, steps=1000).curriculum.most_hops(step) for step in (0, 999)} == {6}


def _hops(world: World, loader: StoryLoader, step: int) -> Sequence[int]:
    numbers = range(step * 64, step * 64 + 64)
    stories = world.stories(0, TRAIN, numbers, most=loader.curriculum.most_hops(step), context=160)
    assert loader.batch(step).inputs.tolist() == world.batch(stories, 160).inputs.tolist()
    return [story.hops for story in stories]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"stories": "cups", "states": "S3"}, "data.states and data.stories exclude each other"),
        ({"stories": "cups", "documents": True}, "data.documents applies to text, not to data.stories"),
        ({"stories": "cups", "prepare": "stdlib"}, "data.prepare applies to text"),
        ({"stories": "cups", "loss": "all"}, "data.loss must be one of answers, text"),
        ({"stories": "cups", "curriculum": 2}, "data.curriculum must be 0 or more and at most 1"),
    ],
)
def test_what_does_not_go_together_is_one_sentence(settings: dict[str, object], sentence: str) -> None:
    with pytest.raises(LoopformerError, match=sentence):
        DataConfig(**settings)  # type: ignore[arg-type]
