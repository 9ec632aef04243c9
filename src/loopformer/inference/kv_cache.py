"""Memory for keys and values (KV): who holds which pages, which prompts share them, and the slots of the plain
runner.

blocks = BlockManager(pages=1000, page_tokens=64)
root = blocks.prefix_root(fingerprint(model), trajectory, dtype)
prefix = blocks.match_prefix(root, prompt)           # blocks of this prompt that are cached already
held = blocks.allocate(ticket, budget, count, prefix)   # these and new ones, `count` in all
blocks.cache_prompt(ticket, root, prompt)            # after its KV was written: other prompts may share it
blocks.free_except(tickets)                          # all other sequences have finished; cached blocks stay

A page holds the KV of `page_tokens` tokens in one loop. A block is the M pages of the same tokens along a
trajectory of M loops. Full blocks of prompts are cached. The cache key of a block is the block before it and its
own tokens. The key of a prompt's first block begins with a root, which stands for the weights, the trajectory and
the dtype. So two prompts share a block only if all of these are equal and all tokens before it are. The lookup
compares the tokens themselves.

Holders and cache are the source of truth. The free pages are derived from them, and derived anew (`_recount`) after
an error or Ctrl-C in the middle of a change. All of this belongs to the thread that runs the engine's steps.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor

from loopformer.errors import RunFailed
from loopformer.model.cache import KVCache, LoopPlan, SequenceKV
from loopformer.model.conditioning import Condition
from loopformer.model.looped import LoopedLM

MAX_ROOTS = 256  # trajectories whose prompts are cached at a time
MAX_UNRECORDED_TOKENS = 2  # tokens that steps may have written since the slot's length was recorded
NO_TICKET = -1  # in place of a sequence's ticket, where the sequence has gone or moved

Fingerprint = tuple[tuple[int, object, int], ...]


def fingerprint(model: LoopedLM) -> Fingerprint:
    """The address of each weight and how often it was written, so it differs once weights have changed.

    PyTorch does not count writes to `weight.data`, nor those to weights that were made in inference mode.
    """
    return tuple(
        [
            (weight.data_ptr(), weight.dtype, 0 if weight.is_inference() else weight._version)
            for weight in model.parameters()
        ]
    )


def page_bytes(model: LoopedLM, page_tokens: int) -> int:
    """The KV of so many tokens in one loop."""
    config = model.config
    return config.blocks * 2 * page_tokens * config.width * model.tokens.weight.element_size()


def slot_bytes(model: LoopedLM) -> int:
    """The KV of a whole context in every loop."""
    return model.config.context * model.cost.kv_bytes(value_bytes=model.tokens.weight.element_size())


class KVBlock:
    """The pages of the same tokens, one for each loop. Blocks are compared by identity."""

    __slots__ = ("cache_key", "kv", "pages")

    def __init__(self, pages: tuple[int, ...]) -> None:
        self.pages = pages
        self.cache_key: tuple[KVBlock, tuple[int, ...]] | None = (
            None  # the block before and the tokens, once cached
        )
        self.kv: Tensor | None = None  # [M, k, 2, H, PAGE, D/H]; None on a GPU, where a tensor has all pages


class BlockManager:
    """Which pages are free, which blocks each sequence holds, and which blocks are cached for other prompts.

    A cached block that nobody holds is idle. Idle blocks count as available: they are evicted when pages are
    needed."""

    def __init__(self, pages: int, page_tokens: int) -> None:
        self.pages, self.page_tokens = pages, page_tokens
        self._held: dict[int, tuple[KVBlock, ...]] = {}  # by ticket
        self._cached: OrderedDict[tuple[KVBlock, tuple[int, ...]], KVBlock] = OrderedDict()  # last used at the end
        self._roots: OrderedDict[Hashable, KVBlock] = OrderedDict()
        # Derived from the above; see `_recount`.
        self._free: list[int] = list(range(pages))
        self._holders: Counter[KVBlock] = Counter()
        self._idle_pages = 0
        self._is_counted = True

    @property
    def available_pages(self) -> int:
        """Pages that are free or idle. After an interrupted change it is right from `free_except` on."""
        return len(self._free) + self._idle_pages

    def pages_needed(self, budget: int, tokens: int, prefix: Sequence[KVBlock]) -> int:
        """How many available pages a new sequence of so many tokens takes. Idle prefix blocks count, because
        holding them makes their pages unavailable."""
        held = sum(block in self._holders for block in prefix)
        return budget * (-(-tokens // self.page_tokens) - held)

    # Sequences.

    def held_blocks(self, ticket: int) -> tuple[KVBlock, ...]:
        """The blocks of a sequence, in the order of its tokens."""
        return self._held.get(ticket, ())

    def allocate(self, ticket: int, budget: int, count: int, prefix: Sequence[KVBlock] = ()) -> tuple[KVBlock, ...]:
        """Give a sequence new blocks until it has `count`. If it has none yet, it shares those of the prefix, which
        come from `match_prefix` and may not have been evicted since."""
        with self._changing():
            blocks = self.held_blocks(ticket)
            if not blocks:
                # Held before pages are taken, because idle blocks may be evicted then.
                for block in prefix:
                    is_cached = block.cache_key is not None and self._cached.get(block.cache_key) is block
                    assert is_cached, "evicted since `match_prefix`"
                    self._idle_pages -= 0 if block in self._holders else len(block.pages)
                    self._holders[block] += 1
                blocks = tuple(prefix)
            pages = self._pop_pages(budget * (count - len(blocks)))
            new = [KVBlock(tuple(pages[start : start + budget])) for start in range(0, len(pages), budget)]
            self._holders.update(new)
            self._held[ticket] = (*blocks, *new)
        return self._held[ticket]

    def reserve(self, ticket: int, pages: int) -> None:
        """Hold at least so many pages without content (slot memory), as blocks of any size."""
        held = self.held_blocks(ticket)
        missing = pages - sum(len(block.pages) for block in held)
        if missing > 0:
            self.allocate(ticket, missing, len(held) + 1)

    def free(self, ticket: int) -> None:
        """Take back the blocks of a sequence. Cached ones become idle if nobody else holds them."""
        with self._changing():
            for block in self._held.pop(ticket):
                self._holders[block] -= 1
                if self._holders[block] == 0:
                    del self._holders[block]
                    if block.cache_key is None:
                        self._free += block.pages
                    else:
                        self._idle_pages += len(block.pages)

    def free_except(self, tickets: Collection[int]) -> None:
        """Take back the blocks of all other sequences. It also mends the counts, at the start of each step."""
        self._recount()
        for ticket in [ticket for ticket in self._held if ticket not in tickets]:
            self.free(ticket)

    # Prompts that share a prefix.

    def prefix_root(self, *identity: Hashable) -> KVBlock:
        """The root of all prefixes that have the same weights, trajectory and dtype."""
        if identity not in self._roots:
            self._roots[identity] = KVBlock(())
            while len(self._roots) > MAX_ROOTS:
                self._roots.popitem(last=False)  # its blocks are never found again, and are evicted in time
        self._roots.move_to_end(identity)
        return self._roots[identity]

    def match_prefix(self, root: KVBlock, prompt: Sequence[int]) -> tuple[KVBlock, ...]:
        """The longest chain of cached blocks that the prompt begins with.

        The last token is never part of it: it must be run, because the next token is chosen from its output.
        """
        size, chain = self.page_tokens, list[KVBlock]()
        for start in range(0, len(prompt) - size, size):
            block = self._cached.get((chain[-1] if chain else root, tuple(prompt[start : start + size])))
            if block is None:
                break
            chain.append(block)
        self._touch(chain)
        return tuple(chain)

    def cache_prompt(self, ticket: int, root: KVBlock, prompt: Sequence[int]) -> None:
        """Cache the full blocks of a prompt. Call it after their KV was written, or queued on the decode stream."""
        size, before, chain = self.page_tokens, root, list[KVBlock]()
        with self._changing():
            for index, block in enumerate(self.held_blocks(ticket)[: len(prompt) // size]):
                cache_key = before, tuple(prompt[index * size : (index + 1) * size])
                cached = self._cached.get(cache_key)
                if cached is None:
                    if block.cache_key is not None:
                        break  # it is cached under a key that is not found any more, and a block has one key
                    # The key comes first: a cached block has one even if an interruption comes in between.
                    block.cache_key, cached = cache_key, block
                    self._cached[cache_key] = block
                before = cached  # equal prompts that were run at the same time keep blocks of their own
                chain.append(cached)
            self._touch(chain)

    def clear_cache(self) -> None:
        """Forget all prompts. Sequences keep the blocks that they hold."""
        self._is_counted = False
        self._cached = OrderedDict()
        self._recount()

    def _touch(self, chain: Sequence[KVBlock]) -> None:
        """Mark a chain as last used, from its end. So the end is evicted first: a block is found through those
        before."""
        for block in reversed(chain):
            assert block.cache_key is not None
            self._cached.move_to_end(block.cache_key)

    # Counting.

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Change holders, cache and counts. After an exception inside, the next change begins with a recount."""
        self._recount()
        self._is_counted = False
        yield
        self._is_counted = True  # not reached after an exception

    def _pop_pages(self, count: int) -> list[int]:
        """Free pages. Idle blocks are evicted for them, those used longest ago first."""
        missing, evicted = count - len(self._free), list[KVBlock]()
        if missing > self._idle_pages:
            raise RunFailed("The memory for keys and values is full.")
        idle = (block for block in self._cached.values() if block not in self._holders)
        while missing > 0:
            evicted.append(next(idle))
            missing -= len(evicted[-1].pages)
        for block in evicted:
            assert block.cache_key is not None
            del self._cached[block.cache_key]
            block.cache_key = block.kv = None
            self._idle_pages -= len(block.pages)
            self._free += block.pages
        rest = len(self._free) - count
        pages = self._free[rest:]
        del self._free[rest:]
        return pages

    def _recount(self) -> None:
        """Derive what is free from holders and cache, if a change was interrupted."""
        if self._is_counted:
            return
        self._holders = Counter(block for blocks in self._held.values() for block in blocks)
        for block in self._holders:
            if block.cache_key is not None and self._cached.get(block.cache_key) is not block:
                block.cache_key = None
        used = {page for block in (*self._holders, *self._cached.values()) for page in block.pages}
        self._free = [page for page in range(self.pages) if page not in used]
        self._idle_pages = sum(len(block.pages) for block in self._cached.values() if block not in self._holders)
        self._is_counted = True


