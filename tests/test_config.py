import dataclasses
from typing import Any

import pytest
import torch
from options import OPTIONS

from loopformer import LoopformerError
from loopformer.config import (
    ModelConfig,
    from_mapping,
    load_preset,
    load_run,
    preset_names,
    run_from_mapping,
    run_to_mapping,
)
from loopformer.errors import MAX_CHARS
from loopformer.model import LoopedLM

FAMILIES = ("base-loop", "tmlt", "loopformer")


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_builds_and_its_parameters_are_counted_right(name: str) -> None:
    config = from_mapping(ModelConfig, load_preset(name)["model"], "model")
    with torch.device("meta"):
        model = LoopedLM(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == model.cost.parameters.total


def test_the_papers_models_are_all_there() -> None:
    wanted = {f"paper/{family}-{k}x{loops}" for family in FAMILIES for k in (1, 2, 3) for loops in (8, 12, 24)}
    wanted |= {f"paper/base-{n}x1" for n in (3, 6, 12, 24)}
    assert wanted <= set(preset_names())
    assert ModelConfig() == from_mapping(ModelConfig, load_preset("paper/loopformer-3x8")["model"], "model")
    assert (ModelConfig().vocab, ModelConfig().vocab_rows) == (50257, 50304)


def test_settings_survive_as_plain_data(tiny: ModelConfig) -> None:
    assert from_mapping(ModelConfig, dataclasses.asdict(tiny), "model") == tiny


@pytest.mark.parametrize("option", OPTIONS, ids=str)
def test_settings_beyond_the_paper_are_written_where_they_are_used(
    tiny: ModelConfig, option: dict[str, Any]
) -> None:
    assert not option.keys() & tiny.plain().keys()
    assert tiny.plain().items() < dataclasses.replace(tiny, **option).plain().items()
    used = dataclasses.replace(tiny, **option)
    assert from_mapping(ModelConfig, used.plain(), "model") == used
    assert set(used.non_paper_settings) == option.keys()
    run, _ = load_run("demo", [f"model.{name}={value}" for name, value in option.items()])
    assert run_from_mapping(run_to_mapping(run)) == run
    assert option.items() <= run_to_mapping(run)["model"].items()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"block": 2}, "model.block; did you mean model.blocks?"),
        ({"blocks": 0}, "model.blocks must be 1 or more"),
        ({"loops": 10**9}, "model.loops must be 1 or more and at most 4,096, got 1000000000"),
        ({"blocks": "two"}, "model.blocks must be a whole number"),
        ({"blocks": True}, "model.blocks must be a whole number"),
        ({"heads": 7}, "multiple of model.heads"),
        ({"conditioning": "times"}, "one of none, index, time, step, trajectory"),
        ({"time_scale": 0}, "model.time_scale must be positive"),
        ({"inject": "gated", "conditioning": "none"}, "give model.conditioning another value than none"),
        ({"start": "random"}, "set model.inject to adapter"),
        ({"padded_vocab": 10}, "smaller than model.vocab"),
        ({"padded_vocab": 10**30}, "model.padded_vocab must be 1 or more and at most 33,554,432"),
        ({"width": 32, "heads": 32, "positions": "rotary"}, "even width/heads"),
    ],
)
def test_wrong_settings_are_named(change: dict[str, Any], said: str) -> None:
    with pytest.raises(LoopformerError, match=said.replace("?", r"\?")):
        from_mapping(ModelConfig, change, "model")


def test_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(LoopformerError, match="did you mean paper/loopformer-3x8"):
        load_preset("paper/loopformer-3x9")


@pytest.mark.parametrize("rows", [256, 2112, 60_000])
def test_padded_rows_wait_for_the_vocabulary_of_the_data(rows: int) -> None:
    run, keys = load_run("demo", [f"model.padded_vocab={rows}"])
    assert run.model.vocab_rows == rows
    assert "model.vocab" not in keys
    with pytest.raises(LoopformerError, match=r"padded_vocab 8 is smaller than model.vocab 9"):
        load_run("demo", ["model.padded_vocab=8", "model.vocab=9"])
    with pytest.raises(LoopformerError, match="padded_vocab must be a whole number or null"):
        load_run("demo", ["model.padded_vocab=many"])


