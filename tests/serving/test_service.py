"""Which requests come in, and at which budget."""

import asyncio
import json
import logging
import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopformer import LM, LoopformerError, Trajectory
from loopformer.inference.chat import ChatTemplate
from loopformer.inference.request import Choice, Event, Result, Sampling
from loopformer.serving import service as service_module
from loopformer.serving.protocol import ApiError, Job, Served
from loopformer.serving.service import (
    ENTER_LOADS,
    LEAVE_LOADS,
    Admission,
    Service,
    grant_trajectory,
    next_level,
    seconds_to_wait,
)

loads = st.floats(0, 1.5)


@given(st.integers(0, 3), loads)
def test_a_level_lies_between_what_entering_and_leaving_allow(level: int, load: float) -> None:
    after = next_level(level, load)
    assert after >= sum(load >= enter for enter in ENTER_LOADS)
    assert after <= sum(load >= leave for leave in LEAVE_LOADS)
    assert next_level(after, load) == after
    if after != level:  # what stands between leaving and entering stays as it is
        assert (after > level) == (load >= ENTER_LOADS[min(level, 2)])


def test_a_load_that_swings_a_little_changes_nothing() -> None:
    level, seen = 0, []
    for load in (0.1, 0.3, 0.24, 0.26, 0.2, 0.3, 0.12, 0.05):
        level = next_level(level, load)
        seen.append(level)
    assert seen == [0, 1, 1, 1, 1, 1, 1, 0]


@given(st.integers(1, 16), st.integers(1, 20), st.integers(0, 3))
def test_never_below_the_least_nor_above_what_was_asked(budget: int, least: int, level: int) -> None:
    asked = Trajectory.uniform(budget)
    budgets = [grant_trajectory(asked, least, each).budget for each in range(4)]
    assert budgets[0] == budget
    assert budgets == sorted(budgets, reverse=True)
    assert min(least, budget) <= budgets[level] <= budget


def test_a_lowered_schedule_is_uniform_and_an_untouched_one_itself() -> None:
    asked = Trajectory.parse("2-1-2-3")
    assert grant_trajectory(asked, 4, 3) is asked
    assert grant_trajectory(asked, 1, 2) == Trajectory.uniform(2)
    assert [grant_trajectory(Trajectory.uniform(40), 1, level).budget for level in range(4)] == [40, 30, 20, 10]
    assert grant_trajectory(Trajectory.uniform(9), 1, 3).budget == 3


def test_a_full_queue_says_when_to_try_again() -> None:
    admission, full = Admission(rows=2, queue=3, memory=100), Trajectory.uniform(4)
    admitted = [admission.enter(1, lambda _: 1, full) for _ in range(5)]
    with pytest.raises(ApiError) as refused:
        admission.enter(1, lambda _: 1, full)
    assert 1 <= int(refused.value.headers["retry-after"]) <= 60
    assert (refused.value.status, refused.value.code) == (429, "server_busy")
    admission.leave(admitted[0], 3.0)
    assert admission.enter(1, lambda _: 1, full).trajectory == full
    with pytest.raises(LoopformerError, match="more than the 5"):
        admission.enter(6, lambda _: 1, full)


def test_the_wait_follows_what_requests_take() -> None:
    admission, full = Admission(rows=1, queue=1, memory=100), Trajectory.uniform(4)

    def wait() -> int:
        with pytest.raises(ApiError) as refused:
            admission.enter(1, lambda _: 1, full)
        return int(refused.value.headers["retry-after"])

    admitted = [admission.enter(1, lambda _: 1, full) for _ in range(2)]
    assert wait() == 3  # a guess
    admission.leave(admitted[0], 10.0)
    again = admission.enter(1, lambda _: 1, full)
    assert wait() == 5  # two at a time, ten seconds each
    admission.leave(again, 50.0)
    admission.enter(1, lambda _: 1, full)
    assert wait() == 10  # the mean moves a quarter of the way, to 20 seconds


def test_bytes_fill_the_queue_too() -> None:
    admission, full = Admission(rows=2, queue=2, memory=100), Trajectory.uniform(4)
    first = admission.enter(1, lambda _: 150, full)
    with pytest.raises(ApiError, match="busy"):
        admission.enter(1, lambda _: 60, full)
    admission.leave(first, 1.0)
    assert admission.load == 0
    admission.enter(1, lambda _: 1000, full)  # alone: what can never fit the engine says itself


