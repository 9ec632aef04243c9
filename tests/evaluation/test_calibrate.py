"""Thresholds for a mean budget: the simulation is the real thing, and the report says what it is."""

import json
import math
from copy import copy
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from loopformer import LM, LoopedLM, LoopformerError, ModelConfig, Trajectory
from loopformer.data.tokenizer import Tokenizer
from loopformer.evaluation.calibrate import FILE, Wanted, calibrate, draw, plain, read_policy, save, verdict
from loopformer.evaluation.simulate import CopiedText, Numbers, PromptText, Readings, TokenText, cut, read
from loopformer.evaluation.store import weights_hash
from loopformer.evaluation.text import Ids, Text
from loopformer.inference.adaptive.ladder import Ladder, LadderCache, Tally, rung
from loopformer.inference.adaptive.policy import PromptPolicy, TokenPolicy, climb, generate_adaptive
from loopformer.inference.request import Request

LADDER = tuple(rung(4, number) for number in range(1, 5))
UNIFORM = tuple(Trajectory.uniform(number) for number in range(1, 5))


@pytest.fixture(scope="module")
def lm() -> LM:
    torch.manual_seed(0)
    tokenizer = Tokenizer.train(["every pass is told its time and its step"] * 20, 280)
    model = LoopedLM(
        ModelConfig(blocks=1, loops=4, width=32, heads=4, ffn=64, context=24, vocab=tokenizer.vocab_size)
    )
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return LM(model.eval(), tokenizer)


@pytest.fixture(scope="module")
def rows(lm: LM) -> Ids:
    return np.random.default_rng(0).integers(0, lm.model.config.vocab, (8, 25))