class Slot(NamedTuple):
    """The owner of a slot at the start of a step, its budget, and how many of its tokens are cached."""

    ticket: int
    budget: int
    length: int


class SlotPool(KVCache):
    """The KV cache of the plain runner: one tensor per loop, with a slot for each row.

    A loop takes memory when it is first used, and slots grow when a sequence needs longer ones. Slots lie longest
    trajectory first, so the rows that are still in a loop are always its first ones. Before the next step, gaps
    between rows are closed. `layout` names the owner of each slot. A row moves by copying it first and replacing
    the layout after, so an interrupted move leaves the old layout valid.

    In each step call `free_except` first, then `arrange_rows` for the rows left, then `grow` and `admit` for new
    ones."""

    def __init__(self, model: LoopedLM, slots: int) -> None:
        super().__init__(model.config, [], LoopPlan([], [], []), capacity=1, weight=model.tokens.weight)
        self._slots, self._context = slots, model.config.context
        self._order = list(range(slots))
        self._conditions: list[Condition] = []  # of each loop, for every slot
        self.layout: tuple[Slot | None, ...] = (None,) * slots

    @property
    def free(self) -> int:
        return self.layout.count(None)

    @property
    def bytes_per_loop(self) -> int:
        """Memory of one row's keys and values in one loop."""
        return self.bytes_for(1, self.capacity) // self._slots

    def bytes_for(self, loops: int, tokens: int) -> int:
        """Memory of all slots at this size."""
        heads, _, width = self._shape
        return loops * self._blocks * 2 * self._slots * heads * tokens * width * self._weight.element_size()

    def size_for(self, budget: int, tokens: int) -> tuple[int, int]:
        """Loops and tokens of the slots once a sequence fits. They grow by half at least, because growing copies
        them."""
        if tokens > self.capacity:
            tokens = min(self._context, max(tokens, self.capacity * 3 // 2))
        return max(len(self.loops), budget), max(self.capacity, tokens)

    def grow(self, loops: int, tokens: int, table: Condition) -> None:
        """Make all slots this large. `table` is the condition of any trajectory of so many loops."""
        heads, _, width = self._shape
        self._shape = heads, tokens, width
        for number, loop in enumerate(self.loops):
            if loop.shape[-2] < tokens:
                grown = self._empty_loop(self._slots)
                grown[..., : loop.shape[-2], :] = loop
                self.loops[number] = grown
        self.capacity = tokens
        while len(self.loops) < loops:
            condition = table.map(lambda part: part.new_zeros((self._slots, *part.shape[1:])))
            self._conditions = [*self._conditions[: len(self.loops)], condition]
            self.loops = [*self.loops, self._empty_loop(self._slots)]

    def free_except(self, lengths: dict[int, int]) -> None:
        """Free the slots of all but these tickets, record their numbers of cached tokens, and close the gaps."""
        for index, slot in enumerate(self.layout):
            if slot is not None and slot.ticket not in lengths:
                self._clear(index)
        self.layout = tuple(
            slot if slot is None else slot._replace(length=lengths[slot.ticket]) for slot in self.layout
        )
        while True:
            used = [index for index, slot in enumerate(self.layout) if slot is not None]
            gap = next((index for index in range(len(used)) if self.layout[index] is None), None)
            if gap is None:
                return
            # The last row of the next shorter budget fills the gap, so that longest trajectories stay first.
            budget = next(self._budget(index) for index in used if index > gap)
            self._move(max(index for index in used if self._budget(index) == budget), gap)

    def admit(self, ticket: int, table: Condition, kv: SequenceKV, length: int) -> None:
        """Give a slot to a row with the KV of `length` tokens. `table` has the conditions of its M loops."""
        budget = kv.trajectory.budget
        index = self._slots - self.free
        assert budget <= len(self.loops), "call `grow` first"
        assert length <= self.capacity, "call `grow` first"
        assert None not in self.layout[:index], "call `free_except` first: there is a gap between rows"
        shorter = sorted({slot.budget for slot in self.layout if slot is not None and slot.budget < budget})
        for other in shorter:  # the shortest trajectories make room
            first = next(at for at, slot in enumerate(self.layout) if slot is not None and slot.budget == other)
            self._move(first, index)
            index = first
        self._fill(index, kv, length)
        for loop_number, condition in enumerate(self._conditions[:budget]):
            for part, of_row in zip(condition.tensors, table.tensors, strict=True):
                part[index] = of_row[loop_number]
        self._set_slots({index: Slot(ticket, budget, length)})

    def arrange_rows(self, lengths: dict[int, int]) -> list[int]:
        """Set up the cache to extend all rows, by the cached tokens of each. The tickets, in the order of slots."""
        rows = [slot for slot in self.layout if slot is not None]
        assert lengths.keys() == {slot.ticket for slot in rows}, "not the rows that `free_except` left"
        self.lengths = [lengths[slot.ticket] for slot in rows]
        counts = [sum(slot.budget > loop for slot in rows) for loop in range(max(slot.budget for slot in rows))]
        loops = zip(self._conditions, counts, strict=False)
        conditions = [condition.at(slice(count)) for condition, count in loops]
        mixed = counts[-1] < counts[0]
        self.plan = LoopPlan(counts, conditions, list(range(len(rows))) if mixed else None)
        return [slot.ticket for slot in rows]

    def _budget(self, index: int) -> int:
        slot = self.layout[index]
        assert slot is not None
        return slot.budget

    def _move(self, source: int, target: int) -> None:
        """Copy a row into a free slot, then name it there and clear the old one."""
        slot = self.layout[source]
        assert slot is not None
        assert self.layout[target] is None
        end = slot.length + MAX_UNRECORDED_TOKENS
        for loop, condition in zip(self.loops[: slot.budget], self._conditions, strict=False):
            loop[:, :, target, :, :end] = loop[:, :, source, :, :end]
            for part in condition.tensors:
                part[target] = part[source]
        self._set_slots({target: slot, source: slot._replace(ticket=NO_TICKET)})
        self._clear(source)

    def _clear(self, index: int) -> None:
        """Free a slot. A masked position is still multiplied, so a NaN there would spoil the next row."""
        slot = self.layout[index]
        assert slot is not None
        for loop in self.loops[: slot.budget]:
            loop[:, :, index, :, : slot.length + MAX_UNRECORDED_TOKENS] = 0
        self._set_slots({index: None})

    def _set_slots(self, changes: dict[int, Slot | None]) -> None:
        layout = list(self.layout)
        for index, slot in changes.items():
            layout[index] = slot
        self.layout = tuple(layout)
