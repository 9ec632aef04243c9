"""Shared passes equal the plain path for rows of any budget: on a GPU, or in Triton's interpreter."""

import copy
import os
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from loopformer import LoopedLM, LoopformerError, ModelConfig, Trajectory, load
from loopformer.device import synchronise
from loopformer.inference.engine import Engine
from loopformer.inference.request import Choice, Request, Result, Sampling
from loopformer.inference.runner import PlainRunner, Runner
from loopformer.model.conditioning import Condition

from ..models import spread

pytest.importorskip("triton")
from loopformer.inference.fused import launch, single_row
from loopformer.inference.fused import runner as runner_module
from loopformer.inference.fused.launch import DecodeBatch
from loopformer.inference.fused.runner import FusedRunner
from loopformer.inference.fused.streams import HostCopy
from loopformer.inference.kv_cache import page_bytes

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="no GPU")]
DEVICE = "cpu" if INTERPRETED else "cuda"
BASE = ModelConfig(
    blocks=2, loops=3, width=32, heads=2, ffn=48, context=40, vocab=30, positions="rotary", modulator_start="one"
)
KINDS: list[dict[str, Any]] = [
    {"inject": "gated"},
    {"inject": "gated", "start": "normed"},
    {"positions": "learned", "conditioning": "none", "modulator_start": "zero"},
    {"conditioning": "index"},
]


@pytest.fixture(autouse=True)
def _small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a text takes several."""
    torch.set_float32_matmul_precision("highest")
    monkeypatch.setattr(launch, "GPU_PAGE_TOKENS", 16)
    monkeypatch.setattr(single_row, "SPLITS", 2)


@pytest.fixture(scope="module")
def model() -> LoopedLM:
    return spread(replace(BASE, blocks=1, inject="gated"), std=0.4).to(DEVICE)


class Letters:
    """A tokenizer of single letters."""

    eot = 0

    def decode(self, ids: Any) -> str:
        return "".join(chr(97 + number % 26) for number in ids)


class EndlessLetters(Letters):
    """The same; no text ends before it has all tokens that it may have."""

    eot = -1


@pytest.mark.parametrize("kind", KINDS, ids=["injected", "normed", "unconditioned", "index"])
def test_a_pass_of_rows_at_different_loops_is_each_ones_own(kind: dict[str, Any]) -> None:
    model = spread(replace(BASE, **kind)).to(DEVICE)
    along = [Trajectory.uniform(3), Trajectory.uniform(1), Trajectory.uniform(2)]
    texts = [[1, 2, 3, 4, 5], [7, 8], [(3 * place) % 29 for place in range(15)]]
    batch = DecodeBatch(model, slots=3, memory=30 * page_bytes(model, launch.GPU_PAGE_TOKENS))
    pages = iter(range(30))
    with torch.no_grad():
        for slot, (text, trajectory) in enumerate(zip(texts, along, strict=True)):
            cache = model.cache(trajectory, 1, len(text))
            hidden = model.extend(torch.tensor([text], device=DEVICE), cache)
            taken = [next(pages) for _ in range(3 * trajectory.budget)]
            batch.fill(slot, taken, cache.read(0), len(text), model.condition(trajectory))
            text.append(int(model.head(hidden[0, -1])[:30].argmax()))
        batch.set_tokens_from_host({slot: (text[-1], len(text) - 1) for slot, text in enumerate(texts)})
        loops = [0, 0, 0]
        for _ in range(6):
            batch.run([2, 0, 1])
            loops = [loop + 1 for loop in loops]
            ended = [row for row, slot in enumerate([2, 0, 1]) if loops[slot] == along[slot].budget]
            logits = batch.logits(ended)
            slots = [[2, 0, 1][row] for row in ended]
            for number, slot in enumerate(slots):
                expected = model(torch.tensor([texts[slot]], device=DEVICE), along[slot]).logits[0, -1, :30]
                torch.testing.assert_close(logits[number], expected, atol=1e-4, rtol=1e-4)
            tokens = logits.argmax(-1)
            batch.set_tokens_from_device(slots, tokens)
            for slot, token in zip(slots, tokens.tolist(), strict=True):
                texts[slot].append(token)
                loops[slot] = 0


def runner_of(model: LoopedLM, pages: int = 200) -> FusedRunner:
    return FusedRunner(DecodeBatch(model, 3, memory=pages * page_bytes(model, launch.GPU_PAGE_TOKENS)))


def asked(model: LoopedLM) -> list[Request]:
    """Any budget, length and way to choose; more than there are slots, and one that ends at the context."""
    return [
        Request((1, 2, 3, 4, 5), Trajectory.uniform(3), max_tokens=4),
        Request((7, 8), Trajectory.uniform(1), max_tokens=7),
        Request((9, 10, 11), model.resolve("2-1"), Sampling(temperature=1.0, seed=3), max_tokens=5),
        Request((5, 6, 7), Trajectory.uniform(2), Sampling(repetition_penalty=1.5), max_tokens=3),
        Request(
            (9, 8), Trajectory.uniform(2), Sampling(temperature=1.5, top_p=0.9, top_k=12, seed=5), max_tokens=9
        ),
        Request((3,) * 37, Trajectory.uniform(3), max_tokens=9),
        Request((1, 2, 3, 4, 9), Trajectory.uniform(3), max_tokens=1),
    ]


def finished(engine: Engine, requests: list[Request]) -> list[Result]:
    tickets = [engine.submit(request) for request in requests]
    results = {event.ticket: event.result for event in engine.run()}
    return [result for ticket in tickets if (result := results[ticket]) is not None]


def same(results: list[Result], expected: list[Result]) -> None:
    assert [(one.ids, one.text, one.reason) for one in results] == [
        (one.ids, one.text, one.reason) for one in expected
    ]


@pytest.fixture(scope="module")
def expected(model: LoopedLM) -> list[Result]:
    return finished(Engine(model, Letters(), PlainRunner(model, 3)), asked(model))


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens come to the host some time after they were chosen, as on a busy GPU."""
    times, left = random.Random(0), dict[int, int]()

    def has_arrived(copy: HostCopy) -> bool:
        left[id(copy)] = left.get(id(copy), times.randrange(5)) - 1
        return left[id(copy)] < 0

    monkeypatch.setattr(HostCopy, "has_arrived", has_arrived)


