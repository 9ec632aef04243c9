"""Pages and slots, beside a model that counts everything anew: nothing is given twice, lost or shared wrongly."""

import copy
import math
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loopformer import LM, LoopedLM, ModelConfig, Trajectory
from loopformer.errors import RunFailed
from loopformer.inference import kv_cache, runner
from loopformer.inference.engine import Engine
from loopformer.inference.kv_cache import BlockManager, KVBlock, SlotPool
from loopformer.inference.request import Request
from loopformer.inference.runner import PlainRunner
from loopformer.inference.sequence import Sequence
from loopformer.model.cache import SequenceKV

from .models import spread

PAGES, PAGE_TOKENS, MAX_ROOTS = 24, 2, 2
# More of them than there are origins, so that some are forgotten. A longer trajectory takes more pages.
IDENTITIES = [("weights", "1", "fp32"), ("weights", "2", "fp32"), ("weights", "2", "bf16"), ("others", "3", "fp32")]
SCHEDULES = [trajectory for budget in range(1, 5) for trajectory in Trajectory.enumerate(4, budget)]

Identity = tuple[str, str, str]
Prompt = tuple[int, ...]


@pytest.fixture(autouse=True)
def _small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "PAGE", 4)


@pytest.fixture
def few_origins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "MAX_ROOTS", MAX_ROOTS)


def random_operation(draw: random.Random) -> tuple[Any, ...]:
    """The name of a method of `CountedPool`, and its arguments. Prompts are of two letters, so most begin alike."""
    names = ["allocate"] * 8 + ["cache_prompt"] * 4 + ["free"] * 3 + ["grow"] * 2 + ["free_except"]
    name = draw.choice(names * 5 + ["clear_cache"])
    if name == "clear_cache":
        return (name,)
    if name != "allocate":
        return name, draw.randrange(6)
    prompt = tuple(draw.choices((0, 1), k=draw.randint(1, 9)))
    return name, draw.randrange(6), draw.choice(IDENTITIES), prompt, draw.randrange(3), draw.random() < 0.5


@dataclass(frozen=True)
class Holder:
    """A sequence that holds blocks."""

    identity: Identity
    prompt: Prompt
    blocks: tuple[KVBlock, ...]

    @property
    def budget(self) -> int:
        return int(self.identity[1])


def mend(pool: BlockManager) -> None:
    """Begin a step, in which all sequences stay."""
    pool.free_except(set(pool._held))


