"""The process that the engine runs in.

    process = context.Process(target=run_worker, args=(WorkerSettings("runs/mine", rows=16), connection))
    connection.recv()                                   # EngineReady, or one sentence that says what is wrong
    connection.send([Submit(number=0, request=request, stream=True)])                 # or ScoreRequest, Cancel
    outputs, stats = connection.recv()                  # a list of EngineOutput, and EngineStats

The loop reads messages, steps the engine, and sends the outputs in one message. An idle process sends regular
heartbeats. It ends with its parent. The other end of the pipe is engine_process.py.

An output costs the server far more than a token costs the engine, mostly in system calls. A message costs the
engine a third of a millisecond. So both are limited, and an event may hold several tokens. The first and the last
token of a text are never held back.

| limit              | of                  | 1 running text | 64 running texts        |
|--------------------|---------------------|----------------|-------------------------|
| MAX_OUTPUTS        | streamed events     | 1 per token    | 1 per 16 ms, for each   |
| UNSTREAMED_SECONDS | other events        | 1 per 250 ms   | 1 per 250 ms, for each  |
| MAX_MESSAGES       | messages            | 1 per step     | 1 per 4 ms              |

A text that is not streamed needs events before its end only for the metrics.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections import Counter
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait

import torch
from torch import Tensor

from loopformer.device import dtype_of
from loopformer.errors import LoopformerError, RunFailed
from loopformer.inference.chat import ChatTemplate
from loopformer.inference.engine import Engine, warm_up
from loopformer.inference.request import TopLogprobs
from loopformer.inference.sequence import Sequence, Status
from loopformer.lm import LM, load, move_to_device
from loopformer.loading import from_model_folder
from loopformer.loading.folder import is_run_folder, resolve_model_path, run_folder_of
from loopformer.model import LoopedLM
from loopformer.scoring import head_chunks, most_likely
from loopformer.serving.messages import (
    Cancel,
    EngineOutput,
    EngineReady,
    EngineStats,
    LensScores,
    PromptScores,
    ScoreRequest,
    Submit,
    TokenScore,
    WorkerSettings,
    log_as_json,
)
from loopformer.trajectory import Trajectory

logger = logging.getLogger(__name__)
MAX_FAILED_STEPS = 5  # in a row; then the process ends and another one is started
MAX_OUTPUTS = 4000  # events per second of all streams together: each of n streams gets one per n / 4000 s
MAX_MESSAGES = 16_000  # with n running texts the process sends at most one message per n / 16,000 s
UNSTREAMED_SECONDS = 0.25  # between the events of a text that is not streamed
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
    gc.freeze()  # otherwise a full collection visits every module, which stops all requests for a fifth of a second
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
class _PacedText:
    """A text that the engine generates: its number on the pipe, and when its next event is due."""

    number: int
    is_streamed: bool
    next_event_at: float = 0.0


class _Worker:
    """The loop of the process: receive messages, step the engine, send outputs."""

    def __init__(self, lm: LM, engine: Engine, connection: Connection, heartbeat_seconds: float) -> None:
        self._lm, self._engine, self._pipe, self._heartbeat = lm, engine, connection, heartbeat_seconds
        self._sent_counts = engine.counts  # up to the last message; the warm-up is not reported
        self._score_queues: dict[str, list[ScoreRequest]] = {}  # by client, in the order of their turns
        self._next_score_at = 0.0  # ignored while no text is generated
        self._texts: dict[int, _PacedText] = {}  # by the engine's ticket
        self._outputs: list[EngineOutput] = []
        self._are_stats_sent = False
        self._sent_at = 0.0

    def run(self) -> None:
        failures = 0
        while True:
            if not self._score_queues and self._engine.idle:
                while not self._pipe.poll(self._heartbeat):
                    self._send()  # an idle process shows that it is alive
            while self._pipe.poll():
                self._are_stats_sent = False
                for message in self._pipe.recv():
                    self._receive(message)
            self._score()
            try:
                self._step()
                failures = 0
            except Exception:
                # The engine's step is a transaction, so it is safe to repeat. The engine ends a request whose
                # prompt or text fails twice.
                failures += 1
                logger.exception("A step of the engine failed.")
                if failures == MAX_FAILED_STEPS:
                    raise
            has_changed = bool(self._outputs) or not self._are_stats_sent
            pause = self._engine.running / MAX_MESSAGES if has_changed else self._heartbeat
            if time.monotonic() >= self._sent_at + pause:
                self._send()

    def _receive(self, message: Submit | ScoreRequest | Cancel) -> None:
        if isinstance(message, Submit):
            try:
                ticket = self._engine.submit(message.request)
            except Exception as error:
                self._outputs.append(EngineOutput(message.number, _client_error(error)))
            else:
                self._texts[ticket] = _PacedText(message.number, message.stream)
        elif isinstance(message, ScoreRequest):
            self._score_queues.setdefault(message.client, []).append(message)
        else:
            number = message.number
            left = {
                client: [request for request in waiting if request.number != number]
                for client, waiting in self._score_queues.items()
            }
            self._score_queues = {client: waiting for client, waiting in left.items() if waiting}
            for ticket in [ticket for ticket, text in self._texts.items() if text.number == number]:
                self._engine.cancel(ticket)
                del self._texts[ticket]

    def _score(self) -> None:
        """Answer one ScoreRequest of the next client. The next one waits as long as this one took, so that
        generation goes on."""
        began = time.monotonic()
        if not self._score_queues or (began < self._next_score_at and not self._engine.idle):
            return
        client, (request, *others) = next(iter(self._score_queues.items()))
        del self._score_queues[client]
        if others:
            self._score_queues[client] = others  # behind the other clients
        model = self._lm.model
        content: LensScores | PromptScores | LoopformerError
        try:
            arguments = model, list(request.ids), model.resolve(request.trajectory), request.top
            if request.by_loop:
                content = LensScores(top_tokens_by_loop(*arguments))
            else:
                content = PromptScores(score_tokens(*arguments))
        except Exception as error:
            content = _client_error(error)
        self._outputs.append(EngineOutput(request.number, content))
        now = time.monotonic()
        self._next_score_at = now + (now - began)

    def _step(self) -> None:
        events, running = self._engine.step(self._is_due), self._engine.running
        for event in events:
            text = self._texts.get(event.ticket)
            if text is None:  # cancelled
                continue
            self._outputs.append(EngineOutput(text.number, event))
            if event.result is not None:
                del self._texts[event.ticket]
                if event.result.error is not None:
                    logger.error("A request failed: %s", event.result.error)
            pause = running / MAX_OUTPUTS if text.is_streamed else UNSTREAMED_SECONDS
            text.next_event_at = time.monotonic() + pause

    def _is_due(self, sequence: Sequence) -> bool:
        text = self._texts.get(sequence.ticket)
        is_held_back = text is not None and time.monotonic() < text.next_event_at
        return not is_held_back or sequence.status is Status.FINISHED

    def _send(self) -> None:
        engine, counts, sent = self._engine, self._engine.counts, self._sent_counts
        clients = Counter(sequence.request.client for sequence in engine.scheduler.running)
        stats = EngineStats(
            engine.running,
            sum(map(len, self._score_queues.values())) + engine.waiting,
            max(clients.values(), default=0),
            engine.used_bytes / engine.memory_bytes,
            counts.prompt_tokens - sent.prompt_tokens,
            counts.shared_tokens - sent.shared_tokens,
        )
        self._pipe.send((self._outputs, stats))
        self._outputs = []
        self._sent_counts, self._are_stats_sent, self._sent_at = counts, True, time.monotonic()


def _client_error(error: Exception) -> LoopformerError:
    """The error that the client may see. Details of an internal failure go to the log only."""
    if isinstance(error, LoopformerError) and not isinstance(error, RunFailed):
        return LoopformerError(str(error))
    logger.error("A request failed.", exc_info=error)
    return RunFailed("The request could not be run.")


# Scoring given tokens, in one pass without a cache.


@torch.no_grad()
def top_tokens_by_loop(model: LoopedLM, ids: list[int], trajectory: Trajectory, top: int) -> list[TopLogprobs]:
    """The `top` most likely next tokens after each loop, as if the model stopped there."""
    states = model(_batch(model, ids), trajectory, logits=False, states=True).states
    last = model.final_norm(torch.stack([state[0, -1] for state in states]))  # [M, D]
    return [row for _, logits in head_chunks(model, last) for row in _alternatives(logits.log_softmax(-1), top)]


@torch.no_grad()
def score_tokens(model: LoopedLM, ids: list[int], trajectory: Trajectory, top: int) -> list[TokenScore]:
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


def _batch(model: LoopedLM, ids: list[int]) -> Tensor:
    return torch.tensor([ids], dtype=torch.long, device=model.device)


def _alternatives(logprobs: Tensor, top: int) -> list[TopLogprobs]:
    tokens, values = most_likely(logprobs, top)
    return [
        tuple(zip(row, likely, strict=True)) for row, likely in zip(tokens.tolist(), values.tolist(), strict=True)
    ]