@pytest.mark.parametrize("written", ["null", "~", ""])
def test_a_starting_model_can_be_left_out_again(written: str) -> None:
    assert load_run("demo", ["init_from=a", "init_from=" + written])[0].init_from is None
    assert load_run("demo", ["init_from=a"])[0].init_from == "a"


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"training": {"beta1": 1}}, r"training.beta1 must be 0 or more and below 1, got 1"),
        ({"training": {"learning_rate": 0}}, r"training.learning_rate must be positive and at most 100, got 0"),
        ({"training": {"clip": 0}}, "training.clip must be positive, got 0"),
        ({"training": {"warmup": -1}}, "training.warmup must be 0 or more, got -1"),
        ({"training": {"micro_batch": 0}}, "training.micro_batch must be 1 or more, got 0"),
        ({"training": {"micro_batch": 481}}, "training.micro_batch 481 is above training.batch 480"),
        (
            {"training": {"micro_batch": "some"}},
            "training.micro_batch must be a whole number or one of auto, got 'some'",
        ),
        ({"training": {"fused": 1}}, "training.fused must be true or false or one of auto, got 1"),
        ({"training": 3}, "training must be a mapping of settings, got 3"),
        (
            {"objective": {"route_draws": 2, "trajectory_groups": 2}},
            "route_draws is the former name of trajectory_groups",
        ),
        ({"trainin": {}}, "Unknown setting trainin; did you mean training"),
    ],
)
def test_wrong_settings_of_a_run_are_named(section: dict[str, Any], said: str) -> None:
    with pytest.raises(LoopformerError, match=said):
        run_from_mapping(section)


LONG = "9" * 10_000


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (f"training.seed={LONG}", "The value of training.seed is not readable: '9+…9+'."),
        ("training.seed=0x" + "f" * 80, "training.seed must be 0 or more and below .*, got [0-9]{97}\\."),
        ("training.learning_rate=0x" + "f" * 90_000, "The value of training.learning_rate is not readable"),
        ("training.clip=0x" + "f" * 98, None),
        ("training.is=!!bool maybe", "The value of training.is is not readable: '!!bool maybe'"),
        ("training.device=[" + LONG[:100] + ", " * 2000 + "1]", "The value of training.device is not readable"),
        ("training.optimizer=" + "a" * 10_000, "training.optimizer must be one of adamw, muon, got 'a+…a+'"),
        ("training." + "a" * 10_000 + "=1", "Unknown setting training.a+…"),
        ("a" * 10_000 + "=1", "Unknown setting a+…a+; sections are"),
        ("a" * 10_000, "'a+…a+' is not a setting; write key=value"),
    ],
)
def test_what_a_user_writes_is_cut_in_errors(override: str, said: str | None) -> None:
    if said is None:
        assert load_run("demo", [override])[0].training.clip == float(int("f" * 98, 16))
        return
    with pytest.raises(LoopformerError, match=said) as error:
        load_run("demo", [override])
    assert len(str(error.value)) <= MAX_CHARS + 1


def test_a_number_beyond_a_float_is_one_sentence() -> None:
    with pytest.raises(LoopformerError, match=r"learning_rate must be a finite number, got 10+…0+\."):
        run_from_mapping({"training": {"learning_rate": 10**4000}})


def test_files_and_commands_may_use_former_keys() -> None:
    former = {"route_draws": 4, "trajectories": [{"budget": "any", "during": [0, 1], "chance": 1}]}
    run = run_from_mapping({"objective": former})
    assert run.objective.trajectory_groups == 4
    assert run_to_mapping(run)["objective"].keys() & former.keys() == {"trajectories"}
    assert load_run("paper/loopformer", ["objective.route_draws=2"])[0].objective.trajectory_groups == 2


