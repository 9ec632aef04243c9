"""Depth by certainty: exact where it says so, honest about what it costs."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from options import draw_options

from loopformer import LM, LoopedLM, LoopformerError, Trajectory
from loopformer.config import ModelConfig
from loopformer.inference.adaptive.ladder import Ladder, LadderCache, Tally, head_flops, pass_flops, rung
from loopformer.inference.adaptive.policy import (
    Policy,
    PromptPolicy,
    TokenPolicy,
    doubt,
    entropy,
    generate_adaptive,
    kl,
    margin,
    policy_from,
)

from ..models import spread

PROMPTS = ["every pass", "its", "time and step and time"]
NEVER, ALWAYS = -1.0, 1e9  # thresholds that no doubt, or every doubt, is at or below


def test_rungs_share_their_first_steps_and_end_in_a_jump() -> None:
    assert [str(rung(4, number)) for number in range(1, 5)] == ["1", "1-3", "1-1-2", "4"]
    assert all(rung(8, number).steps[: number - 1] == rung(8, 8).steps[: number - 1] for number in range(1, 9))


@st.composite
def climbs(draw: st.DrawFn) -> tuple[ModelConfig, list[list[int]], list[list[int]], int]:
    """A model, groups of tokens that are fed one after another, and the rungs that each tries."""
    loops = draw(st.integers(1, 5))
    kind: Any = draw(st.sampled_from(["trajectory", "step", "time"]))
    config = ModelConfig(
        conditioning=kind,
        blocks=draw(st.integers(1, 2)),
        loops=loops,
        width=16,
        heads=2,
        ffn=24,
        context=24,
        vocab=50,
        positions=draw(st.sampled_from(["learned", "rotary"])),
        time_scale=30.0,
        **{**draw_options(draw, kind), "prelude": 0, "coda": 0},
    )
    ids = st.integers(0, 49)
    groups = [draw(st.lists(ids, min_size=1, max_size=7))]
    groups += [[one] for one in draw(st.lists(ids, max_size=6))]
    tries = st.sets(st.integers(1, loops), min_size=1).map(sorted)
    return config, groups, [draw(tries) for _ in groups], draw(st.integers(0, 10**6))


@given(climbs())
def test_an_exact_climb_equals_a_fixed_run_along_its_rung(
    case: tuple[ModelConfig, list[list[int]], list[list[int]], int],
) -> None:
    config, groups, tries, seed = case
    model = spread(config, seed)
    seen: list[int] = []
    model.stack.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].shape[1]))
    tally = Tally(model.cost)
    cache, text = LadderCache(Ladder(model), "exact", 24, tally), list[int]()
    for group, rungs in zip(groups, tries, strict=True):
        cache.feed(group)
        text += group
        for number in rungs:
            logits = model.head(cache.climb(number))
            with torch.no_grad():
                fixed = model(torch.tensor([text]), rung(config.loops, number)).logits
            assert fixed is not None
            del seen[len(seen) - number :]  # those of the fixed run
            torch.testing.assert_close(logits, fixed[0, -1], atol=1e-4, rtol=1e-4)
        cache.settle(rungs[-1])
    assert tally.passes == len(seen)
    assert not tally.lossy
    # Without what attention adds, FLOPs are the tokens of all passes.
    plain = sum(seen) * model.cost.loop_flops(context=0)
    assert tally.flops >= plain
    assert tally.flops <= plain + sum(seen) * 4 * config.width * len(text) * config.blocks


def test_costs_are_counted_pass_by_pass(tiny: ModelConfig) -> None:
    model = spread(tiny, 0)
    tally = Tally(model.cost)
    cache = LadderCache(Ladder(model), "exact", 16, tally)
    cache.feed([1, 2, 3])
    cache.climb(1)
    cache.settle(1)
    assert (tally.passes, tally.flops) == (1, pass_flops(model.cost, 0, 3))
    cache.feed([4])
    cache.climb(1)  # thrown away
    cache.climb(3)  # two small steps and a jump, and the three earlier tokens through each
    assert tally.passes == 1 + 1 + 3
    assert tally.flops == pytest.approx(pass_flops(model.cost, 0, 4) * 4)
    assert tally.fill_flops == pytest.approx(pass_flops(model.cost, 0, 3) * 3)


def test_a_copied_climb_is_lossy_cheap_and_right_while_nobody_stops_early(tiny: ModelConfig) -> None:
    model = spread(tiny, 1)
    text = torch.randint(tiny.vocab, (12,)).tolist()
    errors, flops = {}, {}
    for fill in ("exact", "copy"):
        for first in (1, 4):
            tally = Tally(model.cost)
            cache = LadderCache(Ladder(model), fill, 12, tally)
            for place, token in enumerate(text):
                cache.feed([token])
                last = 4 if place == len(text) - 1 else first
                hidden = cache.climb(last)
                cache.settle(last)
            with torch.no_grad():
                fixed = model(torch.tensor([text]), 4).hidden[0, -1]
            errors[fill, first] = float((hidden - fixed).abs().max())
            flops[fill, first] = tally.flops
            assert tally.lossy == (fill == "copy")
    assert max(errors["exact", 1], errors["exact", 4], errors["copy", 4]) < 1e-4
    assert errors["copy", 1] > 1e-3
    assert flops["copy", 1] < flops["exact", 1]
    assert flops["copy", 4] == flops["exact", 4]


@pytest.mark.parametrize("fill", ["exact", "copy"])
@pytest.mark.parametrize(("threshold", "route"), [(ALWAYS, "1-3"), (NEVER, "4")])
def test_thresholds_at_the_ends_are_fixed_runs(lm: LM, fill: str, threshold: float, route: str) -> None:
    policy = TokenPolicy((2, 3, 4), (threshold,) * 2, fill=fill)
    requests = lm.requests(PROMPTS, max_tokens=15)
    results, tally = generate_adaptive(lm.model, lm.need_tokenizer(), requests, policy)
    plain = lm.generate(PROMPTS, trajectory=route, max_tokens=15)
    assert [(one.ids, one.reason) for one in results] == [(one.ids, one.reason) for one in plain]
    assert lm.generate(PROMPTS[0], max_tokens=15, adaptive=policy).ids == plain[0].ids
    report = tally.report()
    assert report["chosen"] == {route: report["tokens"]}
    assert report["passes_per_token"] == (2 if route == "1-3" else 4 + 2)
    assert report["mean_budget"] >= report["passes_per_token"] - 1e-9


def test_each_token_is_what_its_own_rung_gives(lm: LM) -> None:
    """Greedy text with a threshold in the middle of its doubts, against fixed runs over the same text."""
    (request,) = lm.requests(["every pass is"], max_tokens=25)

    def fixed(text: list[int], number: int) -> torch.Tensor:
        with torch.no_grad():
            logits = lm.model(torch.tensor([text]), rung(4, number)).logits
        assert logits is not None
        found: torch.Tensor = logits[0, :, : lm.model.config.vocab]
        return found

    middle = float(doubt("margin", fixed(list(range(40, 80)), 1)).median())
    policy = TokenPolicy((1, 2, 4), (middle, middle), "margin")
    (result,), tally = generate_adaptive(lm.model, lm.need_tokenizer(), [request], policy)
    assert len(tally.chosen) == 3
    assert sum(tally.chosen.values()) == len(result.ids)
    for number, token in enumerate(result.ids):
        last = {one: fixed([*request.prompt, *result.ids[:number]], one)[-1] for one in (1, 2, 4)}
        unsure = {one: float(doubt("margin", last[one])) for one in (1, 2)}
        kept = next((one for one in (1, 2) if unsure[one] <= middle), 4)
        if min(abs(one - middle) for one in unsure.values()) > 1e-4:
            assert math.isclose(result.logprobs[number], float(last[kept].log_softmax(-1)[token]), abs_tol=1e-3)


@pytest.mark.parametrize("measure", ["entropy", "margin", "kl"])
def test_a_prompt_chooses_its_trajectory_and_both_prefills_count(lm: LM, measure: str) -> None:
    routes = tuple(map(Trajectory.parse, ("1", "1-1", "2-1-1")))
    looks = 2 if measure == "kl" else 1
    (request,) = lm.requests(["every pass is told"], max_tokens=10)
    length = len(request.prompt)
    for thresholds, place in (((ALWAYS, ALWAYS), 0), ((NEVER, ALWAYS), 1), ((NEVER, NEVER), 2)):
        policy = PromptPolicy(routes, thresholds, measure)
        (result,), tally = generate_adaptive(lm.model, lm.need_tokenizer(), [request], policy)
        plain = lm.generate("every pass is told", trajectory=routes[place], max_tokens=10)
        assert (result.ids, result.trajectory) == (plain.ids, routes[place])
        prefills = sum(routes[one].budget for one in {*range(looks), place})
        decoded = routes[place].budget * (len(result.ids) - 1)
        assert tally.passes == prefills + decoded
        own = pass_flops(tally.cost, length, length + len(result.ids) - 1) * routes[place].budget
        heads = tally.heads * head_flops(tally.cost)
        assert tally.flops == pytest.approx(prefills * pass_flops(tally.cost, 0, length) + own + heads)
        assert tally.heads == looks * min(16, length) + (place >= looks) + len(result.ids) - 1


def test_the_context_limit_and_several_prompts(lm: LM) -> None:
    policy = TokenPolicy((1, 4), (1.0,))
    long = lm.requests(["time " * 12, "its"], max_tokens=500)
    results, tally = generate_adaptive(lm.model, lm.need_tokenizer(), long, policy)
    assert [one.reason in ("context", "end") for one in results] == [True, True]
    assert tally.tokens == sum(len(one.ids) for one in results)


def test_measures_are_what_they_say() -> None:
    logits = torch.randn(3, 7, 11)
    p = logits.softmax(-1)
    torch.testing.assert_close(entropy(logits), torch.special.entr(p).sum(-1))
    ranked = p.sort(descending=True).values
    torch.testing.assert_close(margin(logits), ranked[..., 0] - ranked[..., 1])
    other = torch.randn(3, 7, 11)
    expected = torch.distributions.kl_divergence(
        torch.distributions.Categorical(p), torch.distributions.Categorical(other.softmax(-1))
    )
    torch.testing.assert_close(kl(logits, other), expected)
    certain = torch.zeros(11)
    certain[3] = 50
    for measure in ("entropy", "margin", "kl"):
        assert float(doubt(measure, certain, certain)) == pytest.approx(0, abs=1e-5)
        assert float(doubt(measure, torch.zeros(11), certain)) > 0.9


@pytest.mark.parametrize(
    "policy",
    [
        TokenPolicy((1, 2, 4), (0.5, 1.25), "margin", "copy"),
        TokenPolicy((1, 2, 4), (0.5,), "kl"),
        PromptPolicy((Trajectory.uniform(1), Trajectory.parse("2-1-1")), (0.5,)),
    ],
)
def test_policies_come_back_from_plain_data(policy: Policy) -> None:
    assert policy_from(policy.plain()) == policy


def test_mistakes_are_one_clear_sentence(lm: LM, tiny: ModelConfig) -> None:
    request = lm.requests(["its"])
    one, four = Trajectory.uniform(1), Trajectory.uniform(4)
    told_nothing = LoopedLM(replace(tiny, conditioning="none"))

    def run(model: LoopedLM, policy: Policy) -> Any:
        return generate_adaptive(model, lm.need_tokenizer(), request, policy)

    cases: list[tuple[Any, str]] = [
        (lambda: TokenPolicy((1, 2), (math.nan,)), "finite number, got nan"),
        (lambda: TokenPolicy((1, 2), (0.5, 0.5)), "needs 1 threshold, got 2"),
        (lambda: TokenPolicy((2, 1), (0.5,)), "in rising order"),
        (lambda: TokenPolicy((1,), ()), "two or more rungs"),
        (lambda: TokenPolicy((1, 2), (), "kl"), "three or more"),
        (lambda: TokenPolicy((1, 2), (0.5,), "entropi"), "did you mean entropy"),
        (lambda: TokenPolicy((1, 2), (0.5,), fill="coppy"), "did you mean copy"),
        (lambda: PromptPolicy((one, four), (math.inf,)), "finite number"),
        (lambda: PromptPolicy((one, Trajectory.uniform(2), four), (2.0, 1.0)), "must rise"),
        (lambda: policy_from({"mode": "word"}), "token or prompt"),
        (lambda: policy_from({"mode": "token"}), "no adaptive policy"),
        (lambda: policy_from([]), "no adaptive policy"),
        (lambda: run(lm.model, TokenPolicy((1, 9), (0.5,))), "rungs 1 to 4, not 9"),
        (lambda: run(lm.model, PromptPolicy((one, Trajectory.uniform(9)), (NEVER,))), "above the model's 4 loops"),
        (lambda: run(told_nothing, TokenPolicy((1, 2), (0.5,))), "choose a budget per prompt"),
        (lambda: lm.generate("its", budget=2, adaptive=TokenPolicy((1, 2), (0.5,))), "not both"),
    ]
    for make, said in cases:
        with pytest.raises(LoopformerError, match=said):
            make()
