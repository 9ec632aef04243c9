"""The plain runner in an engine: what it keeps of prompts, its memory, and the likely tokens that it reports."""

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from loopformer import LoopedLM, ModelConfig, Trajectory
from loopformer.inference import runner as runner_module
from loopformer.inference.engine import Engine
from loopformer.inference.kv_cache import slot_bytes
from loopformer.inference.request import Request, Result, Sampling
from loopformer.inference.runner import PlainRunner
from loopformer.inference.sequence import Sequence

from .models import spread

VOCAB, POISON, PAGE = 40, 39, 4
CONFIG = ModelConfig(blocks=1, loops=3, width=16, heads=2, ffn=16, context=30, vocab=VOCAB)
SCHEDULES = [trajectory for budget in range(1, 4) for trajectory in Trajectory.enumerate(3, budget)]


class Letters:
    """A tokenizer of single letters, without an end token."""

    eot = -1

    def decode(self, ids: Any) -> str:
        return "".join(chr(97 + number % 26) for number in ids)


@pytest.fixture(autouse=True)
def _small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "PAGE", PAGE)


@pytest.fixture(scope="module")
def model() -> LoopedLM:
    return spread(CONFIG, seed=2, std=0.4)


def engine_of(model: LoopedLM, slots: int = 3, memory: int | None = None) -> Engine:
    runner = PlainRunner(model, slots, memory)
    return Engine(model, Letters(), runner)


def finish(engine: Engine) -> dict[int, Result]:
    return {event.ticket: event.result for event in engine.run() if event.result is not None}


def alone(model: LoopedLM, request: Request) -> Result:
    engine = engine_of(model, 1)
    engine.submit(request)
    return finish(engine)[0]


def cached_tokens(engine: Engine, request: Request) -> int:
    return engine.runner.cached_tokens(Sequence(10**6, request, Letters(), engine.model.config))


def cached_keys(engine: Engine) -> list[Tensor]:
    """The tensors of all cached blocks."""
    untyped: Any = engine.runner
    return [block.kv for block in untyped.blocks._cached.values()]


def slots_bytes(engine: Engine) -> int:
    untyped: Any = engine.runner
    return sum(loop.nbytes for loop in untyped.slots.loops)


