"""The Python API: load a model with its tokenizer, generate text and score it.

lm = load("runs/demo")                      # a run, a model folder, or published weights
lm.generate("Once upon a time", budget=4).text
lm.generate(["Once upon", "It was"], trajectory="2-1-2-3", temperature=0.8, seed=3)
lm.score(["a text"]); lm.engine(rows=16)    # log-probabilities; continuous batching
lm.model(ids, "2-1-2-3").logits
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack, overload

import torch
from torch import nn

from loopformer.data.tokenizer import Tokenizer
from loopformer.device import choose_device
from loopformer.errors import NO_TOKENIZER, REMOVED, LoopformerError, nearest, require
from loopformer.inference.engine import Engine, generate
from loopformer.inference.fused.batch_pool import BatchPool, unsupported_reason
from loopformer.inference.request import Event, Request, Result, Sampling, is_whole
from loopformer.inference.runner import PlainRunner, Runner
from loopformer.loading import find_model, from_model_folder, read_model
from loopformer.loading.folder import default_trajectory, is_model_folder
from loopformer.model import LoopedLM
from loopformer.model.packed import can_pack_bfloat16
from loopformer.scoring import Score, score_texts
from loopformer.trajectory import Trajectory

Budgets = int | Sequence[int] | None
Trajectories = Trajectory | str | Sequence[Trajectory | str] | None
Fast = bool | Literal["auto"]  # auto: use the fused kernels where they can run
INT8_IS_FOR_CPUS = "int8 decodes on a CPU only; on a GPU use bfloat16."


class RequestOptions(TypedDict, total=False):
    """The keyword options of `lm.requests`. `Sampling` (inference/sampling.py) explains how tokens are chosen."""

    temperature: float
    top_k: int | None
    top_p: float
    min_p: float
    repetition_penalty: float
    seed: int | None
    max_tokens: int
    stops: str | Sequence[str] | None


class GenerateOptions(RequestOptions, total=False):
    """The keyword options of `lm.generate` and `lm.stream`.

    `fast` decodes with fused kernels in CUDA graphs. By default it is on wherever the kernels can run. False
    switches it off. True raises an error if the kernels cannot run. The first use compiles them.
    """

    fast: Fast


@dataclass
class LM:
    """A model with its tokenizer, which is None if the weights came without one."""

    model: LoopedLM
    tokenizer: Tokenizer | None = None
    default_trajectory: Trajectory | None = None  # of calls without a budget or trajectory; None: all loops
    _pool: BatchPool | None = field(default=None, repr=False)  # created by the first fused run

    @property
    def default(self) -> Trajectory | None:
        """The earlier name of `default_trajectory`."""
        return self.default_trajectory

    def to(self, device: str | torch.device, dtype: torch.dtype | None = None) -> LM:
        """Move the model, in place, to a device and dtype.

        On a CPU, torch.int8 and torch.bfloat16 decode faster than torch.float32 (model/packed.py).
        """
        is_int8 = dtype == torch.int8 or (dtype is None and self.model.dtype_name == "int8")
        require(not is_int8 or torch.device(device).type == "cpu", INT8_IS_FOR_CPUS)
        self.model.to(device=device, dtype=torch.float32 if is_int8 else dtype)
        optimize_weight_layout(self.model, is_int8)
        self._pool = None  # its CUDA graphs read the old weights
        return self

    @overload
    def generate(  # type: ignore[overload-overlap]  # a str is also a Sequence[str]
        self,
        prompt: str,
        budget: Budgets = None,
        trajectory: Trajectories = None,
        **options: Unpack[GenerateOptions],
    ) -> Result: ...

    @overload
    def generate(
        self,
        prompt: Sequence[str],
        budget: Budgets = None,
        trajectory: Trajectories = None,
        **options: Unpack[GenerateOptions],
    ) -> list[Result]: ...

    def generate(
        self,
        prompt: str | Sequence[str],
        budget: Budgets = None,
        trajectory: Trajectories = None,
        **options: Unpack[GenerateOptions],
    ) -> Result | list[Result]:
        """Continue one prompt, or several in one batch. Pass one budget or trajectory for all, or one per prompt.

        Options: max_tokens=128, stops=(), temperature=0 (greedy), top_k, top_p, min_p, repetition_penalty, seed,
        fast; see `GenerateOptions`.
        """
        if not isinstance(prompt, Iterable):
            raise LoopformerError(f"A prompt is text, or a list of texts; got {prompt!r}.")
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        fast = options.pop("fast", "auto")
        requests = self.requests(prompts, budget, trajectory, **options)  # type: ignore[misc]
        if not requests:
            return []
        results = {event.ticket: event.result for event in self.events(requests, fast) if event.result is not None}
        return results[0] if isinstance(prompt, str) else [results[ticket] for ticket in range(len(requests))]

    def stream(
        self,
        prompt: str,
        budget: Budgets = None,
        trajectory: Trajectories = None,
        **options: Unpack[GenerateOptions],
    ) -> Iterator[str]:
        """Yield the continuation of a prompt piece by piece. A piece never ends inside a character."""
        fast = options.pop("fast", "auto")
        events = self.events(self.requests([prompt], budget, trajectory, **options), fast)  # type: ignore[misc]
        return (event.piece for event in events if event.piece)

    def events(self, requests: Sequence[Request], fast: Fast = "auto") -> Iterator[Event]:
        """Run requests in one batch and yield their events as they happen. A failed request raises `RunFailed`."""
        fused = self._is_fused(fast)  # Check now: a generator's body runs only at its first next().

        def run() -> Iterator[Event]:
            with self._runner(len(requests), fused) as runner:
                yield from generate(self.model, self.need_tokenizer(), list(requests), runner)

        return run()

    def _is_fused(self, fast: Fast) -> bool:
        """Whether to decode with fused kernels. Raises if `fast` is True and they cannot run."""
        if fast not in (True, False, "auto"):
            raise LoopformerError(f"fast is True, False or 'auto', not {fast!r}.")
        reason = unsupported_reason(self.model)
        if fast is True and reason is not None:
            raise LoopformerError(f"fast {reason}; leave it out.")
        return fast is not False and reason is None

    @contextmanager
    def _runner(self, requests: int, fused: bool) -> Iterator[Runner]:
        """A runner for this many requests. No prefix sharing: each prompt runs once."""
        if not fused:
            yield PlainRunner(self.model, max(1, requests), share_prompts=False)
            return
        from loopformer.inference.fused.runner import FusedRunner  # needs Triton

        self._pool = self._pool or BatchPool(self.model)
        with self._pool.batch(max(1, requests)) as batch:
            yield FusedRunner(batch, share_prompts=False)

    def score(self, texts: Sequence[str], budget: Budgets = None, trajectory: Trajectories = None) -> list[Score]:
        """The log-probabilities of each text's tokens, after an end token as in `loopformer eval`."""
        if isinstance(texts, str):
            raise LoopformerError("score takes a list of texts; put the one text in brackets.")
        if not texts:
            return []
        ids = [self._encode(text) for text in texts]
        trajectories = self.trajectories(len(texts), budget, trajectory)
        return score_texts(self.model, ids, trajectories, self.need_tokenizer().eot)

    def engine(
        self,
        rows: int = 16,
        queue: int = 64,
        fast: Fast = "auto",
        memory: int | None = None,
    ) -> Engine:
        """Continuous batching: at most `rows` requests run at once, at most `queue` more wait.

        On a GPU the engine uses fused kernels unless `fast` is False. Requests of different budgets then run
        their loops in one batch. `memory` limits the bytes of the KV cache, prompts that requests share included.
        Prompts in prefill take more until they are done.
        With fused kernels, requests wait until their keys and values fit. Without them, a row may need a full
        context, so the limit lowers the number of rows.
        """
        require(is_whole(rows) and rows >= 1, f"An engine needs 1 row or more, got {rows}.")
        if not self._is_fused(fast):
            plain = PlainRunner(self.model, rows, memory)
            return Engine(self.model, self.need_tokenizer(), plain, queue)
        from loopformer.inference.fused.launch import DecodeBatch  # needs Triton
        from loopformer.inference.fused.runner import FusedRunner

        runner = FusedRunner(DecodeBatch(self.model, rows, memory))
        return Engine(self.model, self.need_tokenizer(), runner, queue)

    def requests(
        self,
        prompts: Sequence[str],
        budget: Budgets = None,
        trajectory: Trajectories = None,
        **options: Unpack[RequestOptions],
    ) -> list[Request]:
        """Requests for `lm.events` or an engine, one per prompt. `generate` and `stream` run the same requests."""
        if isinstance(prompts, str):
            raise LoopformerError("requests takes a list of prompts; put the one prompt in brackets.")
        for name in options:
            if name in REMOVED:
                raise LoopformerError(REMOVED[name])
            if name not in RequestOptions.__annotations__:
                hint = nearest(name, list(GenerateOptions.__annotations__))
                raise LoopformerError(f"Unknown option {name} for generation; {hint}")
        settings: dict[str, Any] = dict(options)
        stops, max_tokens = settings.pop("stops", None) or (), settings.pop("max_tokens", 128)
        stops = (stops,) if isinstance(stops, str) else tuple(stops)
        sampling = Sampling(**settings)
        trajectories = self.trajectories(len(prompts), budget, trajectory)
        return [
            Request(tuple(self._encode(prompt)), steps, sampling, max_tokens, stops)
            for prompt, steps in zip(prompts, trajectories, strict=True)
        ]

    def trajectories(self, rows: int, budget: Budgets = None, trajectory: Trajectories = None) -> list[Trajectory]:
        """One trajectory per row. Either argument may be a single value or a list; without both, the default."""
        if budget is not None and trajectory is not None:
            raise LoopformerError("Give a budget or a trajectory, not both.")
        chosen: Any = budget if trajectory is None else trajectory
        resolved = self.model.trajectories(self.default_trajectory if chosen is None else chosen, rows)
        return [resolved] * rows if isinstance(resolved, Trajectory) else resolved

    def _encode(self, text: str) -> list[int]:
        """The token ids of a text. Raises if it is not a str that UTF-8 can encode, or too long for sure."""
        if not isinstance(text, str):
            raise LoopformerError(f"A prompt or text must be text, got {text!r}.")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise LoopformerError("The text holds a character that UTF-8 cannot encode; remove it.") from error
        # Encoding takes a second per few megabytes, so do not encode a text that will be refused for its length.
        fewest, context = self.need_tokenizer().fewest_tokens(text), self.model.config.context
        require(fewest <= context, f"A text has at least {fewest} tokens but the context is {context}; shorten it.")
        return self.need_tokenizer().encode(text)

    def need_tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises if the model has none."""
        if self.tokenizer is None:
            raise LoopformerError(NO_TOKENIZER)
        return self.tokenizer


def load(source: str | Path) -> LM:
    """Load a run, a model folder or published weights (file, folder or Hub id), in float32 on the CPU."""

    def read(folder: Path) -> LM:
        if not is_model_folder(folder):
            return load_official(source)
        lm = _build_lm(*read_model(folder))
        trajectory = default_trajectory(folder)
        lm.default_trajectory = None if trajectory is None else lm.model.resolve(trajectory)
        return lm

    return from_model_folder(source, read)


def load_official(source: str | Path, heads: int | None = None, loops: int | None = None) -> LM:
    """Load published weights. Give `heads` and `loops` only if no config lies beside the weights."""
    return _build_lm(*find_model(source, heads, loops))


def move_to_device(lm: LM, device: str, dtype: torch.dtype | None, fast: Fast) -> bool:
    """Move the model to a device, by default in its best dtype. Returns whether fused kernels will run it."""
    chosen = choose_device(device)
    # The model moves first: whether the kernels can run depends on the device that holds its weights.
    fused = fast is not False and unsupported_reason(lm.to(chosen).model) is None
    lm.to(chosen, dtype or (torch.bfloat16 if fused else torch.float32))
    return fused


@torch.no_grad()
def optimize_weight_layout(model: LoopedLM, is_int8: bool = False) -> LoopedLM:
    """Store the weights that every token uses in the layout that decodes fastest, in place.

    A matmul of one row on the CPU is limited by memory bandwidth. PyTorch reads a float32 weight [out, in] with all
    cores only if it is column-major (results/cpu/decode.json). Packed weights are faster, but rounded. The weights'
    values, shapes and saved files do not change.
    """
    is_cpu = model.device.type == "cpu"
    is_packed = model.tokens.weight.dtype == torch.bfloat16 and can_pack_bfloat16()
    model.pack(torch.int8 if is_int8 else torch.bfloat16 if is_cpu and is_packed else None)
    is_column_major = is_cpu and model.packed_dtype is None
    linears = [module for module in model.stack.modules() if isinstance(module, nn.Linear)]
    for weight in (model.tokens.weight, *(linear.weight for linear in linears)):
        weight.data = weight.data.t().contiguous().t() if is_column_major else weight.data.contiguous()
    return model


def _build_lm(model: LoopedLM, tokenizer: Path | None) -> LM:
    return LM(optimize_weight_layout(model).eval(), Tokenizer.load(tokenizer) if tokenizer else None)
