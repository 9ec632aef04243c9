"""Fused generation: batches are lent to one run at a time, kept for the next, and never outlive the weights.

The kernels run on a GPU, or in Triton's interpreter (TRITON_INTERPRET=1).
"""

import copy
import os
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from loopformer import LM, LoopedLM, LoopformerError, ModelConfig, Trajectory, cuda_graphs
from loopformer.data.tokenizer import Tokenizer
from loopformer.inference.engine import generate
from loopformer.inference.fused import batch_pool, streams
from loopformer.inference.fused.batch_pool import (
    MAX_IDLE_BATCHES,
    BatchPool,
    unsupported_reason,
)
from loopformer.inference.fused.weights import weights_by_rows
from loopformer.inference.kv_cache import fingerprint
from loopformer.inference.request import Event, Request, Result
from loopformer.inference.runner import PlainRunner

from ..models import spread

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
FULL = Trajectory.uniform(2)


class FakeBatch:
    """A batch without memory or kernels."""

    nbytes, is_current = 1, True

    def __init__(self, model: LoopedLM, slots: int) -> None:
        self.slots = slots

    def wait_for_prompts(self) -> None:
        pass


def test_no_batch_is_lent_twice_and_the_last_few_are_kept(
    tiny: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "loopformer.inference.fused.launch", SimpleNamespace(DecodeBatch=FakeBatch))
    pool: Any = BatchPool(LoopedLM(tiny))
    with pool.batch(1) as first, pool.batch(1) as second:
        assert first is not second
    with pool.batch(1) as again:
        assert again is first or again is second
    sizes = [2**power for power in range(2 * MAX_IDLE_BATCHES)]
    for slots in sizes:
        with pool.batch(slots):
            pass
    assert [batch.slots for batch in pool._free] == sizes[-MAX_IDLE_BATCHES:]
    with pytest.raises(ValueError, match="on purpose"), pool.batch(4):
        raise ValueError("on purpose")
    assert pool._free[-1].slots == 4
    monkeypatch.setattr(batch_pool, "available_bytes", lambda device: 2)
    with pool.batch(8):
        pass
    assert len(pool._free) == 2
    with pool.batch(8) as stale:
        stale.is_current = False  # its graphs have weights that the model no longer has
    with pool.batch(8) as fresh:
        assert fresh is not stale


