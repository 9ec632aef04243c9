"""What a model says after each loop, and of each token."""

import pytest
import torch

from loopformer import LM, Trajectory
from loopformer.serving.lens import lens, ranked

PROMPT = "every pass is told its time"


def test_the_last_loop_is_what_the_model_says(lm: LM) -> None:
    ids, trajectory = lm.need_tokenizer().encode(PROMPT), Trajectory.parse("2-1-1")
    rows = lens(lm.model, ids, trajectory, top=4)
    logits = lm.model(torch.tensor([ids]), trajectory).logits
    assert logits is not None
    expected = logits[0, -1, : lm.model.config.vocab].float().log_softmax(-1).topk(4)
    assert len(rows) == 3
    assert [token for token, _ in rows[-1]] == expected.indices.tolist()
    torch.testing.assert_close([value for _, value in rows[-1]], expected.values.tolist())
    assert rows[0] != rows[-1]


def test_tokens_are_as_likely_as_the_scorer_says(lm: LM) -> None:
    ids = lm.need_tokenizer().encode(PROMPT)
    rows = ranked(lm.model, [lm.need_tokenizer().eot, *ids], Trajectory.uniform(2), top=3)
    assert rows[0] == (None, ())
    (score,) = lm.score([PROMPT], budget=2)
    assert [row.logprob for row in rows[1:]] == pytest.approx(score.logprobs, abs=1e-4)
    for row in rows[1:]:
        values = [value for _, value in row.alternatives]
        assert values == sorted(values, reverse=True)
        assert row.logprob is not None
        assert values[0] >= row.logprob - 1e-6
