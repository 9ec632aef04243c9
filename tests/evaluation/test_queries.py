"""Requests of all kinds, answered without the harness."""

from typing import Any

import pytest

from loopformer import LM
from loopformer.data.tokenizer import Tokenizer
from loopformer.errors import LoopformerError
from loopformer.evaluation.score import encode_pairs, encode_texts, loglikelihoods
from loopformer.evaluation.tasks import Query, answer, digest
from loopformer.trajectory import Trajectory

from .small import make_model

ROUTE = Trajectory.parse("2-1-1")


def _text(lm: LM, prompt: str, **settings: Any) -> str:
    (value,) = answer(lm, [Query("generate_until", (prompt, settings))], ROUTE).values
    assert isinstance(value, str)
    return value


def test_kinds_may_be_mixed(lm: LM, tokenizer: Tokenizer) -> None:
    queries = [
        Query("generate_until", ("its step", {"until": ["\n"], "max_gen_toks": 4})),
        Query("loglikelihood", ("its", " step")),
        Query("loglikelihood_rolling", ("every pass is told its time " * 3,)),
        Query("loglikelihood", ("its", " time")),
    ]
    found = answer(lm, queries, ROUTE)
    assert found.values[0] == lm.generate("its step", trajectory="2-1-1", max_tokens=4, stops="\n").text
    pairs = encode_pairs(tokenizer, [("its", " step"), ("its", " time")])
    expected = loglikelihoods(lm.model, pairs, ROUTE).answers
    assert [found.values[1], found.values[3]] == [list(one) for one in expected]
    ((total, _),) = loglikelihoods(lm.model, encode_texts(tokenizer, [queries[2].arguments[0]]), ROUTE).answers
    assert found.values[2] == total
    assert found.cut == 0  # a rolling text is read in parts
    assert found.seconds > 0


def test_generation_follows_its_settings(tokenizer: Tokenizer) -> None:
    lm = LM(make_model(tokenizer, context=64), tokenizer)
    plain = lm.generate("every pass", trajectory="2-1-1", max_tokens=12).text
    assert _text(lm, "every pass", max_gen_toks=12) == plain
    assert _text(lm, "every pass", max_tokens=12, do_sample=False, temperature=0.9) == plain
    stop = plain[4:6]
    assert _text(lm, "every pass", max_gen_toks=12, until=stop) == plain[: plain.index(stop)]
    sampled = _text(lm, "every pass", max_gen_toks=12, do_sample=True, temperature=5.0, top_k=50)
    assert sampled != plain
    assert sampled == _text(lm, "every pass", max_gen_toks=12, do_sample=True, temperature=5.0, top_k=50)
    assert isinstance(_text(lm, "", max_gen_toks=3), str)


def test_long_prompts_lose_their_beginning(lm: LM) -> None:
    prompt = "every pass is told its time and its step"
    query = Query("generate_until", (prompt, {"until": [], "max_gen_toks": 6}))
    kept = lm.need_tokenizer().decode(lm.need_tokenizer().encode(prompt)[-10:])
    found = answer(lm, [query], ROUTE)
    assert found.values == [lm.generate(kept, trajectory="2-1-1", max_tokens=6).text]
    assert found.cut == 1


def test_a_batch_gives_what_each_would_alone(lm: LM) -> None:
    queries = [
        Query("generate_until", (prompt, {"until": ["t"], "max_gen_toks": 5}))
        for prompt in ("its", "every pass is", "日本語", "its step")
    ]
    alone = [answer(lm, [query], ROUTE).values[0] for query in queries]
    assert answer(lm, queries, ROUTE, batch_tokens=32).values == alone


def test_the_hash_follows_the_requests() -> None:
    queries = [Query("loglikelihood", ("a", " b")), Query("generate_until", ("a", {"until": ["x"], "top_k": 1}))]
    again = [Query("loglikelihood", ("a", " b")), Query("generate_until", ("a", {"top_k": 1, "until": ["x"]}))]
    assert digest(queries) == digest(again)
    assert digest(queries) != digest(queries[::-1])


def test_what_cannot_be_generated_is_one_sentence(lm: LM) -> None:
    with pytest.raises(LoopformerError, match="256 new tokens but the context is 16"):
        _text(lm, "its", until=["\n"])
    with pytest.raises(LoopformerError, match="num_beams"):
        _text(lm, "its", max_gen_toks=4, num_beams=4)
    with pytest.raises(LoopformerError, match="sets guidance for generation"):
        _text(lm, "its", max_gen_toks=4, guidance=1)
    with pytest.raises(LoopformerError, match="none that we answer"):
        answer(lm, [Query("multiply", ("a",))], ROUTE)
