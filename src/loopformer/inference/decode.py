"""Decoding on any device: the memory of continuous batching, and one step of it for requests of mixed budgets.

backend = PlainBackend(model, slots=16)    # a `Backend` (engine.py); fused/shared.py has another one
choices = backend.prefill(rows)            # run prompts: the first token of each
choices = backend.decode(rows)             # one more token each
backend.free_except(rows)                  # the slots of all other rows are free again

A step that fails half-way leaves the KV cache valid for every `RowState`. It writes only beyond the valid tokens,
and a row is copied into its new slot before the layout, one tuple, names it there.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from loopformer.device import to_device_async
from loopformer.inference.request import Request, RowState
from loopformer.inference.sampling import Choice, sample
from loopformer.model.cache import KVCache, LoopPlan, SequenceKV
from loopformer.model.conditioning import Condition
from loopformer.model.looped import LoopedLM
from loopformer.scoring import common_prefix
from loopformer.trajectory import Trajectory

PREFILL_CHUNK = 512  # tokens of a long prompt that are run at a time
MIN_SHARED_PREFIX = 8  # tokens: a prompt that shares as many with one that is run now waits for its keys
MAX_TABLES = 32  # condition tables of the trajectories that were used last
UNCOUNTED = 2  # most tokens that a slot may hold beyond its noted length: two steps that were not counted yet
NOBODY = -1  # the ticket of a slot that is still to be cleared


def padded(model: LoopedLM, rows: Sequence[Sequence[int]]) -> tuple[Tensor, list[int]]:
    """ids [B, longest] on the model's device, padded at the end, and how many tokens of each row count."""
    counts = [len(row) for row in rows]
    filled = [[*row, *[0] * (max(counts) - len(row))] for row in rows]
    return to_device_async(filled, model.device), counts


def ends(hidden: Tensor, counts: Sequence[int]) -> Tensor:
    """Of padded rows [B, T, …] the last one that counts, each [B, …]."""
    rows = torch.arange(len(counts), device=hidden.device)
    return hidden[rows, to_device_async([count - 1 for count in counts], hidden.device)]


def prefill(
    model: LoopedLM, prompts: Sequence[Sequence[int]], trajectories: Sequence[Trajectory]
) -> tuple[KVCache, Tensor]:
    """Run prompts of any lengths: their KV cache, and the hidden state [B, D] of each one's last token."""
    ids, counts = padded(model, prompts)
    cache = model.cache(list(trajectories), len(prompts))
    return cache, ends(model.extend(ids, cache, counts), counts)


def kv_bytes_per_slot(model: LoopedLM) -> int:
    """Keys and values of a slot that is used in every loop; it has room for a whole context."""
    return model.config.context * model.cost.kv_bytes(value_bytes=model.tokens.weight.element_size())


class BatchSlot(NamedTuple):
    """The owner of a slot, and how many loops it has keys for."""

    ticket: int
    budget: int
    length: int  # tokens that had keys before the present step


class SlotPool(KVCache):
    """A KV cache whose rows come and go. A loop takes memory when it is first used.

    Slots lie longest trajectory first, so that the rows still in the loop are always the first ones. `layout` names
    the owner of each slot. A row moves by copying it into a free slot and then replacing the layout, so the layout
    is true at every moment. Gaps between rows are closed before the next step.
    """

    def __init__(self, model: LoopedLM, slots: int) -> None:
        super().__init__(model.config, [], LoopPlan([], [], []), model.config.context, model.tokens.weight)
        self._slots = slots
        self._order = list(range(slots))
        self._conditions: list[Condition] = []  # of each loop, for every slot
        self.layout: tuple[BatchSlot | None, ...] = (None,) * slots

    @property
    def free(self) -> int:
        return self.layout.count(None)

    @property
    def bytes_per_loop(self) -> int:
        """Memory of one row's keys and values in one loop."""
        return self.loops[0][:, :, 0].nbytes if self.loops else 0

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
        while len(self.loops) < budget:
            self._add_loop(table)
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

    def _add_loop(self, table: Condition) -> None:
        condition = table.map(lambda part: part.new_zeros((self._slots, *part.shape[1:])))
        loop = self._empty_loop(self._slots)
        self._conditions = [*self._conditions[: len(self.loops)], condition]
        self.loops = [*self.loops, loop]


@dataclass(frozen=True)
class Prefix:
    """A prompt and its keys."""

    tokens: tuple[int, ...]
    keys: SequenceKV


