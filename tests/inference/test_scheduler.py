"""Who runs next: order, priority, shares and groups, for a runner that computes nothing."""

import itertools
import math
import random
import time
from collections.abc import Sequence as Items
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopformer import ModelConfig, Trajectory
from loopformer.errors import LoopformerError
from loopformer.inference.request import MAX_PRIORITY, Choice, Request
from loopformer.inference.runner import Runner
from loopformer.inference.scheduler import PRIORITY_SECONDS, Busy, PendingPrefixes, Scheduler
from loopformer.inference.sequence import Sequence, Status

CONFIG = ModelConfig(blocks=1, loops=4, width=8, heads=2, ffn=8, context=100, vocab=100)
TRAJECTORIES = [Trajectory.uniform(2), Trajectory.parse("3-1")]
TOKEN = Choice(5, -1.0)


class Letters:
    """A tokenizer of single letters, without an end token."""

    eot = -1

    def decode(self, ids: Any) -> str:
        return "".join(chr(97 + number % 26) for number in ids)


class FakeRunner:
    """Has room for so many sequences, and says of prompts what a test tells it. It computes nothing."""

    def __init__(self, room: int = 100, chunk_tokens: int = 32, block_tokens: int = 0) -> None:
        self.room, self.chunk_tokens, self._share_tokens = room, chunk_tokens, block_tokens
        self.max_in_flight: int | None = None
        self.prompt_tokens = self.shared_tokens = 0
        self.cached: dict[int, int] = {}  # tokens by ticket
        self.pages: dict[int, int] = {}  # needed, by ticket
        self.under_way: list[Sequence] = []

    def check(self, sequence: Sequence) -> None:
        pass

    available_pages = 100

    def pages_needed(self, sequence: Sequence) -> int:
        return self.pages.get(sequence.ticket, 0)

    def cached_tokens(self, sequence: Sequence) -> int:
        return self.cached.get(sequence.ticket, 0)

    def in_flight(self) -> list[Sequence]:
        return self.under_way

    def start_prefill(self, sequences: list[Sequence]) -> None:
        pass

    def next_prefill(self, block: bool) -> list[Sequence]:
        return []

    def finish_prefill(self, sequences: list[Sequence]) -> list[Choice]:
        return [TOKEN for _ in sequences]

    def decode(self, sequences: list[Sequence]) -> list[list[Choice]]:
        return [[TOKEN] for _ in sequences]

    def free_except(self, running: list[Sequence], waiting: list[Sequence]) -> None:
        pass

    rows = 100
    used_bytes = memory_bytes = 0

    @property
    def free_rows(self) -> int:
        return self.room

    @property
    def block_tokens(self) -> int:
        return self._share_tokens


def sequence(
    ticket: int,
    arrived_at: float = 0.0,
    priority: int = 0,
    client: str | None = None,
    prompt: tuple[int, ...] | int = 8,
    trajectory: Trajectory = TRAJECTORIES[0],
) -> Sequence:
    """By default each is of a client of its own, and its prompt begins like no other one."""
    if isinstance(prompt, int):
        prompt = (ticket % 100, *[0] * (prompt - 1))
    request = Request(prompt, trajectory, priority=priority, client=str(ticket) if client is None else client)
    made = Sequence(ticket, request, Letters(), CONFIG)
    made.arrived_at = arrived_at
    return made


def scheduler_of(sequences: Items[Sequence]) -> Scheduler:
    scheduler = Scheduler(queue=max(1, len(sequences)))
    for one in sequences:
        scheduler.add(one)
    return scheduler


def tickets(sequences: Items[Sequence]) -> list[int]:
    return [one.ticket for one in sequences]


def planned(scheduler: Scheduler, runner: Runner, tokens: int = 10**6) -> list[list[int]]:
    return [tickets(group) for group in scheduler.plan_prefills(runner, tokens)]


times = st.floats(0, 100)
priorities = st.integers(-MAX_PRIORITY, MAX_PRIORITY)


# The order of those who wait.