@contextmanager
def poisoned(model: LoopedLM, token: int = POISON) -> Iterator[None]:
    """Wherever this token is run, its state is not a number."""

    def poison(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output.masked_fill((inputs[0] == token)[..., None], float("nan"))

    hook = model.tokens.register_forward_hook(poison)
    try:
        yield
    finally:
        hook.remove()


@given(
    st.lists(
        st.tuples(
            st.sampled_from(SCHEDULES), st.integers(1, 14), st.none() | st.integers(0, 13), st.integers(0, 1)
        ),
        min_size=1,
        max_size=8,
    ),
    st.sampled_from([3, 512]),
)
def test_rows_that_are_not_a_number_are_never_kept_or_shared(
    model: LoopedLM, drawn: list[tuple[Trajectory, int, int | None, int]], chunk_tokens: int
) -> None:
    """Wherever in a prompt it is, whoever is run together with it, at once or in pieces."""
    requests, bad = [], set()
    for ticket, (trajectory, length, where, kind) in enumerate(drawn):
        prompt = [kind, *range(2, 1 + length)]
        if where is not None and where < length:
            prompt[where] = POISON
            bad.add(ticket)
        requests.append(Request(tuple(prompt), trajectory, max_tokens=4))
    expected = [alone(model, request) for request in requests]
    engine = engine_of(model)
    engine.runner.chunk_tokens = chunk_tokens
    for request in requests:
        engine.submit(request)
    with poisoned(model):
        results = finish(engine)
    for ticket, result in results.items():
        if ticket in bad:
            assert result.reason == "error"
            assert "not a number" in (result.error or "")
        elif POISON not in expected[ticket].ids:
            assert result.ids == expected[ticket].ids
    assert all(keys.isfinite().all() for keys in cached_keys(engine))
    for request in requests:
        before = request.prompt.index(POISON) if POISON in request.prompt else len(request.prompt)
        assert cached_tokens(engine, request) <= before
    tickets = [engine.submit(request) for request in requests]  # where nothing is poisoned any more
    results = finish(engine)
    assert [results[ticket].ids for ticket in tickets] == [result.ids for result in expected]


def test_a_row_that_stops_being_a_number_while_it_decodes_leaves_its_prompt_to_others(model: LoopedLM) -> None:
    other = Request((1, 2), SCHEDULES[1], max_tokens=3)
    texts = [alone(model, Request((first, *range(2, 14)), SCHEDULES[2], max_tokens=10)) for first in range(14, 20)]
    first, expected, token = next(
        (first, text, token)
        for first, text in enumerate(texts, start=14)
        for token in text.ids[1:-1]
        if token > 20 and token not in alone(model, other).ids
    )
    request = Request((first, *range(2, 14)), SCHEDULES[2], max_tokens=10)
    engine = engine_of(model, 2)
    tickets = [engine.submit(request), engine.submit(other)]
    with poisoned(model, token):
        results = finish(engine)
    assert results[tickets[0]].reason == "error"
    assert results[tickets[0]].ids == expected.ids[: expected.ids.index(token) + 1]
    assert all(keys.isfinite().all() for keys in cached_keys(engine))
    untyped: Any = engine.runner
    engine.step()
    assert all(loop.isfinite().all() for loop in untyped.slots.loops)
    again = engine.submit(request)
    assert finish(engine)[again].ids == expected.ids
    assert engine.counts.shared_tokens == 12


@settings(max_examples=15)
@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(0, 400))
def test_shared_prompts_and_slots_stay_within_the_memory(
    model: LoopedLM, seed: int, rows: int, spare_tokens: int
) -> None:
    draw = random.Random(seed)
    memory = rows * slot_bytes(model) + spare_tokens * model.cost.kv_bytes(1, value_bytes=4) // 3
    engine = engine_of(model, rows, memory)
    rows = engine.rows
    beginnings = [tuple(draw.choices(range(VOCAB), k=12)) for _ in range(3)]
    requests = {}
    for _ in range(14):
        prompt = (
            *draw.choice(beginnings)[: draw.randint(1, 12)],
            *draw.choices(range(VOCAB), k=draw.randint(0, 4)),
        )
        request = Request(
            prompt,
            draw.choice(SCHEDULES[-4:] if draw.random() < 0.1 else SCHEDULES[:2]),
            max_tokens=draw.randint(1, 16),
        )
        requests[engine.submit(request)] = request
    results: dict[int, Result] = {}
    while not engine.idle:
        results.update({event.ticket: event.result for event in engine.step() if event.result is not None})
        cached = cached_keys(engine)
        assert slots_bytes(engine) + sum(keys.nbytes for keys in cached) <= memory
        assert len({keys.untyped_storage().data_ptr() for keys in cached}) == len(cached)
        assert all(keys.untyped_storage().nbytes() == keys.nbytes for keys in cached)  # no view of a larger one
        assert engine.used_bytes <= slots_bytes(engine)
    assert sorted(results) == sorted(requests)
    for ticket, request in requests.items():
        assert results[ticket].ids == alone(model, request).ids


