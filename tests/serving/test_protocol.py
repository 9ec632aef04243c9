"""Bodies: what is taken, what is refused by name, what becomes of it."""

import asyncio
import time
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from pydantic import ValidationError

from loopformer import LM, LoopformerError, Trajectory
from loopformer.errors import MAX_CHARS, RunFailed
from loopformer.inference.chat import ChatTemplate
from loopformer.inference.request import Sampling
from loopformer.serving.protocol import (
    CLIENT_GONE,
    IGNORED,
    ApiError,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    Job,
    LensBody,
    Served,
    TokenizeBody,
)

MESSAGES = [{"role": "user", "content": "its time"}]


@pytest.fixture(scope="module")
def served(lm: LM) -> Served:
    tokenizer, config = lm.need_tokenizer(), lm.model.config
    return Served("tiny", ChatTemplate(tokenizer), config, Trajectory.uniform(4), 4, 64, 32)


def completion(**fields: Any) -> CompletionBody:
    return CompletionBody.model_validate({"prompt": "its time", **fields})


@pytest.mark.parametrize("name", [*CompletionBody.unsupported])
def test_what_completions_do_not_support_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValidationError, match=f"'{name}' is a field of OpenAI's that is not supported"):
        completion(**{name: 0.5})
    assert completion(**{name: None}).prompt == "its time"


@pytest.mark.parametrize("name", [*ChatBody.unsupported])
def test_what_chats_do_not_support_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValidationError, match=f"'{name}' is a field of OpenAI's that is not supported"):
        ChatBody.model_validate({"messages": MESSAGES, name: "x"})


def test_values_that_change_nothing_are_taken() -> None:
    completion(frequency_penalty=0, presence_penalty=0.0, best_of=1, logit_bias={}, suffix="")
    ChatBody.model_validate({"messages": MESSAGES, "response_format": {"type": "text"}, "tools": []})
    for name in IGNORED:
        for value in (True, "x", {"a": ["b"]}):
            assert completion(**{name: value}) == completion()
            ChatBody.model_validate({"messages": MESSAGES, name: value})
        with pytest.raises(ValidationError, match="is not a field of this request"):
            TokenizeBody.model_validate({"prompt": "its", name: "x"})
    completion(stream=True, stream_options={"include_usage": True, "include_obfuscation": False})
    TokenizeBody.model_validate({"prompt": "its", "add_special_tokens": True, "return_token_strs": False})
    answered = {"role": "assistant", "content": "yes", "refusal": None, "tool_calls": None}
    ChatBody.model_validate({"messages": [*MESSAGES, answered, *MESSAGES]})


def test_the_sampling_defaults_are_those_of_openai() -> None:
    for body in (completion(), ChatBody.model_validate({"messages": MESSAGES})):
        assert (body.temperature, body.top_p, body.seed) == (1.0, 1.0, None)


@pytest.mark.parametrize(
    "fields",
    [
        {"budget": 0},
        {"budget": 2.0},
        {"budget": True},
        {"budget": "2"},
        {"temperature": float("nan")},
        {"temperature": -1},
        {"top_p": 0},
        {"n": 10**9},
        {"seed": 2**70},
        {"stop": ""},
        {"stop": ["x"] * 17},
        {"prompt": 3},
        {"prompt": [[-1]]},
        {"prompt": ["x", 1]},
        {"priority": 2**40},
        {"max_tokens": -1},
        {"stream": "yes"},
        {"stream_options": {"every": 1}},
        {"bugdet": 1},
    ],
    ids=str,
)
def test_what_is_no_value_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        completion(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"budget": 5},
        {"min_budget": 9},
        {"budget": 2, "min_budget": 3},
        {"budget": 2, "trajectory": "1-1"},
        {"trajectory": "cosine:99999999999"},
        {"trajectory": "9" * 200},
        {"trajectory": "1.5.5-2"},
        {"trajectory": "²"},
        {"trajectory": "0.5,0.6"},
        {"trajectory": "../../etc/passwd"},
        {"model": "/etc/passwd"},
        {"prompt": ""},
        {"prompt": []},
        {"prompt": [10**6]},
        {"max_tokens": 33},
        {"max_tokens": 0},
        {"stream": True, "echo": True},
    ],
    ids=str,
)
def test_what_this_model_cannot_do_is_one_sentence(served: Served, fields: dict[str, Any]) -> None:
    with pytest.raises(LoopformerError) as refused:
        completion(**fields).job(served)
    assert str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("budget", 9),
        ("trajectory", "9-x"),
        ("min_budget", 9),
        ("model", "other"),
        ("max_tokens", 33),
        ("prompt", ""),
        ("prompt", [1] * 65),
    ],
)
def test_the_field_that_is_wrong_is_named(served: Served, field: str, value: Any) -> None:
    with pytest.raises(ApiError) as refused:
        completion(**{field: value}).job(served)
    assert refused.value.param == field


