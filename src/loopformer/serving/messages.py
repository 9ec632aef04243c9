"""The messages between the server's process and the engine's process, and the log format that both use.

The server sends lists of Submit, ScoreRequest and Cancel. The engine's process sends EngineReady, or one sentence
that says why the model cannot be loaded. After that it sends pairs of a list of outputs and an EngineLoad. An
output is an Event of the engine, whose ticket is the server's number of the request, or Scores, or a Failure.
"""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any, Literal, NamedTuple

from loopformer.config import ModelConfig
from loopformer.errors import LoopformerError
from loopformer.inference.request import Event, Request
from loopformer.scoring import Alternatives
from loopformer.trajectory import Trajectory


@dataclass(frozen=True)
class WorkerSettings:
    """The model that the process loads, and how much it runs at once."""

    model: str
    rows: int = 16
    memory: int | None = None  # bytes of keys and values
    device: str = "auto"
    dtype: str | None = None
    fast: bool | Literal["auto"] = "auto"  # auto: where fused kernels can run
    step_seconds: float = 120.0  # a process that is silent for longer counts as hung


class EngineReady(NamedTuple):
    """What was loaded."""

    model: str  # the checkpoint, where a run was given
    config: ModelConfig
    default: Trajectory
    rows: int
    memory: int  # bytes for keys and values
    value_bytes: int
    device: str
    process: int


class EngineLoad(NamedTuple):
    """How busy the engine is, and what it has done since its last message."""

    running: int = 0
    waiting: int = 0
    max_client_running: int = 0  # slots of the client that has most
    memory_usage: float = 0.0
    prompt_tokens: int = 0
    shared_tokens: int = 0


# Messages to the process.


class Submit(NamedTuple):
    """Generate a text."""

    number: int
    request: Request
    stream: bool  # events are sent more often


class ScoreRequest(NamedTuple):
    """Score tokens instead of generating.

    With `by_loop` the result is the likely next tokens after each loop (`lens`), otherwise the log-probability of
    every token (`score_tokens`).
    """

    number: int
    ids: tuple[int, ...]
    trajectory: Trajectory
    top: int
    by_loop: bool


class Cancel(NamedTuple):
    """Drop a request, waiting or running."""

    number: int


# Messages from it: a list of outputs and the engine's load.


class TokenScore(NamedTuple):
    """A token's log-probability, and the most likely tokens at its position. The first token has neither."""

    logprob: float | None
    alternatives: Alternatives


class Scores(NamedTuple):
    """The answer to a ScoreRequest: a list of Alternatives or of TokenScore."""

    ticket: int
    scores: Any


class Failure(NamedTuple):
    """Why a request was refused or ended."""

    ticket: int
    error: LoopformerError


Output = Event | Scores | Failure


def run_worker(settings: WorkerSettings, connection: Connection) -> None:
    """Run the engine in this process.

    The worker is imported here, by its name, so that the server's process never loads the engine.
    """
    import_module("loopformer.serving.worker").run_worker(settings, connection)


# Logs.


class _JsonFormatter(logging.Formatter):
    """One JSON object per line. A message that is already a JSON object gets the time and the level added."""

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        content = json.loads(message) if message.startswith("{") else {"event": "log", "message": message}
        if record.exc_info:
            content["traceback"] = self.formatException(record.exc_info)
        when = self.formatTime(record, "%Y-%m-%dT%H:%M:%S")
        return json.dumps({"time": when, "level": record.levelname.lower(), **content}, ensure_ascii=False)


def log_as_json() -> None:
    """Write the log of this process to stderr, one JSON object per line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter())
    for name in ("loopformer", "uvicorn"):
        logging.getLogger(name).handlers = [handler]
        logging.getLogger(name).setLevel(logging.INFO)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