def test_prompts_share_until_slots_need_the_memory(model: LoopedLM) -> None:
    memory = slot_bytes(model)
    engine = engine_of(model, 1, memory)
    short, short_too = (Request((*range(12), last), SCHEDULES[0], max_tokens=2) for last in (20, 21))
    large = Request((30, 31), Trajectory.uniform(3), max_tokens=28)
    shared = []
    for request in (short, short_too, large, short, short_too):
        ticket = engine.submit(request)
        before = engine.counts.shared_tokens
        assert finish(engine)[ticket].ids == alone(model, request).ids
        shared.append(engine.counts.shared_tokens - before)
        assert slots_bytes(engine) + sum(keys.nbytes for keys in cached_keys(engine)) <= memory
    assert shared == [0, 12, 0, 0, 0]
    assert slots_bytes(engine) == memory
    assert not cached_keys(engine)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(SCHEDULES),
            st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9),
            st.integers(0, 5) | st.just(VOCAB + 3),
            st.sampled_from([0.0, 0.0, 0.8]),
            st.sampled_from([1.0, 1.3]),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_top_logprobs_are_the_models_own_and_change_no_text(
    model: LoopedLM, drawn: list[tuple[Trajectory, list[int], int, float, float]]
) -> None:
    requests = [
        Request(
            tuple(prompt),
            trajectory,
            Sampling(temperature, repetition_penalty=penalty, seed=number),
            max_tokens=5,
            top_logprobs=top_logprobs,
        )
        for number, (trajectory, prompt, top_logprobs, temperature, penalty) in enumerate(drawn)
    ]
    engine = engine_of(model)
    choices: dict[int, list[Any]] = {engine.submit(request): [] for request in requests}
    results: dict[int, Result] = {}
    for event in engine.run():
        choices[event.ticket] += event.choices
        if event.result is not None:
            results[event.ticket] = event.result
    for ticket, request in enumerate(requests):
        without = Request(request.prompt, request.trajectory, request.sampling, max_tokens=5)
        assert results[ticket].ids == alone(model, without).ids
        assert [choice.token for choice in choices[ticket]] == list(results[ticket].ids)
        ids = torch.tensor([[*request.prompt, *results[ticket].ids]])
        with torch.no_grad():
            logits = model(ids, request.trajectory).logits[0, len(request.prompt) - 1 : -1, :VOCAB]
        for choice, expected in zip(choices[ticket], logits.log_softmax(-1), strict=True):
            count = min(request.top_logprobs, VOCAB)
            likely = expected.topk(count)
            # Loops of random weights enlarge the rounding of another order of sums.
            assert choice.logprob == pytest.approx(float(expected[choice.token]), abs=1e-3)
            assert [logprob for _, logprob in choice.top_logprobs] == pytest.approx(
                likely.values.tolist(), abs=1e-3
            )
            # Each value is that of its token, so a tie may be broken either way.
            tokens = [token for token, _ in choice.top_logprobs]
            assert len(set(tokens)) == len(tokens) == count
            assert expected[tokens].tolist() == pytest.approx(likely.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("share_prompts", [False, True])
def test_texts_follow_weights_that_were_changed_in_place(model: LoopedLM, share_prompts: bool) -> None:
    """The conditions of a trajectory's loops too, which are computed once."""
    changed = copy.deepcopy(model)
    engine = Engine(changed, Letters(), PlainRunner(changed, 2, share_prompts=share_prompts))
    request = Request(tuple(range(9)), SCHEDULES[2], max_tokens=8)
    for name in ("conditioner.time.up.weight", "stack.blocks.0.attention.qkv.weight"):
        before = engine.submit(request)
        assert finish(engine)[before].ids == alone(changed, request).ids
        with torch.no_grad():
            dict(changed.named_parameters())[name].mul_(-3)
        after = engine.submit(request)
        assert finish(engine)[after].ids == alone(changed, request).ids


def test_a_prompt_is_run_anew_if_weights_change_between_its_pieces(model: LoopedLM) -> None:
    """Keys of the old weights must reach neither its own text nor prompts that come later."""
    changed = copy.deepcopy(model)
    engine = engine_of(changed)
    engine.runner.chunk_tokens = 8
    other = Request((1, 2), SCHEDULES[0], max_tokens=20)  # beside it, a step runs no more than a piece
    request = Request(tuple(range(20)), SCHEDULES[2], max_tokens=8)
    engine.submit(other)
    engine.step()
    first = engine.submit(request)
    engine.step()
    assert cached_tokens(engine, request) == 0  # it is under way, and nothing is shared yet
    assert engine.counts.prompt_tokens == 2 + 8
    with torch.no_grad():
        dict(changed.named_parameters())["stack.blocks.0.attention.qkv.weight"].mul_(-3)
    second = engine.submit(request)
    results = finish(engine)
    assert results[first].ids == results[second].ids == alone(changed, request).ids
