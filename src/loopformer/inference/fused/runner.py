"""The runner for GPUs: sequences of any budget share every loop, and the device runs ahead of the host.

runner = FusedRunner(DecodeBatch(model, slots=64))  # if batch_pool.unsupported_reason(model) is None
engine = Engine(model, tokenizer, runner)

**Prefill.** Up to MAX_APART prompts of a group run one by one, each as one CUDA graph (prefill.py). More of them
run as one padded batch. They run on the prompt stream, beside the sequences that decode. From its first chunk on a
sequence holds pages for its maximum length, in each of its loops. It gets a slot once its first token has arrived
on the host.

**Decode.** launch.py has the slots and the launches. The runner decides when a sequence that has a slot joins the
launches (`_join`); all else about who runs next is decided in scheduler.py. Tokens are chosen on the device, and
every token takes exactly M loops, so the host can queue the next launches before it has seen a token. What was run
for a sequence that turns out to have ended is dropped. Only a repetition penalty forces a wait, because it needs
the text. All tokens that have arrived are returned at once, so a host that is slower than the device makes text of
several tokens at a time.

**After an exception** the runner compares each slot with its sequence, and recomputes the KV of those that differ.
`_device` is None while it changes, so an interrupted change makes all of them differ. The pages of a
sequence are known to the block manager alone (kv_cache.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from loopformer.errors import LoopformerError
from loopformer.inference.fused.launch import DecodeBatch
from loopformer.inference.fused.streams import HostCopy
from loopformer.inference.kv_cache import NO_TICKET, BlockManager, KVBlock, page_bytes
from loopformer.inference.request import Choice, Draw, Request
from loopformer.inference.runner import PrefillOutput, PromptRunner, prefill
from loopformer.inference.sampling import sample_async, to_choices
from loopformer.inference.sequence import Sequence, Status
from loopformer.model.cache import KVCache, SequenceKV
from loopformer.scoring import most_likely

MAX_APART = 4  # groups up to this size run one CUDA graph per prompt
MAX_IN_FLIGHT = 4  # prefills in flight beyond which no more are planned: they would only wait for each other
TOKENS_AHEAD, LOOPS_AHEAD = 2, 8  # at least so many tokens of some sequence, and loops, are queued at a time
OUT_OF_SYNC = -1  # in place of the new tokens of a row whose KV must be recomputed


class DeviceRow(NamedTuple):
    """The state of a slot after all queued work."""

    slot: int
    budget: int
    max_new_tokens: int
    new_tokens: int  # chosen by then
    loops_done: int = 0  # of the token in progress
    is_joined: bool = False  # whether it takes part in launches: the device has the sequence's last token

    @property
    def has_more_tokens(self) -> bool:
        return self.is_joined and self.new_tokens < self.max_new_tokens

    def after(self, loops: int) -> DeviceRow:
        """The state so many loops later. They end with those of a token at the latest."""
        slot, budget, most, tokens, done, joined = self  # faster than `_replace`, for every row of every launch
        if done + loops == budget:
            return DeviceRow(slot, budget, most, tokens + 1, 0, joined)
        return DeviceRow(slot, budget, most, tokens, done + loops, joined)


class PendingTokens(NamedTuple):
    """A copy of new tokens to the host, queued after so many loops, and the sequence of each row."""

    loops: int
    tickets: tuple[int, ...]  # NO_TICKET where the sequence has gone meanwhile
    copy: HostCopy  # [B, 2 + 2N], as `sample_async` returns them

    def without(self, tickets: set[int]) -> PendingTokens:
        """The same, but the tokens of these sequences are dropped when they arrive."""
        return self._replace(tickets=tuple([NO_TICKET if ticket in tickets else ticket for ticket in self.tickets]))

    def choices(self) -> Iterator[tuple[int, Choice]]:
        """Ticket and token of each row. Waits for the copy."""
        return zip(self.tickets, to_choices(self.copy.wait()), strict=True)


class PrefillInFlight(NamedTuple):
    """Prompts on the prompt stream, and the copy of their first tokens to the host."""

    output: PrefillOutput
    first: PendingTokens


@dataclass(frozen=True)
class DeviceState:
    """The slots, and the tokens that have arrived from them or are on their way."""

    rows: Mapping[int, DeviceRow] = field(default_factory=dict)  # by ticket
    pending: tuple[PendingTokens, ...] = ()
    returned: Mapping[int, list[Choice]] = field(default_factory=dict)  # by the last step, by ticket

    def tokens_not_taken(self, sequences: list[Sequence]) -> dict[int, list[Choice] | None]:
        """By ticket, the tokens that have arrived and that the sequence has not taken, because a step was
        interrupted. None where a sequence is out of sync: its slot is missing, or disagrees with its tokens."""
        not_taken: dict[int, list[Choice] | None] = {}
        for sequence in sequences:
            ticket = sequence.ticket
            not_taken[ticket] = None
            row, returned = self.rows.get(ticket), self.returned.get(ticket, [])
            if row is not None and row.new_tokens != OUT_OF_SYNC:
                arrived = row.new_tokens - self._pending_counts.get(ticket, 0)
                count = arrived - len(sequence.progress.ids)
                if 0 <= count <= len(returned):
                    not_taken[ticket] = returned[len(returned) - count :]
        return not_taken

    @cached_property
    def _pending_counts(self) -> Counter[int]:
        """Tokens on their way, by ticket."""
        return Counter(ticket for pending in self.pending for ticket in pending.tickets)

    def without(self, tickets: set[int]) -> DeviceState:
        """The same without some sequences."""
        pending = [pending.without(tickets) for pending in self.pending]
        return DeviceState(
            {ticket: row for ticket, row in self.rows.items() if ticket not in tickets},
            tuple([tokens for tokens in pending if set(tokens.tickets) != {NO_TICKET}]),
            {ticket: returned for ticket, returned in self.returned.items() if ticket not in tickets},
        )


class FusedRunner(PromptRunner):
    """Continuous batching of mixed budgets through shared loops; see the module's docstring."""

    max_in_flight: int | None = MAX_IN_FLIGHT

    def __init__(self, batch: DecodeBatch, share_prompts: bool = True) -> None:
        super().__init__(batch.model, BlockManager(batch.page_count, batch.page_tokens), share_prompts)
        self.rows = batch.slots
        self._batch = batch
        self._device: DeviceState | None = DeviceState()
        self._in_flight: tuple[PrefillInFlight, ...] = ()

    @property
    def free_rows(self) -> int:
        running = len(self._device.rows) if self._device is not None else 0
        return self.rows - running - len(self.in_flight())

    @property
    def used_bytes(self) -> int:
        pages = self.blocks.pages - self.blocks.available_pages
        return pages * page_bytes(self.model, self.blocks.page_tokens)

    @property
    def memory_bytes(self) -> int:
        return self._batch.nbytes

    def check(self, sequence: Sequence) -> None:
        # This may run in any thread, so it must not touch the counts of the block manager.
        budget, tokens = sequence.trajectory.budget, sequence.reserved_positions
        if budget * -(-tokens // self.blocks.page_tokens) > self.blocks.pages:
            raise LoopformerError(
                f"The request may come to {tokens} tokens in {budget} loops, more than the engine has memory for; "
                "lower max_tokens or the budget."
            )

    @property
    def available_pages(self) -> int:
        return self.blocks.available_pages

    def pages_needed(self, sequence: Sequence) -> int:
        if self.blocks.held_blocks(sequence.ticket):  # since its first chunk
            return 0
        prefix = self._match_prefix(sequence)
        return self.blocks.pages_needed(sequence.trajectory.budget, sequence.reserved_positions, prefix)

    def free_except(self, running: list[Sequence], waiting: list[Sequence]) -> None:
        running_tickets = {sequence.ticket for sequence in running}
        waiting_tickets = {sequence.ticket for sequence in waiting}
        if self._device is not None and (gone := self._device.rows.keys() - running_tickets):
            self._device = self._device.without(gone)
        # Count cancelled prefills until they finish, so that the in-flight limit holds.
        self._in_flight = tuple(
            [
                flight
                for flight in self._in_flight
                if not (waiting_tickets.isdisjoint(flight.first.tickets) and flight.first.copy.has_arrived())
            ]
        )
        self._drop_partial_except(waiting_tickets)
        # Only chunks before the last one are not in flight, so only their pages may be freed while they are still
        # read. Pages are written again by `fill` only, after a later prompt of the same stream has arrived on the
        # host. A second prompt stream would break this.
        in_flight = {sequence.ticket for sequence in self.in_flight()}
        self.blocks.free_except(running_tickets | in_flight | self._partial.keys())

    # Prompts.

    def in_flight(self) -> list[Sequence]:
        return [sequence for flight in self._in_flight for sequence in flight.output.sequences]

    def next_prefill(self, block: bool) -> list[Sequence]:
        for flight in self._in_flight:
            if block or flight.first.copy.has_arrived():
                group = [sequence for sequence in flight.output.sequences if sequence.status is Status.WAITING]
                if group:
                    return group
        return []

    @torch.no_grad()
    def start_prefill(self, sequences: list[Sequence]) -> None:
        self._renew_batch()
        groups = [[sequence] for sequence in sequences] if len(sequences) <= MAX_APART else [sequences]
        for group in groups:
            for sequence in group:
                self._allocate(sequence)
            with self._batch.prompt_stream.after_decode():
                output = self._run_prompts(group)
                if output is None:
                    continue
                chosen = sample_async(output.logits, [sequence.draw() for sequence in group])
                first = PendingTokens(0, tuple([sequence.ticket for sequence in group]), HostCopy(chosen))
            self._in_flight = (*self._in_flight, PrefillInFlight(output, first))

    @torch.no_grad()
    def finish_prefill(self, sequences: list[Sequence]) -> list[Choice]:
        tickets = {sequence.ticket for sequence in sequences}
        flight = next(flight for flight in self._in_flight if tickets <= set(flight.first.tickets))
        choices = dict(flight.first.choices())
        self._in_flight = tuple([other for other in self._in_flight if other is not flight])
        try:
            self._admit_all(
                flight.output, [choice if ticket in tickets else None for ticket, choice in choices.items()]
            )
        finally:
            # The cache of the prompts is freed now, while the decode stream is still to copy it. The prompt stream
            # is one for all threads, and must not give that memory to another prompt before.
            self._batch.prompt_stream.wait_for_decode()
        return [choices[sequence.ticket] for sequence in sequences]

    def _renew_batch(self) -> None:
        """If the weights have changed, start an empty batch in the same memory, and mark every row as out of
        sync."""
        batch = self._batch.renewed()
        if batch is self._batch:
            return
        self._batch.wait_for_prompts()
        self._in_flight, self._partial, self._tables = (), {}, {}
        self._made_for = batch.made_for
        assert batch.page_count == self.blocks.pages  # the engine refuses a model whose dtype has changed
        self.blocks.clear_cache()
        if self._device is not None:
            rows = {ticket: row._replace(new_tokens=OUT_OF_SYNC) for ticket, row in self._device.rows.items()}
            self._device = replace(self._device, rows=rows, pending=(), returned={})
        self._batch = batch  # last: after an interruption before it this method begins again

    def _allocate(self, sequence: Sequence) -> None:
        """Give a sequence the blocks for its maximum length, unless it has them."""
        count = -(-sequence.reserved_positions // self.blocks.page_tokens)
        prefix = self._match_prefix(sequence)
        self.blocks.allocate(sequence.ticket, sequence.trajectory.budget, count, prefix)

    def _match_prefix(self, sequence: Sequence) -> tuple[KVBlock, ...]:
        """The blocks whose KV is written: cached ones, or those that the sequence holds and that are cached."""
        held = self.blocks.held_blocks(sequence.ticket)
        if not held:
            return super()._match_prefix(sequence)
        count = next((number for number, block in enumerate(held) if block.cache_key is None), len(held))
        return held[: min(count, (len(sequence.request.prompt) - 1) // self.blocks.page_tokens)]

    def _read_blocks(self, sequence: Sequence, prefix: tuple[KVBlock, ...]) -> SequenceKV:
        pages = [[block.pages[loop] for block in prefix] for loop in range(sequence.trajectory.budget)]
        return SequenceKV(sequence.trajectory, self._batch.read(pages))

    def _extend(self, ids: Tensor, cache: KVCache, counts: list[int]) -> Tensor:
        if len(counts) > 1:
            return super()._extend(ids, cache, counts)
        return self._batch.prompts.extend(ids, cache)

    @torch.no_grad()
    def _admit(self, sequence: Sequence, kv: SequenceKV) -> None:
        # If this fails, the old state is still valid: only a free slot and this sequence's pages were written.
        length = len(sequence.request.prompt)
        self._device = self._assign_slot(self._device or DeviceState(), sequence, kv, length, new_tokens=1)

    # Decode.

    @torch.no_grad()
    def decode(self, sequences: list[Sequence]) -> list[list[Choice]]:
        not_taken = (self._device or DeviceState()).tokens_not_taken(sequences)
        if None in not_taken.values():
            # Before any of them is run: with new weights, or its blocks would be cached as if they were of these.
            self._renew_batch()
            not_taken = (self._device or DeviceState()).tokens_not_taken(sequences)
        # None until the last line: after an exception the next step recomputes every sequence.
        device, self._device = self._device or DeviceState(), None
        out_of_sync = [sequence for sequence in sequences if not_taken[sequence.ticket] is None]
        device = self._recompute(device, out_of_sync)
        returned = {ticket: tokens or [] for ticket, tokens in not_taken.items()}
        rows = {sequence.ticket: device.rows[sequence.ticket] for sequence in sequences}
        pending = list(device.pending)
        while pending and pending[0].copy.has_arrived():
            _collect(pending.pop(0), returned)
        waits = any(sequence.request.sampling.repetition_penalty != 1 for sequence in sequences)
        while not _is_far_ahead(pending, waits):
            launched = self._launch(sequences, rows, returned)
            if launched is None:
                break
            pending.append(launched)
        while pending and not any(returned.values()):  # a step returns at least one token
            _collect(pending.pop(0), returned)
        self._device = replace(device, rows={**device.rows, **rows}, pending=tuple(pending), returned=returned)
        return list(returned.values())

    def _recompute(self, device: DeviceState, sequences: list[Sequence]) -> DeviceState:
        """Run all tokens but the last of these sequences, and give them slots."""
        if sequences:
            # Condition tables may have been computed on the prompt stream, and a cancelled prompt may still read
            # pages that these sequences get. They have no later prompt there that would wait for it (launch.py).
            self._batch.prompt_stream.decode_waits()
        for sequence in sequences:
            cache, _ = prefill(self.model, [[*sequence.history[:-1]]], [sequence.trajectory])
            others = device.without({sequence.ticket})
            device = self._assign_slot(
                others, sequence, cache.read(0), sequence.num_computed_tokens, len(sequence.ids)
            )
        return device

    def _launch(
        self, sequences: list[Sequence], rows: dict[int, DeviceRow], returned: Mapping[int, list[Choice]]
    ) -> PendingTokens | None:
        """Run all rows that have more tokens until some have run their last loop, and choose the next tokens of
        these. None if no row has more tokens."""
        self._join(sequences, rows)
        active = [sequence for sequence in sequences if rows[sequence.ticket].has_more_tokens]
        if not active:
            return None
        before = [rows[sequence.ticket] for sequence in active]
        loops = min([row.budget - row.loops_done for row in before])
        slots = [row.slot for row in before]
        ended = [number for number, row in enumerate(before) if row.loops_done + loops == row.budget]
        ended_slots = [slots[number] for number in ended]
        requests = [active[number].request for number in ended]
        is_alone = len(active) == 1 and loops == before[0].budget
        if not is_alone:
            self._batch.run(slots, loops)
        if any(request.sampling.repetition_penalty != 1 for request in requests):
            # Chosen outside of the graphs, because the penalty needs the text.
            logits = self._batch.single_row_logits(slots[0], loops) if is_alone else self._batch.logits(ended)
            chosen = sample_async(
                logits, [_draw(active[number], before[number].new_tokens, returned) for number in ended]
            )
            self._batch.set_tokens_from_device(ended_slots, chosen[:, 0])
            copy = HostCopy(chosen)
        elif is_alone and requests[0].sampling.greedy and not requests[0].top_logprobs:
            position = len(requests[0].prompt) + before[0].new_tokens - 1
            copy = self._batch.single_row_greedy(slots[0], loops, position)
        else:
            chosen = (
                self._batch.single_row_sampled(slots[0], loops)
                if is_alone
                else self._batch.next_tokens(ended, ended_slots)
            )
            copy = HostCopy(self._add_top_logprobs(chosen, requests))
        for sequence, row in zip(active, before, strict=True):
            rows[sequence.ticket] = row.after(loops)
        return PendingTokens(loops, tuple([active[number].ticket for number in ended]), copy)

    def _add_top_logprobs(self, chosen: Tensor, requests: list[Request]) -> Tensor:
        """Tokens and log-probabilities [B, 2], and behind them the most likely tokens, as of `sample_async`."""
        count = max(request.top_logprobs for request in requests)
        if not count:
            return chosen
        logprobs = self._batch.last_logits(len(requests)).float().log_softmax(-1)
        tokens, values = most_likely(logprobs, count)
        return torch.cat([chosen, tokens.float(), values], 1)

    def _join(self, sequences: list[Sequence], rows: dict[int, DeviceRow]) -> None:
        """Let new rows join those that run.

        A row joins when rows of its budget begin a token, so that all of them finish in the same launch. A row
        without such partners joins when any row begins a token.
        """
        new = [sequence for sequence in sequences if not rows[sequence.ticket].is_joined]
        if not new:
            return
        active = [row for row in rows.values() if row.has_more_tokens]
        beginning = {row.budget for row in active if row.loops_done == 0}
        if active and not beginning:
            return
        awaited = {row.budget for row in active} - beginning
        joining = [sequence for sequence in new if sequence.trajectory.budget not in awaited]
        if joining:
            self._batch.set_tokens_from_host(
                {
                    rows[sequence.ticket].slot: (sequence.ids[-1], sequence.num_computed_tokens)
                    for sequence in joining
                }
            )
        for sequence in joining:
            rows[sequence.ticket] = rows[sequence.ticket]._replace(is_joined=True)

    def _assign_slot(
        self, device: DeviceState, sequence: Sequence, kv: SequenceKV, length: int, new_tokens: int
    ) -> DeviceState:
        """Give a sequence with so many new tokens a slot, with the KV of `length` tokens."""
        self._allocate(sequence)
        written = len(self._match_prefix(sequence)) * self.blocks.page_tokens
        used = {row.slot for row in device.rows.values()}
        slot = next(slot for slot in range(self.rows) if slot not in used)
        table, draw = self._table(sequence.trajectory), Draw(sequence.request.sampling, sequence.seed)
        self._batch.fill(slot, self._page_table(sequence), kv, length, table, draw, written)
        if self._share_prompts:
            # The KV is queued on the decode stream. Prefills that share it wait for that (`after_decode`).
            self.blocks.cache_prompt(sequence.ticket, self._prefix_root(sequence), sequence.request.prompt)
        row = DeviceRow(slot, sequence.trajectory.budget, sequence.max_new_tokens, new_tokens)
        return replace(device, rows={**device.rows, sequence.ticket: row})

    def _page_table(self, sequence: Sequence) -> list[int]:
        """The pages of a sequence: those of the first loop in the order of its tokens, then those of the second."""
        blocks = self.blocks.held_blocks(sequence.ticket)
        return [block.pages[loop] for loop in range(sequence.trajectory.budget) for block in blocks]


def _is_far_ahead(pending: list[PendingTokens], waits: bool) -> bool:
    """Whether enough is queued. With `waits` the next launch needs all tokens so far."""
    if waits:
        return bool(pending)
    return len(pending) >= TOKENS_AHEAD and sum(tokens.loops for tokens in pending) >= LOOPS_AHEAD


def _collect(arrived: PendingTokens, returned: Mapping[int, list[Choice]]) -> None:
    """Add tokens to what is returned for their sequences. Waits for the copy; tokens of others are dropped."""
    for ticket, choice in arrived.choices():
        if ticket in returned:
            returned[ticket].append(choice)


def _draw(sequence: Sequence, new_tokens: int, returned: Mapping[int, list[Choice]]) -> Draw:
    """What decides the next token of a sequence that has so many new tokens on the device."""
    request = sequence.request
    history: tuple[int, ...] = ()
    if request.sampling.repetition_penalty != 1:  # then nothing is pending (`_is_far_ahead`), so this is all
        history = (*sequence.history, *[choice.token for choice in returned[sequence.ticket]])
    position = len(request.prompt) + new_tokens
    return Draw(request.sampling, sequence.seed, position, history, request.top_logprobs)
