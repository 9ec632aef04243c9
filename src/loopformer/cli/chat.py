"""`loopformer chat`: talk with a model in the terminal, or line by line through a pipe."""

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from loopformer.cli.options import (
    BudgetOption,
    DecodeDtype,
    Device,
    FastOption,
    MinP,
    Model,
    NewTokens,
    RemovedCertainty,
    RepetitionPenalty,
    Seed,
    Temperature,
    TopK,
    TopP,
    TrajectoryOption,
)
from loopformer.cli.output import stoppable
from loopformer.config.model import BOX

if TYPE_CHECKING:
    from loopformer.inference.chat import ChatTemplate, Message
    from loopformer.inference.engine import Engine
    from loopformer.inference.request import Request

HELP = """/budget 2              loops per token
/trajectory 4-2-1-1    a schedule instead
/temperature 0.7       0 is greedy
/reset                 forget what was said
/help                  this
/quit                  end, as Ctrl-D does; Ctrl-C stops an answer
A line that begins with a space is said as it is."""


@stoppable("a chat is kept nowhere, the same command begins a new one")
def chat(
    model: Model = BOX,
    budget: BudgetOption = None,
    trajectory: TrajectoryOption = None,
    system: Annotated[str | None, typer.Option(help="What the model is told before the chat.")] = None,
    certainty: RemovedCertainty = None,
    max_tokens: NewTokens = 256,
    temperature: Temperature = 0.0,
    top_k: TopK = None,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    seed: Seed = None,
    fast: FastOption = None,
    device: Device = "auto",
    dtype: DecodeDtype = None,
) -> None:
    """Talk with a model; /help says what can be changed on the way.

    Turns become a prompt by the chat template of the model's folder, or as `prepare --supervised` writes them. Each
    line of standard input is a turn, also through a pipe: the answers go to stdout, all else to stderr; the exit
    code is 1 if a turn failed.

    Examples: loopformer chat --model runs/mine --temperature 0.7

    loopformer chat --model runs/mine --budget 2 < questions.txt
    """
    from loopformer.device import dtype_of
    from loopformer.errors import LoopformerError
    from loopformer.inference.chat import ChatTemplate
    from loopformer.inference.request import Request
    from loopformer.inference.sampling import Sampling
    from loopformer.lm import load, place
    from loopformer.loading.folder import located, run_of

    wanted = None if dtype is None else dtype_of(dtype)
    lm = load(model)
    fused = place(lm, device, wanted, "auto" if fast is None else fast)
    template = ChatTemplate.find(lm.need_tokenizer(), located(model), run_of(model))
    lm.tokenizer = template.tokenizer
    (follows,) = lm.trajectories(1, budget, trajectory)
    sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty, seed)
    start = Request((0,), follows, sampling, max_tokens, template.stops)
    engine = lm.engine(rows=1, queue=1, fast=fused if fast is None else fast)
    engine.backend.check(start)
    talk = _Chat(engine, template, start, [] if system is None else [{"role": "system", "content": system}])
    config = lm.model.config
    if sys.stdin.isatty():
        with suppress(ImportError):  # where it is there, `input` can be edited and has a history
            import readline  # noqa: F401
        _say(f"{config.blocks}⊗{config.loops}, {config.context} tokens of context; /help says what can be changed")
    failed = False
    with _interrupts() as interrupt:
        while (line := interrupt.read()) is not None:
            try:
                if line.startswith("/"):
                    if not talk.obey(line):
                        break
                elif line.strip():
                    talk.answer(line.strip(), lambda: interrupt.pressed)
            except LoopformerError as error:
                failed = True
                typer.echo(f"loopformer: {error}", err=True)
    if failed and not sys.stdin.isatty():  # at a terminal it was seen
        raise typer.Exit(1)


def _say(sentence: str) -> None:
    """What is not part of the chat."""
    typer.secho(f"[{sentence}]", dim=True, err=True)