@pytest.mark.usefixtures("late")
def test_texts_are_the_same_when_tokens_come_late(model: LoopedLM, expected: list[Result]) -> None:
    same(finished(Engine(model, Letters(), runner_of(model)), asked(model)), expected)


@pytest.mark.usefixtures("late")
def test_prompts_wait_for_one_under_way_that_begins_as_they_do(model: LoopedLM) -> None:
    requests = [Request((*range(1, 20), 20 + number), Trajectory.uniform(2), max_tokens=2) for number in range(3)]
    expected = finished(Engine(model, Letters(), PlainRunner(model, 3)), requests)
    runner = runner_of(model)
    same(finished(Engine(model, Letters(), runner), requests), expected)
    assert (runner.prompt_tokens, runner.shared_tokens) == (20 + 4 + 4, 16 + 16)


@pytest.mark.usefixtures("late")
def test_a_request_cancelled_while_its_prompt_is_under_way_takes_nothing_with_it(
    model: LoopedLM, expected: list[Result]
) -> None:
    runner = runner_of(model)
    engine = Engine(model, Letters(), runner)
    for length in (2, 30):
        gone = engine.submit(Request((1,) * length, Trajectory.uniform(3), max_tokens=5))
        runner.start_prefill(engine.scheduler.waiting)
        engine.cancel(gone)
    same(finished(engine, asked(model)), expected)
    assert runner._device is not None
    assert not runner._device.rows
    assert runner.blocks.available_pages == runner._batch.page_count


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("length", [3, 20])
def test_a_request_that_can_never_come_in_ends_with_the_reason(
    model: LoopedLM, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    monkeypatch.setattr(FusedRunner, "chunk_tokens", 8)  # the longer one is run in pieces
    runner = runner_of(model)
    engine = Engine(model, Letters(), runner)
    fill: Any = runner._batch.fill

    def failing(slot: int, pages: Any, keys: Any, count: int, *more: Any) -> None:
        if count == length:
            raise ValueError("it does not go in")
        fill(slot, pages, keys, count, *more)

    untyped: Any = runner._batch
    untyped.fill = failing
    good = Request((4, 5), Trajectory.uniform(2), max_tokens=9)
    kept, bad = engine.submit(good), engine.submit(Request((7,) * length, Trajectory.uniform(2), max_tokens=4))
    results: dict[int, Result] = {}
    raised = 0
    for _ in range(200):
        try:
            results |= {event.ticket: event.result for event in engine.step() if event.result is not None}
        except ValueError:
            raised += 1
        if engine.idle:
            break
    assert raised == 1
    assert results[bad].error == "it does not go in"
    same([results[kept]], finished(Engine(model, Letters(), PlainRunner(model, 1)), [good]))


@pytest.mark.parametrize(("pages", "piece"), [(200, 512), (9, 512), (200, 8)])  # 9: one of the longest at a time
def test_texts_are_those_of_the_plain_path(
    model: LoopedLM, expected: list[Result], pages: int, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FusedRunner, "chunk_tokens", piece)  # of a prompt, at a time
    runner = runner_of(model, pages)
    results = finished(Engine(model, Letters(), runner), asked(model))
    same(results, expected)
    for one, other in zip(results, expected, strict=True):
        torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(other.logprobs), atol=1e-4, rtol=1e-4)
    assert runner.used_bytes == 0


