"""What a report is asked for, and measuring it: all once, what is missing in a sentence, mistakes as errors."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cli.models import seal

from loopformer import LoopedLM, LoopformerError, ModelConfig
from loopformer.analysis.collect import (
    ReportRequest,
    collect,
    read_skip,
    read_texts,
    short_path,
    training_facts,
)
from loopformer.config import DataConfig, ObjectiveConfig, RunConfig, TrainingConfig, load_run, run_to_yaml
from loopformer.config.run import TrainedTrajectory
from loopformer.data.tokenizer import Tokenizer
from loopformer.errors import FileProblem
from loopformer.loading import save_model
from loopformer.model.cost import Cost

Piece = dict[str, Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two runs, a bare model, one without a tokenizer, one that is not told its steps; a text."""
    tokenizer = Tokenizer.train(["every pass is told its time and its step"] * 9, 280)
    sizes: Piece = {"blocks": 1, "width": 16, "heads": 2, "ffn": 32, "context": 24, "vocab": tokenizer.vocab_size}
    config = ModelConfig(loops=4, modulator_start="normal", **sizes)
    for name, weight in (("elastic", 0.1), ("fixed", 0.0)):
        _run(tmp_path / name, config, weight, tokenizer)
    for name, model in (
        ("bare", ModelConfig(loops=2, modulator_start="normal", **sizes)),
        ("mute", config),
        ("plain", ModelConfig(loops=4, conditioning="none", **sizes)),
    ):
        save_model(LoopedLM(model), tmp_path / name)
        if name != "mute":
            tokenizer.save(tmp_path / name)
    (tmp_path / "text.txt").write_text("every pass is told its time and its step, " * 40)
    return tmp_path


def _run(folder: Path, config: ModelConfig, weight: float, tokenizer: Tokenizer) -> None:
    """A run of ten steps, as training leaves it."""
    torch.manual_seed(int(weight * 10))
    checkpoint = folder / "checkpoints" / "step-00000010"
    save_model(LoopedLM(config), checkpoint)
    tokenizer.save(checkpoint)
    state = {"step": 10, "micro_batch": 4, "world": 1, "threads": 1, "data": "d"}
    (checkpoint / "state.json").write_text(json.dumps(state))
    seal(checkpoint)
    short = [TrainedTrajectory("short", "compositions", weight, weight, rows=0.5)] if weight else []
    objective = ObjectiveConfig((TrainedTrajectory("full"), *short))
    training = TrainingConfig(steps=10, batch=4, seed=7)
    run = RunConfig(config, DataConfig(path="nowhere"), objective, training)
    (folder / "run.yaml").write_text(run_to_yaml(run))
    speeds = [
        {"kind": "train", "step": step, "tokens_per_second": 100.0 + step + 60 * (weight == 0)}
        for step in (1, 5, 9)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in speeds) + '{"cut')


def request(folder: Path, *names: str, **changes: Any) -> ReportRequest:
    models = tuple(str(folder / name) for name in names)
    settings: Piece = {"texts": {"mine": str(folder / "text.txt")}, "prompts": 4, "device": "cpu"}
    return ReportRequest(models, **{**settings, **changes})


def test_all_parts_are_measured_and_a_second_time_none(folder: Path) -> None:
    first = collect(request(folder, "elastic", "fixed"))
    for model in first["models"]:
        assert model["missing"].keys() == {"tasks"}
        assert [row["budget"] for row in model["perplexity"]] == [1, 2, 4]
        assert model["search"]["measured"] == 3
        assert len(model["analysis"]["cka"]) == 5
        assert not any(row["reused"] for row in model["perplexity"])
    again = collect(request(folder, "elastic", "fixed"))
    for model, kept in zip(first["models"], again["models"], strict=True):
        assert all(row["reused"] for row in kept["perplexity"])
        assert kept["analysis"] == model["analysis"]  # with the seconds of the first time
        assert kept["search"]["schedules"] == model["search"]["schedules"]
    more = collect(request(folder, "elastic", budgets=(1, 3)))
    assert [row["reused"] for row in more["models"][0]["perplexity"]] == [True, False]