@pytest.mark.parametrize("measure", ["entropy", "margin", "kl"])
@pytest.mark.parametrize("rungs", [(1, 2, 4), (2, 3, 4), (1, 2, 3, 4)])
def test_a_simulated_climb_is_the_real_one(lm: LM, rows: Ids, measure: str, rungs: tuple[int, ...]) -> None:
    readings = read(lm.model, rows, LADDER, UNIFORM, measure)
    text = TokenText(readings, lm.model.cost, "exact")
    routes = tuple(rung(4, number) for number in rungs)
    choices = list(text.thresholds(routes))
    policy = text.policy(routes, choices[len(choices) // 2])
    assert isinstance(policy, TokenPolicy)
    simulated = text.outcome(routes, policy.thresholds)
    assert min(simulated.chosen.values(), default=0) >= (measure != "kl" and len(rungs) == 3)  # each one is used
    tally, losses = Tally(lm.model.cost), np.empty((8, 24))
    for number, row in enumerate(rows.tolist()):
        cache = LadderCache(Ladder(lm.model), "exact", 24, tally)
        for place, (token, following) in enumerate(pairwise(row)):
            cache.feed([token])
            logits = climb(lm.model, cache, policy, tally)
            losses[number, place] = F.cross_entropy(logits, torch.tensor(following))
        tally.finished(1, 24)
    np.testing.assert_allclose(simulated.losses, losses.mean(1), atol=1e-4)
    assert simulated.passes == pytest.approx(tally.passes_per_token)
    assert simulated.flops == pytest.approx(tally.flops / tally.tokens)
    assert simulated.compute == pytest.approx(tally.mean_budget)
    assert simulated.chosen == {str(route): tally.chosen[route] for route in routes}


@pytest.mark.parametrize("measure", ["entropy", "kl"])
def test_a_simulated_choice_per_prompt_costs_what_the_real_one_does(lm: LM, rows: Ids, measure: str) -> None:
    text = PromptText(read(lm.model, rows, UNIFORM, (), measure), lm.model.cost)
    routes = UNIFORM[0], UNIFORM[1], UNIFORM[3]
    thresholds = list(text.thresholds(routes))[50]
    policy = text.policy(routes, thresholds)
    assert isinstance(policy, PromptPolicy)
    tally = Tally(lm.model.cost)
    for number, row in enumerate(rows.tolist()):
        request = Request(tuple(row[: text.prompt]), UNIFORM[0], max_tokens=text.scored)
        (result,), alone = generate_adaptive(lm.model, _endless(lm), [request], policy)
        assert len(result.ids) == text.scored
        tally.passes, tally.flops = tally.passes + alone.passes, tally.flops + alone.flops
        tally.finished(text.prompt, text.scored)
        with torch.no_grad():
            logits = lm.model(torch.tensor([row[:-1]]), result.trajectory).logits
        assert logits is not None
        loss = F.cross_entropy(
            logits[0, text.prompt - 1 :, : lm.model.config.vocab], torch.tensor(row[text.prompt :])
        )
        assert text.outcome(routes, thresholds).losses[number] == pytest.approx(float(loss), abs=1e-4)
    simulated = text.outcome(routes, thresholds)
    assert sum(count > 0 for count in simulated.chosen.values()) >= 2
    assert simulated.passes == pytest.approx(tally.passes_per_token)
    assert simulated.flops == pytest.approx(tally.flops / tally.tokens)
    assert simulated.compute == pytest.approx(tally.mean_budget)


def _endless(lm: LM) -> Tokenizer:
    """The tokenizer, with an end that the model never writes."""
    tokenizer = copy(lm.need_tokenizer())
    tokenizer.eot = -1
    return tokenizer


def test_copied_climbs_are_run_and_exact_while_nobody_stops_early(lm: LM, rows: Ids) -> None:
    readings = read(lm.model, rows[:2], LADDER, UNIFORM, "entropy")
    text = CopiedText(readings, lm.model, rows[:2])
    deep = text.outcome((LADDER[0], LADDER[3]), (-1.0,))
    np.testing.assert_allclose(deep.losses, text.fixed(UNIFORM[3]).losses, atol=1e-4)
    simulated = TokenText(readings, lm.model.cost, "copy").outcome((LADDER[0], LADDER[3]), (-1.0,))
    assert deep.passes == simulated.passes
    assert deep.flops == pytest.approx(simulated.flops)
    middle = float(np.median(readings.doubt(LADDER[0], LADDER[0])))
    mixed = text.outcome((LADDER[0], LADDER[3]), (middle,))
    assert set(mixed.chosen.values()) != {0}
    assert mixed.passes < deep.passes


def _readings(gains: Numbers, doubts: Numbers) -> Readings:
    """A text on which depth lowers the loss of each token by `gains` per loop [W, T]."""
    losses = {route: 3.0 - gains * (route.budget - 1) for route in {*LADDER, *UNIFORM}}
    return Readings("entropy", losses, {(route, route): doubts for route in LADDER})


def test_it_beats_fixed_budgets_where_doubt_tells_which_tokens_gain(tiny: ModelConfig) -> None:
    cost, dice = LoopedLM(tiny).cost, np.random.default_rng(0)
    hard = dice.random((20, 32)) < 0.2
    routes = LADDER[0], LADDER[3]
    noise = 0.01 * dice.standard_normal((20, 32))
    telling = TokenText(_readings(0.5 * hard + noise, hard.astype(float)), cost, "copy")
    found = verdict(telling.outcome(routes, (0.5,)), [[telling.fixed(route) for route in UNIFORM]], "passes")
    assert found.word == "better"
    assert found.cost == pytest.approx(1 + 4 * hard.mean())
    blind = TokenText(_readings(0.5 * hard + noise, dice.random((20, 32))), cost, "copy")
    assert verdict(blind.outcome(routes, (0.8,)), [[blind.fixed(one) for one in UNIFORM]], "passes").word == "worse"


@pytest.mark.parametrize(
    "wanted",
    [
        Wanted(2.5),
        Wanted(2.0, measure="margin", choices=(1, 2, 4)),
        Wanted(3.5, measure="kl"),
        Wanted(3.5, mode="prompt", count="compute", choices=(1, 4)),
        Wanted(2.5, mode="prompt", measure="kl"),
        Wanted(3.0, fill="copy", copy_tokens=48),
    ],
    ids=lambda wanted: f"{wanted.mode}-{wanted.measure}-{wanted.fill}",
)
def test_calibration_keeps_to_the_budget_and_goes_to_disk_and_back(
    lm: LM, rows: Ids, wanted: Wanted, tmp_path: Path
) -> None:
    seen: list[tuple[int, int | None]] = []
    found = calibrate(lm.model, rows, wanted, lambda doing, done, total: seen.append((done, total)))
    assert found.expected <= wanted.mean_budget
    assert seen[-1][0] == seen[-1][1]
    assert set(found.verdicts) == {"passes", "compute"}
    assert (found.policy, found.picked) in found.curve
    assert [one.passes for one in found.fixed["uniform"]] == [1, 2, 3, 4]
    content = plain(found, wanted, {"weights": weights_hash(lm.model)})
    path = save(content, tmp_path / "new")
    assert read_policy(path, lm.model) == read_policy(path.parent, lm.model) == found.policy
    picture = draw(json.loads(path.read_text()), path.parent)
    assert picture is not None
    assert picture.stat().st_size > 1000
    (result,), tally = generate_adaptive(
        lm.model, lm.need_tokenizer(), lm.requests(["its time"], max_tokens=5), found.policy
    )
    assert 1 <= len(result.ids) <= 5
    assert tally.lossy == content["lossy"]


def test_text_is_cut_as_in_training(lm: LM) -> None:
    tokenizer = lm.need_tokenizer()
    text = Text("mine", "all of it", (np.arange(30), np.arange(40, 80)), "", tokenizer)
    windows = cut(text, 10, limit=6)
    assert windows.shape == (6, 11)
    assert windows.ravel()[:11].tolist() == list(range(11))
    assert windows[3, :2].tolist() == [tokenizer.eot, 40]
    assert (windows[1:, 0] == windows[:-1, -1]).all()


def test_mistakes_are_one_clear_sentence(lm: LM, rows: Ids, tiny: ModelConfig, tmp_path: Path) -> None:
    told_nothing = LoopedLM(replace(tiny, conditioning="none"))
    (tmp_path / "broken.json").write_text('{"format": ')
    (tmp_path / "other.json").write_text('{"format": "something"}')
    head = {"format": "loopformer-calibration", "version": 1}
    (tmp_path / "foreign.json").write_text(json.dumps({**head, "weights": "abc"}))
    good = {**head, "weights": weights_hash(lm.model)}
    (tmp_path / "hollow.json").write_text(json.dumps(good))
    broken = {"mode": "token", "rungs": [1, 2], "thresholds": [math.nan], "measure": "entropy"}
    (tmp_path / "nan.json").write_text(json.dumps({**good, "policy": broken}))
    short = Text("mine", "all of it", (np.arange(30),), "", lm.need_tokenizer())
    cases: list[tuple[Any, str]] = [
        (lambda: calibrate(lm.model, rows, Wanted(0.5)), "must lie in 1 to 4"),
        (lambda: calibrate(lm.model, rows, Wanted(5)), "must lie in 1 to 4"),
        (lambda: calibrate(lm.model, rows, Wanted(math.nan)), "must lie in 1 to 4"),
        (lambda: calibrate(lm.model, rows, Wanted(1.0)), "ask for more"),
        (lambda: calibrate(lm.model, rows, Wanted(2, choices=(1, 5))), "2 or more depths in 1 to 4"),
        (lambda: calibrate(lm.model, rows, Wanted(4, measure="kl", choices=(1, 2))), "3 or more depths"),
        (lambda: calibrate(told_nothing, rows, Wanted(2)), "choose a budget per prompt"),
        (lambda: calibrate(LoopedLM(replace(tiny, loops=1)), rows, Wanted(1)), "nothing to choose"),
        (lambda: Wanted(2, measure="entropie"), "did you mean entropy"),
        (lambda: Wanted(2, mode="tokens"), "did you mean token"),
        (lambda: Wanted(2, fill="coppy"), "did you mean copy"),
        (lambda: Wanted(2, count="flops"), "valid are passes, compute"),
        (lambda: Wanted(2, mode="prompt", fill="copy"), "a prompt needs no fill"),
        (lambda: cut(short, 24, 100), "gives 1 windows of 24 tokens"),
        (lambda: read_policy(tmp_path / "none.json", lm.model), "There is no calibration"),
        (lambda: read_policy(tmp_path, lm.model), FILE),
        (lambda: read_policy(tmp_path / "broken.json", lm.model), "no whole JSON"),
        (lambda: read_policy(tmp_path / "other.json", lm.model), "no calibration that"),
        (lambda: read_policy(tmp_path / "foreign.json", lm.model), "other weights"),
        (lambda: read_policy(tmp_path / "hollow.json", lm.model), "is damaged"),
        (lambda: read_policy(tmp_path / "nan.json", lm.model), "finite number, got nan"),
    ]
    for make, said in cases:
        with pytest.raises(LoopformerError, match=said):
            make()