@pytest.mark.parametrize(
    ("pair", "weights"),
    [
        ({}, [(1.0, 0.0), (0.1, 0.1)]),
        ({"short_weight": 0.2}, [(1.0, 0.0), (0.2, 0.1)]),
        ({"short_weight": 0, "consistency_weight": "0"}, [(1.0, 0.0)]),
        ({"short_weight": 0, "consistency_weight": "1e-1", "short_fraction": 0.5}, [(1.0, 0.0), (0.0, 0.1)]),
    ],
)
def test_the_pair_of_earlier_versions_is_read_as_a_list(pair: dict[str, Any], weights: list[Any]) -> None:
    entries = run_from_mapping({"objective": pair}).objective.trajectories
    assert [(entry.weight, entry.match) for entry in entries] == weights
    assert [entry.sampler for entry in entries[1:]] == ["compositions"] * len(entries[1:])
    assert [entry.rows for entry in entries[1:]] == [pair.get("short_fraction", 1.0)] * len(entries[1:])


@pytest.mark.parametrize(
    ("preset", "setting", "said"),
    [
        (
            "demo",
            "objective.trajectories=[{budget: full}, {budget: short, rows: 0.1}]",
            "is less than one row; raise it, or training.batch to 10, the smallest for this objective",
        ),
        (
            "demo",
            "objective.trajectories=[{budget: full}, {budget: short, rows: 0.1}, {budget: 1, rows: 0.03}]",
            "budget short: rows 0.1 of 4 rows is less than one row; raise it, or training.batch to 34",
        ),
        (
            "demo",
            "objective.trajectories=[{budget: full}, {budget: short, weight: -1}]",
            "budget short: weight must be 0 or more, got -1",
        ),
        (
            "demo",
            "objective.trajectories=[{budget: full}, {budget: short, sampler: some}]",
            "budget short: sampler must be one of compositions",
        ),
        ("demo", "objective.short_weight=-1", "objective.short_weight was removed; write the list"),
        ("demo", "objective.sampler=some", "objective.sampler was removed; write the list"),
        ("demo", "objective.trajectories=[{budget: 9}]", "beyond the model's 4 loops"),
        ("demo", "objective.trajectories=[{budget: some}]", "a budget is full, short, any"),
        ("demo", "objective.trajectories=[{budget: [3, 2]}]", "a budget is full, short, any"),
        (
            "demo",
            "objective.trajectories=[{budget: 2, match: 1}]",
            "to match budget 2, the full trajectory must be in the list",
        ),
        ("demo", "objective.trajectories=[{budget: 2, active_range: [0, 0.5]}]", "from 0.5 of training on"),
        ("demo", "objective.trajectories=[{weight: 1}]", "must have its budget"),
        ("demo", "objective.trajectories=[{budget: full, match: 1}]", "match compares others with it"),
        ("demo", "objective.trajectories=[]", "must be a list of trajectories"),
        ("demo", "objective.trajectories=false", "must be a list of trajectories"),
        ("demo", "objective.trajectories=[full]", "each of objective.trajectories must be a mapping"),
        ("demo", "objective.trajectories=[{bugdet: 2}]", "did you mean budget"),
        ("demo", "objective.trajectories=[{budget: 2, rows: 0.5}]", "let them add up to 1"),
        (
            "demo",
            "objective.trajectories=[{budget: 2}, {budget: 1, rows: 2}]",
            "rows must be positive and at most 1, got 2",
        ),
        ("demo", "objective.trajectories=any", "must be a list"),
        (
            "paper/base",
            "objective.trajectories=[{budget: full}, {budget: short, weight: 0.1}]",
            "no shorter trajectory",
        ),
        (
            "paper/tmlt-ee",
            "objective.trajectories=[{budget: full}, {budget: short, sampler: compositions}]",
            "only follows uniform trajectories",
        ),
    ],
)
def test_wrong_objectives_are_named(preset: str, setting: str, said: str) -> None:
    with pytest.raises(LoopformerError, match=said) as caught:
        load_run(preset, ["training.batch=4", "objective.trajectory_groups=1", setting])
    assert "\n" not in str(caught.value)


def test_a_model_has_up_to_4096_loops_and_blocks() -> None:
    for name in ("loops", "blocks"):
        assert getattr(ModelConfig(**{name: 4096}), name) == 4096  # type: ignore[arg-type]
        with pytest.raises(LoopformerError, match=f"model.{name} must be 1 or more and at most 4,096, got 4097"):
            ModelConfig(**{name: 4097})  # type: ignore[arg-type]