def test_bounds_are_part_of_what_is_taken(served: Served) -> None:
    last = served.config.vocab - 1
    assert completion(prompt=["its"] * 128, logprobs=0).job(served).alternatives == 0
    assert completion(prompt=[1, last], logprobs=20, max_tokens=32).job(served).alternatives == 20
    assert completion(prompt=[1] * 64).job(served).alternatives is None
    assert completion(prompt=[1]).job(served).prompts == ((1,),)
    for field in ("max_tokens", "max_completion_tokens"):
        assert ChatBody.model_validate({"messages": MESSAGES, field: 1}).job(served).max_tokens == 1
        with pytest.raises(ValidationError):
            ChatBody.model_validate({"messages": MESSAGES, field: 0})
    with pytest.raises(ValidationError, match="at most 128 items"):
        completion(prompt=["its"] * 129)
    with pytest.raises(ApiError, match=f"must lie in 0…{last}"):
        completion(prompt=[1, last + 1]).job(served)
    with pytest.raises(ApiError, match="above the model's 4 loops"):
        completion(trajectory="cosine:99999999999").job(served)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [({}, None), ({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 3}, 3)],
)
def test_a_chat_lists_alternatives_when_it_is_asked_to(
    served: Served, fields: dict[str, Any], expected: int | None
) -> None:
    assert ChatBody.model_validate({"messages": MESSAGES, **fields}).job(served).alternatives == expected


@pytest.mark.parametrize(
    ("name", "shown"), [("bugdet", "bugdet"), ("x" * 99, "x" * 64), ("a\udc80", "a\\udc80")], ids=repr
)
def test_an_unknown_field_is_named(name: str, shown: str) -> None:
    with pytest.raises(ValidationError) as refused:
        completion(**{name: 1})
    assert f"'{shown}' is not a field of this request; " in refused.value.errors()[0]["msg"]


@pytest.mark.parametrize("field", ["budget", "min_budget", "max_tokens", "trajectory", "model"])
def test_a_long_value_is_not_repeated_whole(served: Served, field: str) -> None:
    value: Any = "9" * 250 if field in ("trajectory", "model") else 10**2000
    with pytest.raises(ApiError) as refused:
        completion(**{field: value}).job(served)
    assert "9" * 70 in str(refused.value) or "0" * 70 in str(refused.value)
    assert len(str(refused.value)) <= MAX_CHARS + 1


def test_a_long_unknown_field_is_refused_as_fast_as_a_short_one() -> None:
    began = time.process_time()
    with pytest.raises(ValidationError):
        completion(**{"max_tokens" * 1_000_000: 1})
    assert time.process_time() - began < 0.2


def test_what_is_not_said_is_within_what_the_server_gives(served: Served) -> None:
    assert completion().job(served).max_tokens == 16
    assert completion().job(replace(served, max_output=8)).max_tokens == 8
    for top_k in (0, -1, None):
        assert completion(top_k=top_k).job(served).sampling.top_k is None


