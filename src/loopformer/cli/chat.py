"""`loopformer chat`: talk with a model in the terminal, or line by line through a pipe."""

import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated

import typer

from loopformer.cli.options import (
    SAMPLED_TEMPERATURE,
    SAMPLED_TOP_P,
    BudgetOption,
    DecodeDtype,
    Device,
    FastOption,
    MinP,
    Model,
    NewTokens,
    RepetitionPenalty,
    Seed,
    Temperature,
    TopK,
    TopP,
    TrajectoryOption,
    draw_seed,
)
from loopformer.cli.output import stoppable
from loopformer.config.model import BOX
from loopformer.errors import LoopformerError, RunFailed, nearest

if TYPE_CHECKING:
    from loopformer.inference.chat import ChatTemplate, Message
    from loopformer.inference.engine import Engine
    from loopformer.inference.request import Request, Sampling

HELP = """/budget 2              loops per token
/trajectory 2-1-2-3    a schedule instead of a budget
/temperature 0.7       0 is greedy
/reset                 forget the conversation
/help                  this list
/quit                  end the chat, like Ctrl-D; Ctrl-C stops an answer
A line that begins with a space is sent as text."""
# An example of each command's value; empty: takes no value.
COMMAND_EXAMPLES = {"budget": "2", "trajectory": "2-1-2-3", "temperature": "0.7"}
COMMAND_EXAMPLES |= {"reset": "", "help": "", "quit": ""}


@stoppable("a chat is not saved, the same command begins a new one")
def chat(
    model: Model = BOX,
    budget: BudgetOption = None,
    trajectory: TrajectoryOption = None,
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    max_tokens: NewTokens = 256,
    temperature: Temperature = SAMPLED_TEMPERATURE,
    top_k: TopK = None,
    top_p: TopP = SAMPLED_TOP_P,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    seed: Seed = None,
    fast: FastOption = None,
    device: Device = "auto",
    dtype: DecodeDtype = None,
) -> None:
    """Talk with a model; /help lists what can be changed during the chat.

    The chat template of the model's folder turns messages into a prompt; without one they are written as
    `prepare --supervised` writes them. Each line of standard input is a message. Answers go to stdout, everything
    else to stderr. Answers are sampled, and the seed is printed: the same --seed gives the same answers. The exit
    code is 1 if an answer failed.

    Examples: loopformer chat --model runs/mine --temperature 0.7

    loopformer chat --model runs/mine --budget 2 < questions.txt
    """
    from loopformer.device import dtype_of
    from loopformer.inference.chat import ChatTemplate, was_tuned_to_answer
    from loopformer.inference.request import Request, Sampling
    from loopformer.lm import load, move_to_device
    from loopformer.loading.folder import resolve_model_path, run_folder_of

    chosen_dtype = None if dtype is None else dtype_of(dtype)
    lm = load(model)
    fused = move_to_device(lm, device, chosen_dtype, "auto" if fast is None else fast)
    template = ChatTemplate.find(lm.need_tokenizer(), resolve_model_path(model), run_folder_of(model))
    lm.tokenizer = template.tokenizer
    (first_trajectory,) = lm.trajectories(1, budget, trajectory)
    sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty, draw_seed() if seed is None else seed)
    # Each answer replaces the prompt (0,).
    template_request = Request((0,), first_trajectory, sampling, max_tokens, template.stops)
    engine = lm.engine(rows=1, queue=1, fast=fused if fast is None else fast)
    engine.check(template_request)
    messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    conversation = Conversation(engine, template, template_request, messages)
    config = lm.model.config
    is_typed, failed = sys.stdin.isatty(), False
    if is_typed:
        with suppress(ImportError):  # gives `input` line editing and history
            import readline  # noqa: F401
        # Ctrl-C stops only the answer here, so replace stoppable's handler, unless SIGINT is ignored.
        if callable(signal.getsignal(signal.SIGINT)):
            signal.signal(signal.SIGINT, signal.default_int_handler)
    if was_tuned_to_answer(model) is False:
        _note("this model was never tuned to answer: it continues your text")
    if not sampling.greedy:
        _note(_describe_sampling(sampling))
    if is_typed:
        _note(f"{config.blocks}⊗{config.loops}, {config.context} tokens of context; /help lists the commands")
    prompt = "> " if is_typed and sys.stdout.isatty() else ""
    while (line := _read_line(prompt)) is not None:
        try:
            if line.startswith("/"):
                if not conversation.run_command(line):
                    break
            elif line.strip():
                conversation.answer(line.strip())
        except LoopformerError as error:
            failed = True
            typer.echo(f"loopformer: {error}", err=True)
        except KeyboardInterrupt:
            if not is_typed:  # in a pipe, Ctrl-C ends the program
                raise
    if failed and not is_typed:  # a person at a terminal has seen the error
        raise typer.Exit(1)