def test_a_fuller_queue_grants_less_and_an_empty_one_all_again() -> None:
    admission, full = Admission(rows=2, queue=8, memory=1000, degrade=True), Trajectory.uniform(4)
    admitted = [admission.enter(1, lambda _: 1, full, min_budget=2) for _ in range(10)]
    budgets = [each.trajectory.budget for each in admitted]
    assert budgets == [4, 4, 4, 4, 3, 3, 2, 2, 2, 2]
    assert admitted[-1].trajectory != full
    assert admitted[0].trajectory == full
    for each in admitted:
        admission.leave(each, 1.0)
    assert admission.level == 0
    assert admission.enter(1, lambda _: 1, full).trajectory == full


def test_without_degrade_everybody_gets_what_they_ask_for() -> None:
    admission, full = Admission(rows=1, queue=9, memory=1000), Trajectory.uniform(4)
    assert all(admission.enter(1, lambda _: 1, full).trajectory == full for _ in range(10))


@given(st.integers(0, 500), st.integers(1, 64), st.floats(0, 1e4))
def test_a_wait_is_a_second_or_more_and_a_minute_or_less(waiting: int, rows: int, seconds: float) -> None:
    assert 1 <= seconds_to_wait(waiting, rows, seconds) <= 60


@pytest.mark.parametrize(
    ("texts", "size", "load"),
    [
        (2, 50, 0.0),  # the slots are taken, and their memory
        (2, 75, 0.125),  # half as many bytes again, of the four times as many that the queue may hold
        (2, 150, 0.5),
        (4, 25, 0.25),  # two of the eight places in the queue
        (4, 40, 0.25),  # the greater of 0.25 by texts and 0.15 by bytes
        (4, 75, 0.5),
        (10, 50, 1.0),
    ],
)
def test_the_load_is_the_share_of_the_queue_in_use(texts: int, size: int, load: float) -> None:
    admission, full = Admission(rows=2, queue=8, memory=100), Trajectory.uniform(4)
    for _ in range(texts):
        admission.enter(1, lambda _: size, full)
    assert admission.load == pytest.approx(load)


def test_the_queue_holds_bytes_in_proportion_to_its_texts() -> None:
    """Two rows fill the memory of 100 bytes, so two rows and eight in the queue may hold 500."""
    admission, full = Admission(rows=2, queue=8, memory=100), Trajectory.uniform(4)
    admission.enter(1, lambda _: 460, full)
    with pytest.raises(ApiError, match="busy"):
        admission.enter(1, lambda _: 41, full)
    admission.enter(1, lambda _: 40, full)
    assert admission.load == 1


def test_bytes_alone_lower_the_budget() -> None:
    admission, full = Admission(rows=2, queue=8, memory=100, degrade=True), Trajectory.uniform(4)
    budgets = [admission.enter(1, lambda _: 50, full).trajectory.budget for _ in range(3)]
    assert budgets == [4, 4, 4]
    admission.enter(1, lambda _: 50, full)  # 200 bytes: the queue is a quarter full
    assert admission.enter(1, lambda _: 50, full).trajectory.budget == 3


@pytest.mark.parametrize(
    ("waiting", "rows", "seconds", "wait"),
    [
        (0, 1, 0.5, 1),  # never less than a second
        (0, 1, 10.0, 10),  # one runs: it has to leave
        (0, 4, 10.0, 3),  # one of four has to leave: 2.5 s
        (1, 4, 10.0, 2),
        (8, 4, 12.0, 4),  # four of twelve have to leave
        (64, 16, 20.0, 8),
        (64, 16, 200.0, 60),  # never more than a minute
    ],
)
def test_the_wait_is_for_half_the_queue(waiting: int, rows: int, seconds: float, wait: int) -> None:
    assert seconds_to_wait(waiting, rows, seconds) == wait