class CountedPool:
    """A pool beside a naive model of it. Each operation runs in both, and `check` compares them."""

    def __init__(self) -> None:
        self.pool = BlockManager(PAGES, PAGE_TOKENS)
        self.holders: dict[int, Holder] = {}
        self.cached: list[KVBlock] = []  # the last used at the end
        self.found: dict[tuple[KVBlock, Prompt], KVBlock] = {}  # by the origin and all tokens from the beginning
        self.contents: dict[KVBlock, tuple[Identity, Prompt]] = {}  # of all full blocks that prompts ever had
        self.origins: dict[Identity, KVBlock] = {}  # the last used at the end
        self.known_origins: set[KVBlock] = set()  # those that were forgotten as well

    def apply(self, operation: tuple[Any, ...]) -> None:
        name, *arguments = operation
        method: Callable[..., None] = getattr(self, name)
        method(*arguments)

    def allocate(self, ticket: int, identity: Identity, prompt: Prompt, extra: int, publish: bool) -> None:
        """Admit a sequence, as a runner does it."""
        if ticket in self.holders:
            return
        origin = self.prefix_root(identity)
        shared = self.pool.match_prefix(origin, prompt)
        assert shared == self.match_prefix(origin, prompt)
        for number, block in enumerate(shared):
            assert self.contents[block] == (identity, prompt[: (number + 1) * PAGE_TOKENS])
            assert (number + 1) * PAGE_TOKENS < len(prompt)  # never the last token
        tokens = len(prompt) + extra * PAGE_TOKENS
        self.take(ticket, Holder(identity, prompt, ()), shared, tokens)
        if publish:
            self.cache_prompt(ticket)

    def grow(self, ticket: int) -> None:
        """Give a sequence one more block."""
        if ticket in self.holders:
            self.take(
                ticket, self.holders[ticket], (), (len(self.holders[ticket].blocks) + 1) * PAGE_TOKENS, grows=True
            )

    def take(
        self, ticket: int, holder: Holder, shared: tuple[KVBlock, ...], tokens: int, grows: bool = False
    ) -> None:
        count, kept = math.ceil(tokens / PAGE_TOKENS), holder.blocks or shared
        before, held = self.pool.available_pages, self.held_blocks
        needed = self.pool.pages_needed(holder.budget, tokens, kept)
        missing = (count - len(kept)) * holder.budget - (PAGES - len(self.used_pages))
        droppable = [block for block in self.cached if block not in held and block not in kept]
        if needed > before:
            with pytest.raises(RunFailed, match="memory for keys and values is full"):
                self.pool.allocate(ticket, holder.budget, count, shared)
            return  # and nothing was evicted in vain
        while missing > 0:
            missing -= len(droppable[0].pages)
            self.drop(droppable.pop(0))
        used = self.used_pages
        blocks = self.pool.allocate(ticket, holder.budget, count, shared)
        assert blocks[: len(kept)] == kept
        assert len(blocks) == count
        new = [page for block in blocks[len(kept) :] for page in block.pages]
        assert len(set(new)) == len(new) == (count - len(kept)) * holder.budget
        assert used.isdisjoint(new)
        self.holders[ticket] = Holder(holder.identity, holder.prompt, blocks)
        self.note_contents(ticket)
        assert self.pool.available_pages == before - needed

    def cache_prompt(self, ticket: int) -> None:
        holder = self.holders.get(ticket)
        if holder is None:
            return
        origin, chain = self.prefix_root(holder.identity), list[KVBlock]()
        self.pool.cache_prompt(ticket, origin, holder.prompt)
        for number, block in enumerate(holder.blocks[: len(holder.prompt) // PAGE_TOKENS]):
            path = origin, holder.prompt[: (number + 1) * PAGE_TOKENS]
            if path not in self.found:
                if block in self.cached:  # where it cannot be found, as the blocks before it were dropped
                    break
                self.cached.append(block)
                self.found[path] = block
            chain.append(self.found[path])
        self.use(chain)

    def free(self, ticket: int) -> None:
        if ticket in self.holders:
            self.pool.free(ticket)
            del self.holders[ticket]

    def free_except(self, ticket: int) -> None:
        kept = {ticket, ticket + 1}
        self.pool.free_except(kept)
        self.holders = {ticket: holder for ticket, holder in self.holders.items() if ticket in kept}

    def clear_cache(self) -> None:
        self.pool.clear_cache()
        self.cached, self.found = [], {}

    def prefix_root(self, identity: Identity) -> KVBlock:
        origin = self.pool.prefix_root(*identity)
        if identity in self.origins:
            assert origin is self.origins.pop(identity)
        else:
            assert origin not in self.known_origins, "an origin was kept that should be forgotten"
            self.known_origins.add(origin)
        self.origins = dict([*self.origins.items(), (identity, origin)][-MAX_ROOTS:])
        return origin

    def match_prefix(self, origin: KVBlock, prompt: Prompt) -> tuple[KVBlock, ...]:
        chain: list[KVBlock] = []
        for end in range(PAGE_TOKENS, len(prompt), PAGE_TOKENS):
            if (origin, prompt[:end]) not in self.found:
                break
            chain.append(self.found[origin, prompt[:end]])
        self.use(chain)
        return tuple(chain)

    def use(self, chain: list[KVBlock]) -> None:
        self.cached = [block for block in self.cached if block not in chain] + chain[::-1]

    def drop(self, dropped: KVBlock) -> None:
        """Blocks after it may stay, but are not found any more."""
        self.cached.remove(dropped)
        for origin, tokens in [path for path, block in self.found.items() if block is dropped]:
            self.found = {
                path: block
                for path, block in self.found.items()
                if path[0] is not origin or path[1][: len(tokens)] != tokens
            }

    def note_contents(self, ticket: int) -> None:
        holder = self.holders[ticket]
        for number, block in enumerate(holder.blocks[: len(holder.prompt) // PAGE_TOKENS]):
            self.contents.setdefault(block, (holder.identity, holder.prompt[: (number + 1) * PAGE_TOKENS]))

    @property
    def held_blocks(self) -> set[KVBlock]:
        return {block for holder in self.holders.values() for block in holder.blocks}

    @property
    def used_pages(self) -> set[int]:
        pages = [page for block in self.held_blocks | set(self.cached) for page in block.pages]
        assert len(set(pages)) == len(pages), "a page has two blocks"
        return set(pages)

    def check(self) -> None:
        mend(self.pool)
        assert self.pool.available_pages == PAGES - sum(len(block.pages) for block in self.held_blocks)
        assert self.used_pages <= set(range(PAGES))
        for ticket in range(7):
            holder = self.holders.get(ticket)
            assert self.pool.held_blocks(ticket) == (holder.blocks if holder else ())
        for block in self.held_blocks | set(self.cached):
            assert (block.cache_key is not None) == (block in self.cached)

    def check_that_all_pages_can_be_given(self) -> None:
        """What is available can be had, and nothing that is held is among it."""
        held = {page for block in self.held_blocks for page in block.pages}
        (block,) = (
            self.pool.allocate(99, self.pool.available_pages, 1) if self.pool.available_pages else (KVBlock(()),)
        )
        assert sorted([*held, *block.pages]) == list(range(PAGES))


@pytest.mark.usefixtures("few_origins")
@settings(max_examples=150)
@given(st.integers(0, 2**32))
def test_a_pool_is_what_a_naive_model_counts(seed: int) -> None:
    draw, counted = random.Random(seed), CountedPool()
    for _ in range(60):
        counted.apply(random_operation(draw))
        counted.check()
    counted.check_that_all_pages_can_be_given()


@pytest.mark.usefixtures("few_origins")
def test_a_prompt_that_is_published_twice_is_cached_once() -> None:
    """Also where its origin was forgotten in between, so that its blocks cannot be found any more."""
    pool = BlockManager(2, PAGE_TOKENS)
    pool.allocate(0, 1, 2)
    for _ in range(2):
        pool.cache_prompt(0, pool.prefix_root(*IDENTITIES[0]), (5, 6, 7, 8))
        for identity in IDENTITIES[1:]:
            pool.prefix_root(*identity)
    pool.free(0)
    assert pool.available_pages == 2
    assert len(pool.allocate(1, 1, 2)) == 2


class Injected(BaseException):
    """An interruption on purpose."""


@contextmanager
def fault_at(number: int) -> Iterator[list[int]]:
    """Raise before the so-manyth line of kv_cache.py that is run, calls included. The list says which it was."""
    struck: list[int] = []
    lines = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines
        if frame.f_code.co_filename != kv_cache.__file__ or frame.f_code.co_name == "<genexpr>":
            return None
        lines += event in ("call", "line")
        if lines == number and not struck:
            struck.append(frame.f_lineno)
            raise Injected
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield struck
    finally:
        sys.settrace(before)


def used_pool() -> CountedPool:
    """A pool that is nearly full, of blocks that are shared, cached, both or neither."""
    counted = CountedPool()
    for step in [
        ("allocate", 0, IDENTITIES[1], (0, 0, 1, 1, 0), 1, True),
        ("allocate", 1, IDENTITIES[1], (0, 0, 1, 1, 1), 0, True),
        ("allocate", 2, IDENTITIES[1], (0, 0, 0, 0, 0, 0), 0, True),
        ("allocate", 3, IDENTITIES[0], (1, 1, 0, 0), 0, True),
        ("allocate", 4, IDENTITIES[1], (0, 1, 1, 1, 0), 0, False),
        ("free", 2),
        ("free", 3),
    ]:
        counted.apply(step)
    counted.check()
    return counted


ACTS: dict[str, Callable[[BlockManager], object]] = {
    "match_prefix": lambda pool: pool.match_prefix(pool.prefix_root(*IDENTITIES[1]), (0, 0, 1, 1, 0)),
    "allocate": lambda pool: pool.allocate(
        5, 2, 3, pool.match_prefix(pool.prefix_root(*IDENTITIES[1]), (0, 0, 0, 0, 0))
    ),
    "allocate and drop": lambda pool: pool.allocate(5, 2, pool.available_pages // 2, ()),
    "allocate too much": lambda pool: pool.allocate(5, 2, PAGES, ()),
    "cache_prompt": lambda pool: pool.cache_prompt(4, pool.prefix_root(*IDENTITIES[1]), (0, 1, 1, 1, 0)),
    "free": lambda pool: pool.free(0),
    "free_except": lambda pool: pool.free_except({1}),
    "clear_cache": lambda pool: pool.clear_cache(),
    "prefix_root": lambda pool: pool.prefix_root(*IDENTITIES[3]),
}


@pytest.mark.usefixtures("few_origins")
@pytest.mark.parametrize("twice", [False, True], ids=["once", "again while it is counted anew"])
@pytest.mark.parametrize("act", ACTS)
def test_a_pool_counts_right_after_an_interruption_anywhere(act: str, twice: bool) -> None:
    number = 0
    while True:
        number += 1
        counted = used_pool()
        pool, before = counted.pool, dict(counted.holders)
        with fault_at(number) as struck, suppress(Injected, RunFailed):
            ACTS[act](pool)
        if not struck:
            break
        if twice:
            with fault_at(1 + number % 11), suppress(Injected):
                mend(pool)
        mend(pool)
        counted.holders = {
            ticket: Holder(IDENTITIES[1], before[ticket].prompt if ticket in before else (), blocks)
            for ticket in range(7)
            if (blocks := pool.held_blocks(ticket))
        }
        for ticket, holder in counted.holders.items():
            assert ticket not in before or holder.blocks == before[ticket].blocks
        assert pool.available_pages == PAGES - sum(len(block.pages) for block in counted.held_blocks), struck
        assert all(block.cache_key == cache_key for cache_key, block in pool._cached.items()), struck
        holders = set(counted.held_blocks)
        for identity in IDENTITIES[:2]:  # what is shared now is what was written, and nobody else's
            for block in {
                block for text in TEXTS for block in pool.match_prefix(pool.prefix_root(*identity), text)
            }:
                taken = {page for other in holders - {block} for page in other.pages}
                assert taken.isdisjoint(block.pages), struck
        for text in TEXTS:
            for end, block in enumerate(pool.match_prefix(pool.prefix_root(*IDENTITIES[1]), text), start=1):
                assert counted.contents[block] == (IDENTITIES[1], text[: end * PAGE_TOKENS]), struck
        counted.check_that_all_pages_can_be_given()
        pool.free_except(())
        assert pool.available_pages == PAGES
        (block,) = pool.allocate(0, PAGES, 1)
        assert sorted(block.pages) == list(range(PAGES))
    assert number > 10


TEXTS = [tuple(number >> bit & 1 for bit in range(7)) for number in range(128)]


def test_the_ends_of_prompts_used_longest_ago_are_dropped_first() -> None:
    pool = BlockManager(9, PAGE_TOKENS)
    origin = pool.prefix_root("weights")
    texts = [(first, *range(10, 16)) for first in (1, 2, 3)]
    for ticket, text in enumerate(texts):
        pool.allocate(ticket, 1, 3)
        pool.cache_prompt(ticket, origin, text)
        if ticket < 2:
            pool.free(ticket)
    pool.match_prefix(origin, texts[0])
    lengths = []
    for ticket in range(10, 16):
        pool.allocate(ticket, 1, 1)
        # Asked for in this order, the text that was used longest ago stays that.
        lengths.append([len(pool.match_prefix(origin, text)) for text in (texts[1], texts[0], texts[2])])
    assert lengths == [[2, 3, 3], [1, 3, 3], [0, 3, 3], [0, 2, 3], [0, 1, 3], [0, 0, 3]]
    with pytest.raises(RunFailed):
        pool.allocate(16, 1, 1)
    assert len(pool.match_prefix(origin, texts[2])) == 3  # a sequence holds it


def test_admitting_a_prompt_takes_as_long_beside_a_thousand_others_as_beside_a_few() -> None:
    few, many = admission_seconds(20), admission_seconds(1000)
    assert many[0] < 5 * few[0], "a new prompt"
    assert many[1] < 5 * few[1], "a known one"


def admission_seconds(others: int) -> tuple[float, float]:
    """The processor time of admitting a new prompt and a cached one, at the fastest of twenty attempts."""
    size, budget, blocks = 16, 8, 25
    pool, draw = BlockManager((others + 10) * blocks * budget, size), random.Random(0)
    origin = pool.prefix_root("weights")

    def admit(ticket: int, prompt: Prompt) -> float:
        begun = time.process_time()
        shared = pool.match_prefix(origin, prompt)
        assert pool.pages_needed(budget, len(prompt), shared) <= pool.available_pages
        pool.allocate(ticket, budget, blocks, shared)
        pool.cache_prompt(ticket, origin, prompt)
        return time.process_time() - begun

    texts = [tuple(draw.choices(range(300), k=size * blocks)) for _ in range(others + 20)]
    for ticket, text in enumerate(texts[:others]):
        admit(ticket, text)
        pool.free(ticket)
    assert all(len(pool.match_prefix(origin, text)) == blocks - 1 for text in texts[:others])
    new = [admit(others + number, text) for number, text in enumerate(texts[others:])]
    pool.free_except(())
    known = [admit(2 * others + number, text) for number, text in enumerate(texts[others - 10 :])]
    return min(new), min(known)


def cached_tokens(engine: Engine, request: Request) -> int:
    sequence = Sequence(10**6, request, _Letters(), engine.model.config)
    return engine.runner.cached_tokens(sequence)


class _Letters:
    eot = -1

    def decode(self, ids: Any) -> str:
        return "".join(chr(97 + number % 26) for number in ids)


def engine_of(model: LoopedLM) -> Engine:
    return Engine(model, _Letters(), PlainRunner(model, 4))


def text_of(engine: Engine, request: Request) -> Prompt:
    engine.submit(request)
    return next(event.result.ids for event in engine.run() if event.result is not None)


@given(
    st.lists(st.tuples(st.sampled_from(SCHEDULES), st.integers(0, 2)), min_size=1, max_size=6),
    st.integers(1, 4),
)
def test_no_prefix_is_ever_shared_across_schedules(
    lm: LM, drawn: list[tuple[Trajectory, int]], together: int
) -> None:
    prompts = [(*range(5, 5 + 8 + ends), 40 + ends) for ends in range(3)]  # 8 tokens are common to all
    requests = [Request(prompts[ends], trajectory, max_tokens=3) for trajectory, ends in drawn]
    engine = engine_of(lm.model)
    for start in range(0, len(requests), together):
        for request in requests[start : start + together]:
            engine.submit(request)
        for event in engine.run():
            if event.result is not None:
                request = requests[event.ticket]
                assert event.result.ids == text_of(engine_of(lm.model), request)
    followed = {trajectory for trajectory, _ in drawn}
    for trajectory in SCHEDULES:
        assert cached_tokens(engine, Request((*prompts[0], 1), trajectory)) >= 8 * (trajectory in followed)
        assert (cached_tokens(engine, Request(prompts[0], trajectory)) > 0) == (trajectory in followed)
    assert engine.counts.shared_tokens == 8 * (len(drawn) - len(followed))


def test_prompts_share_nothing_once_a_weight_was_changed_in_place(lm: LM) -> None:
    """Whichever weight it is. Texts are then those of the new weights."""
    for number, (name, _) in enumerate(lm.model.named_parameters()):
        model = copy.deepcopy(lm.model)
        engine, request = engine_of(model), Request(tuple(range(5, 18)), SCHEDULES[number % 8], max_tokens=6)
        text_of(engine, request)
        assert cached_tokens(engine, request) == 12
        with torch.no_grad():
            dict(model.named_parameters())[name].mul_(-3)
        before = engine.counts.shared_tokens
        assert text_of(engine, request) == text_of(engine_of(model), request), name
        assert engine.counts.shared_tokens == before, name


def test_prompts_share_nothing_across_dtypes(lm: LM) -> None:
    model = copy.deepcopy(lm.model)
    engine, request = engine_of(model), Request(tuple(range(5, 18)), SCHEDULES[3], max_tokens=2)
    text_of(engine, request)
    model.to(torch.bfloat16)
    assert cached_tokens(engine, request) == 0
    pool = BlockManager(1, 1)
    origins = [
        pool.prefix_root("weights", trajectory, dtype)
        for trajectory in (Trajectory.uniform(2), Trajectory.parse("3-1"))
        for dtype in ("fp32", "bf16")
    ]
    assert len(set(origins)) == 4


CONFIG = ModelConfig(blocks=1, loops=4, width=8, heads=2, ffn=8, context=24, vocab=16)


@given(st.integers(0, 2**32))
def test_slots_that_grow_keep_their_keys(seed: int) -> None:
    model, draw = spread(CONFIG), random.Random(seed)
    pool, kept = SlotPool(model, 4), dict[int, SequenceKV]()
    for ticket in range(8):
        budget, tokens, leaver = draw.randint(1, 4), draw.randint(1, min(24, 6 + 4 * ticket)), draw.randrange(10)
        pool.free_except({ticket: keys.loops[0].shape[-2] for ticket, keys in kept.items()})
        trajectory, before = Trajectory.uniform(budget), (len(pool.loops), pool.capacity)
        table = model.condition(trajectory)
        size = pool.size_for(budget, tokens)
        assert size[0] == max(before[0], budget)
        assert max(before[1], tokens) <= size[1] <= CONFIG.context
        assert size[1] in (before[1], CONFIG.context) or size[1] >= max(tokens, before[1] * 3 // 2)
        pool.grow(*size, table)
        assert (len(pool.loops), pool.capacity) == size
        assert pool.bytes == pool.bytes_for(*size) <= pool.bytes_for(CONFIG.loops, CONFIG.context)
        keys = SequenceKV(trajectory, [torch.randn(1, 2, 2, tokens, 4) for _ in range(budget)])
        pool.admit(ticket, table, keys, tokens)
        kept[ticket] = keys
        assert slots_of(pool) == set(kept)
        for index, slot in enumerate(pool.layout):
            for loop, store in enumerate(pool.loops):
                expected = torch.zeros_like(store[:, :, index])
                if slot is not None and loop < slot.budget:
                    expected[..., : slot.length, :] = kept[slot.ticket].loops[loop]
                assert torch.equal(store[:, :, index], expected)
        budgets = [slot.budget for slot in pool.layout if slot is not None]
        assert budgets == sorted(budgets, reverse=True)
        if leaver in kept or pool.free == 0:
            kept.pop(leaver if leaver in kept else min(kept))


def slots_of(pool: SlotPool) -> set[int]:
    return {slot.ticket for slot in pool.layout if slot is not None}


def test_slots_whose_growth_was_interrupted_grow_again_and_keep_their_keys() -> None:
    model, number = spread(CONFIG), 0
    trajectory = Trajectory.uniform(2)
    keys = SequenceKV(trajectory, [torch.randn(1, 2, 2, 5, 4) for _ in range(2)])
    while True:
        number += 1
        pool = SlotPool(model, 2)
        pool.grow(2, 5, model.condition(trajectory))
        pool.admit(0, model.condition(trajectory), keys, 5)
        table = model.condition(Trajectory.uniform(4))
        with fault_at(number) as struck, suppress(Injected):
            pool.grow(4, 9, table)
        pool.grow(*pool.size_for(4, 9), table)
        assert all(torch.equal(loop[:, :, 0, :, :5], keys.loops[at]) for at, loop in enumerate(pool.loops[:2]))
        assert pool.bytes == pool.bytes_for(4, 9)
        if not struck:
            break
    assert number > 5