def test_a_side_stream_belongs_to_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch on another GPU than the current one goes back to its pool."""
    waits: list[tuple[str, str]] = []

    class FakeStream(str):
        def wait_stream(self, other: str) -> None:
            waits.append((str(self), other))

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: FakeStream(f"decode on {device}"))
    monkeypatch.setattr(streams, "stream_of", lambda index, purpose: FakeStream(f"{purpose} on cuda:{index}"))
    stream = streams.SideStream("prompts", torch.device("cuda:1"))
    stream.decode_waits()
    stream.wait_for_decode()
    assert waits == [("decode on cuda:1", "prompts on cuda:1"), ("prompts on cuda:1", "decode on cuda:1")]


def test_threads_get_the_same_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow_stream(device: int) -> object:
        time.sleep(0.05)
        return object()

    monkeypatch.setattr(torch.cuda, "Stream", slow_stream)
    cuda_graphs._make_stream.cache_clear()
    try:
        with ThreadPoolExecutor(4) as threads:
            found = list(threads.map(lambda _: cuda_graphs.stream_of(0, "prompts"), range(4)))
    finally:
        cuda_graphs._make_stream.cache_clear()
    assert len(set(map(id, found))) == 1


def test_errors_say_what_fast_cannot_do(lm: LM) -> None:
    untyped: Any = lm
    mistakes: list[tuple[Any, str]] = [
        (lambda: untyped.generate("told", int8=True), "int8 was removed; choose the dtype int8 on a CPU"),
        (lambda: untyped.stream("told", int8=True), "int8 was removed"),
        (lambda: lm.generate("told", fast=True), "fast needs a CUDA device and Triton; leave it out"),
        (lambda: lm.engine(fast=True), "fast needs a CUDA device and Triton; leave it out"),
        (lambda: untyped.generate("told", fast="yes"), "fast is True, False or 'auto', not 'yes'"),
        (
            lambda: untyped.generate("told", draft=1),
            "draft was removed, as it made .* leave it out",
        ),
        (lambda: untyped.stream("told", draft=1), "draft was removed"),
    ]
    for call, message in mistakes:
        with pytest.raises(LoopformerError, match=message):
            call()


def test_a_setting_without_kernels_is_named_and_it_decodes_plainly(lm: LM) -> None:
    other = LM(spread(replace(lm.model.config, norms="sandwich"), std=0.3), lm.tokenizer)
    assert unsupported_reason(other.model) == "has no kernels for model.norms"
    with pytest.raises(LoopformerError, match=r"fast has no kernels for model.norms; leave it out"):
        other.generate("told", fast=True)
    assert other.generate("told", max_tokens=4) == other.generate("told", fast=False, max_tokens=4)


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["every pass is told its time and its step"] * 20, 270)


@pytest.fixture
def model(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> LoopedLM:
    """For the kernels, and only where they run."""
    pytest.importorskip("triton")
    from loopformer.inference.fused import single_row

    if INTERPRETED:  # in few programs, which the interpreter runs one after the other
        monkeypatch.setattr(single_row, "OUTPUTS_PER_PROGRAM", dict.fromkeys(single_row.WARPS, 128))
        monkeypatch.setattr(single_row, "SPLITS", 2)
    if not INTERPRETED and not torch.cuda.is_available():
        pytest.skip("no GPU")
    torch.set_float32_matmul_precision("highest")
    config = ModelConfig(blocks=1, loops=2, width=8, heads=1, ffn=8, context=20, vocab=tokenizer.vocab_size)
    model = LoopedLM(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.6)
    return model.eval().to(DEVICE)


def fused(pool: BatchPool, tokenizer: Tokenizer, requests: list[Request]) -> Iterator[Event]:
    from loopformer.inference.fused.runner import FusedRunner

    with pool.batch(len(requests)) as batch:
        yield from generate(pool.model, tokenizer, requests, FusedRunner(batch, share_prompts=False))


def make_requests(count: int, tokens: int) -> list[Request]:
    return [Request((5 + number, 9), FULL, max_tokens=tokens) for number in range(count)]


def results(events: Iterable[Event]) -> list[Result]:
    by_ticket = {event.ticket: event.result for event in events if event.result is not None}
    return [by_ticket[ticket] for ticket in sorted(by_ticket)]


@pytest.mark.cuda
def test_runs_at_once_do_not_mix(model: LoopedLM, tokenizer: Tokenizer) -> None:
    requests = make_requests(2, 5)
    expected = [result.ids for result in results(generate(model, tokenizer, requests, PlainRunner(model, 3)))]
    pool = BatchPool(model)
    for _ in range(2):  # with batches that were used before, too
        runs = [fused(pool, tokenizer, [request]) for request in requests]
        in_turn = list(zip_longest(*runs))  # a step of each, which may bring several tokens
        ids = [results(event for event in events if event)[0].ids for events in zip(*in_turn, strict=True)]
        assert ids == expected
    assert len(pool._free) == 2


@pytest.mark.cuda
def test_batches_are_bounded_and_kept_where_there_is_room(
    model: LoopedLM, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = make_requests(3, 3)
    expected = [result.ids for result in results(generate(model, tokenizer, requests, PlainRunner(model, 3)))]
    pool = BatchPool(model)
    monkeypatch.setattr(batch_pool, "MAX_SLOTS", 2)
    monkeypatch.setattr(batch_pool, "available_bytes", lambda device: 0)
    assert [result.ids for result in results(fused(pool, tokenizer, requests))] == expected  # the third waits
    assert pool._free == []
    monkeypatch.setattr(batch_pool, "available_bytes", lambda device: 1 << 40)
    with pool.batch(5) as batch:
        assert batch.slots == 2
    assert pool._free == [batch]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_user_can_change_the_weights(lm: LM) -> None:
    pytest.importorskip("triton")
    ready = LM(copy.deepcopy(lm.model), lm.tokenizer).to("cuda")
    plain = ready.generate("told", max_tokens=8, fast=False)
    assert "".join(ready.stream("told", max_tokens=8, fast=True)) == plain.text
    assert ready.generate("told", max_tokens=8, fast=True).text == plain.text
    ready.model.to(torch.bfloat16)  # behind its back
    rounded = ready.generate("told", max_tokens=1, fast=True)
    assert rounded.logprobs == pytest.approx(plain.logprobs[:1], abs=0.2)


@pytest.mark.parametrize("start", ["embedding", "normed"])
def test_the_first_loop_starts_from_what_the_model_starts_from(tiny: ModelConfig, start: str) -> None:
    model = spread(replace(tiny, positions="rotary", inject="gated", start=start))  # type: ignore[arg-type]
    assert model.config.fused_unsupported is None
    ids = torch.arange(tiny.vocab)
    weights = weights_by_rows(model)
    expected, _ = model.add_positions(model.tokens(ids)[None], ids[None])
    torch.testing.assert_close(weights.embedding, expected[0].detach())
    torch.testing.assert_close(weights.head, model.tokens.weight.detach())


def test_learned_positions_do_not_support_a_normed_start(tiny: ModelConfig) -> None:
    assert replace(tiny, positions="learned", start="normed").fused_unsupported == "start"


def test_changed_weights_have_another_fingerprint(tiny: ModelConfig) -> None:
    model = spread(replace(tiny, positions="rotary", start="normed"))
    before = fingerprint(model)
    assert fingerprint(model) == before
    with torch.no_grad():
        model.tokens.weight.mul_(2)
    assert fingerprint(model) != before