def test_the_wait_follows_a_moving_average() -> None:
    """The first duration counts in full, each later one a quarter."""
    admission, full = Admission(rows=1, queue=1, memory=100), Trajectory.uniform(4)
    running, leaving = (admission.enter(1, lambda _: 1, full) for _ in range(2))
    waits = []
    for seconds in (40.0, 40.0, 8.0, 8.0, 0.0, 72.0, 72.0):
        admission.leave(leaving, seconds)
        leaving = admission.enter(1, lambda _: 1, full)
        with pytest.raises(ApiError, match=r"try again in \d+ s") as refused:
            admission.enter(1, lambda _: 1, full)
        waits.append(int(refused.value.headers["retry-after"]))
    averages = [40, 40, 32, 26, 19.5, 32.625, 42.46875]
    assert waits == [math.ceil(average / 2) for average in averages]  # one of the two has to leave
    admission.leave(running, 0.0)


def test_a_client_may_hold_three_times_what_it_leaves_free() -> None:
    admission, full = Admission(rows=4, queue=12, memory=10**6), Trajectory.uniform(4)
    with pytest.raises(LoopformerError, match="13 texts at once are more than the 12 that this server accepts"):
        admission.enter(13, lambda _: 1, full, client="many")
    held = [admission.enter(1, lambda _: 1, full, client="many") for _ in range(12)]
    with pytest.raises(ApiError, match="You have 12 texts in flight, which is your share") as refused:
        admission.enter(1, lambda _: 1, full, client="many")
    assert (refused.value.status, refused.value.code) == (429, "client_busy")
    others = [admission.enter(1, lambda _: 1, full, client=f"other {number}") for number in range(4)]
    with pytest.raises(ApiError, match="The server is busy"):  # only now nobody comes in
        admission.enter(1, lambda _: 1, full, client="one more")
    assert admission.by_client["many"] == 12
    for admitted in (*held, *others):
        admission.leave(admitted, 1.0)
    assert not admission.by_client


def test_latencies_are_measured_from_the_request_and_tokens_from_the_first(
    lm: LM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two texts of a request: one gets three tokens from 2 to 8 s, the other a single one."""
    clock = [100.0]
    monkeypatch.setattr(service_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    full, choice = Trajectory.uniform(4), Choice(5, -1.0)

    def ended(count: int) -> Result:
        return Result("", (5,) * count, (-1.0,) * count, "length", 3, full)

    answers = [
        (101.0, {}),
        (102.0, {1: Event(0, "", None, (choice,), 101.5)}),
        (105.0, {0: Event(0, "", ended(1), (choice,), 104.0)}),
        (108.0, {1: Event(0, "", ended(3), (choice, choice), 101.5)}),
    ]

    async def read() -> dict[int, Event]:
        clock[0], events = answers.pop(0)
        return events

    cancelled: list[object] = []
    call = SimpleNamespace(read=read)
    engine: Any = SimpleNamespace(state="ready", submit=lambda requests, stream: call, cancel=cancelled.append)
    served = Served("tiny", ChatTemplate(lm.need_tokenizer()), lm.model.config, full, 4, 64, 32)
    service = Service(engine, served, Admission(rows=2, queue=3, memory=10**9))
    job = Job(((1, 2, 3),), 2, Sampling(), 8, (), full, 1, 0, None)

    async def generate() -> None:
        async with service.generate(job, "/v1/completions", stream=True) as generation:
            async for _ in generation.events():
                pass

    with caplog.at_level(logging.INFO):
        asyncio.run(generate())
    line = json.loads(caplog.messages[-1])
    assert (line["queue_seconds"], line["first_token_seconds"], line["seconds"]) == (1.5, 2.0, 8.0)
    assert (line["texts"], line["prompt_tokens"], line["new_tokens"]) == (2, 3, 4)
    assert cancelled == [call]
    values = {
        sample.name.removeprefix("loopformer:"): sample.value
        for metric in service.metrics.registry.collect()
        for sample in metric.samples
        if sample.labels.get("budget") == "4"
    }
    assert values["request_queue_time_seconds_sum"] == 1.5 + 4
    assert values["time_to_first_token_seconds_sum"] == 2 + 5
    assert values["e2e_request_latency_seconds_sum"] == 8 + 5
    assert values["request_time_per_output_token_seconds_count"] == 1, "a text of one token has no time between"
    assert values["request_time_per_output_token_seconds_sum"] == (8 - 2) / 2
    assert values["prompt_tokens_total"] == 2 * 3
    assert values["generation_tokens_total"] == 4
    assert values["request_success_total"] == 2
