"""What the engine's process loads, and what a model says after each loop and of each token."""

import contextlib
import ctypes
import json
import multiprocessing
import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from loopformer import LM, LoopformerError, Trajectory
from loopformer.errors import RunFailed
from loopformer.inference.engine import warm_up
from loopformer.inference.request import Event
from loopformer.serving import worker
from loopformer.serving.messages import Cancel, EngineStats, ScoreRequest, Submit, WorkerSettings
from loopformer.serving.protocol import ApiError
from loopformer.serving.worker import _client_error, _Worker, load_served, score_tokens, top_tokens_by_loop

from .servers import add_checkpoint, save_served

PROMPT = "every pass is told its time"


def test_the_last_loop_is_what_the_model_says(lm: LM) -> None:
    ids, trajectory = lm.need_tokenizer().encode(PROMPT), Trajectory.parse("2-1-1")
    rows = top_tokens_by_loop(lm.model, ids, trajectory, top=4)
    logits = lm.model(torch.tensor([ids]), trajectory).logits
    assert logits is not None
    expected = logits[0, -1, : lm.model.config.vocab].float().log_softmax(-1).topk(4)
    assert len(rows) == 3
    assert [token for token, _ in rows[-1]] == expected.indices.tolist()
    torch.testing.assert_close([value for _, value in rows[-1]], expected.values.tolist())
    assert rows[0] != rows[-1]


