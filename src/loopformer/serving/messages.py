"""The messages between the server's process and the engine's process, and the log format that both use.

| direction   | message                                                                           |
|-------------|-----------------------------------------------------------------------------------|
| from engine | first: EngineReady, or a sentence (str) that says why the model cannot be loaded  |
| to engine   | a list of Submit, ScoreRequest and Cancel                                         |
| from engine | a pair: a list of EngineOutput, and EngineStats                                   |

Each text has three ids. On the pipe it is the `number` of its request, which the server counts up. In the engine it
is a `ticket`, which only worker.py uses. In the answer it is the `index` among the texts of the HTTP request.
"""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Literal, NamedTuple

from loopformer.config import ModelConfig
from loopformer.errors import LoopformerError
from loopformer.inference.request import Event, Request, TopLogprobs
from loopformer.trajectory import Trajectory


@dataclass(frozen=True)
class WorkerSettings:
    """The model that the process loads, and how much it runs at once."""

    model: str
    rows: int = 16
    memory: int | None = None  # bytes of the KV cache
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
    memory: int  # bytes of the KV cache
    value_bytes: int
    device: str
    process: int


class EngineStats(NamedTuple):
    """How busy the engine is now, and what it has done since its last message (`new_…`)."""

    running: int = 0
    waiting: int = 0
    max_client_running: int = 0  # slots of the client that has most
    memory_usage: float = 0.0
    new_prompt_tokens: int = 0  # computed
    new_prefix_hits: int = 0  # prompt tokens that were found in the prefix cache


# Messages to the engine.


class Submit(NamedTuple):
    """Generate a text."""

    number: int
    request: Request
    stream: bool  # events are sent more often


class ScoreRequest(NamedTuple):
    """Score tokens instead of generating. The answer is LensScores with `by_loop`, otherwise PromptScores."""

    number: int
    ids: tuple[int, ...]
    trajectory: Trajectory
    top: int
    by_loop: bool
    client: str = ""


class Cancel(NamedTuple):
    """Drop a request, waiting or running."""

    number: int


# Messages from the engine.


class TokenScore(NamedTuple):
    """A token's log-probability, and the most likely tokens at its position. The first token has neither."""

    logprob: float | None
    top_logprobs: TopLogprobs


class PromptScores(NamedTuple):
    """The scores of all tokens of a ScoreRequest."""

    tokens: list[TokenScore]


class LensScores(NamedTuple):
    """The most likely next tokens after each loop."""

    loops: list[TopLogprobs]


Content = Event | PromptScores | LensScores


class EngineOutput(NamedTuple):
    """What is new of a request. An error says why it was refused or ended."""

    number: int  # of the request; the ticket of an event means nothing to the server
    content: Content | LoopformerError

    @property
    def is_last(self) -> bool:
        return not isinstance(self.content, Event) or self.content.result is not None


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
    # Its warnings are about odd requests, with which a client could fill the log.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
