from typing import Any

import pytest

from loopformer import LM, LoopformerError
from loopformer.inference.request import Request


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