@given(st.lists(times, max_size=20))
def test_equals_are_served_in_the_order_of_arrival(arrivals: list[float]) -> None:
    made = [sequence(ticket, arrived_at) for ticket, arrived_at in enumerate(arrivals)]
    expected = sorted(range(len(arrivals)), key=lambda ticket: arrivals[ticket])
    assert tickets(scheduler_of(made).order_waiting()) == expected


@given(times, priorities, times, priorities)
def test_a_level_of_priority_is_worth_some_seconds_of_waiting(
    first_at: float, first: int, second_at: float, second: int
) -> None:
    made = [sequence(0, first_at, first, client="same"), sequence(1, second_at, second, client="same")]
    lead = (second_at - first_at) + PRIORITY_SECONDS * (second - first)
    if abs(lead) > 1e-6:
        assert tickets(scheduler_of(made).order_waiting()) == ([0, 1] if lead > 0 else [1, 0])


arrivals_of_clients = st.lists(st.tuples(times, priorities, st.sampled_from("abcd")), min_size=1, max_size=40)


def serve(scheduler: Scheduler) -> Sequence:
    """Let the next sequence come in."""
    ((ticket,),) = planned(scheduler, FakeRunner(room=1))
    (served,) = [one for one in scheduler.waiting if one.ticket == ticket]
    served.append([TOKEN])
    return served


@given(arrivals_of_clients)
def test_clients_take_turns(arrivals: list[tuple[float, int, str]]) -> None:
    """Whatever their priorities and times, nobody is served twice while another client waits."""
    made = [sequence(ticket, *arrival) for ticket, arrival in enumerate(sorted(arrivals))]
    scheduler, served = scheduler_of(made), list[str]()
    while scheduler.waiting:
        waiting = {one.request.client for one in scheduler.waiting}
        served.append(serve(scheduler).request.client)
        counts = [served.count(client) for client in waiting]
        assert max(counts) - min(counts) <= 1


@given(st.integers(1, 8), st.integers(1, 30), st.integers(1, 60))
def test_a_newcomer_is_served_next_however_many_others_wait(clients: int, backlog: int, rounds: int) -> None:
    """Beside clients that submit anew whatever was served, with the highest priority."""
    scheduler, ticket = Scheduler(queue=1000), 0
    for _ in range(backlog):
        for client in range(clients):
            scheduler.add(sequence(ticket, 0.0, -MAX_PRIORITY, client=str(client)))
            ticket += 1
    for _ in range(rounds):
        served = serve(scheduler)
        scheduler.add(sequence(ticket, 1.0, -MAX_PRIORITY, client=served.request.client))
        ticket += 1
    scheduler.add(sequence(10_000, 99.0, MAX_PRIORITY, client="ordinary"))
    before = 0
    while serve(scheduler).ticket != 10_000:
        before += 1
    assert before < clients


@given(arrivals_of_clients)
def test_a_client_is_served_by_priority_and_arrival(arrivals: list[tuple[float, int, str]]) -> None:
    made = [sequence(ticket, *arrival) for ticket, arrival in enumerate(arrivals)]
    order = scheduler_of(made).order_waiting()
    for client in "abcd":
        due = [
            one.arrived_at + PRIORITY_SECONDS * one.request.priority
            for one in order
            if one.request.client == client
        ]
        assert due == sorted(due)


@pytest.mark.parametrize("arrivals_per_second", [1, 4])
def test_the_lowest_priority_comes_to_its_turn_however_many_others_keep_coming(arrivals_per_second: int) -> None:
    """One row, which serves as many as come in, all of the highest priority and of the same client."""
    scheduler = Scheduler(queue=1000)
    low = sequence(0, 0.0, MAX_PRIORITY, client="same")
    scheduler.add(low)
    backlog = 10
    ticket, served = 1, list[Sequence]()
    for _ in range(backlog):
        scheduler.add(sequence(ticket, 0.0, -MAX_PRIORITY, client="same"))
        ticket += 1
    while low not in served:
        assert len(served) < 1000
        at = (len(served) + 1) / arrivals_per_second
        scheduler.add(sequence(ticket, at, -MAX_PRIORITY, client="same"))
        ticket += 1
        following = scheduler.order_waiting()[0]
        following.cancel()  # it has run
        served.append(following)
    later = sum(one.arrived_at > 0 for one in served)
    assert later <= 2 * MAX_PRIORITY * PRIORITY_SECONDS * arrivals_per_second
    assert later > 0.5 * MAX_PRIORITY * PRIORITY_SECONDS * arrivals_per_second  # priority does count