class PrefixCache:
    """The prompts that were run last: a new prompt does not run again what it shares with one of them.

    Keys follow from the trajectory, so only prompts of the same trajectory share. At most `max_tokens` tokens are
    stored; what was used longest ago goes first.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._prefixes: list[Prefix] = []  # the last used at the end

    def find(self, request: Request) -> tuple[SequenceKV, int]:
        """The keys of the prompt that shares the longest beginning, and the length of that. The last token of a
        prompt is always run, as the next token is chosen from its output."""
        prompt = request.prompt
        best = max(
            self._of_trajectory(request), key=lambda prefix: common_prefix(prefix.tokens, prompt), default=None
        )
        shared = min(common_prefix(best.tokens, prompt), len(prompt) - 1) if best is not None else 0
        if best is None or shared == 0:
            return SequenceKV(request.trajectory, []), 0
        self._prefixes = [prefix for prefix in self._prefixes if prefix is not best] + [best]
        return best.keys, shared

    def remember(self, request: Request, keys: SequenceKV) -> None:
        """Store a prompt unless nearly all of it is stored, in place of the prompts that it begins with."""
        prompt, same = request.prompt, self._of_trajectory(request)
        stored = max((common_prefix(prefix.tokens, prompt) for prefix in same), default=0)
        if len(prompt) > self.max_tokens or len(prompt) - stored < MIN_SHARED_PREFIX:
            return
        beginnings = [prefix for prefix in same if common_prefix(prefix.tokens, prompt) == len(prefix.tokens)]
        remaining = [prefix for prefix in self._prefixes if not any(prefix is other for other in beginnings)]
        remaining.append(Prefix(prompt, keys.copy()))
        while sum(len(prefix.tokens) for prefix in remaining) > self.max_tokens:
            del remaining[0]
        self._prefixes = remaining

    def _of_trajectory(self, request: Request) -> list[Prefix]:
        return [prefix for prefix in self._prefixes if prefix.keys.trajectory == request.trajectory]


class RunPrompts(NamedTuple):
    """Prompts that were run together: what their next tokens are chosen from, and the keys they leave."""

    rows: tuple[RowState, ...]
    cache: KVCache
    logits: Tensor  # [B, V]


class PromptBackend(ABC):
    """The half of a backend that runs prompts: which of them together, what they share, long ones in pieces.

    A subclass has the slots: it says who has room (`fits`) and takes in a prompt that was run (`admit`).
    """

    prefill_chunk = PREFILL_CHUNK

    def __init__(self, model: LoopedLM, remember: int | None) -> None:
        """`remember`: tokens of earlier prompts to keep for sharing; four contexts by default."""
        self.model = model
        self._remember = 4 * model.config.context if remember is None else remember
        self.prompt_tokens = self.shared_tokens = 0
        self.forget()

    def forget(self) -> None:
        """Drop everything that was computed from the model's weights, which have changed."""
        self._prefixes = PrefixCache(self._remember)
        self._begun: dict[int, KVCache] = {}  # of prompts of which some pieces were run, by ticket
        self._tables: dict[Trajectory, Condition] = {}

    @abstractmethod
    def fits(self, rows: Sequence[RowState]) -> bool:
        """Whether there is room for these, besides those that run."""

    @abstractmethod
    def admit(self, row: RowState, keys: SequenceKV) -> None:
        """Give a row, whose prompt was run, its slot."""

    def plan(self, waiting: Sequence[RowState], tokens: int) -> list[list[RowState]]:
        """The next prompts to run, in groups of about the same length, so that little is padded. A prompt that
        shares its beginning with another one waits for its keys."""
        chosen: list[tuple[int, int, RowState]] = []  # tokens to run, tokens shared
        under_way = self._under_way_rows()
        self._begun = {row.ticket: self._begun[row.ticket] for row in waiting if row.ticket in self._begun}
        for row in waiting:
            if not self.fits([*(other for _, _, other in chosen), row]):
                break
            prompt = row.request.prompt
            shared = self._find_keys(row)[1]
            shared_now = (
                common_prefix(other.request.prompt, prompt)
                for other in (*under_way, *(other for _, _, other in chosen))
                if other.trajectory == row.trajectory
            )
            if self._prefixes.max_tokens and max(shared_now, default=0) >= shared + MIN_SHARED_PREFIX:
                break
            chosen.append((len(prompt) - shared, shared, row))
            long = len(prompt) - shared > self.prefill_chunk
            tokens -= self.prefill_chunk if long else len(prompt) - shared
            if long or tokens <= 0:
                break
        groups: list[list[RowState]] = []
        longest = 0
        for rest, shared, row in sorted(chosen, key=lambda entry: -entry[0]):
            alike = 0 < longest <= self.prefill_chunk and 4 * rest >= 3 * longest
            if alike and shared + longest <= self.model.config.context:
                groups[-1].append(row)
            else:
                groups.append([row])
                longest = rest
        return groups

    def _under_way_rows(self) -> Sequence[RowState]:
        """Rows whose prompts are being run."""
        return ()

    @torch.no_grad()
    def prefill(self, rows: Sequence[RowState]) -> list[Choice | int]:
        run = self._run(rows)
        if isinstance(run, int):
            return [run]
        choices = sample(run.logits, [row.draw() for row in rows])
        self._admit_run(run, choices)
        return [*choices]

    def _run(self, rows: Sequence[RowState]) -> RunPrompts | int:
        """Run prompts, or one more piece of a long one: then the number of its tokens that were run by now."""
        shared = [self._find_keys(row) for row in rows]
        new = [row.request.prompt[count:] for row, (_, count) in zip(rows, shared, strict=True)]
        is_piece = len(rows) == 1 and len(new[0]) > self.prefill_chunk
        ids, counts = padded(self.model, [new[0][: self.prefill_chunk]] if is_piece else new)
        # The last piece has a cache of its own: when its logits fail, the earlier pieces stay as they are.
        cache = self._begun.get(rows[0].ticket) if is_piece else None
        if cache is None:
            capacity = max(count for _, count in shared) + max(map(len, new))
            cache = self.model.cache([row.trajectory for row in rows], len(rows), capacity, condition=self._table)
            for number, (keys, count) in enumerate(shared):
                cache.write(number, keys, count)
        hidden = self._extend(ids, cache, counts)  # [B, T, D]
        logits = None if is_piece else self._logits(ends(hidden, counts))
        self.prompt_tokens += sum(counts)
        others = [count for row, (_, count) in zip(rows, shared, strict=True) if row.ticket not in self._begun]
        self.shared_tokens += sum(others)
        if logits is None:
            self._begun = {**self._begun, rows[0].ticket: cache}
            return cache.lengths[0]
        tickets = {row.ticket for row in rows}
        self._begun = {ticket: cache for ticket, cache in self._begun.items() if ticket not in tickets}
        return RunPrompts(tuple(rows), cache, logits)

    def _admit_run(self, run: RunPrompts, choices: Sequence[Choice | None]) -> None:
        """Give slots to rows whose prompts were run. The choice is None where a row was cancelled meanwhile."""
        for number, (row, choice) in enumerate(zip(run.rows, choices, strict=True)):
            if choice is None or math.isnan(choice.logprob):
                continue  # the row has ended; keys that are NaN must not reach the cache of the others
            keys = run.cache.read(number)
            self._prefixes.remember(row.request, keys)
            self.admit(row, keys)

    def _find_keys(self, row: RowState) -> tuple[SequenceKV, int]:
        """The keys of a prompt's beginning, from its earlier pieces or from another prompt, and their length."""
        if row.ticket in self._begun:
            cache = self._begun[row.ticket]
            return cache.read(0), cache.lengths[0]
        return self._prefixes.find(row.request)

    def _extend(self, ids: Tensor, cache: KVCache, counts: Sequence[int]) -> Tensor:
        """Run tokens of prompts on top of their cache, as `model.extend` does."""
        return self.model.extend(ids, cache, counts, check=False)

    def _logits(self, hidden: Tensor) -> Tensor:
        return self.model.head(hidden)[:, : self.model.config.vocab]

    def _table(self, trajectory: Trajectory) -> Condition:
        """The conditions of a trajectory's loops; those used last are cached."""
        if trajectory not in self._tables:
            recent = list(self._tables.items())[1 - MAX_TABLES :]
            self._tables = {**dict(recent), trajectory: self.model.condition(trajectory)}
        return self._tables[trajectory]


