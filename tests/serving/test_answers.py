"""The JSON of answers, where it depends on the request or the state of a text."""

import itertools
import json
import math
import tracemalloc
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopformer import LM, Trajectory
from loopformer.inference.chat import ChatTemplate
from loopformer.inference.detokenizer import TextStream
from loopformer.inference.request import Choice, Event, Reason, Result
from loopformer.serving.answers import AnswerWriter, ChatWriter, CompletionWriter, count_usage
from loopformer.serving.protocol import ChatBody, CompletionBody, Served


@pytest.fixture(scope="module")
def served(lm: LM) -> Served:
    return Served("tiny", ChatTemplate(lm.need_tokenizer()), lm.model.config, Trajectory.uniform(4), 4, 64, 32)


def event(text: str, *logprobs: float, reason: Reason | None = None) -> Event:
    choices = tuple(Choice(number, logprob) for number, logprob in enumerate(logprobs, 1))
    result = None if reason is None else Result(text, (), (), reason, 1, Trajectory.uniform(4))
    return Event(0, text, result, choices)


def writer(kind: type[AnswerWriter], served: Served, budget: int = 4, **fields: Any) -> AnswerWriter:
    if kind is ChatWriter:
        body: Any = ChatBody.model_validate({"messages": [{"role": "user", "content": "its"}], **fields})
    else:
        body = CompletionBody.model_validate({"prompt": "its", **fields})
    return kind(served, body.job(served), Trajectory.uniform(budget))


def test_a_chunk_has_what_is_new_and_null_on_purpose(served: Served) -> None:
    chat = writer(ChatWriter, served)
    (first,) = json.loads(chat.opening().to_json())["choices"]
    assert first == {
        "index": 0,
        "delta": {"role": "assistant", "content": ""},
        "logprobs": None,
        "finish_reason": None,
    }
    for part, delta, reason in (
        (event("x", 0.0), {"content": "x"}, None),
        (event("", reason="end"), {}, "stop"),
    ):
        content = json.loads(chat.chunk(0, part).to_json())
        assert set(content) == {"id", "object", "created", "model", "choices"}
        (choice,) = content["choices"]
        assert choice == {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}


@pytest.mark.parametrize("kind", [CompletionWriter, ChatWriter])
@given(sizes=st.lists(st.integers(1, 5), min_size=1))
def test_the_tokens_of_an_event_are_told_one_by_one(
    served: Served, kind: type[CompletionWriter] | type[ChatWriter], sizes: list[int]
) -> None:
    """However many of them an event has, even if it ends within a character."""
    text = "its naïve 😀 time 時"
    choices = [Choice(token, -token / 8, ((token, -token / 8),)) for token in served.tokenizer.encode(text)]
    fields = {"logprobs": True, "top_logprobs": 1} if kind is ChatWriter else {"logprobs": 1}

    def logprobs_of(sizes: Iterable[int]) -> tuple[str, dict[str, list[Any]]]:
        answer, stream, left = writer(kind, served, **fields), TextStream(served.tokenizer), choices
        shown, told = "", dict[str, list[Any]]()
        for size in sizes:
            new, left = left[:size], left[size:]
            piece = stream.push(*(choice.token for choice in new)) + ("" if left else stream.finish())
            (choice,) = json.loads(answer.chunk(0, Event(0, piece, None, tuple(new))).to_json())["choices"]
            shown += choice["text"] if kind is CompletionWriter else choice["delta"]["content"]
            for name, values in choice["logprobs"].items():
                told.setdefault(name, []).extend(values or ())
            if not left:
                break
        return shown, told

    shown, told = logprobs_of(itertools.chain(sizes, itertools.repeat(3)))
    assert shown == text
    assert (shown, told) == logprobs_of(itertools.repeat(1))
    assert len(told["content" if kind is ChatWriter else "token_ids"]) == len(choices)


def test_texts_are_known_by_their_index_and_echo_their_own_prompts(served: Served) -> None:
    """The tickets of events are the engine's: here all are 0."""
    completion = writer(CompletionWriter, served, prompt=["its", "time"], n=2, echo=True)
    usage = count_usage(served.cost, completion._job, [1] * 4, scored=False, budget=4)
    choices = json.loads(completion.complete([event(str(number)) for number in range(4)], usage))["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert [choice["text"] for choice in choices] == ["its0", "its1", "time2", "time3"]
    (choice,) = json.loads(completion.chunk(3, event("x")).to_json())["choices"]
    assert (choice["index"], choice["text"]) == (3, "x")


@pytest.mark.parametrize(("budget", "extra"), [(4, {}), (3, {"asked_budget": 4})])
def test_the_requested_budget_is_named_where_less_was_granted(
    served: Served, budget: int, extra: dict[str, int]
) -> None:
    job = CompletionBody.model_validate({"prompt": "its"}).job(served)
    usage = count_usage(served.cost, job, [1], scored=False, budget=budget)
    answer = writer(CompletionWriter, served, budget).complete([event("x", 0.0, reason="length")], usage)
    expected = {"budget": budget, "trajectory": str(budget), "degraded": bool(extra), **extra}
    assert json.loads(answer)["loopformer"] == expected


def test_many_log_probabilities_take_little_more_memory_than_their_text(served: Served) -> None:
    top = tuple((token, -1.0) for token in range(20))
    text = event("x")._replace(choices=(Choice(1, -1.0, top),) * 20)
    chat = writer(ChatWriter, served, logprobs=True, top_logprobs=20, n=100)
    usage = count_usage(served.cost, chat._job, [20] * 100, scored=False, budget=4)
    chat.complete([text], usage)
    tracemalloc.start()
    try:
        size, peak = len(chat.complete([text] * 100, usage)), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 5 * size


def test_an_impossible_token_has_a_finite_logprob(served: Served) -> None:
    part = event("x", -math.inf)
    (choice,) = json.loads(writer(CompletionWriter, served, logprobs=0).chunk(0, part).to_json())["choices"]
    assert choice["logprobs"]["token_logprobs"] == [-9999.0]
    (choice,) = json.loads(writer(ChatWriter, served, logprobs=True).chunk(0, part).to_json())["choices"]
    assert [token["logprob"] for token in choice["logprobs"]["content"]] == [-9999.0]


def test_usage_counts_passes_and_flops(served: Served) -> None:
    job = CompletionBody.model_validate({"prompt": [1, 2, 3], "n": 2}).job(served)
    used = count_usage(served.cost, job, [3, 3], scored=False, budget=2)
    assert used.prompt_tokens == 3
    assert used.completion_tokens == 6
    assert used.total_tokens == 9
    assert used.loops == 2 * 2 * (3 + 2)
    # With their prompts scored: two tokens of each run again, also where nothing is generated.
    assert count_usage(served.cost, job, [3, 3], scored=True, budget=2).loops == 2 * 2 * (3 + 2 + 2)
    assert count_usage(served.cost, job, [0, 0], scored=True, budget=2).loops == 2 * 2 * 2
    decoded = sum(served.cost.forward_flops(2, context, causal=False) for context in (4, 5))
    assert used.flops == pytest.approx(2 * (served.cost.prefill_flops(3, 2) + decoded))
