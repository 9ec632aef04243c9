"""The memory order of weights that decoding reads fastest.

On the CPU a product with one row is limited by reading the weight, and PyTorch reads a weight [out, in] on all
cores only when it lies in memory by columns (benchmarks/decode_cpu.py). Values, shapes and files stay the same.

What a user holds: a model and its tokenizer.

lm = load("runs/demo")                      # a run, a model folder, or the authors' published weights
lm.generate("Once upon a time", budget=4).text
lm.model(ids, "4-2-1-1").logits
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, overload

import torch
from torch import nn

from loopformer.data.tokenizer import Tokenizer
from loopformer.errors import LoopformerError, nearest, require
from loopformer.inference.adaptive.policy import Policy, generate_adaptive
from loopformer.inference.decode import generate
from loopformer.inference.draft import Draft, Report, speculate
from loopformer.inference.engine import Engine
from loopformer.inference.fused.backend import Fast
from loopformer.inference.request import Event, Request, Result
from loopformer.inference.sampling import Sampling
from loopformer.inference.score import Score, score_texts
from loopformer.loading import find_model
from loopformer.loading.folder import default_trajectory, is_model_folder
from loopformer.loading.published import model_folder
from loopformer.model import LoopedLM
from loopformer.trajectory import Trajectory


@torch.no_grad()
def lay_out(model: LoopedLM) -> LoopedLM:
    """Put the weights that every token reads by columns on the CPU, by rows elsewhere; in place."""
    by_columns = model.tokens.weight.device.type == "cpu"
    weights = [model.tokens.weight, *(one.weight for one in model.stack.modules() if isinstance(one, nn.Linear))]
    for weight in weights:
        weight.data = weight.data.t().contiguous().t() if by_columns else weight.data.contiguous()
    return model


_LIMITS = ["max_tokens", "stops"]


_OPTIONS = [*_LIMITS, *(one.name for one in fields(Sampling))]


Budget = int | Sequence[int] | None


Schedule = Trajectory | str | Sequence[Trajectory | str] | None


@dataclass
class LM:
    """A model with what belongs to it. `tokenizer` is None where the weights came without one."""

    model: LoopedLM
    tokenizer: Tokenizer | None = None
    default: Trajectory | None = None  # what is followed where a call does not say; None is the full one
    _fast: dict[bool, Fast] = field(default_factory=dict, repr=False)  # by int8; made when first asked for

    def to(self, device: str | torch.device, dtype: torch.dtype | None = None) -> LM:
        """Move the model, in place, to a device and dtype."""
        lay_out(self.model.to(device=device, dtype=dtype))
        self._fast = {}
        return self

    @overload
    def generate(
        self, prompt: str, budget: Budget = None, trajectory: Schedule = None, **options: Any
    ) -> Result: ...

    @overload
    def generate(
        self, prompt: Sequence[str], budget: Budget = None, trajectory: Schedule = None, **options: Any
    ) -> list[Result]: ...

    def generate(
        self, prompt: str | Sequence[str], budget: Budget = None, trajectory: Schedule = None, **options: Any
    ) -> Result | list[Result]:
        """Continue one prompt, or several together; a budget or trajectory for all or for each.

        Options: max_tokens=128, stops=(), temperature=0 (greedy), top_k, top_p, min_p, repetition_penalty, seed;
        fast=True replays fused kernels as a CUDA graph, compiled at first use; without a GPU it changes nothing;
        int8=True goes with it and reads int8 copies of the weights, on a GPU (see inference/fused/quantise.py);
        draft=Draft(…) drafts tokens along a shorter trajectory and verifies them (see inference/draft.py),
        with fast=True on a GPU greedily and one prompt after the other (see inference/fused/speculate.py);
        adaptive=TokenPolicy(…) or PromptPolicy(…) chooses depth by certainty (see inference/adaptive/policy.py).
        """
        require(isinstance(prompt, Iterable), f"A prompt is text, or a list of texts; got {prompt!r}.")
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        draft: Draft | None = options.pop("draft", None)
        fast, int8 = _speed(options)
        policy: Policy | None = options.pop("adaptive", None)
        require(isinstance(draft, Draft | None), f"draft takes a Draft(Trajectory.uniform(1), …), not {draft!r}.")
        require(isinstance(policy, Policy | None), f"adaptive takes a TokenPolicy or PromptPolicy, not {policy!r}.")
        given = sum(one is not None for one in (draft, budget, trajectory))
        require(policy is None or not given, "Give an adaptive policy, or a draft, budget or trajectory; not both.")
        require(policy is None or not (fast or int8), "adaptive goes without fast and int8; leave them out.")
        requests = self.requests(prompts, budget, trajectory, **options)
        if not requests:
            return []
        if draft is not None:
            ordered, _ = self.speculate(requests, draft, fast, int8=int8)
        elif policy is not None:
            ordered, _ = generate_adaptive(self.model, self.need_tokenizer(), requests, policy)
        else:
            events = self.events(requests, fast, int8)
            results = {event.row: event.result for event in events if event.result is not None}
            ordered = [results[row] for row in range(len(prompts))]
        return ordered[0] if isinstance(prompt, str) else ordered

    def stream(
        self, prompt: str, budget: Budget = None, trajectory: Schedule = None, **options: Any
    ) -> Iterator[str]:
        """Continue a prompt and give its text piece by piece, whole characters each."""
        for name in ("draft", "adaptive"):
            require(name not in options, f"stream takes no {name}; generate does.")
        fast, int8 = _speed(options)
        requests = self.requests([prompt], budget, trajectory, **options)
        return (event.piece for event in self.events(requests, fast, int8) if event.piece)

    def events(self, requests: Sequence[Request], fast: bool = False, int8: bool = False) -> Iterator[Event]:
        """Run requests together; see inference/decode.py, and inference/fused/backend.py for `fast` and `int8`."""
        path, tokenizer = self._fast_path(fast, int8), self.need_tokenizer()
        return path.generate(tokenizer, requests) if path else generate(self.model, tokenizer, requests)

    def speculate(
        self,
        requests: Sequence[Request],
        draft: Draft,
        fast: bool = False,
        show: Callable[[Event], object] = lambda event: None,
        int8: bool = False,
    ) -> tuple[list[Result], Report]:
        """Run requests with a draft; `show` gets the events as they come."""
        for budget in {request.trajectory.budget for request in requests}:
            require(
                draft.budget < budget,
                f"A draft at budget {draft.budget} gains nothing for a text at budget {budget}; take fewer loops.",
            )
        path, tokenizer = self._fast_path(fast, int8), self.need_tokenizer()
        if path:
            return path.speculate(tokenizer, requests, draft, show)
        return speculate(self.model, tokenizer, requests, draft, show)

    def _fast_path(self, fast: bool, int8: bool) -> Fast | None:
        """The fused path, if it is asked for and can run here."""
        require(fast or not int8, "int8 goes with fast; ask for both.")
        ready = fast and Fast.ready(self.model)
        require(ready or not int8, "int8 needs a CUDA device and Triton; leave it out.")
        if not ready:
            return None
        if int8 not in self._fast:
            self._fast[int8] = Fast(self.model, int8)
        return self._fast[int8]

    def score(self, texts: Sequence[str], budget: Budget = None, trajectory: Schedule = None) -> list[Score]:
        """Log-probabilities of texts, token by token; the first follows an end token, as in `loopformer eval`."""
        require(not isinstance(texts, str), "score takes a list of texts; put the one text in brackets.")
        if not texts:
            return []
        ids = [self._encode(text) for text in texts]
        trajectories = self.trajectories(len(texts), budget, trajectory)
        return score_texts(self.model, ids, trajectories, self.need_tokenizer().eot)

    def engine(self, rows: int = 16, queue: int = 64) -> Engine:
        """Continuous batching: at most `rows` requests run at once, at most `queue` more wait."""
        return Engine(self.model, self.need_tokenizer(), rows, queue)

    def requests(
        self, prompts: Sequence[str], budget: Budget = None, trajectory: Schedule = None, **options: Any
    ) -> list[Request]:
        """What `generate` and `stream` run."""
        for name in options:
            require(name in _OPTIONS, f"Unknown option {name} for generation; {nearest(name, _OPTIONS)}")
        limits = {name: options.pop(name) for name in _LIMITS if name in options}
        stops = limits.pop("stops", None) or ()
        limits["stops"] = (stops,) if isinstance(stops, str) else tuple(stops)
        sampling = Sampling(**options)
        trajectories = self.trajectories(len(prompts), budget, trajectory)
        ids = [tuple(self._encode(prompt)) for prompt in prompts]
        return [
            Request(one, trajectory, sampling, **limits) for one, trajectory in zip(ids, trajectories, strict=True)
        ]

    def trajectories(self, rows: int, budget: Budget = None, trajectory: Schedule = None) -> list[Trajectory]:
        """A trajectory for each row, from a budget or a trajectory for all or for each, or the default."""
        require(budget is None or trajectory is None, "Give a budget or a trajectory, not both.")
        asked: Any = budget if trajectory is None else trajectory
        asked = self.default if asked is None else asked
        found = self.model.trajectories(asked, rows)
        return [found] * rows if isinstance(found, Trajectory) else found

    def _encode(self, text: str) -> list[int]:
        """The tokens of a text, which must be one."""
        require(isinstance(text, str), f"A prompt or text must be text, got {text!r}.")
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


def _speed(options: dict[str, Any]) -> tuple[bool, bool]:
    """Take fast and int8 out of the options."""
    return options.pop("fast", False), options.pop("int8", False)


def load(source: str | Path) -> LM:
    """Load a run, a model folder of ours or the authors' weights (file, folder or Hub id), fp32 on the CPU."""
    folder = model_folder(source)  # checks a run's checksums, so it is looked for once
    lm = _lm(*find_model(folder if is_model_folder(folder) else source))
    trajectory = default_trajectory(folder)
    lm.default = None if trajectory is None else lm.model.resolve(trajectory)
    return lm


def load_official(source: str | Path, heads: int | None = None, loops: int | None = None) -> LM:
    """Load the authors' weights; `heads` and `loops` are needed only where no config stands beside them."""
    return _lm(*find_model(source, heads, loops))


def _lm(model: LoopedLM, tokenizer: Path | None) -> LM:
    return LM(lay_out(model).eval(), Tokenizer.load(tokenizer) if tokenizer else None)