class PlainBackend(PromptBackend):
    """Continuous batching in PyTorch on any device: rows of any budget, prompts that share beginnings."""

    def __init__(self, model: LoopedLM, slots: int, remember: int | None = None) -> None:
        """`remember`: tokens of earlier prompts to keep for sharing; four contexts by default."""
        super().__init__(model, remember)
        self.pool = SlotPool(model, slots)

    def check(self, request: Request) -> None:
        """Nothing is refused."""

    def fits(self, rows: Sequence[RowState]) -> bool:
        return len(rows) <= self.pool.free

    def used_bytes(self, rows: Sequence[RowState]) -> int:
        return sum(row.trajectory.budget for row in rows) * self.pool.bytes_per_loop

    @property
    def memory_bytes(self) -> int:
        return len(self.pool.layout) * kv_bytes_per_slot(self.model)

    def admit(self, row: RowState, keys: SequenceKV) -> None:
        self.pool.admit(row.ticket, self._table(row.trajectory), keys, len(row.request.prompt))

    @torch.no_grad()
    def decode(self, rows: Sequence[RowState]) -> list[list[Choice]]:
        by_ticket = {row.ticket: row for row in rows}
        tickets = self.pool.arrange_rows({row.ticket: row.cached for row in rows})
        in_slots = [by_ticket[ticket] for ticket in tickets]
        ids = torch.tensor([row.ids[-1:] for row in in_slots], device=self.model.device)  # [B, 1]
        hidden = self.model.extend(ids, self.pool, check=False)[:, 0]  # [B, D]
        chosen = dict(zip(tickets, sample(self._logits(hidden), [row.draw() for row in in_slots]), strict=True))
        return [[chosen[row.ticket]] for row in rows]

    def free_except(self, rows: Sequence[RowState]) -> None:
        self.pool.free_except({row.ticket: row.cached for row in rows})
