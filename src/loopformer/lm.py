"""What a user holds: a model and its tokenizer.

lm = load("runs/demo")                      # a run, a model folder, or the authors' published weights
lm.generate("Once upon a time", budget=4).text
lm.generate(["Once upon", "It was"], trajectory="4-2-1-1", temperature=0.8, seed=3)
lm.score(["a text"]); lm.engine(rows=16)    # log-probabilities; continuous batching
lm.model(ids, "4-2-1-1").logits
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
from loopformer.errors import REMOVED_CERTAINTY, REMOVED_DRAFT, LoopformerError, nearest, require
from loopformer.inference.decode import PlainBackend, kv_bytes_per_slot
from loopformer.inference.engine import Backend, Engine, generate
from loopformer.inference.fused.backend import BatchPool, unsupported_reason
from loopformer.inference.request import Event, Request, Result
from loopformer.inference.sampling import Sampling, is_whole
from loopformer.loading import find_model, from_model_folder, read_model
from loopformer.loading.folder import default_trajectory, is_model_folder
from loopformer.model import LoopedLM
from loopformer.scoring import Score, score_texts
from loopformer.trajectory import Trajectory

Budget = int | Sequence[int] | None
Schedule = Trajectory | str | Sequence[Trajectory | str] | None
Fast = bool | Literal["auto"]  # auto: where it can run
REMOVED = {  # options of earlier versions
    "certainty": REMOVED_CERTAINTY,
    "draft": f"{REMOVED_DRAFT}.",
    "int8": 'int8 was removed; leave it out, and on a GPU decode in bfloat16: lm.to("cuda", torch.bfloat16).',
}


class RequestOptions(TypedDict, total=False):
    """What `lm.requests` takes; see `Sampling` (inference/sampling.py) for how tokens are chosen."""

    temperature: float
    top_k: int | None
    top_p: float
    min_p: float
    repetition_penalty: float
    seed: int | None
    max_tokens: int
    stops: str | Sequence[str] | None


class GenerateOptions(RequestOptions, total=False):
    """What `lm.generate` and `lm.stream` take. `fast` replays fused kernels as CUDA graphs, compiled at first use.
    They are used by default where they can run, on a GPU. False switches them off; True is an error if they cannot
    run."""

    fast: Fast


@dataclass
class LM:
    """A model with what belongs to it. `tokenizer` is None where the weights came without one."""

    model: LoopedLM
    tokenizer: Tokenizer | None = None
    default: Trajectory | None = None  # what is followed where a call does not say; None is the full one
    _pool: BatchPool | None = field(default=None, repr=False)  # made at first use

    def to(self, device: str | torch.device, dtype: torch.dtype | None = None) -> LM:
        """Move the model, in place, to a device and dtype."""
        optimize_weight_layout(self.model.to(device=device, dtype=dtype))
        self._pool = None
        return self

    @overload
    def generate(  # type: ignore[overload-overlap]  # text is a sequence of texts, too
        self,
        prompt: str,
        budget: Budget = None,
        trajectory: Schedule = None,
        **options: Unpack[GenerateOptions],
    ) -> Result: ...

    @overload
    def generate(
        self,
        prompt: Sequence[str],
        budget: Budget = None,
        trajectory: Schedule = None,
        **options: Unpack[GenerateOptions],
    ) -> list[Result]: ...

    def generate(
        self,
        prompt: str | Sequence[str],
        budget: Budget = None,
        trajectory: Schedule = None,
        **options: Unpack[GenerateOptions],
    ) -> Result | list[Result]:
        """Continue one prompt, or several together; a budget or trajectory for all or for each.

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
        ended = {event.ticket: event.result for event in self.events(requests, fast) if event.result is not None}
        return ended[0] if isinstance(prompt, str) else [ended[ticket] for ticket in range(len(requests))]

    def stream(
        self,
        prompt: str,
        budget: Budget = None,
        trajectory: Schedule = None,
        **options: Unpack[GenerateOptions],
    ) -> Iterator[str]:
        """Continue a prompt and give its text piece by piece, whole characters each."""
        fast = options.pop("fast", "auto")
        events = self.events(self.requests([prompt], budget, trajectory, **options), fast)  # type: ignore[misc]
        return (event.piece for event in events if event.piece)

    def events(self, requests: Sequence[Request], fast: Fast = "auto") -> Iterator[Event]:
        """Run requests together, and give their events as they come; a request that fails is raised."""
        fused = self._is_fused(fast)  # here, so that a wrong option is refused before the first event

        def run() -> Iterator[Event]:
            with self._backend(len(requests), fused) as backend:
                yield from generate(self.model, self.need_tokenizer(), requests, backend)

        return run()

    def _is_fused(self, fast: Fast) -> bool:
        """Whether fused kernels decode; an error if `fast` demands them and they cannot."""
        if fast not in (True, False, "auto"):
            raise LoopformerError(f"fast is True, False or 'auto', not {fast!r}.")
        why = unsupported_reason(self.model)
        if fast is True and why is not None:
            raise LoopformerError(f"fast {why}; leave it out.")
        return fast is not False and why is None

    @contextmanager
    def _backend(self, requests: int, fused: bool) -> Iterator[Backend]:
        """A backend for so many requests."""
        if not fused:
            yield PlainBackend(self.model, max(1, requests), remember=0)
            return
        from loopformer.inference.fused.shared import SharedBackend  # needs Triton

        self._pool = self._pool or BatchPool(self.model)
        with self._pool.batch(max(1, requests)) as batch:
            yield SharedBackend(batch, remember=0)

    def score(self, texts: Sequence[str], budget: Budget = None, trajectory: Schedule = None) -> list[Score]:
        """Log-probabilities of texts, token by token; the first follows an end token, as in `loopformer eval`."""
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

        On a GPU, unless `fast` is False, through fused kernels: passes are shared by requests
        of any budget. `memory` is bytes for keys and values: there requests
        wait until theirs fit, elsewhere there are fewer rows, as each has room for a whole context.
        """
        if not is_whole(rows) or rows < 1:
            raise LoopformerError(f"An engine needs 1 row or more, got {rows}.")
        if not self._is_fused(fast):
            if memory is not None:
                rows = min(rows, memory // kv_bytes_per_slot(self.model))
                require(
                    rows >= 1,
                    f"{memory:,} bytes hold no row of keys, which takes {kv_bytes_per_slot(self.model):,}.",
                )
            return Engine(self.model, self.need_tokenizer(), PlainBackend(self.model, rows), rows, queue)
        from loopformer.inference.fused.batch import SharedBatch  # needs Triton
        from loopformer.inference.fused.shared import SharedBackend

        backend = SharedBackend(SharedBatch(self.model, rows, memory))
        return Engine(self.model, self.need_tokenizer(), backend, rows, queue)

    def requests(
        self,
        prompts: Sequence[str],
        budget: Budget = None,
        trajectory: Schedule = None,
        **options: Unpack[RequestOptions],
    ) -> list[Request]:
        """What `generate` and `stream` run."""
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
            Request(tuple(self._encode(prompt)), follows, sampling, max_tokens, stops)
            for prompt, follows in zip(prompts, trajectories, strict=True)
        ]

    def trajectories(self, rows: int, budget: Budget = None, trajectory: Schedule = None) -> list[Trajectory]:
        """A trajectory for each row, from a budget or a trajectory for all or for each, or the default."""
        if budget is not None and trajectory is not None:
            raise LoopformerError("Give a budget or a trajectory, not both.")
        wanted: Any = budget if trajectory is None else trajectory
        resolved = self.model.trajectories(self.default if wanted is None else wanted, rows)
        return [resolved] * rows if isinstance(resolved, Trajectory) else resolved

    def _encode(self, text: str) -> list[int]:
        """The tokens of a text, which must be one."""
        if not isinstance(text, str):
            raise LoopformerError(f"A prompt or text must be text, got {text!r}.")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise LoopformerError("The text is not UTF-8: it holds bytes that are no character.") from error
        return self.need_tokenizer().encode(text)

    def need_tokenizer(self) -> Tokenizer:
        """The tokenizer, for what cannot be done without one."""
        if self.tokenizer is None:
            raise LoopformerError("This model came without a tokenizer; put its tokenizer.json beside its weights.")
        return self.tokenizer


def load(source: str | Path) -> LM:
    """Load a run, a model folder of ours or the authors' weights (file, folder or Hub id), fp32 on the CPU."""

    def read(folder: Path) -> LM:
        if not is_model_folder(folder):
            return load_official(source)
        lm = _lm(*read_model(folder))
        trajectory = default_trajectory(folder)
        lm.default = None if trajectory is None else lm.model.resolve(trajectory)
        return lm

    return from_model_folder(source, read)


