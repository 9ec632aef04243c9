"""The process that the engine runs in.

    process = context.Process(target=run_worker, args=(WorkerSettings("runs/mine", rows=16), connection))
    connection.recv()                                   # EngineReady, or one sentence that says what is wrong
    connection.send([Submit(number=0, request=request, stream=True)])                 # or ScoreRequest, Cancel
    outputs, load = connection.recv()                   # a list of Event, Scores and Failure, and an EngineLoad

The loop reads messages, steps the engine, and sends the outputs in one message. An idle process sends regular
heartbeats. It ends with its parent. The other end of the pipe is engine_process.py.

An output costs the server far more than a token costs the engine, mostly in system calls. So when many texts stream
fast, an event holds several tokens: all streams together get at most MAX_OUTPUTS events per second. That is one
event every 16 ms for each of 64 streams, and every token for a single stream. The first and the last token of a
text are never held back. A text that is not streamed gets an event every UNSTREAMED_SECONDS, for the metrics. A
message costs the engine a third of a millisecond, so with 64 requests it sends at most one every 4 ms.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Sequence as Items
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait

import torch
from torch import Tensor

from loopformer.device import dtype_of
from loopformer.errors import LoopformerError, RunFailed
from loopformer.inference.chat import ChatTemplate
from loopformer.inference.engine import Engine, warm_up
from loopformer.inference.sequence import Sequence, Status
from loopformer.lm import LM, load, move_to_device
from loopformer.loading import from_model_folder
from loopformer.loading.folder import is_run_folder, resolve_model_path, run_folder_of
from loopformer.model import LoopedLM
from loopformer.scoring import Alternatives, head_chunks, most_likely
from loopformer.serving.messages import (
    Cancel,
    EngineLoad,
    EngineReady,
    Failure,
    Output,
    ScoreRequest,
    Scores,
    Submit,
    TokenScore,
    WorkerSettings,
    log_as_json,
)
from loopformer.trajectory import Trajectory

logger = logging.getLogger(__name__)
MAX_FAILED_STEPS = 5  # in a row; then the process ends and another one is started
MAX_OUTPUTS = 4000  # per second, of all streams together
MAX_MESSAGES = 16_000  # per second, divided by the number of running requests
UNSTREAMED_SECONDS = 0.25  # between the events of an answer that is not streamed
M_MMAP_THRESHOLD = -3  # of glibc's malloc.h
MAX_QUEUE = 1 << 20  # far more than the server admits


# The process.


def run_worker(settings: WorkerSettings, connection: Connection) -> None:
    """Load the model, report it, and handle messages until the pipe is closed."""
    for number in (signal.SIGINT, signal.SIGTERM):  # a terminal sends them to the whole group; the parent drains
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _return_large_blocks()
    log_as_json()
    try:
        lm, source = load_served(settings)
        engine = lm.engine(settings.rows, queue=MAX_QUEUE, fast=settings.fast, memory=settings.memory)
        if lm.model.tokens.weight.is_cuda:
            loops = lm.model.config.loops
            # Budgets L, L/2, …, 1.
            warm_up(engine, [loops >> shift for shift in range(loops.bit_length())])
    except Exception as error:
        if not isinstance(error, LoopformerError):
            logger.exception("The model could not be loaded.")
        connection.send(str(error) or type(error).__name__)
        return
    weight = lm.model.tokens.weight
    (default,) = lm.trajectories(1)
    connection.send(
        EngineReady(
            source,
            lm.model.config,
            default,
            engine.rows,
            engine.memory_bytes,
            weight.element_size(),
            str(weight.device),
            os.getpid(),
        )
    )
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        _Worker(lm, engine, connection, settings.step_seconds / 4).run()


def load_served(settings: WorkerSettings) -> tuple[LM, str]:
    """The model on its device, and its path. The end token of the chat template ends completions, too."""
    model = settings.model
    if is_run_folder(model):
        lm, source = from_model_folder(model, lambda checkpoint: (load(checkpoint), str(checkpoint)))
    else:
        lm, source = load(model), model
    lm.tokenizer = ChatTemplate.find(lm.need_tokenizer(), resolve_model_path(model), run_folder_of(model)).tokenizer
    move_to_device(lm, settings.device, None if settings.dtype is None else dtype_of(settings.dtype), settings.fast)
    return lm, source


def _return_large_blocks() -> None:
    """Let glibc give large freed blocks back to the system.

    By itself it raises the size of those blocks with use. The heap of a process that allocates tensors of many
    sizes then fragments and grows."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])  # a step that hangs would not notice the closed pipe
    os._exit(1)


@dataclass
class _Reader:
    """Who reads the events of a request, and how often."""

    number: int
    stream: bool
    next_at: float = 0.0  # when the next event is due