def test_nothing_tells_where_things_lie(folder: Path) -> None:
    found = collect(request(folder, "elastic", "bare"))
    text = json.dumps(found)
    assert str(folder) not in text
    assert [model["name"] for model in found["models"]] == ["elastic", "bare"]
    assert [model["analysis"]["model"] for model in found["models"]] == ["elastic", "bare"]
    assert found["asked"]["texts"] == [{"name": "mine", "source": "text.txt"}]
    assert {row["text"] for model in found["models"] for row in model["perplexity"]} == {"mine"}


def test_stopped_in_the_middle_it_goes_on_from_there(folder: Path) -> None:
    def stop(doing: str, *_: object) -> None:
        if doing.endswith("M=4"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collect(request(folder, "elastic"), stop)
    (model,) = collect(request(folder, "elastic"))["models"]
    assert [row["reused"] for row in model["perplexity"]] == [True, True, False]


def test_a_part_that_cannot_be_had_is_a_sentence(folder: Path) -> None:
    found = collect(request(folder, "bare", "mute", "plain", skip=frozenset({"analysis"})))
    bare, mute, plain = (model["missing"] for model in found["models"])
    assert bare["search"] == "There is only one schedule of this budget, so there is nothing to search."
    assert "--skip analysis" in bare["analysis"]
    assert "without a run" in bare["training"]
    assert all("tokenizer" in mute[part] for part in ("perplexity", "search"))
    assert "does not depend on its steps" in plain["search"]
    assert "perplexity" not in plain
    deep = collect(request(folder, "bare", "elastic", search=3, budgets=(4,)))["models"][0]
    assert "Budget 3 is above the model's 2 loops" in deep["missing"]["search"]
    assert [row["budget"] for row in deep["perplexity"]] == [2]


def test_too_few_prompts_are_a_sentence(folder: Path) -> None:
    (model,) = collect(request(folder, "bare", prompts=500))["models"]
    assert model["missing"]["analysis"].startswith("mine has ")
    assert "500 prompts" in model["missing"]["analysis"]
    assert model["perplexity"]


def test_without_a_text_the_rest_remains(folder: Path) -> None:
    (model,) = collect(request(folder, "elastic", texts=None))["models"]
    assert model["missing"].keys() == {"perplexity", "tasks", "search", "analysis"}
    assert "--text NAME=SOURCE" in model["missing"]["perplexity"]
    assert model["training"]


@pytest.mark.parametrize(
    ("changes", "kind", "said"),
    [
        ({"texts": {"x": "none.txt"}}, FileProblem, "none.txt"),
        ({"data": Path("nowhere")}, FileProblem, "no folder nowhere"),
        ({"budgets": (1, 5)}, LoopformerError, "above the 4 loops of the deepest model"),
        ({"search": 5}, LoopformerError, "above the 4 loops of the deepest model"),
        ({"dtype": "float8"}, LoopformerError, "float8"),
        ({"device": "abacus"}, LoopformerError, "abacus"),
    ],
)
def test_what_the_user_got_wrong_is_an_error(folder: Path, changes: Piece, kind: type, said: str) -> None:
    with pytest.raises(kind, match=said):
        collect(request(folder, "elastic", **changes))


def test_a_run_that_is_not_there_is_an_error(folder: Path) -> None:
    with pytest.raises(FileProblem, match="nothing"):
        collect(request(folder, "nothing"))


def test_training_is_read_from_the_run(folder: Path) -> None:
    facts, fixed = training_facts(folder / "elastic"), training_facts(folder / "fixed")
    assert facts is not None
    assert fixed is not None
    cost = Cost(load_run(str(folder / "elastic" / "run.yaml"))[0].model)
    assert facts["tokens"] == 10 * 4 * 24
    assert facts["tokens_per_second"] == 105.0  # the median of 101, 105 and 109
    assert facts["seed"] == 7
    assert facts["fixed_flops_per_token"] == fixed["flops_per_token"] == cost.training_flops()
    both = cost.training_flops(budgets=[cost.config.loops, 2])
    assert facts["flops_per_token"] == pytest.approx((cost.training_flops() + both) / 2)  # half of the rows
    assert facts["data"] == "d"
    assert training_facts(folder / "bare") is None


def test_without_the_harness_the_rest_remains(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = [name for name in sys.modules if name.startswith("lm_eval.")]  # other tests may have used it
    for name in ("lm_eval", *loaded):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "loopformer.lm_eval", raising=False)
    (model,) = collect(request(folder, "elastic", tasks="paper", skip=frozenset({"analysis", "search"})))["models"]
    assert "pip install 'loopformer[eval]'" in model["missing"]["tasks"]
    assert model["perplexity"]


def test_tasks_come_from_the_harness(folder: Path) -> None:
    pytest.importorskip("lm_eval")
    example = {
        "premise": "It rains.",
        "choice1": "It is wet.",
        "choice2": "It is dry.",
        "question": "effect",
        "label": 0,
    }
    (folder / "eval").mkdir()
    (folder / "eval" / "copa.validation.jsonl").write_text((json.dumps(example) + "\n") * 3)
    settings = request(
        folder,
        "elastic",
        tasks="copa",
        data=folder / "eval",
        limit=2,
        search_tasks=True,
        skip=frozenset({"analysis"}),
    )
    found = collect(settings)
    (model,) = found["models"]
    assert "tasks" not in model["missing"]
    assert found["tasks"]["tasks"]["copa"]["examples"] == 2
    assert [run["budget"] for run in model["tasks"]] == [1, 2, 4]
    assert all(run["tasks"]["copa"]["value"] in (0.0, 1.0) for run in model["tasks"])
    assert {row["accuracy"] for row in model["search"]["schedules"]} <= {0.0, 1.0}
    assert str(folder) not in json.dumps(found)
    with pytest.raises(LoopformerError, match="has no data for piqa"):
        collect(request(folder, "elastic", tasks="piqa", data=folder / "eval"))


def test_texts_have_the_names_they_are_given() -> None:
    assert read_texts(["my news=/far/news.txt", "stdlib", "/far/today.txt"]) == {
        "my news": "/far/news.txt",
        "stdlib": "stdlib",
        "today.txt": "/far/today.txt",
    }


@pytest.mark.parametrize(
    ("given", "said"), [(["=x"], "NAME=SOURCE"), (["x="], "NAME=SOURCE"), (["a=x", "a=y"], "Two texts are named a")]
)
def test_texts_without_a_name_of_their_own_are_refused(given: list[str], said: str) -> None:
    with pytest.raises(LoopformerError, match=said):
        read_texts(given)


def test_an_unknown_part_names_the_nearest() -> None:
    assert read_skip(" tasks, search ") == {"tasks", "search"}
    assert read_skip(None) == frozenset()
    with pytest.raises(LoopformerError, match="did you mean tasks"):
        read_skip("task")


def test_a_shallow_model_is_measured_where_it_can_be() -> None:
    request = ReportRequest(("a", "b"), budgets=(2, 8))
    request.check_budgets([1, 8])
    assert request.budgets_of(ModelConfig(loops=8)) == [2, 8]
    assert request.budgets_of(ModelConfig(loops=4)) == [2]
    assert request.budgets_of(ModelConfig(loops=1)) == [1]
    assert ReportRequest(("a",)).budgets_of(ModelConfig(loops=8)) == [1, 2, 4, 8]


@pytest.mark.parametrize("wrong", [{"budgets": (9,)}, {"search": 9}])
def test_a_budget_above_every_model_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(LoopformerError, match="9 is above the 8 loops of the deepest model"):
        ReportRequest(("a", "b"), **wrong).check_budgets([4, 8])


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"models": ()}, "nothing to report on"),
        ({"prompts": 0}, "--prompts"),
        ({"limit": 0}, "--limit"),
        ({"search": 0}, "--search"),
        ({"max_tokens": 0}, "--max-tokens"),
        ({"search_tasks": True}, "--search-tasks"),
        ({"search_tasks": True, "tasks": "piqa", "skip": frozenset({"search"})}, "--search-tasks"),
    ],
)
def test_wrong_numbers_are_one_sentence(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(LoopformerError, match=said):
        ReportRequest(**{"models": ("a",), **wrong})


def test_the_data_alone_asks_for_the_papers_tasks() -> None:
    assert ReportRequest(("a",)).task_names is None
    assert ReportRequest(("a",), data=Path("eval")).task_names == "paper"
    assert ReportRequest(("a",), data=Path("eval"), tasks="piqa").task_names == "piqa"


def test_paths_are_shown_without_their_place() -> None:
    assert short_path("/home/me/news.jsonl") == "news.jsonl"
    assert short_path("../news.jsonl") == "news.jsonl"
    assert short_path("runs/mine") == "runs/mine"
    assert short_path("hf:owner/texts") == "hf:owner/texts"