def test_a_name_in_a_message_is_refused_by_name() -> None:
    with pytest.raises(ValidationError, match="'name' is a field of OpenAI's that is not supported"):
        ChatBody.model_validate({"messages": [{**MESSAGES[0], "name": "me"}]})


def test_a_prompt_that_is_too_long_is_said_to_be(served: Served) -> None:
    with pytest.raises(ApiError, match="at most 64") as refused:
        completion(prompt=[1] * 65).job(served)
    assert refused.value.code == "context_length_exceeded"


def test_a_text_that_is_surely_too_long_is_not_encoded(served: Served) -> None:
    tokenizer = mock.Mock(wraps=served.tokenizer)
    busy = replace(served, chat=ChatTemplate(tokenizer))
    text = "its " * 100_000
    for job in (
        lambda: completion(prompt=text).job(busy),
        lambda: completion(prompt=["its", text]).job(busy),
        lambda: ChatBody.model_validate({"messages": [*MESSAGES, {"role": "user", "content": text}]}).job(busy),
        lambda: LensBody.model_validate({"prompt": text}).ids(busy),
    ):
        with pytest.raises(ApiError, match=r"at least \d+ tokens; this server accepts at most 64") as refused:
            job()
        assert refused.value.code == "context_length_exceeded"
    assert tokenizer.encode.mock_calls == [mock.call("its")]
    with pytest.raises(ApiError, match=r"has \d+ tokens; this server accepts at most 64"):
        completion(prompt=["its " * 65] * 9).job(busy)
    assert tokenizer.encode.call_count == 2
    assert not tokenizer.encode_batch.mock_calls


def test_a_job_is_what_the_engine_runs(served: Served) -> None:
    job = completion(prompt=["its", "time"], n=2, seed=7, stop="x", max_tokens=5, trajectory="2-1-1").job(served)
    requests = job.requests(job.trajectory)
    assert [request.sampling.seed for request in requests] == [7, 8, 7, 8]
    assert [request.prompt for request in requests] == [prompt for prompt in job.prompts for _ in range(job.n)]
    assert {request.stops for request in requests} == {("x",)}
    assert job.trajectory == Trajectory.parse("2-1-1")
    assert job.min_budget == 3  # a schedule that is named stays, unless its owner allows less
    assert completion(budget=3).job(served).min_budget == 1
    assert completion(trajectory="2-1-1", min_budget=2).job(served).min_budget == 2


def test_all_forms_of_a_prompt_are_the_same(served: Served) -> None:
    ids = served.tokenizer.encode("its time")
    forms: list[Any] = ["its time", ["its time"], ids, [ids]]
    assert len({completion(prompt=form).job(served).prompts for form in forms}) == 1


def test_a_chat_without_a_limit_may_fill_the_context(served: Served) -> None:
    body = ChatBody.model_validate({"messages": MESSAGES})
    assert body.job(served).max_tokens == served.max_output
    alone = body.job(replace(served, max_output=served.config.context))
    assert alone.max_tokens == served.config.context + 1 - len(alone.prompts[0])  # the last token needs no position
    with pytest.raises(LoopformerError, match="not both"):
        ChatBody.model_validate({"messages": MESSAGES, "max_tokens": 2, "max_completion_tokens": 3}).job(served)


def test_what_ends_a_chat_ends_its_answer(served: Served) -> None:
    job = ChatBody.model_validate({"messages": MESSAGES, "stop": "x"}).job(served)
    assert job.stops == ("x", *served.chat.stops)
    assert completion(stop="x").job(served).stops == ("x",)


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (ApiError("Busy.", 429, "server_busy"), 429, "Busy."),
        (LoopformerError("No such budget."), 400, "No such budget."),
        (RunFailed("The text could not be generated."), 500, "The text could not be generated."),
        (asyncio.CancelledError(), CLIENT_GONE, "The client disconnected."),
        (RuntimeError("CUDA"), 500, "The server failed to answer this request."),
    ],
    ids=repr,
)
def test_errors_have_a_status_and_no_internals(error: BaseException, status: int, message: str) -> None:
    api_error = ApiError.of(error)
    assert (api_error.status, str(api_error)) == (status, message)