# Shares.


def test_a_client_with_one_is_served_beside_a_client_with_fifty() -> None:
    made = [sequence(ticket, 0.001 * ticket, client="many") for ticket in range(50)]
    made.append(sequence(50, 1.0, client="one"))
    assert tickets(scheduler_of(made).order_waiting())[:3] == [0, 50, 1]


def test_equal_turns_are_served_in_the_order_of_arrival_whatever_their_priority() -> None:
    """Otherwise clients with the most urgent priority would all come before one without."""
    made = [sequence(0, 0.0, client="ordinary")]
    made += [sequence(ticket, 0.1 * ticket, -MAX_PRIORITY, client=f"{9 - ticket}") for ticket in range(1, 9)]
    assert tickets(scheduler_of(made).order_waiting()) == list(range(9))


def test_clients_that_submit_one_text_after_another_hold_up_nobody() -> None:
    scheduler = Scheduler(queue=100)
    for ticket, client in enumerate(("two", "two", "a", "b")):
        scheduler.add(sequence(ticket, 0.0, client=client))
    for ticket in range(4, 20):  # one of "a" or "b" always waits
        served = serve(scheduler)
        served.cancel()
        scheduler.remove({served.ticket})
        if served.request.client != "two":
            scheduler.add(sequence(ticket, float(ticket), client=served.request.client))
    assert 1 not in tickets(scheduler.waiting)


def test_a_client_that_had_its_turn_waits_for_the_turns_of_others() -> None:
    made = [sequence(0, 0.0, client="a"), sequence(1, 1.0, client="a"), sequence(2, 2.0, client="b")]
    scheduler = scheduler_of(made)
    assert tickets(scheduler.order_waiting()) == [0, 2, 1]
    made[0].append([TOKEN])
    assert tickets(scheduler.order_waiting()) == [2, 1]
    made[0].cancel()
    assert tickets(scheduler.order_waiting()) == [2, 1]


# Prefills.


def test_prompts_that_were_begun_come_first() -> None:
    made = [sequence(ticket, float(ticket), priority=-MAX_PRIORITY) for ticket in range(3)]
    begun = sequence(3, 50.0, priority=MAX_PRIORITY, prompt=90)
    begun.started_at = 51.0
    scheduler, runner = scheduler_of([*made, begun]), FakeRunner()
    assert tickets(scheduler.order_waiting()) == [3, 0, 1, 2]
    assert planned(scheduler, runner) == [[3]]  # one more piece of it, and nothing beside it
    runner.cached[3] = 70  # whose last piece is short enough
    assert sorted(itertools.chain(*planned(scheduler, runner))) == [0, 1, 2, 3]


@given(
    st.lists(st.integers(1, 80), min_size=1, max_size=20),
    st.integers(1, 200),
    st.integers(0, 20),
    st.sampled_from([4, 32, 100]),
    st.randoms(use_true_random=False),
)
def test_prefills_stay_within_tokens_and_room_and_groups_are_alike(
    lengths: list[int], tokens: int, room: int, chunk_tokens: int, draw: random.Random
) -> None:
    made = [sequence(ticket, float(ticket), prompt=length) for ticket, length in enumerate(lengths)]
    runner = FakeRunner(room, chunk_tokens)
    runner.cached = {ticket: draw.randrange(length) for ticket, length in enumerate(lengths) if draw.random() < 0.3}
    rest = [length - runner.cached.get(ticket, 0) for ticket, length in enumerate(lengths)]
    groups = planned(scheduler_of(made), runner, tokens)
    chosen = sorted(itertools.chain(*groups))
    assert chosen == list(range(len(chosen)))  # those who are first, each once
    assert len(chosen) <= room
    costs = [min(rest[ticket], chunk_tokens) for ticket in chosen]
    assert sum(costs[:-1]) < tokens  # they end with the one that exceeds it
    assert all(rest[ticket] <= chunk_tokens for ticket in chosen[:-1])  # or with a piece of a long one
    if len(chosen) < min(room, len(lengths)):
        assert sum(costs) >= tokens or rest[chosen[-1]] > chunk_tokens
    for group in groups:
        longest = max(rest[ticket] for ticket in group)
        assert len(group) == 1 or longest <= chunk_tokens
        assert all(4 * rest[ticket] >= 3 * longest for ticket in group)
        assert max(runner.cached.get(ticket, 0) for ticket in group) + longest <= CONFIG.context
    if len({*rest}) == 1 and rest[0] <= chunk_tokens and not runner.cached:
        assert len(groups) <= 1  # equal ones are run together