@dataclass
class _Chat:
    """What was said so far, and how the next answer is made: as the request `like`, with a prompt of its own."""

    engine: "Engine"
    template: "ChatTemplate"
    like: "Request"
    messages: "list[Message]" = field(default_factory=list)
    forgets: bool = False  # whether it was said that the context is full

    def obey(self, line: str) -> bool:
        """Do what a line such as `/budget 2` says; False if it is to end."""
        from loopformer.errors import LoopformerError, nearest

        command, _, value = line[1:].strip().partition(" ")
        value = value.strip()
        known = {"budget": "2", "trajectory": "4-2-1-1", "temperature": "0.7", "reset": "", "help": "", "quit": ""}
        if command not in known:
            advice = nearest(f"/{command}", [f"/{name}" for name in known])
            raise LoopformerError(f"There is no /{command}; {advice} A space before it makes it text.")
        if bool(value) != bool(known[command]):
            raise LoopformerError(f"Write it as /{command} {known[command]}".rstrip() + ".")
        if command == "quit":
            return False
        if command == "help":
            typer.echo(HELP, err=True)
        elif command == "reset":
            self.messages = [message for message in self.messages if message["role"] == "system"]
            self.forgets = False
            _say("what was said is forgotten")
        else:
            self._set(command, value)
        return True

    def _set(self, name: str, value: str) -> None:
        from loopformer.errors import LoopformerError

        if name == "temperature":
            try:
                sampling = replace(self.like.sampling, temperature=float(value))
            except ValueError as error:
                if isinstance(error, LoopformerError):
                    raise
                raise LoopformerError(f"{value!r} is no number; write it as /temperature 0.7.") from error
            self.like = replace(self.like, sampling=sampling)
        else:
            if name == "budget" and not value.isdecimal():
                raise LoopformerError(f"{value!r} is no number of loops; write it as /budget 2.")
            self.like = replace(self.like, trajectory=self.engine.model.resolve(value))
        _say(f"trajectory {self.like.trajectory}, temperature {self.like.sampling.temperature:g}")

    def answer(self, question: str, stopped: Callable[[], bool]) -> None:
        """Stream the answer to a question, until it ends or is stopped; both are remembered."""
        from loopformer.errors import RunFailed
        from loopformer.inference.request import REASONS

        started, tokens = time.perf_counter(), self.engine.counts.new_tokens
        context = self.engine.model.config.context
        chat, ids = self.template.fit(
            [*self.messages, {"role": "user", "content": question}],
            context - min(self.like.max_tokens, context // 4),
        )
        ticket = self.engine.submit(replace(self.like, prompt=ids))
        if len(chat) <= len(self.messages) and not self.forgets:
            self.forgets = True
            _say("the context is full: from here on the oldest turns are left out")
        text, result = "", None
        while result is None and not stopped():
            for event in self.engine.step():
                result = event.result
                piece = event.piece if text else event.piece.lstrip()
                text += piece
                sys.stdout.write(piece)
                sys.stdout.flush()
        self.engine.cancel(ticket)
        sys.stdout.write("\n")
        sys.stdout.flush()
        if text.strip():
            self.messages = [*chat, {"role": "assistant", "content": text.strip()}]
        if result is not None and result.error is not None:
            raise RunFailed(result.error)
        seconds, tokens = time.perf_counter() - started, self.engine.counts.new_tokens - tokens
        reason = "stopped" if result is None else REASONS[result.reason]
        each = f"{seconds / max(1, tokens) * 1e3:.1f} ms each, prompt included"
        _say(f"{tokens} tokens, {each}; budget {self.like.trajectory.budget}; {reason}")


class _Interrupt:
    """Ctrl-C as a chat takes it: at a terminal it stops the answer, or drops the line that is being typed.

    Where lines come from a pipe or a file nobody is there to go on, and it stops the answer and then the chat.
    """

    def __init__(self) -> None:
        self.pressed = self.reading = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.pressed = True
        if self.reading:
            raise KeyboardInterrupt

    def read(self) -> str | None:
        """The next line that is said; None at the end."""
        from loopformer.errors import LoopformerError

        typed = sys.stdin.isatty()
        at_terminal = typed and sys.stdout.isatty()
        while True:
            try:
                self.reading = True
                if self.pressed and not typed:
                    raise KeyboardInterrupt
                self.pressed = False
                line = input("> " if at_terminal else "")
                self.reading = False
                return line
            except KeyboardInterrupt:
                if not typed:
                    raise
                if at_terminal:
                    typer.echo("")
                    _say("Ctrl-D or /quit ends the chat")
            except EOFError:
                if at_terminal:
                    typer.echo("")
                return None
            except UnicodeDecodeError as error:
                raise LoopformerError("Standard input is not UTF-8 text; convert it.") from error
            finally:
                self.reading = False


@contextmanager
def _interrupts() -> Iterator[_Interrupt]:
    """Take Ctrl-C over as long as the chat lasts, unless it is ignored, as in the background."""
    interrupt, before = _Interrupt(), signal.getsignal(signal.SIGINT)
    if not callable(before):
        yield interrupt
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)
