"""What a user holds: a model and its tokenizer.

lm = load("runs/demo")                      # a run, a model folder, or the authors' published weights
lm.generate("Once upon a time", budget=4).text
lm.model(ids, "4-2-1-1").logits
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import torch

from loopformer.config import require
from loopformer.data.tokenizer import Tokenizer
from loopformer.errors import LoopformerError
from loopformer.inference.adaptive import Policy, generate_adaptive
from loopformer.inference.engine import Engine
from loopformer.inference.generate import Request, Result, generate
from loopformer.inference.layout import lay_out
from loopformer.inference.sampling import Sampling
from loopformer.inference.score import Score, score
from loopformer.inference.speculative import Draft, speculate
from loopformer.loading import find_model
from loopformer.model import LoopedLM
from loopformer.trajectory import Trajectory

Budget = int | Sequence[int] | None
Schedule = Trajectory | str | Sequence[Trajectory | str] | None


@dataclass
class LM:
    """A model with what belongs to it. `tokenizer` is None where the weights came without one."""

    model: LoopedLM
    tokenizer: Tokenizer | None = None

    def to(self, device: str | torch.device, dtype: torch.dtype | None = None) -> LM:
        """Move the model, in place, to a device and dtype."""
        lay_out(self.model.to(device=device, dtype=dtype))
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
        draft=Draft(…) drafts tokens along a shorter trajectory and verifies them (see inference/speculative.py);
        adaptive=TokenPolicy(…) or PromptPolicy(…) chooses depth by certainty (see inference/adaptive.py).
        """
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        draft: Draft | None = options.pop("draft", None)
        policy: Policy | None = options.pop("adaptive", None)
        given = sum(one is not None for one in (draft, budget, trajectory))
        require(policy is None or not given, "Give an adaptive policy, or a draft, budget or trajectory; not both.")
        requests = self.requests(prompts, budget, trajectory, **options)
        if draft is not None:
            ordered, _ = speculate(self.model, self.need_tokenizer(), requests, draft)
        elif policy is not None:
            ordered, _ = generate_adaptive(self.model, self.need_tokenizer(), requests, policy)
        else:
            events = generate(self.model, self.need_tokenizer(), requests)
            results = {event.row: event.result for event in events if event.result is not None}
            ordered = [results[row] for row in range(len(prompts))]
        return ordered[0] if isinstance(prompt, str) else ordered

    def stream(
        self, prompt: str, budget: Budget = None, trajectory: Schedule = None, **options: Any
    ) -> Iterator[str]:
        """Continue a prompt and give its text piece by piece, whole characters each."""
        requests = self.requests([prompt], budget, trajectory, **options)
        return (event.piece for event in generate(self.model, self.need_tokenizer(), requests) if event.piece)

    def score(self, texts: Sequence[str], budget: Budget = None, trajectory: Schedule = None) -> list[Score]:
        """Log-probabilities of texts, token by token."""
        require(not isinstance(texts, str), "score takes a list of texts; put the one text in brackets.")
        if not texts:
            return []
        ids = [self.need_tokenizer().encode(text) for text in texts]
        return score(self.model, ids, self.routes(len(texts), budget, trajectory))

    def engine(self, rows: int = 16, queue: int = 64) -> Engine:
        """Continuous batching: at most `rows` requests run at once, at most `queue` more wait."""
        return Engine(self.model, self.need_tokenizer(), rows, queue)

    def requests(
        self, prompts: Sequence[str], budget: Budget = None, trajectory: Schedule = None, **options: Any
    ) -> list[Request]:
        """What `generate` and `stream` run."""
        limits = {name: options.pop(name) for name in ("max_tokens", "stops") if name in options}
        stops = limits.pop("stops", ())
        limits["stops"] = (stops,) if isinstance(stops, str) else tuple(stops)
        try:
            sampling = Sampling(**options)
        except TypeError as error:
            raise LoopformerError(f"Unknown option for generation: {error}.") from error
        routes = self.routes(len(prompts), budget, trajectory)
        ids = [tuple(self.need_tokenizer().encode(prompt)) for prompt in prompts]
        return [Request(one, route, sampling, **limits) for one, route in zip(ids, routes, strict=True)]

    def routes(self, rows: int, budget: Budget = None, trajectory: Schedule = None) -> list[Trajectory]:
        """A trajectory for each row, from a budget or a trajectory for all or for each; the full one by default."""
        require(budget is None or trajectory is None, "Give a budget or a trajectory, not both.")
        asked: Any = budget if trajectory is None else trajectory
        found = self.model.routes(asked, rows)
        return [found] * rows if isinstance(found, Trajectory) else found

    def need_tokenizer(self) -> Tokenizer:
        """The tokenizer, for what cannot be done without one."""
        if self.tokenizer is None:
            raise LoopformerError("This model came without a tokenizer; put its tokenizer.json beside its weights.")
        return self.tokenizer


def load(source: str | Path) -> LM:
    """Load a run, a model folder of ours or the authors' weights (file, folder or Hub id), fp32 on the CPU."""
    return _lm(*find_model(source))


def load_official(source: str | Path, heads: int | None = None, loops: int | None = None) -> LM:
    """Load the authors' weights; `heads` and `loops` are needed only where no config stands beside them."""
    return _lm(*find_model(source, heads, loops))


def _lm(model: LoopedLM, tokenizer: Path | None) -> LM:
    return LM(lay_out(model).eval(), Tokenizer.load(tokenizer) if tokenizer else None)