@pytest.mark.parametrize("rows", [1, 2])
def test_drawn_texts_are_those_of_the_plain_path(model: LoopedLM, rows: int) -> None:
    sampling = [
        Sampling(temperature=1.2, top_p=0.9, seed=1),
        Sampling(temperature=2.0, top_k=9, min_p=0.05, seed=2),
    ]
    requests = [Request((3, 1, 4), Trajectory.uniform(2), one, max_tokens=8) for one in sampling[:rows]]
    plain = finished(Engine(model, EndlessLetters(), PlainRunner(model, rows)), requests)
    greedy = [replace(one, sampling=Sampling()) for one in requests]
    runner = runner_of(model)
    found = finished(Engine(model, EndlessLetters(), runner), [*requests, *greedy])
    same(found[:rows], plain)
    assert len({one.ids for one in found}) == rows + 1  # not the most likely ones
    same(finished(Engine(model, EndlessLetters(), runner), requests), plain)  # in slots that were others'


@pytest.mark.parametrize("together", [False, True])
def test_top_logprobs_are_those_of_the_plain_path(model: LoopedLM, together: bool) -> None:
    """Whether the next token is chosen in a graph, for a single row, or on the host because of a penalty."""
    draws = [(Sampling(), 3), (Sampling(temperature=1.2, seed=1), 2), (Sampling(), 0)]
    draws.append((Sampling(repetition_penalty=1.5), 4))
    requests = [
        Request((3, 1, 4), Trajectory.uniform(2), sampling, max_tokens=4, top_logprobs=count)
        for sampling, count in draws
    ]

    def choices(runner: Runner) -> list[list[Choice]]:
        engine = Engine(model, EndlessLetters(), runner)
        by_ticket: dict[int, list[Choice]] = {}
        for batch in [requests] if together else [[request] for request in requests]:
            by_ticket |= {engine.submit(request): [] for request in batch}
            for event in engine.run():
                by_ticket[event.ticket] += event.choices
        return list(by_ticket.values())

    fused, plain = choices(runner_of(model)), choices(PlainRunner(model, 3))
    for request, found, wanted in zip(requests, fused, plain, strict=True):
        assert [one.token for one in found] == [one.token for one in wanted]
        assert all(len(one.top_logprobs) == request.top_logprobs for one in found)
        torch.testing.assert_close(
            torch.tensor([one.top_logprobs for one in found]),
            torch.tensor([one.top_logprobs for one in wanted]),
            atol=1e-4,
            rtol=1e-4,
        )


