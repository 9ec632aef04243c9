import math
from collections.abc import Callable
from copy import deepcopy
from typing import Any, cast

import pytest
import torch

from loopformer import LM, LoopformerError, Trajectory
from loopformer.errors import RunFailed
from loopformer.inference.request import Request

PROMPTS = ["every pass", "its", "time and step and time", "told"]
ROUTES = ["1", "4", "2-1-1", "3-1"]


def by_hand(lm: LM, prompt: str, trajectory: str, tokens: int) -> list[int]:
    """Greedy decoding without a cache."""
    assert lm.tokenizer is not None
    ids = lm.tokenizer.encode(prompt)
    count = len(ids)
    for _ in range(tokens):
        with torch.no_grad():
            logits = lm.model(torch.tensor([ids]), trajectory).logits
        assert logits is not None
        ids.append(int(logits[0, -1, : lm.model.config.vocab].argmax()))
        if ids[-1] == lm.tokenizer.eot:
            break
    return ids[count:]


def test_a_mixed_batch_equals_each_alone_without_a_cache(lm: LM) -> None:
    together = lm.generate(PROMPTS, trajectory=ROUTES, max_tokens=20)
    for prompt, trajectory, result in zip(PROMPTS, ROUTES, together, strict=True):
        assert list(result.ids) == by_hand(lm, prompt, trajectory, 20)
        assert str(result.trajectory) == trajectory
        assert lm.generate(prompt, trajectory=trajectory, max_tokens=20).text == result.text


def test_rows_that_end_early_leave_without_disturbing_the_rest(lm: LM) -> None:
    requests = [
        lm.requests([p], trajectory=r, max_tokens=m)[0]
        for p, r, m in zip(PROMPTS, ROUTES, (3, 11, 1, 7), strict=True)
    ]
    found = {e.ticket: e.result for e in lm.events(requests) if e.result}
    for row, (prompt, trajectory, most) in enumerate(zip(PROMPTS, ROUTES, (3, 11, 1, 7), strict=True)):
        result = found[row]
        assert result is not None
        assert list(result.ids) == by_hand(lm, prompt, trajectory, most)


def test_seeds_decide_and_company_does_not(lm: LM) -> None:
    alone = lm.generate("its time", temperature=1.0, seed=3, max_tokens=15, budget=2)
    beside = lm.generate(["told", "its time", "step"], temperature=1.0, seed=3, max_tokens=15, budget=2)[1]
    assert alone.ids == beside.ids
    assert alone.ids != lm.generate("its time", temperature=1.0, seed=4, max_tokens=15, budget=2).ids


def test_no_prompts_no_results(lm: LM) -> None:
    assert lm.generate([]) == []
    assert lm.score([]) == []


def test_damaged_weights_are_said_and_not_taken_for_an_end(lm: LM) -> None:
    damaged = LM(deepcopy(lm.model), lm.tokenizer)
    damaged.model.tokens.weight.data[7] = math.nan
    for temperature in (0.0, 1.0):
        with pytest.raises(RunFailed, match="not a number"):
            damaged.generate("its", max_tokens=3, temperature=temperature)


def test_streaming_gives_the_same_text(lm: LM) -> None:
    whole = lm.generate("every", max_tokens=25, temperature=1.0, seed=1)
    assert "".join(lm.stream("every", max_tokens=25, temperature=1.0, seed=1)) == whole.text


def test_limits_end_with_their_reason(lm: LM) -> None:
    assert lm.tokenizer is not None
    assert lm.generate("its", max_tokens=2).reason == "length"
    text = lm.generate("its", max_tokens=30).text
    cut = lm.generate("its", max_tokens=30, stops=[text[5:8]])
    assert (cut.reason, cut.text) == ("stop", text[: text.index(text[5:8])])


@pytest.mark.parametrize("length", [60, 63, 64])
def test_the_context_is_filled_and_no_further(lm: LM, length: int) -> None:
    request = Request(tuple(range(40, 40 + length)), Trajectory.uniform(4), max_tokens=500)
    (result,) = (event.result for event in lm.events([request]) if event.result)
    assert (result.reason, len(result.ids)) == ("context", 64 - length + 1)


def test_mistakes_are_one_clear_sentence(lm: LM) -> None:
    long, wrong, untyped = " ".join(["step"] * 300), cast(Any, 5), cast(Any, lm)
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: lm.generate(""), "The prompt is empty"),
        (lambda: lm.generate(long), "but the context is 64; shorten it"),
        (lambda: lm.generate("a", budget=9), "above the model's 4 loops"),
        (lambda: lm.generate("a", budget=2, trajectory="1-1"), "not both"),
        (lambda: lm.generate("a", max_tokens=0), "max_tokens must be 1 or more"),
        (lambda: untyped.generate("a", max_tokens=2.5), "a whole number; got 2.5"),
        (lambda: untyped.generate("a", certainty=0.5), "certainty was removed from generation"),
        (lambda: untyped.generate("a", temprature=1), "Unknown option temprature .* did you mean temperature"),
        (lambda: untyped.generate("a", stops=[1]), "stop string must be text"),
        (lambda: lm.generate("caf\udce9"), "UTF-8 cannot encode"),
        (lambda: lm.generate(["a", wrong]), "must be text, got 5"),
        (lambda: lm.generate(wrong), "A prompt is text, or a list of texts"),
        (lambda: Request((1,), wrong), "5 is no Trajectory"),
        (lambda: lm.generate("a", temperature=math.nan), "finite number"),
        (lambda: lm.score("text"), "list of texts"),
        (lambda: lm.score([""]), "is empty"),
        (lambda: lm.score(["caf\udce9"]), "UTF-8 cannot encode"),
        (lambda: LM(lm.model).generate("a"), "without a tokenizer"),
    ]
    for call, said in cases:
        with pytest.raises(LoopformerError, match=said):
            call()