@pytest.mark.parametrize("fewer", ["the tokenizer", "the model", "neither"])
def test_token_ids_end_before_the_vocabulary(served: Served, fewer: str) -> None:
    """The model may have more ids than its tokenizer, as padding, or the tokenizer more than its model."""
    vocab = served.tokenizer.vocab_size
    sizes = {"the tokenizer": vocab + 8, "the model": vocab - 8, "neither": vocab}
    served = replace(served, config=replace(served.config, vocab=sizes[fewer]))
    first_wrong = min(sizes[fewer], vocab)
    for ids in ([0], [first_wrong - 1], [0, first_wrong - 1]):
        assert completion(prompt=ids).job(served).prompts == (tuple(ids),)
        assert completion(prompt=[ids, ids]).job(served).prompts == (tuple(ids), tuple(ids))
        assert LensBody.model_validate({"prompt": ids}).ids(served) == ids
        assert DetokenizeBody.model_validate({"tokens": ids}).text(served) == served.tokenizer.decode(ids)
    for ids in ([first_wrong], [0, first_wrong]):
        for refuse in (
            lambda ids=ids: completion(prompt=ids).job(served),
            lambda ids=ids: completion(prompt=[[0], ids]).job(served),
            lambda ids=ids: LensBody.model_validate({"prompt": ids}).ids(served),
            lambda ids=ids: DetokenizeBody.model_validate({"tokens": ids}).text(served),
        ):
            with pytest.raises(ApiError, match=f"Token ids must lie in 0…{first_wrong - 1}"):
                refuse()


def test_a_text_needs_memory_for_its_tokens_but_not_beyond_the_context(served: Served) -> None:
    each = served.cost.kv_bytes(2, served.value_bytes)
    for prompt, max_tokens, tokens in (
        ([1] * 5, 3, 8),
        ([1] * (served.config.context - 2), 3, served.config.context),
        ([1] * 5, 0, 5),  # only scored
    ):
        job = Job((tuple(prompt),), 2, Sampling(), max_tokens, (), Trajectory.uniform(2), 1, 0, None)
        assert job.kv_bytes(served, Trajectory.uniform(2)) == 2 * tokens * each


@pytest.mark.parametrize(
    ("conditioning", "trained", "expected"),
    [
        ("trajectory", frozenset({1, 2, 3}), [False, False, True]),
        ("trajectory", frozenset({1, 4}), [False, False, False]),
        ("trajectory", None, [False, False, None]),
        ("index", frozenset({1, 3, 4}), [True, False, True]),
        ("none", None, [None, None, None]),
    ],
)
def test_a_loop_is_trained_to_predict_where_a_trained_budget_ends(
    served: Served, conditioning: Any, trained: frozenset[int] | None, expected: list[bool | None]
) -> None:
    config = replace(served.config, conditioning=conditioning)
    served = replace(served, config=config, trained_budgets=trained)
    assert [served.is_trained(Trajectory.uniform(3), loop) for loop in (1, 2, 3)] == expected


def test_another_model_is_not_found(served: Served) -> None:
    for name in (None, "tiny"):
        assert completion(model=name).job(served).prompts == completion().job(served).prompts
    for use in (
        lambda: completion(model="gpt").job(served),
        lambda: TokenizeBody.model_validate({"prompt": "a", "model": "gpt"}).ids(served),
        lambda: DetokenizeBody.model_validate({"tokens": [1], "model": "gpt"}).text(served),
        lambda: LensBody.model_validate({"prompt": "a", "model": "gpt"}).requested_trajectory(served),
    ):
        with pytest.raises(ApiError, match="The model 'gpt' is not served here; 'tiny' is") as refused:
            use()
        assert (refused.value.status, refused.value.code) == (404, "model_not_found")