def _read_line(prompt: str) -> str | None:
    """The next line of standard input; None at its end. At a terminal, Ctrl-C drops the line."""
    while True:
        try:
            return input(prompt)
        except UnicodeDecodeError as error:
            raise LoopformerError("Standard input is not UTF-8 text; convert it.") from error
        except EOFError:
            if prompt:
                typer.echo("")
            return None
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            typer.echo("", err=True)
            _note("Ctrl-D or /quit ends the chat")


def _describe_sampling(sampling: "Sampling") -> str:
    """How tokens are chosen, with the seed that repeats the chat."""
    if sampling.greedy:
        return "greedy"
    return f"temperature {sampling.temperature:g}, top-p {sampling.top_p:g}, seed {sampling.seed}"


def _note(sentence: str) -> None:
    """Print a remark about the chat to stderr."""
    typer.secho(f"[{sentence}]", dim=True, err=True)


@dataclass
class Conversation:
    """The messages so far, and the settings of the next answer."""

    engine: "Engine"
    template: "ChatTemplate"
    template_request: "Request"  # its prompt is replaced for each answer
    messages: "list[Message]" = field(default_factory=list)
    warned_of_context: bool = False

    def run_command(self, line: str) -> bool:
        """Run a command such as `/budget 2`. False means that the chat ends."""
        command, _, value = line[1:].strip().partition(" ")
        value = value.strip()
        if command not in COMMAND_EXAMPLES:
            advice = nearest(f"/{command}", [f"/{name}" for name in COMMAND_EXAMPLES])
            raise LoopformerError(f"There is no /{command}; {advice} Begin the line with a space to send it.")
        if bool(value) != bool(COMMAND_EXAMPLES[command]):
            raise LoopformerError(f"Write it as /{command} {COMMAND_EXAMPLES[command]}".rstrip() + ".")
        if command == "quit":
            return False
        if command == "help":
            typer.echo(HELP, err=True)
            return True
        if command == "reset":
            self.messages = [message for message in self.messages if message["role"] == "system"]
            self.warned_of_context = False
            _note("the conversation is forgotten")
            return True
        if command == "temperature":
            try:
                temperature = float(value)
            except ValueError as error:
                raise LoopformerError(f"{value!r} is not a number; write it as /temperature 0.7.") from error
            sampling = replace(self.template_request.sampling, temperature=temperature)
            request = replace(self.template_request, sampling=sampling)
        else:  # budget or trajectory
            request = replace(self.template_request, trajectory=self.engine.model.resolve(value))
        self.template_request = request
        _note(f"trajectory {request.trajectory}, {_describe_sampling(request.sampling)}")
        return True

    def answer(self, question: str) -> None:
        """Stream the answer to a question, and append both to the messages. Ctrl-C stops the answer."""
        from loopformer.inference.request import REASONS

        started, tokens_before = time.perf_counter(), self.engine.counts.new_tokens
        context = self.engine.model.config.context
        # Reserve room for the answer: `max_tokens`, but at most a quarter of the context.
        messages, prompt = self.template.fit(
            [*self.messages, {"role": "user", "content": question}],
            context - min(self.template_request.max_tokens, context // 4),
        )
        ticket = self.engine.submit(replace(self.template_request, prompt=prompt))
        if len(messages) <= len(self.messages) and not self.warned_of_context:
            self.warned_of_context = True
            _note("the context is full: the oldest messages are left out from now on")
        text, result = "", None
        interrupt = None
        try:
            while result is None:
                for event in self.engine.step():
                    result = event.result
                    piece = event.piece if text else event.piece.lstrip()
                    text += piece
                    sys.stdout.write(piece)
                    sys.stdout.flush()
        except KeyboardInterrupt as error:
            interrupt = error
        finally:
            self.engine.cancel(ticket)  # after Ctrl-C the request would keep its slot
        sys.stdout.write("\n")
        sys.stdout.flush()
        if text.strip():
            self.messages = [*messages, {"role": "assistant", "content": text.strip()}]
        if result is not None and result.error is not None:
            raise RunFailed(result.error)
        seconds, tokens = time.perf_counter() - started, self.engine.counts.new_tokens - tokens_before
        budget = self.template_request.trajectory.budget
        reason = "stopped" if result is None else REASONS[result.reason]
        _note(
            f"{tokens} tokens, {seconds / max(1, tokens) * 1e3:.1f} ms each including the prompt; "
            f"{budget} {'loop' if budget == 1 else 'loops'} each; {reason}"
        )
        if interrupt is not None:
            raise interrupt