def test_prompts_of_unlike_length_are_run_apart_in_the_order_of_who_is_first() -> None:
    made = [sequence(ticket, prompt=length) for ticket, length in enumerate((8, 30, 9, 24, 7, 22))]
    assert planned(scheduler_of(made), FakeRunner()) == [[2, 0, 4], [1, 3], [5]]


@pytest.mark.parametrize(("tokens", "count"), [(15, 2), (16, 2), (17, 3)])
def test_prompts_end_with_the_one_that_reaches_the_limit_of_tokens(tokens: int, count: int) -> None:
    scheduler = scheduler_of([sequence(ticket, float(ticket), prompt=8) for ticket in range(5)])
    assert planned(scheduler, FakeRunner(), tokens) == [list(range(count))]


@pytest.mark.parametrize(("cached", "together"), [(70, True), (71, False)])
def test_prompts_are_run_apart_if_together_they_exceed_the_context(cached: int, together: bool) -> None:
    """A group has one cache, which holds the longest shared beginning and the longest rest."""
    made = [sequence(0, prompt=30), sequence(1, prompt=cached + 28)]
    runner = FakeRunner()
    runner.cached = {1: cached}
    assert planned(scheduler_of(made), runner) == ([[0, 1]] if together else [[0], [1]])


@pytest.mark.parametrize("waits_for", ["the one under way", "the one before it"])
def test_a_prompt_waits_for_another_that_it_can_share_with(waits_for: str) -> None:
    first, same, after = (
        sequence(0, prompt=(*range(10), 50)),
        sequence(1, prompt=(*range(10), 60)),
        sequence(2, prompt=(70, 71)),
    )
    runner = FakeRunner(block_tokens=4)
    scheduler = scheduler_of([first, same, after])
    if waits_for == "the one under way":
        runner.under_way = [first]
        assert planned(scheduler, runner) == []
    else:
        assert planned(scheduler, runner) == [[0]]
        first.append([TOKEN])
    runner.under_way = []
    runner.cached = {1: 8}
    assert sorted(itertools.chain(*planned(scheduler, runner)))[-2:] == [1, 2]


@pytest.mark.parametrize(
    ("prompt", "trajectory", "cached", "block_tokens"),
    [
        ((0, 1, 2, 50, 51, 52), TRAJECTORIES[0], 0, 4),  # less than a page is common
        (tuple(range(10)), TRAJECTORIES[1], 0, 4),  # another trajectory
        ((0, 1, 2, 3), TRAJECTORIES[0], 0, 4),  # its last token is never shared
        (tuple(range(10)), TRAJECTORIES[0], 8, 4),  # as much is cached already
        (tuple(range(10)), TRAJECTORIES[0], 0, 0),  # nothing is shared here
    ],
)
def test_a_prompt_that_could_share_nothing_waits_for_nobody(
    prompt: tuple[int, ...], trajectory: Trajectory, cached: int, block_tokens: int
) -> None:
    runner = FakeRunner(block_tokens=block_tokens)
    runner.under_way = [sequence(0, prompt=tuple(range(12)))]
    runner.cached = {1: cached}
    scheduler = scheduler_of([*runner.under_way, sequence(1, prompt=prompt, trajectory=trajectory)])
    assert planned(scheduler, runner) == [[1]]


