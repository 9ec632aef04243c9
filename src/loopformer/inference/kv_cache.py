"""Memory for keys and values: pages that sequences hold, prompts that they share, and slots of the plain runner.

pool = PagePool(pages=1000, page_tokens=64)
origin = pool.origin(fingerprint(model), trajectory, dtype)
shared = pool.match(origin, prompt)              # blocks of this prompt that are cached already
blocks = pool.allocate(ticket, budget, count, shared)   # these and new ones, `count` in all
pool.publish(ticket, origin, prompt)             # after the keys were written: other prompts may share them
pool.release_except(tickets)                     # all but these have gone; cached blocks stay

A page has room for the keys and values of PAGE tokens in one loop. A block is the M pages of the same tokens along
a trajectory of M loops. Full blocks of prompts are cached under a key: the block before, and the tokens. The first
block of a prompt follows an origin, which stands for the weights, the trajectory and the dtype. So two prompts
share a block only if all of these are equal, and all tokens before it. Python's dict compares the tokens on a hit.

The truth is who holds which blocks and which blocks are cached. What is free follows from that. It is counted along
as long as nothing goes wrong, and counted anew after an error or Ctrl-C in the middle of a change.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Hashable, Sequence
from typing import NamedTuple

from torch import Tensor

from loopformer.errors import RunFailed
from loopformer.model.cache import KVCache, LoopPlan, SequenceKV
from loopformer.model.conditioning import Condition
from loopformer.model.looped import LoopedLM

MAX_ORIGINS = 256  # trajectories whose prompts are cached at a time
UNCOUNTED = 2  # most tokens that a slot may hold beyond its noted length: two steps that were not counted yet
NOBODY = -1  # the ticket of a slot that is still to be cleared


Fingerprint = tuple[tuple[int, object, int], ...]


def fingerprint(model: LoopedLM) -> Fingerprint:
    """Where each weight lies and how often it was written; it differs once weights have changed."""
    return tuple(
        [
            (weight.data_ptr(), weight.dtype, 0 if weight.is_inference() else weight._version)
            for weight in model.parameters()
        ]
    )


def page_bytes(model: LoopedLM, page_tokens: int) -> int:
    """Keys and values of so many tokens in one loop."""
    config = model.config
    return config.blocks * 2 * page_tokens * config.width * model.tokens.weight.element_size()


def slot_bytes(model: LoopedLM) -> int:
    """Keys and values of a whole context in every loop."""
    return model.config.context * model.cost.kv_bytes(value_bytes=model.tokens.weight.element_size())


class KVBlock:
    """The pages of the same tokens, one for each loop. Blocks are compared by identity."""

    __slots__ = ("key", "keys", "pages")

    def __init__(self, pages: tuple[int, ...]) -> None:
        self.pages = pages
        self.key: tuple[KVBlock, tuple[int, ...]] | None = (
            None  # the block before and the tokens, once it is cached
        )
        self.keys: Tensor | None = None  # [M, k, 2, H, PAGE, D/H] of the plain runner, which has no tensor of pages


class PagePool:
    """Counts pages: which block has which, which sequence holds which blocks, and which blocks are cached."""

    def __init__(self, pages: int, page_tokens: int) -> None:
        self.pages, self.page_tokens = pages, page_tokens
        self._held: dict[int, tuple[KVBlock, ...]] = {}  # by ticket
        self._cached: OrderedDict[tuple[KVBlock, tuple[int, ...]], KVBlock] = (
            OrderedDict()
        )  # the last used at the end
        self._origins: OrderedDict[Hashable, KVBlock] = OrderedDict()
        # These follow from the above; see `_recount`.
        self._free: list[int] = list(range(pages))
        self._holders: Counter[KVBlock] = Counter()
        self._idle = 0  # pages of cached blocks that nobody holds
        self._is_counted = True

    @property
    def available(self) -> int:
        """Pages that are free, or would be if cached blocks that nobody holds were dropped."""
        self._recount()
        return len(self._free) + self._idle

    def pages_to_take(self, budget: int, tokens: int, shared: Sequence[KVBlock]) -> int:
        """How much `available` falls when a sequence of so many tokens comes in with these shared blocks."""
        self._recount()
        held = sum(block in self._holders for block in shared)
        return budget * (-(-tokens // self.page_tokens) - held)

    # Sequences.

    def holding(self, ticket: int) -> tuple[KVBlock, ...]:
        """The blocks of a sequence, in the order of its tokens."""
        return self._held.get(ticket, ())

    def allocate(self, ticket: int, budget: int, count: int, shared: Sequence[KVBlock] = ()) -> tuple[KVBlock, ...]:
        """Give a sequence new blocks until it has `count`. A sequence that has none gets the shared ones first."""
        self._recount()
        blocks = self.holding(ticket)
        self._is_counted = False
        if not blocks:
            for block in shared:  # before pages are taken, so that these are not dropped to make room
                self._idle -= 0 if block in self._holders else len(block.pages)
                self._holders[block] += 1
            blocks = tuple(shared)
        pages = self._take_pages(budget * (count - len(blocks)))
        new = [KVBlock(tuple(pages[start : start + budget])) for start in range(0, len(pages), budget)]
        self._holders.update(new)
        self._held[ticket] = (*blocks, *new)
        self._is_counted = True
        return self._held[ticket]

    def release(self, ticket: int) -> None:
        """Take back the blocks of a sequence. Cached blocks stay cached."""
        self._recount()
        self._is_counted = False
        for block in self._held.pop(ticket):
            self._holders[block] -= 1
            if self._holders[block] == 0:
                del self._holders[block]
                if block.key is None:
                    self._free += block.pages
                else:
                    self._idle += len(block.pages)
        self._is_counted = True

    def release_except(self, tickets: Collection[int]) -> None:
        """Take back the blocks of all other sequences."""
        for ticket in [ticket for ticket in self._held if ticket not in tickets]:
            self.release(ticket)

    # Prompts that share.

    def origin(self, *identity: Hashable) -> KVBlock:
        """What the first blocks of prompts follow that have the same weights, trajectory and dtype."""
        if identity not in self._origins:
            self._origins[identity] = KVBlock(())
            while len(self._origins) > MAX_ORIGINS:
                self._origins.popitem(last=False)  # its blocks are never found again, and are dropped in time
        self._origins.move_to_end(identity)
        return self._origins[identity]

    def match(self, origin: KVBlock, prompt: Sequence[int]) -> tuple[KVBlock, ...]:
        """The longest chain of cached blocks that the prompt begins with. Its last token is never among them, as
        the next token is chosen from that one's output."""
        size, blocks = self.page_tokens, list[KVBlock]()
        for start in range(0, len(prompt) - size, size):
            block = self._cached.get((blocks[-1] if blocks else origin, tuple(prompt[start : start + size])))
            if block is None:
                break
            blocks.append(block)
        self._use(blocks)
        return tuple(blocks)

    def publish(self, ticket: int, origin: KVBlock, prompt: Sequence[int]) -> None:
        """Cache the full blocks of a prompt, whose keys must have been written or queued to be."""
        size, before, chain = self.page_tokens, origin, list[KVBlock]()
        self._recount()
        self._is_counted = False
        for index, block in enumerate(self.holding(ticket)[: len(prompt) // size]):
            key = before, tuple(prompt[index * size : (index + 1) * size])
            cached = self._cached.get(key)
            if cached is None:
                if block.key is not None:
                    break  # it is cached under a key that is not found any more, and a block has one key
                block.key, cached = key, block
                self._cached[key] = block
            before = cached
            chain.append(cached)
        self._use(chain)
        self._is_counted = True

    def forget_prompts(self) -> None:
        """Cache nothing any more. Sequences keep the blocks that they hold."""
        self._is_counted = False
        self._cached = OrderedDict()
        self._recount()

    def _use(self, chain: Sequence[KVBlock]) -> None:
        """Make the beginning of a chain the block that was used last. So chains are dropped from their ends:
        without its beginning the rest of a chain could not be found."""
        for block in reversed(chain):
            assert block.key is not None
            self._cached.move_to_end(block.key)

    # Counting.

    def _take_pages(self, count: int) -> list[int]:
        """Free pages, for which cached blocks that nobody holds are dropped, those used longest ago first."""
        while len(self._free) < count:
            block = next((block for block in self._cached.values() if block not in self._holders), None)
            if block is None or block.key is None:
                raise RunFailed("The memory for keys and values is full.")
            del self._cached[block.key]
            block.key = block.keys = None
            self._idle -= len(block.pages)
            self._free += block.pages
        kept = len(self._free) - count
        pages, self._free = self._free[kept:], self._free[:kept]
        return pages

    def _recount(self) -> None:
        """Count anew what is free, if a change was interrupted."""
        if self._is_counted:
            return
        for key, block in self._cached.items():
            block.key = key
        for blocks in self._held.values():
            for block in blocks:
                if block.key is not None and self._cached.get(block.key) is not block:
                    block.key = None  # its publication was interrupted
        self._holders = Counter(block for blocks in self._held.values() for block in blocks)
        used = {page for block in (*self._holders, *self._cached.values()) for page in block.pages}
        self._free = [page for page in range(self.pages) if page not in used]
        self._idle = sum(len(block.pages) for block in self._cached.values() if block not in self._holders)
        self._is_counted = True


class BatchSlot(NamedTuple):
    """The owner of a slot, and how many loops it has keys for."""

    ticket: int
    budget: int
    length: int  # tokens that had keys before the present step


class SlotPool(KVCache):
    """The KV cache of the plain runner, one tensor per loop, whose rows come and go.

    A loop takes memory when it is first used, and slots grow when a sequence needs longer ones. Slots lie longest
    trajectory first, so that the rows still in the loop are always the first ones. `layout` names the owner of each
    slot. A row moves by copying it into a free slot and then replacing the layout, so the layout is true at every
    moment. Gaps between rows are closed before the next step.
    """

    def __init__(self, model: LoopedLM, slots: int) -> None:
        super().__init__(model.config, [], LoopPlan([], [], []), capacity=1, weight=model.tokens.weight)
        self._slots, self._context = slots, model.config.context
        self._order = list(range(slots))
        self._conditions: list[Condition] = []  # of each loop, for every slot
        self.layout: tuple[BatchSlot | None, ...] = (None,) * slots

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
        """Loops and tokens of the slots once they have room for a sequence. Slots grow by half at least, as growing
        copies them."""
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
        """Free the slots of all but these tickets, which have so many tokens each, and close the gaps."""
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

    def admit(self, ticket: int, table: Condition, keys: SequenceKV, length: int) -> None:
        """Give a slot to a row that has run `length` tokens; `table` conditions its M loops."""
        budget = keys.trajectory.budget
        index = self._slots - self.free
        shorter = sorted({slot.budget for slot in self.layout if slot is not None and slot.budget < budget})
        for other in shorter:  # the shortest trajectories make room
            first = next(at for at, slot in enumerate(self.layout) if slot is not None and slot.budget == other)
            self._move(first, index)
            index = first
        self._fill(index, keys, length)
        for loop_number, condition in enumerate(self._conditions[:budget]):
            for part, of_row in zip(condition.tensors, table.tensors, strict=True):
                part[index] = of_row[loop_number]
        self._publish({index: BatchSlot(ticket, budget, length)})

    def arrange_rows(self, lengths: dict[int, int]) -> list[int]:
        """Set up the cache to extend rows that have so many tokens each; the tickets in the order of slots."""
        rows = [slot for slot in self.layout if slot is not None]
        self.lengths = [lengths[slot.ticket] for slot in rows]
        counts = [sum(slot.budget > loop for slot in rows) for loop in range(max(slot.budget for slot in rows))]
        loops = zip(self._conditions, counts, strict=False)
        conditions = [condition.at(slice(count)) for condition, count in loops]
        mixed = counts[-1] < counts[0]
        self.passes = LoopPlan(counts, conditions, list(range(len(rows))) if mixed else None)
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
        end = slot.length + UNCOUNTED  # a step may have been run since the length was noted
        for loop, condition in zip(self.loops[: slot.budget], self._conditions, strict=False):
            loop[:, :, target, :, :end] = loop[:, :, source, :, :end]
            for part in condition.tensors:
                part[target] = part[source]
        self._publish({target: slot, source: slot._replace(ticket=NOBODY)})
        self._clear(source)

    def _clear(self, index: int) -> None:
        """Free a slot. A masked position is still multiplied, so a NaN there would spoil the next row."""
        slot = self.layout[index]
        assert slot is not None
        for loop in self.loops[: slot.budget]:
            loop[:, :, index, :, : slot.length + UNCOUNTED] = 0
        self._publish({index: None})

    def _publish(self, changes: dict[int, BatchSlot | None]) -> None:
        layout = list(self.layout)
        for index, slot in changes.items():
            layout[index] = slot
        self.layout = tuple(layout)