def test_tokens_are_as_likely_as_the_scorer_says(lm: LM) -> None:
    ids = lm.need_tokenizer().encode(PROMPT)
    rows = score_tokens(lm.model, [lm.need_tokenizer().eot, *ids], Trajectory.uniform(2), top=3)
    assert rows[0] == (None, ())
    (score,) = lm.score([PROMPT], budget=2)
    assert [row.logprob for row in rows[1:]] == pytest.approx(score.logprobs, abs=1e-4)
    for row in rows[1:]:
        values = [value for _, value in row.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert row.logprob is not None
        assert values[0] >= row.logprob - 1e-6


def test_of_a_run_the_checkpoint_that_was_loaded_is_named(tmp_path: Path) -> None:
    first = add_checkpoint(tmp_path, 1, std=0.3)
    _, source = load_served(WorkerSettings(str(tmp_path), device="cpu"))
    assert source == str(first)
    second = add_checkpoint(tmp_path, 2, std=0.2)
    assert load_served(WorkerSettings(str(tmp_path), device="cpu"))[1] == str(second)
    assert load_served(WorkerSettings(source, device="cpu"))[1] == source
    shutil.rmtree(first)
    with pytest.raises(LoopformerError, match="step-00000001"):
        load_served(WorkerSettings(source, device="cpu"))


def test_a_fault_of_ours_is_told_from_a_request_that_is_wrong() -> None:
    refused = _client_error(LoopformerError("No such budget."))
    assert str(refused) == "No such budget."
    assert ApiError.of(refused).status == 400
    for error in (RuntimeError("CUDA"), RunFailed("no memory")):
        refused = _client_error(error)
        assert ApiError.of(refused).status == 500
        assert str(error) not in str(refused)


def test_the_end_of_an_answer_is_the_chat_templates(lm: LM, tmp_path: Path) -> None:
    folder, prompt = save_served(tmp_path), "its time"
    tokenizer, whole = lm.need_tokenizer(), lm.generate(prompt, max_tokens=60, temperature=2.0, seed=1)
    end = next(token for token in whole.ids if tokenizer.decode([token]).isalnum())  # written as it is
    settings = {"chat_template": "{{ messages[0].content }}", "eos_token": tokenizer.decode([end])}
    (Path(folder) / "tokenizer_config.json").write_text(json.dumps(settings))
    served, _ = load_served(WorkerSettings(folder, device="cpu"))
    engine = served.engine(rows=1)
    engine.submit(*served.requests([prompt], max_tokens=60, temperature=2.0, seed=1))
    *_, last = engine.run()
    assert last.result is not None
    assert last.result.reason == "end"
    assert last.result.ids == whole.ids[: whole.ids.index(end) + 1]


def test_what_warms_up_leaves_nothing_behind(lm: LM) -> None:
    engine = lm.engine(rows=5, fast=False)
    warm_up(engine, [4, 2, 1])
    assert engine.idle
    assert engine.counts.new_tokens > 5
    assert engine.counts.shared_tokens > 0  # prompts behind a cached prefix have graphs of their own
    ours, theirs = multiprocessing.Pipe()
    _Worker(lm, engine, theirs, heartbeat_seconds=1)._send()
    assert ours.recv() == ([], EngineStats())
    engine.submit(*lm.requests([PROMPT], budget=2, max_tokens=12))
    *_, last = engine.run()
    assert last.result is not None
    assert last.result.ids == lm.generate(PROMPT, budget=2, max_tokens=12).ids


def test_scoring_leaves_half_of_the_time_to_texts(lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def slow(*args: object) -> list[object]:
        nonlocal now
        now += 2.0
        return []

    monkeypatch.setattr(worker, "top_tokens_by_loop", slow)
    monkeypatch.setattr(worker, "time", SimpleNamespace(monotonic=lambda: now))
    engine = lm.engine(rows=2, fast=False)
    working = _Worker(lm, engine, multiprocessing.Pipe()[1], heartbeat_seconds=1)
    for number in range(4):
        working._receive(ScoreRequest(number, (1, 2), Trajectory.uniform(1), 1, by_loop=True))
    for _ in range(2):  # nobody waits for a text
        working._score()
    engine.submit(*lm.requests([PROMPT], max_tokens=4))
    for after, left in ((0.0, 2), (1.9, 2), (0.2, 1), (1.0, 1), (1.1, 0)):
        now += after
        working._score()
        assert sum(map(len, working._score_queues.values())) == left


def test_clients_take_turns_to_be_scored(lm: LM) -> None:
    working = _Worker(lm, lm.engine(rows=1, fast=False), multiprocessing.Pipe()[1], heartbeat_seconds=1)

    def wait(first: int, count: int, client: str) -> None:
        for number in range(first, first + count):
            working._receive(ScoreRequest(number, (1, 2), Trajectory.uniform(1), 1, True, client))

    def scored() -> int:
        working._score()
        return working._outputs[-1].number

    wait(0, 100, "many")
    assert scored() == 0
    wait(200, 3, "few")
    wait(300, 1, "one")
    working._receive(Cancel(201))
    assert [scored() for _ in range(6)] == [1, 200, 300, 2, 202, 3]
    for number in range(4, 100):
        working._receive(Cancel(number))
    working._score()
    assert working._outputs[-1].number == 3  # nobody is left


def test_texts_that_ended_or_were_cancelled_are_forgotten(lm: LM) -> None:
    engine = lm.engine(rows=4, fast=False)
    working = _Worker(lm, engine, multiprocessing.Pipe()[1], heartbeat_seconds=1)
    (request,) = lm.requests([PROMPT], budget=1, max_tokens=3)
    for number in range(50):
        working._receive(Submit(number, request, stream=True))
    assert len(working._texts) == 50
    for number in range(0, 50, 5):
        working._receive(Cancel(number))
    while not engine.idle:
        working._step()
    assert not working._texts
    ended = {output.number for output in working._outputs if output.is_last}
    assert ended == {number for number in range(50) if number % 5}


@pytest.mark.skipif(not hasattr(ctypes.pythonapi, "mallopt"), reason="needs glibc")
def test_large_blocks_are_returned_however_large_those_before_them_were() -> None:
    """By itself glibc takes them from the heap once a larger one was freed."""

    class Info(ctypes.Structure):  # malloc.h
        names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
        _fields_ = [(name, ctypes.c_int) for name in names.split()]

    libc = ctypes.CDLL(None)
    libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    libc.free.argtypes, libc.mallinfo.restype = [ctypes.c_void_p], Info

    def allocate() -> None:
        worker._return_large_blocks()
        libc.free(libc.malloc(16 << 20))
        before = libc.mallinfo().hblks  # how many blocks came from the system, which gets them back
        for _ in range(64):  # far more than the heap has room for
            libc.malloc(8 << 20)
        os._exit(libc.mallinfo().hblks > before)

    process = multiprocessing.get_context("fork").Process(target=allocate)  # as it changes the whole process
    process.start()
    process.join(240)
    assert process.exitcode == 1


@pytest.mark.parametrize(
    ("stream", "pieces_per_second", "expected"), [(True, 10**9, 12), (True, 0.001, 2), (False, 10**9, 2)]
)
def test_tokens_that_come_fast_are_sent_together(
    lm: LM, monkeypatch: pytest.MonkeyPatch, stream: bool, pieces_per_second: float, expected: int
) -> None:
    monkeypatch.setattr(worker, "MAX_OUTPUTS", pieces_per_second)
    monkeypatch.setattr(worker, "UNSTREAMED_SECONDS", 1000)
    (request,) = lm.requests([PROMPT], budget=2, max_tokens=12)
    alone = lm.generate(PROMPT, budget=2, max_tokens=12)
    ours, theirs = multiprocessing.Pipe()

    def work() -> None:
        with contextlib.suppress(EOFError):
            _Worker(lm, lm.engine(rows=2, fast=False), theirs, heartbeat_seconds=1).run()

    thread = threading.Thread(target=work)
    thread.start()
    ours.send([Submit(7, request, stream)])
    events: list[Event] = []
    while not events or events[-1].result is None:
        outputs, _ = ours.recv()
        assert {output.number for output in outputs} <= {7}
        events += [output.content for output in outputs]
    ours.close()
    thread.join(240)
    assert not thread.is_alive()
    assert len(events) == expected
    assert len(events[0].choices) == 1  # the first does not wait
    assert all(event.started_at is not None for event in events)
    assert "".join(event.piece for event in events) == alone.text
    choices = [choice for event in events for choice in event.choices]
    assert [choice.token for choice in choices] == list(alone.ids)
    assert [choice.logprob for choice in choices] == pytest.approx(alone.logprobs)
    assert events[-1].result is not None
    assert events[-1].result.reason == alone.reason
