"""Faults harm nobody: whatever is raised wherever, every text is right, comes once, and none is lost.

LOOPFORMER_FAULTS=all injects at every call of every kind instead of at a part of them. The fused engine's kernels
run on a GPU, or for a few faults in Triton's interpreter (TRITON_INTERPRET=1).
"""

import copy
import os
import random
import signal
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loopformer import LM, LoopedLM, ModelConfig, Trajectory
from loopformer.data.tokenizer import Tokenizer
from loopformer.inference import runner as runner_module
from loopformer.inference.engine import Engine
from loopformer.inference.fused.batch_pool import BatchPool
from loopformer.inference.kv_cache import SlotPool
from loopformer.inference.request import Event, Request, Result
from loopformer.inference.runner import prefill

from .models import spread

EVERYWHERE = os.environ.get("LOOPFORMER_FAULTS") == "all"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
FUSED = pytest.param(
    "fused",
    marks=[
        pytest.mark.cuda,
        pytest.mark.skipif(
            find_spec("triton") is None or not (INTERPRETED or torch.cuda.is_available()), reason="no GPU"
        ),
    ],
)
KINDS = ["plain", FUSED]  # of engines


@pytest.fixture(autouse=True)
def _small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that short prompts share some."""
    monkeypatch.setattr(runner_module, "PAGE", 2)


class Injected(RuntimeError):
    """A failure on purpose."""


@pytest.fixture(scope="module")
def small() -> LM:
    tokenizer = Tokenizer.train(["every pass is told its time and its step"] * 20, 270)
    config = ModelConfig(blocks=1, loops=3, width=16, heads=2, ffn=16, context=32, vocab=tokenizer.vocab_size)
    return LM(spread(config, seed=3, std=0.5), tokenizer)


@pytest.fixture(scope="module")
def fused(small: LM) -> LM:
    """The same where the fused kernels run, if they do."""
    if not (INTERPRETED or torch.cuda.is_available()):
        return small
    torch.set_float32_matmul_precision("highest")
    return LM(copy.deepcopy(small.model), small.tokenizer).to("cpu" if INTERPRETED else "cuda")


def runs_on(kind: str, small: LM, fused: LM) -> LM:
    """The model where a kind of engine runs it."""
    return fused if kind == "fused" else small


def engine_of(lm: LM, kind: str = "plain", rows: int = 3, pool: BatchPool | None = None) -> Engine:
    if kind != "fused":
        return lm.engine(rows, fast=False)
    from loopformer.inference.fused.runner import FusedRunner

    with (pool or pool_of(lm.model)).batch(rows) as batch:
        return Engine(lm.model, lm.need_tokenizer(), FusedRunner(batch))


@cache
def pool_of(model: LoopedLM) -> BatchPool:
    """Its graphs are used again."""
    return BatchPool(model)


def requests_of(lm: LM) -> list[Request]:
    """Mixed budgets, lengths and seeds; two begin alike, and slots are fewer than requests."""
    asked = [
        ("every pass", 3, 4, 0.0),
        ("its", 1, 6, 1.0),
        ("told its time", 3, 2, 0.0),
        ("told its step", 3, 3, 0.7),
    ]
    asked += [("step", 2, 5, 0.0), ("and", 2, 1, 1.0)]
    return [
        lm.requests([prompt], budget=budget, max_tokens=tokens, temperature=temperature, seed=number)[0]
        for number, (prompt, budget, tokens, temperature) in enumerate(asked)
    ]


def right_texts(lm: LM, kind: str) -> list[tuple[str, tuple[int, ...]]]:
    results = finished(list(submitted(lm, kind).run()))
    return [(results[ticket].text, results[ticket].ids) for ticket in sorted(results)]


def submitted(lm: LM, kind: str = "plain") -> Engine:
    engine = engine_of(lm, kind)
    for request in requests_of(lm):
        engine.submit(request)
    return engine


def finished(events: list[Event]) -> dict[int, Result]:
    """The result of each ticket, which must have come once, with pieces that make up its text."""
    results: dict[int, list[Result]] = defaultdict(list)
    pieces: dict[int, str] = defaultdict(str)
    for event in events:
        pieces[event.ticket] += event.piece
        if event.result is not None:
            results[event.ticket].append(event.result)
    for ticket, found in results.items():
        assert len(found) == 1, f"{len(found)} results for ticket {ticket}"
        assert pieces[ticket] == found[0].text
    return {ticket: found for ticket, (found,) in results.items()}


@contextmanager
def fault_at(number: int, kind: type[BaseException]) -> Iterator[list[str]]:
    """Raise once, at the so-manyth call of a function of the package; the list says where it was."""
    where: list[str] = []
    calls = 0

    def trace(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if event != "call" or "loopformer" not in file or "/tests/" in file or name == "<genexpr>":
            return  # a generator that is closed cannot raise
        if file.endswith("kernels.py"):
            return  # which are Python in Triton's interpreter alone
        calls += 1
        if calls == number:
            where.append(frame.f_code.co_qualname)
            raise kind("on purpose")

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield where
    finally:
        sys.settrace(before)


def drive(
    engine: Engine, kinds: tuple[type[BaseException], ...] = (Injected, MemoryError, KeyboardInterrupt)
) -> list[Event]:
    """Take events until nothing is left to do, going on after every fault."""
    received: list[Event] = []
    for _ in range(1000):
        try:
            for event in engine.run():
                received.append(event)
        except (Injected, MemoryError, KeyboardInterrupt):
            continue
        return received
    raise AssertionError("The engine is stuck.")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("raised", [Injected, MemoryError, KeyboardInterrupt])
def test_a_fault_at_any_call_harms_nobody(small: LM, fused: LM, kind: str, raised: type[BaseException]) -> None:
    lm = runs_on(kind, small, fused)
    expected = right_texts(small, "plain")
    rng, number, tried = random.Random(repr((raised, kind))), 0, 0
    while tried < 4 or not (INTERPRETED and kind == "fused"):
        number += 1 if EVERYWHERE else rng.randrange(1, 160)
        engine = submitted(lm, kind)
        with fault_at(number, raised) as where:
            events = drive(engine)
        if not where:
            break  # past the last call
        tried += 1
        assert engine.idle
        results = finished(events)
        assert sorted(results) == list(range(len(expected))), where
        assert [(results[one].text, results[one].ids) for one in sorted(results)] == expected, where
    assert tried > (10 if not INTERPRETED else 3)


@pytest.mark.parametrize("kind", KINDS)
def test_real_signals_at_random_moments_harm_nobody(small: LM, fused: LM, kind: str) -> None:
    lm, many = runs_on(kind, small, fused), 400 if EVERYWHERE else 40
    expected = right_texts(small, "plain")
    if kind == "fused":
        list(submitted(lm, kind).run())  # what is imported at first use is not struck
    rng, armed, struck = random.Random(1), [False], [0]

    def strike(_: int, frame: FrameType | None) -> None:
        if frame is not None and frame.f_code.co_name == "gc_callback":
            signal.setitimer(signal.ITIMER_VIRTUAL, 1e-4)  # Python drops what is raised in one; strike after it
        elif armed[0]:
            armed[0] = False
            struck[0] += 1
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGVTALRM, strike)
    try:
        for _ in range(many if not (INTERPRETED and kind == "fused") else 2):
            engine, received = submitted(lm, kind), []
            for attempt in range(1000):
                try:
                    armed[0] = attempt < 30  # and then let it come to an end
                    signal.setitimer(signal.ITIMER_VIRTUAL, rng.uniform(1e-4, 8e-3))
                    for event in engine.run():
                        received.append(event)
                    armed[0] = False
                    break
                except KeyboardInterrupt:
                    pass
            assert engine.idle
            assert torch.is_grad_enabled()
            results = finished(received)
            assert [(results[one].text, results[one].ids) for one in sorted(results)] == expected
    finally:
        armed[0] = False
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    assert struck[0] > (20 if not INTERPRETED else 5)


@contextmanager
def poisoned(model: LoopedLM, token: int) -> Iterator[None]:
    """Wherever this token is run, its state is not a number."""

    def poison(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output.masked_fill((inputs[0] == token)[..., None], float("nan"))

    hook = model.tokens.register_forward_hook(poison)
    try:
        yield
    finally:
        hook.remove()


@pytest.mark.parametrize("while_decoding", [False, True])
def test_one_request_that_is_not_a_number_ends_alone(small: LM, while_decoding: bool) -> None:
    """Its slot, whose keys are no numbers either, serves the next ones."""
    prompts = ["every pass is told its time and its step", "its", "told", "step", "and"]  # the first is longest
    good = small.requests(prompts, budget=2, max_tokens=6)
    expected = small.generate(prompts, budget=2, max_tokens=6)
    used = {token for result in expected for token in result.ids} | {t for request in good for t in request.prompt}
    strange = [token for token in range(200) if token not in used]
    if while_decoding:  # a text that comes to a token which nobody else has, beyond where the short ones end
        for token in strange:
            bad = Request((token,) * 9, Trajectory.uniform(2), max_tokens=5)
            engine = engine_of(small, rows=2)
            engine.submit(bad)
            poison = [t for t in finished(list(engine.run()))[0].ids[:3] if t in strange and t != token]
            if poison:
                break
    else:
        bad, poison = Request((strange[0], 5), Trajectory.uniform(2), max_tokens=9), strange
    engine = engine_of(small, rows=2)
    tickets = [engine.submit(request) for request in (good[0], bad, *good[1:])]
    with poisoned(small.model, poison[0]):
        results = finished(list(engine.run()))
    failed = results[tickets[1]]
    assert failed.reason == "error"
    assert "not a number" in (failed.error or "")
    assert bool(failed.ids) == while_decoding
    for ticket, result in zip([tickets[0], *tickets[2:]], expected, strict=True):
        assert (results[ticket].text, results[ticket].ids) == (result.text, result.ids)


@pytest.mark.parametrize("kind", [FUSED])
@pytest.mark.parametrize("while_decoding", [False, True])
def test_one_fused_request_that_is_not_a_number_ends_alone(
    small: LM, fused: LM, kind: str, while_decoding: bool
) -> None:
    prompts = ["every pass is told its time and its step", "its", "told", "step", "and"]
    expected = small.generate(prompts, budget=2, max_tokens=6, fast=False)
    bad = Request((3, 5), Trajectory.uniform(2), max_tokens=9)
    engine = engine_of(fused, kind, 2, BatchPool(fused.model))  # graphs that are recorded here keep the poison
    good = fused.requests(prompts, budget=2, max_tokens=6)
    tickets = [engine.submit(request) for request in (good[0], bad, *good[1:])]
    untyped: Any = engine.runner
    admit_with, placed = untyped._admit, []

    def admit(row: Any, keys: Any) -> None:  # its keys are no numbers: what it looks at, then
        if row.ticket == tickets[1] and while_decoding:
            for loop in keys.loops:
                loop.fill_(float("nan"))
            placed.append(row.ticket)
        admit_with(row, keys)

    untyped._admit = admit
    if while_decoding:
        results = finished(list(engine.run()))
    else:
        with poisoned(fused.model, 3):
            results = finished(list(engine.run()))
    failed = results[tickets[1]]
    assert failed.reason == "error"
    assert "not a number" in (failed.error or "")
    assert bool(failed.ids) == while_decoding == bool(placed)
    for ticket, result in zip([tickets[0], *tickets[2:]], expected, strict=True):
        assert (results[ticket].text, results[ticket].ids) == (result.text, result.ids)


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_whose_own_work_fails_again_and_again_ends_with_it(small: LM, fused: LM, kind: str) -> None:
    class Fragile:
        """A tokenizer that cannot read one token."""

        eot = small.need_tokenizer().eot
        bad = 0

        def decode(self, ids: Any) -> str:
            if self.bad in ids:
                raise ValueError("cannot read it")
            return small.need_tokenizer().decode(ids)

    texts = small.generate(["its", "told"], budget=1, max_tokens=6)
    tokenizer: Any = Fragile()
    tokenizer.bad = next(token for token in texts[0].ids if token not in texts[1].ids)
    engine = engine_of(LM(runs_on(kind, small, fused).model, tokenizer), kind, rows=2)
    for request in small.requests(["its", "told"], budget=1, max_tokens=6):
        engine.submit(request)
    received: list[Event] = []
    raised = 0
    while not engine.idle:
        try:
            received += engine.step()
        except ValueError:
            raised += 1
    assert raised == 1
    results = finished(received)
    assert (results[0].reason, results[0].error) == ("error", "cannot read it")
    assert results[1].text == texts[1].text


def test_whoever_leaves_early_finds_the_rest_later(small: LM) -> None:
    every = [event._replace(started_at=None) for event in submitted(small).run()]
    engine, received = submitted(small), []
    while not engine.idle:
        for event in engine.run():
            received.append(event)
            break
    assert [event._replace(started_at=None) for event in received] == every
    assert list(engine.run()) == engine.step() == []


@pytest.mark.parametrize("kind", KINDS)
def test_idle_counts_what_was_not_taken(small: LM, fused: LM, kind: str) -> None:
    engine = engine_of(runs_on(kind, small, fused), kind, rows=1)
    engine.submit(small.requests(["its"], max_tokens=1)[0])
    assert next(engine.run()).result is not None
    engine.submit(small.requests(["its"], max_tokens=1)[0])
    with pytest.raises(Injected), fault_after_take(engine):
        engine.step()
    assert not engine.idle
    assert len(engine.step()) == 1
    assert engine.idle


@contextmanager
def fault_after_take(engine: Engine) -> Iterator[None]:
    """Fail when slots are given back, after the last token was taken."""
    free, calls = engine.runner.free_except, 0

    def broken(running: Any, waiting: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise Injected("on purpose")
        free(running, waiting)

    engine.runner.free_except = broken  # type: ignore[method-assign]
    try:
        yield
    finally:
        engine.runner.free_except = free  # type: ignore[method-assign]


def test_a_slot_that_a_row_left_is_clear(small: LM) -> None:
    """Also of what a step wrote that was never finished: the next row must not meet it."""
    pool, table = SlotPool(small.model, 3), small.model.condition(Trajectory.uniform(2))
    pool.grow(2, 8, table)
    cache, _ = prefill(small.model, [[5, 6, 7]], [Trajectory.uniform(2)])
    for ticket in (1, 2):
        pool.admit(ticket, table, cache.read(0), 3)
    pool.loops[0][0][1][1, :, 3] = float("nan")  # ticket 2's, beyond what counts
    pool.free_except({2: 3})
    assert [slot and slot.ticket for slot in pool.layout] == [2, None, None]
    for loop in range(2):
        assert all(not tensor[1:].any() for tensor in pool.loops[loop][0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_that_was_cancelled_leaves_nothing_behind(small: LM, fused: LM, kind: str) -> None:
    engine = engine_of(runs_on(kind, small, fused), kind, rows=1)
    tickets = [engine.submit(small.requests([text], max_tokens=4)[0]) for text in ("its", "told")]
    start, engine.runner.start_prefill = engine.runner.start_prefill, _refuse  # type: ignore
    with pytest.raises(Injected):
        engine.step()
    engine.runner.start_prefill = start  # type: ignore[method-assign]
    engine.cancel(tickets[0])
    assert list(finished(list(engine.run()))) == tickets[1:]


def _refuse(rows: Any) -> Any:
    raise Injected("on purpose")
