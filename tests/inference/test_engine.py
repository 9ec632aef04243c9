"""Continuous batching: each request alone or among others, rows that come and go, prompts that share."""

import copy
import random
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from options import OPTIONS, Option

from loopformer import LM, LoopformerError, Trajectory
from loopformer.inference import runner as runner_module
from loopformer.inference import scheduler as scheduler_module
from loopformer.inference import sequence as sequence_module
from loopformer.inference.engine import Engine, warm_up
from loopformer.inference.kv_cache import slot_bytes
from loopformer.inference.request import Choice, Request, Result
from loopformer.inference.runner import PlainRunner
from loopformer.inference.scheduler import Busy
from loopformer.inference.sequence import Sequence

from .models import spread


@pytest.fixture(autouse=True)
def _small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that short prompts share some."""
    monkeypatch.setattr(runner_module, "PAGE", 4)


ROUTES = [str(trajectory) for budget in range(1, 5) for trajectory in Trajectory.enumerate(4, budget)]
PROMPTS = ["every pass is told", "its", "time and its step", "told its time", "naïve café"]


def requests_of(lm: LM, draws: list[tuple[int, int, int]]) -> list[Request]:
    return [
        lm.requests(
            [PROMPTS[prompt % len(PROMPTS)]],
            trajectory=ROUTES[trajectory % len(ROUTES)],
            max_tokens=tokens,
            temperature=0.7 * (prompt % 2),
            seed=prompt,
        )[0]
        for prompt, trajectory, tokens in draws
    ]


def finish(engine: Engine) -> dict[int, Result]:
    return {event.ticket: event.result for event in engine.run() if event.result is not None}


def alone(lm: LM, request: Request) -> Result:
    engine = lm.engine(rows=1)
    ticket = engine.submit(request)
    return finish(engine)[ticket]


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 14), st.integers(1, 12)), min_size=1, max_size=9),
    st.integers(1, 5),
    st.integers(0, 99),
)
def test_a_text_does_not_depend_on_company(lm: LM, draws: list[tuple[int, int, int]], rows: int, seed: int) -> None:
    requests = requests_of(lm, draws)
    engine = lm.engine(rows=rows)
    waiting, results, tickets, arrivals = list(requests), {}, {}, random.Random(seed)
    while waiting or not engine.idle:
        for _ in range(arrivals.randrange(4)):
            if waiting:
                request = waiting.pop(0)
                tickets[engine.submit(request)] = request
        results.update({event.ticket: event.result for event in engine.step() if event.result is not None})
        assert engine.running <= rows
    for ticket, request in tickets.items():
        mine = lm.generate(
            lm.need_tokenizer().decode(list(request.prompt)),
            trajectory=request.trajectory,
            max_tokens=request.max_tokens,
            temperature=request.sampling.temperature,
            seed=request.sampling.seed,
        )
        assert results[ticket].ids == mine.ids
        assert results[ticket].text == mine.text
        torch.testing.assert_close(results[ticket].logprobs, mine.logprobs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("option", OPTIONS, ids=str)
def test_settings_beyond_the_paper_decode_what_an_uncached_model_would(lm: LM, option: Option) -> None:
    model = spread(replace(lm.model.config, **option), std=0.3)
    engine = LM(model, lm.tokenizer).engine(rows=3)
    budgets = ("4", "2-2", "1-3", "3-1", "2-1-1", "4")
    prompts = [lm.need_tokenizer().encode(prompt) for prompt in (*PROMPTS, PROMPTS[0])]
    for number, (prompt, budget) in enumerate(zip(prompts, budgets, strict=True)):
        engine.submit(Request(tuple(prompt), Trajectory.parse(budget), max_tokens=3 + number % 4))
    results = finish(engine)
    for ticket, (prompt, budget) in enumerate(zip(prompts, budgets, strict=True)):
        ids = list(prompt)
        for token in results[ticket].ids:
            logits = model(torch.tensor([ids]), budget).logits[0, -1, : model.config.vocab]
            assert token == int(logits.argmax())
            ids.append(token)


def test_a_common_beginning_is_run_once(lm: LM) -> None:
    beginning = "every pass is told its time and its step, "
    requests = lm.requests([beginning + end for end in PROMPTS], budget=2, max_tokens=6)
    engine = lm.engine(rows=5)
    tickets = [engine.submit(request) for request in requests]
    results = finish(engine)
    shared = len(lm.need_tokenizer().encode(beginning)) - 1  # the last token may join with the next letter
    assert engine.counts.shared_tokens >= 4 * (shared - shared % 4)
    assert engine.counts.prompt_tokens + engine.counts.shared_tokens == sum(len(r.prompt) for r in requests)
    for ticket, request in zip(tickets, requests, strict=True):
        assert results[ticket].ids == alone(lm, request).ids
    before = engine.counts.prompt_tokens
    engine.submit(requests[0])  # also after everyone has gone
    finish(engine)
    assert engine.counts.prompt_tokens - before == (len(requests[0].prompt) - 1) % 4 + 1


def test_a_prompt_that_goes_on_where_another_ended_is_shared_too(lm: LM) -> None:
    """Most of the second is known from the first, and then the whole of it is asked for again."""
    first = tuple(random.Random(3).choices(range(3, 200), k=24))
    second = first[:20] + tuple(random.Random(4).choices(range(3, 200), k=20))
    engine = lm.engine(rows=5)
    for prompt in (first, second, second, (*second, 7)):
        engine.submit(Request(prompt, Trajectory.uniform(2), max_tokens=3))
    results = finish(engine)
    assert engine.counts.prompt_tokens == 24 + 20 + 4 + 1
    assert results[1].ids == results[2].ids == alone(lm, Request(second, Trajectory.uniform(2), max_tokens=3)).ids


def test_other_trajectories_do_not_share(lm: LM) -> None:
    engine = lm.engine()
    for budget in (1, 2):
        engine.submit(lm.requests([PROMPTS[0]], budget=budget, max_tokens=2)[0])
    finish(engine)
    assert engine.counts.shared_tokens == 0


def test_prompts_share_nothing_when_asked(lm: LM) -> None:
    engine = Engine(lm.model, lm.need_tokenizer(), PlainRunner(lm.model, 1, share_prompts=False))
    for _ in range(2):
        engine.submit(lm.requests([PROMPTS[0]], max_tokens=2)[0])
    finish(engine)
    assert engine.counts.shared_tokens == 0


def test_cancelling_frees_the_row_at_once(lm: LM) -> None:
    engine = lm.engine(rows=2)
    first, second, third = (
        engine.submit(lm.requests([prompt], budget=budget, max_tokens=30)[0])
        for prompt, budget in zip(PROMPTS, (4, 1, 2), strict=False)
    )
    engine.step()
    assert (engine.running, engine.waiting) == (2, 1)
    runner: Any = engine.runner
    assert engine.used_bytes == 5 * runner.slots.bytes_per_loop
    engine.cancel(first)
    assert engine.running == 1
    engine.step()
    assert engine.used_bytes == 3 * runner.slots.bytes_per_loop
    results = finish(engine)
    assert set(results) == {second, third}
    assert results[second].ids == lm.generate(PROMPTS[1], budget=1, max_tokens=30).ids
    assert engine.used_bytes == 0
    engine.cancel(second)  # done already


def test_a_waiting_request_can_be_cancelled(lm: LM) -> None:
    engine = lm.engine(rows=1)
    kept, dropped = (engine.submit(lm.requests([prompt], max_tokens=3)[0]) for prompt in PROMPTS[:2])
    engine.cancel(dropped)
    assert set(finish(engine)) == {kept}


def test_rows_are_used_again_and_no_memory_is_added(lm: LM) -> None:
    runner = PlainRunner(lm.model, rows=3)
    engine = Engine(lm.model, lm.need_tokenizer(), runner)
    draw = random.Random(0)
    taken = []
    for _ in range(3):
        for _ in range(12):
            engine.submit(requests_of(lm, [(draw.randrange(10), draw.randrange(15), draw.randrange(1, 9))])[0])
        engine.submit(lm.requests(["its"], budget=4, max_tokens=60)[0])
        finish(engine)
        taken.append(runner.slots.bytes)
    assert taken == [taken[0]] * 3
    assert taken[0] <= 3 * slot_bytes(lm.model)


def test_loops_and_tokens_that_nobody_uses_take_no_memory(lm: LM) -> None:
    runner = PlainRunner(lm.model, rows=2)
    engine = Engine(lm.model, lm.need_tokenizer(), runner)
    sizes = []
    for budget, length in ((1, 10), (1, 12), (3, 9), (2, 4), (1, 99)):
        engine.submit(Request((5, 6), Trajectory.uniform(budget), max_tokens=length - 2))
        finish(engine)
        tokens, rest = divmod(runner.slots.bytes, 2 * lm.model.cost.kv_bytes(1, value_bytes=4))
        assert rest == 0
        sizes.append(tokens)
    assert sizes == [10, 15, 3 * 15, 3 * 15, 3 * 64]  # grown by half at least, and to the context at most


def test_cost_is_the_sum_of_the_budgets(lm: LM) -> None:
    engine = lm.engine(rows=4)
    for budget in (1, 4, 2, 1):
        engine.submit(lm.requests(["its"], budget=budget, max_tokens=5)[0])
    engine.step()
    seen: list[int] = []
    hook = lm.model.stack.register_forward_hook(lambda module, inputs, output: seen.append(len(inputs[0])))
    engine.step()
    hook.remove()
    assert seen == [4, 2, 1, 1]


def test_a_full_queue_refuses_and_a_wrong_request_hurts_no_other(lm: LM) -> None:
    engine = lm.engine(rows=1, queue=2)
    good = lm.requests(["its"], max_tokens=3)[0]
    wrong = [
        (Request((1, 10**6), Trajectory.uniform(1)), "Token ids must lie in"),
        (Request((1,) * 65, Trajectory.uniform(1)), "65 tokens but the context is 64"),
        (Request((1,), Trajectory.uniform(5)), "above the model's 4 loops"),
    ]
    tickets = [engine.submit(good)]
    for request, said in wrong:
        for refuse in (engine.check, engine.submit):
            with pytest.raises(LoopformerError, match=said):
                refuse(request)
    tickets.append(engine.submit(good))
    with pytest.raises(Busy, match=r"queue is full \(2 requests are waiting\); try again later"):
        engine.submit(good)
    assert set(finish(engine)) == set(tickets)
    engine.submit(good)
    for rows, queue in ((0, 1), (1, 0)):
        with pytest.raises(LoopformerError, match="1 r"):
            lm.engine(rows=rows, queue=queue)


def test_prompts_up_to_the_context_share_and_end(lm: LM) -> None:
    """A long shared beginning beside a long new prompt: together they would not fit, apart they do."""
    context = lm.model.config.context
    long = tuple(random.Random(1).choices(range(3, 200), k=context))
    other = tuple(random.Random(2).choices(range(3, 200), k=context - 1))
    engine = lm.engine(rows=4)
    trajectory = Trajectory.uniform(2)
    engine.submit(Request(long, trajectory, max_tokens=9))
    first = finish(engine)[0]
    assert first.reason in ("context", "end")
    tickets = [engine.submit(Request(prompt, trajectory, max_tokens=9)) for prompt in (long[:60] + long[:2], other)]
    results = finish(engine)
    for ticket, prompt in zip(tickets, (long[:60] + long[:2], other), strict=True):
        assert results[ticket].ids == alone(lm, Request(prompt, trajectory, max_tokens=9)).ids


def test_submitting_and_cancelling_from_other_threads(lm: LM) -> None:
    engine = lm.engine(rows=4, queue=1000)
    tickets: list[int] = []

    def submit(number: int) -> None:
        for _ in range(10):
            ticket = engine.submit(lm.requests(["told"], budget=1 + number, max_tokens=8)[0])
            tickets.append(ticket)
            if number == 3:
                engine.cancel(ticket)

    threads = [threading.Thread(target=submit, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    results: dict[int, Result] = {}
    while any(thread.is_alive() for thread in threads) or not engine.idle:
        results.update({event.ticket: event.result for event in engine.step() if event.result is not None})
    assert len(tickets) == 40
    assert 30 <= len(results) <= 40
    for result in results.values():
        assert result.ids == lm.generate("told", trajectory=result.trajectory, max_tokens=8).ids


def test_a_step_that_is_interrupted_leaves_gradients_as_they_were(lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the code of `torch.no_grad` itself would leave them off."""
    engine = lm.engine(rows=1)
    engine.submit(lm.requests(["its"], max_tokens=5)[0])
    engine.step()

    def interrupt(_: list[Sequence]) -> list[list[Choice]]:
        torch.set_grad_enabled(False)
        raise KeyboardInterrupt

    monkeypatch.setattr(engine.runner, "decode", interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert torch.is_grad_enabled()


def test_a_step_that_fails_loses_nobody(lm: LM) -> None:
    engine = lm.engine(rows=3)
    tickets = [engine.submit(lm.requests([prompt], budget=2, max_tokens=5)[0]) for prompt in PROMPTS]
    engine.step()

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    hook = lm.model.final_norm.register_forward_hook(full)
    for _ in range(3):
        with pytest.raises(torch.OutOfMemoryError):
            engine.step()
    hook.remove()
    results = finish(engine)
    assert set(results) == set(tickets)
    for ticket, prompt in zip(tickets, PROMPTS, strict=True):
        assert results[ticket].ids == lm.generate(prompt, budget=2, max_tokens=5).ids


def test_prompts_that_started_before_their_group_failed_are_not_started_again(
    lm: LM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the fused runner starts the prompts of a group: one by one, so some are in flight when another fails."""
    prompts = [(65, 66, 67, 68), (75, 74, 73)]
    requests = [Request(prompt, Trajectory.uniform(2), max_tokens=6) for prompt in prompts]
    expected = [alone(lm, request).ids for request in requests]
    engine = lm.engine(rows=3)
    start, failures = engine.runner.start_prefill, iter([torch.OutOfMemoryError("once")])

    def start_one_by_one(group: list[Sequence]) -> None:
        for number, sequence in enumerate(group):
            if number == 1:
                for failure in failures:
                    raise failure
            start([sequence])

    monkeypatch.setattr(engine.runner, "start_prefill", start_one_by_one)
    tickets = [engine.submit(request) for request in requests]
    results = finish(engine)
    assert list(failures) == []
    assert [results[ticket].ids for ticket in tickets] == expected


def test_tokens_that_are_no_whole_numbers_are_refused_at_once(lm: LM) -> None:
    engine = lm.engine(rows=1)
    for token in (1.5, "a", None, 2**70):
        with pytest.raises(LoopformerError, match="A prompt is made of token ids, which are whole numbers"):
            engine.submit(Request((1, token), Trajectory.uniform(1)))  # type: ignore[arg-type]
    assert engine.idle


def test_a_long_prompt_is_run_in_pieces_between_the_tokens_of_others(
    lm: LM, monkeypatch: pytest.MonkeyPatch
) -> None:
    long, short = lm.requests(["every pass is told its time and its step, every pass", "its"], max_tokens=6)
    expected = [alone(lm, request) for request in (long, short)]
    monkeypatch.setattr(PlainRunner, "chunk_tokens", 4)
    engine = lm.engine()
    first = engine.submit(short)
    engine.step()
    second = engine.submit(long)
    events = list(engine.run())
    began = next(number for number, event in enumerate(events) if event.ticket == second)
    assert sum(event.ticket == first for event in events[:began]) >= 3
    found = {event.ticket: event.result for event in events if event.result is not None}
    assert [found[ticket].ids for ticket in (second, first)] == [one.ids for one in expected]
    assert engine.counts.prompt_tokens == len(long.prompt) + len(short.prompt)


def test_a_prompt_that_was_run_in_part_can_be_cancelled_or_fail(lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    (long,) = lm.requests(["every pass is told its time and its step, every pass"], max_tokens=3)
    expected = alone(lm, long)
    monkeypatch.setattr(PlainRunner, "chunk_tokens", 4)
    monkeypatch.setattr(scheduler_module, "IDLE_PREFILL_TOKENS", 4)
    engine = lm.engine(rows=1)
    gone, kept = engine.submit(long), engine.submit(long)
    engine.step()
    engine.cancel(gone)
    engine.step()
    untyped: Any = engine.runner
    extend, untyped.model = untyped.model, None  # as a fault in the middle of a piece leaves it
    with pytest.raises(AttributeError):
        engine.step()
    untyped.model = extend
    found = finish(engine)
    assert (set(found), found[kept].ids) == ({kept}, expected.ids)
    assert not untyped._partial


def test_a_piece_that_works_forgives(lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PlainRunner, "chunk_tokens", 4)
    monkeypatch.setattr(scheduler_module, "IDLE_PREFILL_TOKENS", 4)
    text = "every pass is told its time and its step, every pass"
    (long,) = lm.requests([text], max_tokens=2)
    engine = lm.engine()
    engine.submit(long)
    untyped: Any = engine.runner
    for fails in (True, False, True):  # never twice in a row
        kept, untyped.model = untyped.model, None if fails else untyped.model
        if fails:
            with pytest.raises(AttributeError):
                engine.step()
        else:
            engine.step()
        untyped.model = kept
    assert next(iter(finish(engine).values())).error is None


def test_a_cancelled_prompt_leaves_no_keys_behind(lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PlainRunner, "chunk_tokens", 4)
    monkeypatch.setattr(scheduler_module, "IDLE_PREFILL_TOKENS", 4)
    engine = lm.engine()
    ticket = engine.submit(lm.requests(["every pass is told its time and its step, every pass"])[0])
    engine.step()
    untyped: Any = engine.runner
    assert set(untyped._partial) == {ticket}
    engine.cancel(ticket)
    engine.step()
    assert not untyped._partial


def test_events_bring_the_tokens_of_their_results(lm: LM) -> None:
    engine = lm.engine(rows=2)
    for request in lm.requests(PROMPTS, max_tokens=6):
        engine.submit(request)
    came: dict[int, list[tuple[int, float]]] = {}
    for event in engine.run():
        came.setdefault(event.ticket, []).extend((choice.token, choice.logprob) for choice in event.choices)
        if event.result is not None:
            assert came[event.ticket] == list(zip(event.result.ids, event.result.logprobs, strict=True))


def test_memory_bounds_the_rows(lm: LM) -> None:
    each = slot_bytes(lm.model)
    engine = lm.engine(rows=8, memory=3 * each + 1)
    assert (engine.rows, engine.memory_bytes) == (3, 3 * each + 1)
    with pytest.raises(LoopformerError, match="bytes of one row's keys"):
        lm.engine(memory=each - 1)


def test_a_limit_on_the_memory_of_a_request_ends_its_text(lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    """One function says how many positions a request reserves, and all else follows it."""
    request = Request((5, 6, 7), Trajectory.uniform(2), max_tokens=20)

    def run() -> tuple[Result, int]:
        runner = PlainRunner(lm.model, 1)
        engine = Engine(lm.model, lm.need_tokenizer(), runner)
        ticket = engine.submit(request)
        return finish(engine)[ticket], runner.slots.capacity

    whole, _ = run()
    assert len(whole.ids) == 20
    monkeypatch.setattr(sequence_module, "positions_to_reserve", lambda request, context: 10)
    limited, capacity = run()
    assert limited.ids == whole.ids[:8]  # the prompt, seven tokens that are run, and the last one
    assert limited.reason == "context"
    assert capacity == 10


def test_a_cancelled_request_brings_what_came_before_and_nothing_after(lm: LM) -> None:
    """Its events wait meanwhile, as those of a text that is not streamed do."""
    engine = lm.engine(rows=2)
    tickets = [engine.submit(request) for request in lm.requests(PROMPTS[:2], max_tokens=9)]
    for _ in range(3):
        assert engine.step(lambda sequence: False) == []
    engine.cancel(tickets[0])
    events = engine.step()
    assert [event.ticket for event in events] == tickets
    assert [len(event.choices) for event in events] == [3, 4]
    assert events[0].result is None
    assert {event.ticket for event in engine.run()} == {tickets[1]}


def test_a_request_may_be_cancelled_while_another_ends_in_the_same_step(
    lm: LM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their prompts were run as two groups, and the first one's end frees what the second one has."""
    tokenizer = lm.need_tokenizer()
    engine, decode = lm.engine(rows=2, fast=False), tokenizer.decode
    engine.submit(Request((5, 6), Trajectory.uniform(2), max_tokens=1))
    other = engine.submit(Request((7,) * 9, Trajectory.uniform(2), max_tokens=4))

    def cancel_other(ids: Any) -> str:
        engine.cancel(other)
        return decode(ids)

    monkeypatch.setattr(tokenizer, "decode", cancel_other)
    assert [event.ticket for event in engine.step()] == [0]
    assert engine.idle


def test_a_failure_is_forgiven_by_the_next_token(lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that cannot be decoded at every other try has all its tokens in the end."""
    tokenizer = lm.need_tokenizer()
    expected, calls, decode = lm.generate(PROMPTS[0], max_tokens=6), 0, tokenizer.decode

    def fail(ids: Any) -> str:
        nonlocal calls
        calls += 1
        if calls % 4 == 2:
            raise ValueError("on purpose")
        return decode(ids)

    engine = lm.engine(rows=1)
    engine.submit(lm.requests([PROMPTS[0]], max_tokens=6)[0])
    monkeypatch.setattr(tokenizer, "decode", fail)
    results, raised = [], 0
    while not engine.idle:
        try:
            results += [event.result for event in engine.step() if event.result is not None]
        except ValueError:
            raised += 1
    assert raised >= 2
    assert [(result.text, result.error) for result in results] == [(expected.text, None)]


def test_a_model_that_moves_while_its_engine_runs_is_named(lm: LM) -> None:
    other = LM(copy.deepcopy(lm.model), lm.tokenizer)
    engine = other.engine(rows=1)
    engine.submit(other.requests([PROMPTS[0]], max_tokens=3)[0])
    engine.step()
    other.to("cpu", torch.bfloat16)
    with pytest.raises(LoopformerError, match="The model was moved while this engine has it; make a new engine"):
        engine.step()
    other.to("cpu", torch.float32)
    assert finish(engine)[0].error is None


def test_warming_up_runs_prompts_of_every_length_and_every_number_of_rows(
    lm: LM, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = lm.engine(rows=3, fast=False)
    submitted: list[tuple[int, int, int, float]] = []
    decoded: set[int] = set()
    decode = engine.runner.decode

    def submit(request: Request) -> int:
        sampling, budget = request.sampling, request.trajectory.budget
        submitted.append((budget, len(request.prompt), request.max_tokens, sampling.temperature))
        return Engine.submit(engine, request)

    def count_rows(sequences: list[Sequence]) -> list[list[Choice]]:
        decoded.add(len(sequences))
        return decode(sequences)

    monkeypatch.setattr(engine, "submit", submit)
    monkeypatch.setattr(engine.runner, "decode", count_rows)
    warm_up(engine, [4, 2])
    rows = [(budget, 32, most, 0) for budget in (4, 1) for most in (4, 5, 6)]
    alone = [(32, 2, 0), (63, 2, 0), (4 + 1, 2, 1), (4 + 32, 2, 1), (63, 2, 1)]  # the last three behind a page
    assert submitted == rows + [(budget, *prompt) for budget in (4, 2) for prompt in alone]
    assert decoded == {1, 2, 3}
    assert engine.counts.shared_tokens == 2 * 2 * 4, "the page, for two of the three prompts of each budget"
