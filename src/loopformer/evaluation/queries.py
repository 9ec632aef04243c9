"""What lm-evaluation-harness asks a model, as plain data, and our answers; the harness itself is not needed.

    query = Query("loglikelihood", ("The sky is", " blue"))
    answered = answer(lm, [query], Trajectory.uniform(4))
    answered.values            # [[-1.25, True]]

Kinds and arguments are the harness's own:
    loglikelihood          (context, continuation) → [log-likelihood, whether greedy decoding would have given it]
    loglikelihood_rolling  (text,)                 → log-likelihood, each token given as much before it as fits
    generate_until         (context, settings)     → the text up to a stop string
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loopformer.errors import LoopformerError, require
from loopformer.evaluation.loglikelihood import (
    BATCH_TOKENS,
    Count,
    encode_pairs,
    encode_texts,
    loglikelihoods_along,
)
from loopformer.inference.generate import Request, generate
from loopformer.inference.sampling import Sampling
from loopformer.lm import LM
from loopformer.trajectory import Trajectory

KINDS = ("loglikelihood", "loglikelihood_rolling", "generate_until")
MAX_NEW_TOKENS = 256  # where a task does not say; the harness's own default
_LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # names of the same, by rank
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class Query:
    """One request of a task."""

    kind: str
    arguments: tuple[Any, ...]

    @property
    def line(self) -> str:
        """As one line of JSON, always the same for the same request."""
        return json.dumps([self.kind, *self.arguments], ensure_ascii=False, sort_keys=True)


@dataclass(frozen=True)
class Answered:
    """Answers in the order asked, in plain data, and what they took."""

    values: list[Any]
    tokens: int  # run through the model, padding not counted
    cut: int  # requests whose text did not fit the context and lost its beginning
    seconds: float


def digest(queries: Sequence[Query]) -> str:
    """One hash for a list of requests."""
    return hashlib.sha256("\n".join(query.line for query in queries).encode()).hexdigest()


def answer(
    lm: LM,
    queries: Sequence[Query],
    route: Trajectory,
    batch_tokens: int = BATCH_TOKENS,
    count: Count | None = None,
) -> Answered:
    """Answer requests of any kinds along one trajectory."""
    return answer_along(lm, queries, [route], batch_tokens, count)[route]


def answer_along(
    lm: LM,
    queries: Sequence[Query],
    routes: Sequence[Trajectory],
    batch_tokens: int = BATCH_TOKENS,
    count: Count | None = None,
) -> dict[Trajectory, Answered]:
    """The same along several, which share what they can; each is said to have taken its share of the time."""
    started = time.perf_counter()
    values: dict[Trajectory, list[Any]] = {route: [None] * len(queries) for route in routes}
    tokens, cut = dict.fromkeys(routes, 0), dict.fromkeys(routes, 0)
    for kind in sorted({query.kind for query in queries}):
        require(kind in KINDS, f"A request of the kind {kind!r} is none that we answer: {', '.join(KINDS)}.")
        places = [place for place, query in enumerate(queries) if query.kind == kind]
        arguments = [queries[place].arguments for place in places]
        if kind == "generate_until":
            found = {route: _generate(lm, arguments, route, batch_tokens, count) for route in routes}
        else:
            found = _score(lm, kind, arguments, routes, batch_tokens, count)
        for route, (several, run, short) in found.items():
            for place, value in zip(places, several, strict=True):
                values[route][place] = value
            tokens[route] += run
            cut[route] += short
    seconds = (time.perf_counter() - started) / max(1, len(values))
    return {route: Answered(values[route], tokens[route], cut[route], seconds) for route in values}


def _score(
    lm: LM,
    kind: str,
    arguments: Sequence[Any],
    routes: Sequence[Trajectory],
    batch_tokens: int,
    count: Count | None,
) -> dict[Trajectory, tuple[list[Any], int, int]]:
    """Of each trajectory the answers, the tokens run, and how many requests did not fit the context."""
    tokenizer = lm.need_tokenizer()
    rolling = kind == "loglikelihood_rolling"
    if rolling:
        spans = encode_texts(tokenizer, [text for (text,) in arguments])
    else:
        spans = encode_pairs(tokenizer, [(context, continuation) for context, continuation in arguments])
    scored = loglikelihoods_along(lm.model, spans, routes, batch_tokens, count=count)
    if rolling:  # a long text is read in parts, nothing of it is lost
        return {route: ([total for total, _ in one.answers], one.tokens, 0) for route, one in scored.items()}
    return {route: ([list(pair) for pair in one.answers], one.tokens, one.cut) for route, one in scored.items()}


def _generate(
    lm: LM, arguments: Sequence[Any], route: Trajectory, batch_tokens: int, count: Count | None
) -> tuple[list[Any], int, int]:
    """Texts, prompts of about the same length together."""
    tokenizer, context = lm.need_tokenizer(), lm.model.config.context
    prompts = tokenizer.encode_batch([prompt for prompt, _ in arguments])
    requests, cut = [], 0
    for number, (ids, (_, settings)) in enumerate(zip(prompts, arguments, strict=True)):
        new, stops, sampling = _settings(settings, seed=number)
        require(
            new < context,
            f"The task asks for up to {new} new tokens but the context is {context}; "
            "set max_gen_toks below it in the task's generation_kwargs.",
        )
        cut += len(ids) > context - new
        kept = ids[-(context - new) :] or [tokenizer.eot]
        requests.append(Request(tuple(kept), route, sampling, new, stops))
    order = sorted(range(len(requests)), key=lambda number: -len(requests[number].prompt))
    rows = max(1, batch_tokens // context)
    texts: list[Any] = [""] * len(requests)
    tokens = 0
    for start in range(0, len(order), rows):
        batch = order[start : start + rows]
        for event in generate(lm.model, tokenizer, [requests[number] for number in batch]):
            if event.result is not None:
                texts[batch[event.row]] = event.result.text
                tokens += event.result.prompt_tokens + len(event.result.ids)
        if count:
            count(start + len(batch), len(order))
    return texts, tokens, cut


def _settings(given: Mapping[str, Any], seed: int) -> tuple[int, tuple[str, ...], Sampling]:
    """New tokens at most, stop strings and sampling, from a task's generation_kwargs."""
    settings = dict(given)
    until = settings.pop("until", None) or []
    stops = (until,) if isinstance(until, str) else tuple(until)
    limits = [settings.pop(name, None) for name in _LIMITS]
    new = int(next((limit for limit in limits if limit is not None), MAX_NEW_TOKENS))
    sampling = {name: settings.pop(name) for name in _SAMPLING if settings.get(name) is not None}
    sampling["temperature"] = float(sampling.get("temperature", 0.0))
    if settings.pop("do_sample", None) is False:
        sampling["temperature"] = 0.0
    if settings.pop("num_beams", 1) != 1 or settings:
        names = ", ".join(settings) or "num_beams"
        raise LoopformerError(f"The task sets {names} for generation, which we do not have; leave it out.")
    return new, stops, Sampling(**sampling, seed=seed)
