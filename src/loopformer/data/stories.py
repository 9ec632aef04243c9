"""Short stories about a small world that end in a question, whose answer follows from a known number of facts.

    world = World.open("cups")                       # or the path of a settings file
    for story in world.stories(seed=0, stream=TRAIN, numbers=range(8), hops=3):
        world.text(story), story.answer              # "The ball is under the left cup. … Where is the ball?", an id
    StoryLoader(world, context=192, batch=64, steps=1000).batch(step=7)

A world is a settings file in worlds/: its people, places and things, and the wordings of what happens. A simulation
(simulation.py, village.py) draws what happens, a phrasebook (phrasebook.py) tells it, a reader (reader.py) reads it
back. The hops of a story are the facts that must be chained to answer its question.

A row holds a story with its question, the answer, and end tokens. Only the answer and the end token after it have a
loss, or with `data.loss=text` all of the story.

Guesses from the surface do not help. The first, the last or the most often named candidate is the answer no more
often than by chance. To this end stories are accepted at rates that are measured once on a sample (`balance`).

A story follows from (seed, stream, number). The number of a training story is step · batch + row. So every step has
fresh stories, resuming is exact, and ranks and micro-batches change nothing. Over the first part of training the
most hops grow from 1 to those of the world.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import random
import re
import signal
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from loopformer.config.model import check_keys, check_settings, from_mapping, setting
from loopformer.config.run import RunConfig
from loopformer.data.loader import IGNORE_INDEX, Batch, stream_key
from loopformer.data.phrasebook import PERSON, PRONOUNS, Phrasebook, WorldEvent
from loopformer.data.reader import Reader
from loopformer.data.simulation import Cups, HeldOutPairs, Simulation
from loopformer.data.states import TRAIN, VALIDATION
from loopformer.data.tokenizer import Tokenizer
from loopformer.data.village import Village
from loopformer.errors import FileProblem, LoopformerError, RunFailed, nearest, require
from loopformer.files import read_yaml

HELD_OUT = 3  # the stream of stories with held-out pairs, beside those of states.py
FOLDER = Path(__file__).parent / "worlds"
SIMULATIONS: dict[str, type[Simulation]] = {"cups": Cups, "village": Village}
GUESSES = ("first", "last", "most often, or earlier", "most often, or later")  # of the candidates that are named
PILOT = 4000  # stories that measure how often the guesses are right
RAREST = 0.005  # the smallest share of a group of stories that is used
MAX_DRAWS = 10_000  # for one story
ROW_EXTRAS = 1  # tokens of a row besides the story: the answer

StoryGroup = tuple[object, ...]  # the kind of a story's answer, then which guesses are right, or the answer itself


def world_names() -> list[str]:
    """The worlds of the package."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


@dataclass(frozen=True)
class WorldSettings:
    """What a settings file says besides its words and templates."""

    kind: Literal["cups", "village"] = setting("cups", "The simulation.")
    hops: int = setting(6, "The most hops of a story.", minimum=1, maximum=32)
    distractors: float = setting(0.15, "The chance of a sentence that changes nothing.", minimum=0, below=1)
    held_out: float = setting(0.1, "The share of pairs that only test stories name together.", minimum=0, below=1)
    connectives: tuple[str, ...] = setting((), "What a sentence may begin with.")


@dataclass(frozen=True)
class Story:
    """The ids of a story with its question, and of the answer."""

    ids: list[int]
    answer: int
    hops: int
    kind: str  # of the answer
    chance: float  # that a guess among the possible answers is right
    group: StoryGroup  # decides the rate at which such stories are accepted


class EncodedStory(NamedTuple):
    """A story with its question, and its answer, in the ids of some tokenizer."""

    ids: list[int]
    answer: list[int]


class Reading(NamedTuple):
    """A sentence that was read back. Without an event it is no sentence of its world."""

    event: WorldEvent | None
    is_possible: bool
    end: int  # of the sentence, among the tokens of the story