def load_official(source: str | Path, heads: int | None = None, loops: int | None = None) -> LM:
    """Load the authors' weights; `heads` and `loops` are needed only where no config stands beside them."""
    return _lm(*find_model(source, heads, loops))


def move_to_device(lm: LM, device: str, dtype: torch.dtype | None, fast: Fast) -> bool:
    """Move the model to where a user lets it run, by default in the dtype that suits; whether fused kernels will
    run it."""
    where = choose_device(device)
    fused = fast is not False and unsupported_reason(lm.to(where).model) is None
    lm.to(where, dtype or (torch.bfloat16 if fused else torch.float32))
    return fused


@torch.no_grad()
def optimize_weight_layout(model: LoopedLM) -> LoopedLM:
    """Put the weights that every token reads into the memory order that decoding reads fastest; in place.

    On the CPU a matmul with one row is limited by reading the weight, and PyTorch reads a weight [out, in] on all
    cores only when it lies in memory by columns (results/cpu/decode.json). Values, shapes and files stay the same.
    """
    by_columns = model.device.type == "cpu"
    linears = [module for module in model.stack.modules() if isinstance(module, nn.Linear)]
    for weight in (model.tokens.weight, *(linear.weight for linear in linears)):
        weight.data = weight.data.t().contiguous().t() if by_columns else weight.data.contiguous()
    return model


def _lm(model: LoopedLM, tokenizer: Path | None) -> LM:
    return LM(optimize_weight_layout(model).eval(), Tokenizer.load(tokenizer) if tokenizer else None)
