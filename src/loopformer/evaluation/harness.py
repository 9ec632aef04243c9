"""Our models in lm-evaluation-harness.

    lm = LoopformerLM("runs/mine", budget=4)                       # or trajectory="4-2-1-1", or a loaded LM
    lm_eval.simple_evaluate(model=lm, tasks=["arc_easy"])
    lm_eval.simple_evaluate(model=lm.at(2), tasks=["arc_easy"])    # another budget, the same weights

The harness's own command line has the model as `loopformer` through `python -m loopformer.lm_eval`. Batches are
counted in tokens (`batch_tokens`), so the harness's batch sizes are not used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

from loopformer.errors import LoopformerError, nearest, require
from loopformer.evaluation.loglikelihood import BATCH_TOKENS, loglikelihoods
from loopformer.evaluation.queries import Answered, Query, answer
from loopformer.evaluation.sharing import Span
from loopformer.evaluation.store import weights_hash
from loopformer.evaluation.subject import Subject
from loopformer.lm import LM
from loopformer.model.looped import Route

try:
    from lm_eval.api import model as api
    from lm_eval.api.registry import register_model
except ImportError as error:
    raise LoopformerError("lm-evaluation-harness is not installed; run: pip install 'loopformer[eval]'.") from error

_ITS_DEVICE = "cuda:0"  # what the harness's command line says where the user says nothing, also without a GPU
ARGUMENTS = ["path", "budget", "trajectory", "device", "dtype", "batch_tokens"]


@register_model("loopformer")
class LoopformerLM(api.TemplateLM):  # type: ignore[misc]
    """A model along one trajectory, as the harness wants it."""

    def __init__(
        self,
        path: str | LM | None = None,
        budget: int | None = None,
        trajectory: Route = None,
        device: str | None = None,
        dtype: str = "float32",
        batch_tokens: int = BATCH_TOKENS,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        **others: Any,
    ) -> None:
        super().__init__()
        for name in others:
            raise LoopformerError(f"Unknown model argument {name}; {nearest(name, ARGUMENTS)}")
        if path is None:
            raise LoopformerError("Say which model: --model_args path=runs/mine,budget=4.")
        require(budget is None or trajectory is None, "Give a budget or a trajectory, not both.")
        where = "auto" if device in (None, _ITS_DEVICE) else device
        self.lm = path if isinstance(path, LM) else Subject.open(str(path), where, dtype).lm
        self.route = self.lm.model.route(budget if trajectory is None else trajectory)
        self.batch_tokens = batch_tokens
        self._device = self.lm.model.tokens.weight.device

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> LoopformerLM:
        """From the command line's model arguments, which come before its own options."""
        return cls(**{**(additional_config or {}), **arg_dict})

    def at(self, trajectory: Route) -> LoopformerLM:
        """The same weights along another trajectory or at another budget."""
        other = copy(self)
        other.route = self.lm.model.route(trajectory)
        return other

    @property
    def eot_token_id(self) -> int:
        return self.lm.need_tokenizer().eot

    @property
    def max_length(self) -> int:
        return self.lm.model.config.context

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return self.lm.need_tokenizer().encode(string)

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        return [(total, greedy) for total, greedy in self._answer("loglikelihood", requests, disable_tqdm)]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        return self._answer("loglikelihood_rolling", requests, disable_tqdm)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        return self._answer("generate_until", requests, disable_tqdm)

    def _answer(self, kind: str, requests: Sequence[Any], disable_tqdm: bool) -> list[Any]:
        from tqdm import tqdm  # type: ignore[import-untyped]  # as every model of the harness does

        with tqdm(total=len(requests), desc=f"Running {kind} requests", disable=disable_tqdm) as bar:

            def count(done: int, _: int) -> None:
                bar.update(done - bar.n)

            queries = [Query(kind, request.args) for request in requests]
            return answer(self.lm, queries, self.route, self.batch_tokens, count).values

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        spans = [Span((*before, *scored), len(scored)) for _, before, scored in requests]
        return loglikelihoods(self.lm.model, spans, self.route, self.batch_tokens).answers

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes into its results about the model."""
        weight = self.lm.model.tokens.weight
        return {
            "model_num_parameters": sum(one.numel() for one in self.lm.model.parameters()),
            "model_dtype": str(weight.dtype),
            "model_sha": weights_hash(self.lm.model),
            "trajectory": str(self.route),
            "budget": self.route.budget,
        }


class Recorded(api.LM):  # type: ignore[misc]
    """Answers that were given before, task by task, in the order of the requests."""

    def __init__(self, queries: Mapping[str, Sequence[Query]], answered: Mapping[str, Answered]) -> None:
        super().__init__()
        self._left = {
            (task, kind): iter(
                [value for query, value in zip(asked, answered[task].values, strict=True) if query.kind == kind]
            )
            for task, asked in queries.items()
            for kind in {query.kind for query in asked}
        }

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        return [(total, greedy) for total, greedy in self._next("loglikelihood", requests)]

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        return self._next("loglikelihood_rolling", requests)

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        return self._next("generate_until", requests)

    def _next(self, kind: str, requests: Sequence[Any]) -> list[Any]:
        return [next(self._left[request.task_name, kind]) for request in requests]