@given(
    size=st.integers(0, 4),
    prompts=st.lists(st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=12), st.booleans()), min_size=1),
)
def test_a_prompt_shares_the_full_blocks_in_which_it_begins_like_another(
    size: int, prompts: list[tuple[list[int], bool]]
) -> None:
    *others, last = [
        sequence(ticket, prompt=tuple(prompt), trajectory=TRAJECTORIES[which])
        for ticket, (prompt, which) in enumerate(prompts)
    ]
    pending = PendingPrefixes(size)
    for other in others:
        pending.add(other)
    shared = [0]
    for other in others:
        tokens = last.request.prompt
        pairs = zip(other.request.prompt, tokens, strict=False)
        common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        if size and other.trajectory == last.trajectory:
            shared.append(min(common, len(tokens) - 1) // size * size)
    assert pending.shared_tokens(last) == max(shared)


def test_planning_prompts_behind_one_prefix_takes_time_in_proportion_to_their_number() -> None:
    """Comparing them in pairs took 64 times as long for 64 prompts as for 8."""
    assert planning_seconds(64) < 24 * planning_seconds(8)


def planning_seconds(count: int) -> float:
    """The processor time to plan prompts that begin with the same 384 cached tokens, at the fastest of twenty."""
    config = replace(CONFIG, context=512)
    prefix, fastest = tuple(range(96)) * 4, math.inf
    for _ in range(20):
        runner = FakeRunner(chunk_tokens=512, block_tokens=16)
        runner.cached = dict.fromkeys(range(count), 384)
        waiting = [
            Sequence(ticket, Request((*prefix, ticket, *range(16)), TRAJECTORIES[0]), Letters(), config)
            for ticket in range(count)
        ]
        scheduler = scheduler_of(waiting)
        started = time.process_time()
        groups = scheduler.plan_prefills(runner, 2048)
        fastest = min(fastest, time.process_time() - started)
        assert sum(map(len, groups)) == count
    return fastest


def test_not_too_many_prefills_are_in_flight() -> None:
    made = [sequence(ticket) for ticket in range(4)]
    scheduler, runner = scheduler_of(made), FakeRunner()
    runner.under_way, runner.max_in_flight = made[:2], 3
    assert planned(scheduler, runner) == [[2, 3]]
    runner.max_in_flight = 2
    assert planned(scheduler, runner) == []


# The queue.


@given(st.integers(1, 5), st.integers(0, 2**32))
def test_the_queue_is_busy_at_its_limit_and_not_before(queue: int, seed: int) -> None:
    steps = random.Random(seed).choices(["add", "run", "cancel", "end", "remove"], [6, 2, 1, 1, 1], k=60)
    scheduler, waiting, running = Scheduler(queue), list[Sequence](), list[Sequence]()
    for ticket, step in enumerate(steps):
        if step == "add":
            new = sequence(ticket)
            if len(waiting) == queue:
                with pytest.raises(Busy, match=rf"queue is full \({queue} requests are waiting\)"):
                    scheduler.add(new)
            else:
                scheduler.add(new)
                waiting.append(new)
        elif step == "run" and waiting:
            running.append(waiting.pop())
            running[-1].append([TOKEN])
        elif step == "cancel" and waiting:
            scheduler.cancel(waiting.pop(0).ticket)
        elif step == "end" and running:
            running.pop().fail("no luck")
        elif step == "remove":
            scheduler.remove({one.ticket for one in scheduler.sequences if one.status is Status.FINISHED})
            assert set(scheduler.sequences) == {*waiting, *running}
        assert set(scheduler.order_waiting()) == set(waiting)
        assert set(scheduler.running) == set(running)


@pytest.mark.parametrize("queue", [0, -1, 1.5, None])
def test_a_queue_holds_one_at_least(queue: Any) -> None:
    with pytest.raises(LoopformerError, match="must hold 1 request or more"):
        Scheduler(queue)