class _Worker:
    """The loop of the process: receive messages, step the engine, send outputs."""

    def __init__(self, lm: LM, engine: Engine, connection: Connection, heartbeat_seconds: float) -> None:
        self._lm, self._engine, self._pipe, self._heartbeat = lm, engine, connection, heartbeat_seconds
        self._counts = engine.counts  # at the last message; the warm-up is not counted
        self._score_queue: list[ScoreRequest] = []
        self._next_score_at = 0.0  # ignored while no text is generated
        self._readers: dict[int, _Reader] = {}  # by the engine's ticket
        self._outputs: list[Output] = []
        self._is_load_sent = False
        self._sent_at = 0.0

    def run(self) -> None:
        failures = 0
        while True:
            if not self._score_queue and self._engine.idle:
                while not self._pipe.poll(self._heartbeat):
                    self._send()  # an idle process shows that it is alive
            while self._pipe.poll():
                self._is_load_sent = False
                for message in self._pipe.recv():
                    self._receive(message)
            self._score()
            try:
                self._step()
                failures = 0
            except Exception:
                # The engine's step is a transaction, so it is safe to repeat; it ends a request that fails twice.
                failures += 1
                logger.exception("A step of the engine failed.")
                if failures == MAX_FAILED_STEPS:
                    raise
            has_changed = bool(self._outputs) or not self._is_load_sent
            pause = self._engine.running / MAX_MESSAGES if has_changed else self._heartbeat
            if time.monotonic() >= self._sent_at + pause:
                self._send()

    def _receive(self, message: Submit | ScoreRequest | Cancel) -> None:
        if isinstance(message, Submit):
            try:
                ticket = self._engine.submit(message.request)
            except Exception as error:
                self._outputs.append(Failure(message.number, _client_error(error)))
            else:
                self._readers[ticket] = _Reader(message.number, message.stream)
        elif isinstance(message, ScoreRequest):
            self._score_queue.append(message)
        else:
            number = message.number
            self._score_queue = [waiting for waiting in self._score_queue if waiting.number != number]
            for ticket in [ticket for ticket, reader in self._readers.items() if reader.number == number]:
                self._engine.cancel(ticket)
                del self._readers[ticket]

    def _score(self) -> None:
        """Answer one ScoreRequest. The next one waits as long as this one took, so that generation goes on."""
        began = time.monotonic()
        if not self._score_queue or (began < self._next_score_at and not self._engine.idle):
            return
        request, model = self._score_queue.pop(0), self._lm.model
        try:
            score = lens if request.by_loop else score_tokens
            scores = score(model, request.ids, model.resolve(request.trajectory), request.top)
            self._outputs.append(Scores(request.number, scores))
        except Exception as error:
            self._outputs.append(Failure(request.number, _client_error(error)))
        self._next_score_at = 2 * time.monotonic() - began

    def _step(self) -> None:
        events, running = self._engine.step(self._is_due), self._engine.running
        for event in events:
            reader = self._readers.get(event.ticket)
            if reader is None:  # cancelled
                continue
            self._outputs.append(event._replace(ticket=reader.number))
            if event.result is not None:
                del self._readers[event.ticket]
                if event.result.error is not None:
                    logger.error("A request failed: %s", event.result.error)
            pause = running / MAX_OUTPUTS if reader.stream else UNSTREAMED_SECONDS
            reader.next_at = time.monotonic() + pause

    def _is_due(self, sequence: Sequence) -> bool:
        reader = self._readers.get(sequence.ticket)
        is_held_back = reader is not None and time.monotonic() < reader.next_at
        return not is_held_back or sequence.status is Status.FINISHED

    def _send(self) -> None:
        engine, counts, before = self._engine, self._engine.counts, self._counts
        clients = Counter(sequence.request.client for sequence in engine.scheduler.running)
        load = EngineLoad(
            engine.running,
            len(self._score_queue) + engine.waiting,
            max(clients.values(), default=0),
            engine.used_bytes / engine.memory_bytes,
            counts.prompt_tokens - before.prompt_tokens,
            counts.shared_tokens - before.shared_tokens,
        )
        self._pipe.send((self._outputs, load))
        self._counts, self._outputs, self._is_load_sent, self._sent_at = counts, [], True, time.monotonic()


def _client_error(error: Exception) -> LoopformerError:
    """The error that the client may see. Details of an internal failure go to the log only."""
    if isinstance(error, LoopformerError) and not isinstance(error, RunFailed):
        return LoopformerError(str(error))
    logger.error("A request failed.", exc_info=error)
    return RunFailed("The request could not be run.")


# Scoring given tokens, in one pass without a cache.


@torch.no_grad()
def lens(model: LoopedLM, ids: Items[int], trajectory: Trajectory, top: int) -> list[Alternatives]:
    """The `top` most likely next tokens after each loop, as if the model stopped there."""
    states = model(_batch(model, ids), trajectory, logits=False, states=True).states
    last = model.final_norm(torch.stack([state[0, -1] for state in states]))  # [M, D]
    return [row for _, logits in head_chunks(model, last) for row in _alternatives(logits.log_softmax(-1), top)]


@torch.no_grad()
def score_tokens(model: LoopedLM, ids: Items[int], trajectory: Trajectory, top: int) -> list[TokenScore]:
    """The log-probability of every token, and those of the `top` most likely tokens at its position."""
    if len(ids) < 2:
        return [TokenScore(None, ()) for _ in ids]
    hidden = model(_batch(model, ids[:-1]), trajectory, logits=False).hidden[0]  # [T - 1, D]
    targets = torch.tensor(ids[1:], device=hidden.device)
    rows = [TokenScore(None, ())]
    for part, logits in head_chunks(model, hidden):
        logprobs = logits.log_softmax(-1)
        chosen = logprobs.gather(1, targets[part, None])[:, 0].tolist()
        rows += map(TokenScore, chosen, _alternatives(logprobs, top))
    return rows


def _batch(model: LoopedLM, ids: Items[int]) -> Tensor:
    return torch.tensor([list(ids)], dtype=torch.long, device=model.device)


def _alternatives(logprobs: Tensor, top: int) -> list[Alternatives]:
    tokens, values = most_likely(logprobs, top)
    return [
        tuple(zip(row, likely, strict=True)) for row, likely in zip(tokens.tolist(), values.tolist(), strict=True)
    ]
