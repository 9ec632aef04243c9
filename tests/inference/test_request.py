import math
from typing import Any

import pytest

from loopformer import LM, LoopformerError
from loopformer.inference.request import Request, Sampling


def test_a_request_takes_stops_as_a_tuple(lm: LM) -> None:
    wrong: Any = "the"
    with pytest.raises(LoopformerError, match="must be a tuple of strings, not 'the'"):
        Request((1,), lm.model.resolve(1), stops=wrong)
    with pytest.raises(LoopformerError, match="takes a list of prompts"):
        lm.requests("abc")


def test_stop_strings_are_bounded(lm: LM) -> None:
    trajectory, longest = lm.model.resolve(1), "a" * 4096
    assert Request((1,), trajectory, stops=(longest,) * 256).stops == (longest,) * 256
    with pytest.raises(LoopformerError, match="A stop string may have 4096 characters, got 60000"):
        Request((1,), trajectory, stops=("a" * 60_000,))
    with pytest.raises(LoopformerError, match="A request may have 256 stop strings, got 257"):
        Request((1,), trajectory, stops=("a",) * 257)


def test_priorities_and_top_logprobs_are_bounded(lm: LM) -> None:
    trajectory = lm.model.resolve(1)
    assert Request((1,), trajectory, priority=-10).priority == -10
    for priority in (11, -11, 0.5):
        with pytest.raises(LoopformerError, match="priority must be a whole number from -10 to 10"):
            Request((1,), trajectory, priority=priority)  # type: ignore[arg-type]
    with pytest.raises(LoopformerError, match="top_logprobs must be 0 or more"):
        Request((1,), trajectory, top_logprobs=-1)


@pytest.mark.parametrize(
    ("name", "allowed", "refused"),
    [
        ("temperature", (0, 1e300), (-1e-9, math.inf, math.nan)),
        ("top_k", (None, 1), (0, -1, 2.5)),
        ("top_p", (1e-9, 1), (0, 1 + 1e-9)),
        ("min_p", (0, 1), (-1e-9, 1 + 1e-9)),
        ("repetition_penalty", (0.01, 100), (0.0099, 100.1, 10**400)),
        ("seed", (None, -1, 2**70), (0.5,)),
    ],
)
def test_settings_of_sampling_have_bounds_that_belong_to_them(
    name: str, allowed: tuple[Any, ...], refused: tuple[Any, ...]
) -> None:
    for value in allowed:
        assert getattr(Sampling(**{name: value}), name) == value
    for value in refused:
        with pytest.raises(LoopformerError, match=rf"^{name} must "):
            Sampling(**{name: value})


def test_a_text_has_one_new_token_at_least(lm: LM) -> None:
    assert Request((1,), lm.model.resolve(1), max_tokens=1, top_logprobs=0, priority=10).max_tokens == 1
    with pytest.raises(LoopformerError, match="max_tokens must be 1 or more"):
        Request((1,), lm.model.resolve(1), max_tokens=0)