class Faulty:
    """Raises at the so-manyth call of any method of a batch."""

    def __init__(self, batch: DecodeBatch, number: int) -> None:
        self.batch, self.left = batch, number

    def renewed(self) -> "Faulty":
        return self

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.batch, name)
        if not callable(found):
            return found

        def call(*args: Any, **options: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                raise MemoryError("on purpose")
            given = found(*args, **options)
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt  # it was done, and nobody noted it
            return given

        return call


@pytest.mark.parametrize("number", range(1, 60, 7 if INTERPRETED else 1))
def test_a_fault_at_any_launch_harms_nobody(model: LoopedLM, expected: list[Result], number: int) -> None:
    runner = runner_of(model)
    untyped: Any = runner
    untyped._batch = Faulty(runner._batch, number)
    engine = Engine(model, Letters(), runner)
    requests = asked(model)
    tickets = [engine.submit(request) for request in requests]
    results: dict[int, Result] = {}
    while not engine.idle:
        try:
            for event in engine.run():
                if event.result is not None:
                    results[event.ticket] = event.result
        except (MemoryError, KeyboardInterrupt):
            continue
    same([results[ticket] for ticket in tickets], expected)


def test_a_cancelled_row_leaves_its_slot_and_pages(model: LoopedLM, expected: list[Result]) -> None:
    runner = runner_of(model)
    engine = Engine(model, Letters(), runner)
    endless = engine.submit(Request((1, 2), Trajectory.uniform(2), max_tokens=30))
    engine.step()
    engine.step()
    engine.cancel(endless)
    same(finished(engine, asked(model)), expected)
    assert runner._device is not None
    assert not runner._device.rows
    assert runner.blocks.available_pages == runner._batch.page_count


def test_what_can_never_run_is_refused(model: LoopedLM) -> None:
    engine = Engine(model, Letters(), runner_of(model, 2))
    with pytest.raises(LoopformerError, match="more than the engine has memory for"):
        engine.submit(Request((1, 2), Trajectory.uniform(3), max_tokens=5))
    with pytest.raises(LoopformerError, match="hold no page of keys"):
        DecodeBatch(model, 3, memory=1)


def test_a_fault_while_slots_are_filled_admits_no_more_than_fit(
    model: LoopedLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "MAX_APART", 1)
    requests = [Request((number, 2, 3), Trajectory.uniform(2), max_tokens=4) for number in range(1, 7)]
    expected = finished(Engine(model, Letters(), PlainRunner(model, 3)), requests)
    runner = runner_of(model, 6)
    fill, calls = runner._batch.fill, 0

    def failing(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise MemoryError("on purpose")
        fill(*args)

    untyped: Any = runner._batch
    untyped.fill = failing
    same(finished(Engine(model, Letters(), runner), requests), expected)
    assert calls > len(requests)


def test_norms_of_an_unconditioned_model_keep_their_weights_in_bf16() -> None:
    config = replace(BASE, conditioning="none", modulator_start="zero")
    model = spread(config, std=0.1).to(DEVICE, torch.bfloat16)
    table = DecodeBatch(model, slots=1)._modulation(Condition(), 2)
    for number, block in enumerate(model.stack.typed_blocks()):
        assert block.norm_1.weight is not None
        torch.testing.assert_close(1 + table[1, number, 2], block.norm_1.weight.float(), atol=1e-6, rtol=0)


def test_a_row_alone_runs_whole_tokens_and_goes_on_among_others(model: LoopedLM) -> None:
    """Texts are the same, however often it is left alone and joined, and whatever its schedule."""
    requests = [
        Request((4, 5, 6), model.resolve("2-1"), max_tokens=28),
        Request((9, 8), Trajectory.uniform(3), max_tokens=4),
        Request((1, 3, 5, 7), model.resolve("1-2"), max_tokens=4),
    ]
    expected = finished(Engine(model, Letters(), PlainRunner(model, 3)), requests)
    runner = runner_of(model)
    engine = Engine(model, Letters(), runner)
    results: dict[int, Result] = {}
    alone = 0
    tickets = [engine.submit(requests[0])]
    for step in range(200):
        if step in (2, 5):
            tickets.append(engine.submit(requests[len(tickets)]))
        results |= {event.ticket: event.result for event in engine.step() if event.result is not None}
        alone += runner._batch._single_row is not None
        if engine.idle and len(tickets) == 3:
            break
    same([results[ticket] for ticket in tickets], expected)
    for ticket, one in zip(tickets, expected, strict=True):
        assert results[ticket].logprobs == pytest.approx(one.logprobs, abs=3e-4)
    assert 2 < alone < step


def test_rows_of_a_budget_choose_their_tokens_together_whenever_they_came(model: LoopedLM) -> None:
    requests = [Request((4, 5, 6 + number), Trajectory.uniform(3), max_tokens=24) for number in range(2)]
    other = Request((9, 8), Trajectory.uniform(1), max_tokens=40)  # after each of its passes others could begin
    expected = finished(Engine(model, EndlessLetters(), PlainRunner(model, 3)), [*requests, other])
    runner = runner_of(model)
    engine = Engine(model, EndlessLetters(), runner)
    tickets, results, chosen = [engine.submit(other), engine.submit(requests[0])], dict[int, Result](), []
    untyped: Any = runner
    launch_next = untyped._launch

    def noted(*args: Any) -> Any:
        chosen.append(launch_next(*args))
        return chosen[-1]

    untyped._launch = noted
    while not engine.idle:
        synchronise(next(model.parameters()).device)  # a prompt is there at the next step, however busy the GPU is
        results |= {event.ticket: event.result for event in engine.step() if event.result is not None}
        if len(tickets) == 2 and len(chosen) > 3:
            tickets.append(engine.submit(requests[1]))
    same([results[ticket] for ticket in (*tickets[1:], tickets[0])], expected)
    first, second = (
        [number for number, one in enumerate(chosen) if one and ticket in one.tickets] for ticket in tickets[1:]
    )
    assert second[0] > first[0]
    shared = [number for number in second if number <= first[-1]]
    assert shared
    assert set(shared) <= set(first)


def test_other_weights_need_other_graphs(model: LoopedLM) -> None:
    changed = copy.deepcopy(model)
    runner = runner_of(changed)
    engine, memory = Engine(changed, Letters(), runner), runner._batch._kv_pages
    requests = [Request((1, 2, 3), Trajectory.uniform(2), max_tokens=6)]
    finished(engine, requests)
    with torch.no_grad():
        for parameter in changed.stack.parameters():
            parameter.mul_(-1.5)
    expected = finished(Engine(changed, Letters(), PlainRunner(changed, 3)), requests)
    same(finished(engine, requests), expected)
    assert runner._batch._kv_pages is memory


def test_rows_that_run_go_on_with_other_weights_and_keep_their_places(model: LoopedLM) -> None:
    """Every slot but one is taken when the weights change, and more come than fit."""
    changed = copy.deepcopy(model)
    requests = [Request((number, 2, 3), Trajectory.uniform(2), max_tokens=9) for number in range(1, 6)]
    engine = Engine(changed, Letters(), runner_of(changed))
    tickets = [engine.submit(request) for request in requests[:2]]
    for _ in range(2):
        engine.step()
    begun = {row.ticket: row.ids for row in engine.scheduler.running}
    assert len(begun) == 2
    with torch.no_grad():
        for parameter in changed.stack.parameters():
            parameter.mul_(-1.5)
    tickets += [engine.submit(request) for request in requests[2:]]
    results = {event.ticket: event.result for event in engine.run() if event.result is not None}
    assert sorted(results) == tickets
    for ticket, ids in begun.items():
        text = (*requests[ticket].prompt, *results[ticket].ids[: len(results[ticket].ids) - 1])
        follows = Request(text, Trajectory.uniform(2), max_tokens=1)
        (last,) = finished(Engine(changed, Letters(), PlainRunner(changed, 3)), [follows])
        assert results[ticket].ids[: len(ids)] == ids
        assert results[ticket].ids[-1:] == last.ids
    expected = finished(Engine(changed, Letters(), PlainRunner(changed, 3)), requests[2:])
    same([results[ticket] for ticket in tickets[2:]], expected)


@pytest.mark.skipif(INTERPRETED, reason="one warp after the other there")
def test_many_wide_rows_write_what_they_write_alone() -> None:
    """So wide that several warps share a row, and none may write over what another is yet to read."""
    lm = load("box").to(DEVICE)
    words = lm.model.config.vocab
    prompts = [tuple((17 * row + 7 * place * place) % words for place in range(16)) for row in range(12)]
    requests = [
        Request(prompt, Trajectory.uniform(budget), max_tokens=48) for prompt in prompts for budget in (1, 2, 4, 8)
    ]

    def texts(fast: bool) -> dict[int, tuple[int, ...]]:
        return {event.ticket: event.result.ids for event in lm.events(requests, fast) if event.result is not None}

    plain = texts(fast=False)
    for _ in range(4):
        assert texts(fast=True) == plain