class World:
    """The stories of a settings file. `source` is its name or path, as in `data.stories`."""

    def __init__(self, settings: Mapping[str, Any], source: str) -> None:
        self.source = source
        self._all_settings = settings
        plain = {key: value for key, value in settings.items() if key not in ("words", "templates")}
        self.settings = from_mapping(WorldSettings, plain, source)
        check_settings(self.settings, source)
        simulation = SIMULATIONS[self.settings.kind]
        slot_kinds = list(dict.fromkeys(kind for kinds in simulation.slots.values() for kind in kinds.split()))
        kinds = [*slot_kinds, *simulation.answers]
        self.words, people = _words(settings.get("words"), kinds, simulation.fewest, source)
        templates = _templates(settings.get("templates"), list(simulation.sections), source)
        paired = chain.from_iterable(self.words[kind] for kind in slot_kinds if kind != PERSON)
        self.held_out = HeldOutPairs(self.words[PERSON], paired, self.settings.held_out)
        self.book = Phrasebook(
            templates,
            self.words,
            people,
            simulation.slots,
            simulation.sections,
            simulation.openings,
            simulation.questions,
            self.settings.connectives,
        )
        self._simulation = simulation(self.words, self.held_out, self.settings.distractors)
        vocab = self.book.vocab
        self._kind_ids = {kind: {vocab[word] for word in words} for kind, words in self.words.items()}
        self._held_out_ids = [{vocab[word] for word in pair} for pair in self.held_out.pairs]
        self._rates: dict[int, dict[StoryGroup, float]] = {}

    @classmethod
    def open(cls, source: str) -> World:
        """A world of the package by its name, or one of your own by the path of its settings file."""
        path = FOLDER / f"{source}.yaml" if source in world_names() else Path(source)
        if path.suffix not in (".yaml", ".yml"):
            hint = nearest(source, world_names(), f"choose {' or '.join(world_names())}, or give a .yaml file.")
            raise LoopformerError(f"There is no world {source!r}; {hint}")
        if not path.is_file():
            names = " or ".join(world_names())
            raise FileProblem(f"There is no settings file {path}; check the path, or choose {names}.")
        return cls(read_yaml(path), source)

    @property
    def setting(self) -> str:
        """The setting that trains on these stories."""
        return f"data.stories={self.source}"

    @property
    def hops(self) -> int:
        """The most hops of a story."""
        return self.settings.hops

    @property
    def tokenizer(self) -> Tokenizer:
        """Maps the words and the punctuation of this world to ids; the last id is the end token."""
        return self.book.tokenizer

    @property
    def vocab_size(self) -> int:
        return len(self.book.vocab)

    @property
    def tokens(self) -> int:
        """Tokens on disk, as in `TokenData`. There are none: stories are drawn and never stored."""
        return 0

    @cached_property
    def index_hash(self) -> str:
        """Identifies the data in checkpoints. It changes with the settings and with how stories are drawn."""
        drawn = [(story.ids, story.answer) for story in self.stories(0, TRAIN, range(16))]
        content = json.dumps([self._all_settings, self.book.vocab, drawn], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    def loader(self, run: RunConfig) -> StoryLoader:
        """The training batches of a run."""
        training = run.training
        return StoryLoader(
            self,
            run.model.context,
            training.batch,
            training.seed,
            training.steps,
            run.data.curriculum,
            run.data.loss == "text",
            run.data.workers,
        )

    def windows(self, run: RunConfig) -> StoryWindows:
        """The validation stories of a run."""
        return StoryWindows(self, run.model.context, run.training.validation_windows)

    def stories(
        self,
        seed: int,
        stream: int,
        numbers: Iterable[int],
        hops: int | None = None,
        most: int | None = None,
        context: int | None = None,
    ) -> list[Story]:
        """The stories with these numbers.

        hops      of every story; by default story i has 1 + i mod the world's most hops
        most      draws the hops of each story from 1 to this number instead
        context   draws a story again if its row is longer
        """
        numbers = list(numbers)
        keys = stream_key(seed, stream, np.array(numbers, np.uint64)).tolist()
        limit = 1 << 30 if context is None else context - ROW_EXTRAS
        return [
            self._draw(key, hops or (1 + (key % most if most else number % self.hops)), limit, stream == HELD_OUT)
            for key, number in zip(keys, numbers, strict=True)
        ]

    def _draw(self, key: int, hops: int, limit: int, needs_held_out: bool) -> Story:
        """The first draw that the balance accepts, that fits, and that has a held-out pair where one is needed."""
        rng, rates = random.Random(key), self._balance(hops)
        for _ in range(MAX_DRAWS):
            story = self._try(rng, hops, needs_held_out)
            if story is None or rng.random() >= rates.get(story.group, 0.0) or len(story.ids) > limit:
                continue
            if needs_held_out and not self.has_held_out(story):
                continue
            if story.kind in self._simulation.answers:
                return replace(story, chance=1 / sum(group[0] == story.kind for group in rates))
            return story
        remedy = "lower held_out, change the world's words or hops, or raise model.context"
        raise LoopformerError(f"The world {self.source} has no such story of {hops} hops; {remedy}.")

    def _try(self, rng: random.Random, hops: int, free: bool) -> Story | None:
        draft = self._simulation.draw(rng, hops, free)
        if draft is None:
            return None
        *sentences, question = self.book.tell(rng, [*draft.events, draft.question])
        ids = list(chain.from_iterable(sentences))
        answer = self.book.vocab[draft.answer]
        mentions = list(filter(self._kind_ids[draft.kind].__contains__, ids))
        is_named = draft.kind not in self._simulation.answers
        group = (draft.kind, *((guess == answer for guess in guesses(mentions)) if is_named else (answer,)))
        return Story([*ids, *question], answer, hops, draft.kind, draft.chance, group)

    def has_held_out(self, story: Story) -> bool:
        """Whether a sentence of the story names a held-out pair."""
        stops, sentence = self.book.stops, set[int]()
        for token in story.ids:
            sentence.add(token)
            if token in stops:
                if any(pair <= sentence for pair in self._held_out_ids):
                    return True
                sentence.clear()
        return False

    def _balance(self, hops: int) -> dict[StoryGroup, float]:
        """The rates at which stories of this many hops are accepted, by group."""
        if hops not in self._rates:
            rng = random.Random(f"balance {hops}")
            tried = (self._try(rng, hops, free=False) for _ in range(MAX_DRAWS))
            found = islice((story for story in tried if story is not None), PILOT)
            self._rates[hops] = balance(list(found))
        return self._rates[hops]

    def batch(self, stories: Sequence[Story], context: int, learns_text: bool = False) -> Batch:
        """Rows of a story and its answer, padded with end tokens [B, T], and targets [B, T].

        The targets are the answer and the end token, so that a model stops after the answer. With `learns_text` all
        tokens of the story are targets as well.
        """
        import torch

        ids = np.empty((2, len(stories), context), np.int64)  # inputs and targets
        for row, story in enumerate(self.encode(stories, self.tokenizer)):
            ids[:, row] = story_row([story], self.tokenizer.eot, context, learns_text)
        inputs, targets = torch.from_numpy(ids)
        return Batch(inputs, targets, None)

    def encode(self, stories: Sequence[Story], tokenizer: Tokenizer) -> list[EncodedStory]:
        """Stories in the ids of a tokenizer, the world's own or another."""
        if tokenizer.hash == self.tokenizer.hash:
            return [EncodedStory(story.ids, [story.answer]) for story in stories]
        texts = tokenizer.encode_batch([self.text(story) for story in stories])
        answers = tokenizer.encode_batch([" " + self.tokenizer.decode([story.answer]) for story in stories])
        return [EncodedStory(*pair) for pair in zip(texts, answers, strict=True)]

    def text(self, story: Story) -> str:
        """The story with its question, as text."""
        return self.tokenizer.decode(story.ids)

    @cached_property
    def _reader(self) -> Reader:
        return Reader(self.book)

    def read(self, ids: Sequence[int]) -> list[Reading]:
        """The sentences of a story, read back: their events, and whether each is possible in the state so far."""
        state, readings = self._simulation.state(), list[Reading]()
        for number, (event, end) in enumerate(self._reader.read(ids)):
            readings.append(Reading(event, event is not None and state.apply(*event, why=1 << number), end))
        return readings

    def opening(self, ids: Sequence[int]) -> int:
        """The number of tokens in the opening of a story, which says who and what is where."""
        openings = self._simulation.openings
        return max(reading.end for reading in self.read(ids) if reading.event and reading.event[0] in openings)

    def read_on(self, opening: Sequence[int], ids: Sequence[int]) -> list[Reading]:
        """The whole sentences that continue an opening, up to a question."""
        readings = list[Reading]()
        for reading in self.read([*opening, *ids]):
            is_question = reading.event is not None and reading.event[0] in self._simulation.questions
            is_cut = reading.event is None and ids[reading.end - len(opening) - 1] not in self.book.stops
            if is_question or is_cut:
                break
            readings.append(reading)
        return [reading for reading in readings if reading.end > len(opening)]

    def long_length(self, tokenizer: Tokenizer) -> int:
        """The tokens that nine of ten of the stories with the most hops do not exceed with their answer."""
        encoded = self.encode(self.stories(0, VALIDATION, range(64), self.hops), tokenizer)
        return sorted(len(story.ids) + len(story.answer) for story in encoded)[58]

    def check_context(self, context: int) -> None:
        """Refuse a context that many of the longest stories would not fit."""
        needed = self.long_length(self.tokenizer)  # longer ones are drawn again
        remedy = f"set it to {needed} or more"
        require(context >= needed, f"model.context is {context}, too short for {self.setting}; {remedy}.")


def story_row(
    stories: Sequence[EncodedStory], end: int, context: int, learns_text: bool
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The inputs and targets [T] of a row of stories, each with its answer and an end token. End tokens pad it.

    Answers and the end tokens after them are targets, and with `learns_text` all of the stories.
    """
    ids, has_loss, start = np.full(context + 1, end), np.zeros(context + 1, bool), 0
    for story in stories:
        answer = start + len(story.ids)
        stop = answer + len(story.answer) + 1
        ids[start:answer], ids[answer : stop - 1] = story.ids, story.answer
        has_loss[start if learns_text else answer : stop] = True
        start = stop
    return ids[:-1], np.where(has_loss, ids, IGNORE_INDEX)[1:]


class StoryWindows:
    """The first `count` stories of a stream, for evaluation. The hops take turns."""

    def __init__(self, world: World, context: int, count: int, seed: int = 0, stream: int = VALIDATION) -> None:
        require(count >= 1, f"There must be 1 story or more, got {count}.")
        world.check_context(context)
        self._world, self._context, self._count = world, context, count
        self._seed, self._stream = seed, stream

    def __len__(self) -> int:
        return self._count

    def stories(self, start: int, stop: int) -> list[Story]:
        """Stories start:stop."""
        numbers = range(self._count)[start:stop]
        return self._world.stories(self._seed, self._stream, numbers, context=self._context)

    def batch(self, start: int, stop: int) -> Batch:
        """Rows start:stop."""
        return self._world.batch(self.stories(start, stop), self._context)


class StoryDrawer:
    """Draws training stories, in processes if there are workers: a GPU may learn faster than one process tells."""

    def __init__(self, world: World, seed: int, context: int | None, workers: int) -> None:
        self._world, self._seed, self._context, self._workers = world, seed, context, workers
        self._pool: ProcessPoolExecutor | None = None
        if workers:
            # Not by fork: the trainer has threads, and a GPU that a fork could not use.
            processes = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(workers, processes, _open_in_worker, (world.source,))
            weakref.finalize(self, self._pool.shutdown, wait=False, cancel_futures=True)

    def __call__(self, numbers: Sequence[int], most: int) -> list[Story]:
        """The training stories with these numbers, of 1 to `most` hops; any number of workers draws the same."""
        if self._pool is None:
            return self._world.stories(self._seed, TRAIN, numbers, most=most, context=self._context)
        size = -(-len(numbers) // self._workers) or 1
        parts = (numbers[start : start + size] for start in range(0, len(numbers), size))
        draw = partial(_draw_in_worker, seed=self._seed, most=most, context=self._context)
        try:
            return list(chain.from_iterable(self._pool.map(draw, parts)))
        except BrokenProcessPool as error:
            reason = "there may be too little memory; lower data.workers, then --resume"
            raise RunFailed(f"A process that draws stories has died; {reason}.") from error


_worker_world: World  # of a process that draws stories


def _open_in_worker(source: str) -> None:
    global _worker_world
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes, and the trainer decides
    _worker_world = World.open(source)


def _draw_in_worker(numbers: Sequence[int], seed: int, most: int, context: int | None) -> list[Story]:
    return _worker_world.stories(seed, TRAIN, numbers, most=most, context=context)


@dataclass(frozen=True)
class Curriculum:
    """The most hops of the stories of a step: they grow from 1 to `hops` over some steps."""

    hops: int
    steps: float

    def most_hops(self, step: int) -> int:
        return self.hops if step >= self.steps else 1 + int(self.hops * step / self.steps)


class StoryLoader:
    """Training batches of fresh stories by step number; the most hops grow over a share of the steps."""

    def __init__(
        self,
        world: World,
        context: int,
        batch: int,
        seed: int = 0,
        steps: int = 1,
        curriculum: float = 0.0,
        learns_text: bool = False,
        workers: int = 0,
    ) -> None:
        world.check_context(context)
        self.batch_size = batch
        self._world, self._context, self._learns_text = world, context, learns_text
        self._draw = StoryDrawer(world, seed, context, workers)
        self.curriculum = Curriculum(world.hops, curriculum * steps)

    def batch(self, step: int, rows: Sequence[int] | None = None) -> Batch:
        """The global batch of a step, or some of its rows."""
        numbers = [step * self.batch_size + row for row in (range(self.batch_size) if rows is None else rows)]
        return self._world.batch(
            self._draw(numbers, self.curriculum.most_hops(step)), self._context, self._learns_text
        )

    def epoch(self, step: int) -> float:
        """Always 0: no story is repeated."""
        return 0.0


def guesses(mentions: Sequence[int]) -> tuple[int, ...]:
    """What a reader would guess who only looks at where and how often candidates are named, as in GUESSES."""
    counts = Counter(mentions)  # in the order of the first mentions
    most = max(counts.values())
    earlier = next(token for token, count in counts.items() if count == most)
    later = next(token for token in reversed(mentions) if counts[token] == most)
    return mentions[0], mentions[-1], earlier, later


def balance(stories: Sequence[Story]) -> dict[StoryGroup, float]:
    """The rates at which to accept stories of each group, so that every guess is right as often as by chance.

    A story's group is the kind of its answer and which guesses are right. Iterative proportional fitting finds the
    rates that change the mix of groups least. Where the group holds the answer itself (yes or no, a number), all
    answers become equally frequent.
    """
    rates = dict[StoryGroup, float]()
    for kind in dict.fromkeys(story.kind for story in stories):
        every = Counter(story.group for story in stories if story.kind == kind)
        # A group that hardly occurs would need a high rate, which slows down all draws; it is left out.
        counts = Counter({group: count for group, count in every.items() if count >= RAREST * every.total()})
        weights = dict.fromkeys(counts, 1.0)
        if all(len(group) == 1 + len(GUESSES) for group in every):
            chances = dict.fromkeys(counts, 0.0)  # the sum of the chances of each group's stories
            for story in stories:
                if story.group in chances:
                    chances[story.group] += story.chance
            for index in (1 + guess for _ in range(100) for guess in range(len(GUESSES))):
                total = sum(counts[group] * weights[group] for group in counts)
                chance = sum(chances[group] * weights[group] for group in counts) / total
                right = sum(counts[group] * weights[group] for group in counts if group[index]) / total
                if 0 < right < 1:
                    factor = chance * (1 - right) / (right * (1 - chance))
                    weights.update({group: weights[group] * factor for group in counts if group[index]})
        elif len(counts) > 1:
            weights = {group: 1 / count for group, count in counts.items()}
        else:  # only one answer occurs, so there is nothing to ask
            continue
        most = max(weights.values())
        # Rounded, so that rates do not depend on how a machine adds floats.
        rates.update({group: float(f"{weight / most:.4g}") for group, weight in weights.items()})
    return rates


def _words(
    words: Any, kinds: Sequence[str], fewest: Mapping[str, int], source: str
) -> tuple[dict[str, list[str]], dict[str, str]]:
    """The words of each kind, and the pronoun of each person."""
    _check_sections(words, kinds, "words", source)
    people = words[PERSON]
    is_split = isinstance(people, Mapping) and people.keys() <= PRONOUNS.keys()
    example = "{she: [Mia], he: [Ben]}"
    require(is_split, f"{source}: words.{PERSON} must be lists of names by pronoun, as in {example}.")
    lists = {kind: people.get(kind, words.get(kind)) for kind in (*PRONOUNS, *kinds) if kind != PERSON}
    for kind, each in lists.items():
        is_list = isinstance(each or [], list) and all(
            type(word) in (str, int) and re.fullmatch(r"[^\W_]+", str(word)) for word in each or []
        )
        require(is_list, f"{source}: words.{kind} must be a list of single words, with yes and no in quotes.")
    pronouns = {str(name): pronoun for pronoun in PRONOUNS for name in people.get(pronoun) or []}
    found = {kind: list(pronouns) if kind == PERSON else list(map(str, words[kind] or [])) for kind in kinds}
    for kind, count in fewest.items():
        require(len(found[kind]) >= count, f"{source}: words.{kind} needs {count} words or more.")
    word, count = Counter(chain.from_iterable(found.values())).most_common(1)[0]
    require(count == 1, f"{source}: the word {word!r} stands twice in words; leave one of them out.")
    return found, pronouns


def _templates(templates: Any, sections: Sequence[str], source: str) -> dict[str, list[str]]:
    _check_sections(templates, sections, "templates", source)
    for section, lines in templates.items():
        is_list = isinstance(lines, list) and lines and all(isinstance(line, str) for line in lines)
        require(bool(is_list), f"{source}: templates.{section} must be a list of sentences.")
    return dict(templates)


def _check_sections(sections: Any, known: Sequence[str], name: str, source: str) -> None:
    require(isinstance(sections, Mapping), f"{source}: {name} must be a mapping with {', '.join(known)}.")
    check_keys(sections, list(known), f"{source}: {name}.")
    missing = [key for key in known if key not in sections]
    require(not missing, f"{source}: {name} lacks {', '.join(missing)}; add what is missing.")
