"""Steps as CUDA graphs. Without a GPU a "graph" runs its launches again, which shows all but the recording."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import loopformer
from loopformer.config import load_run
from loopformer.errors import LoopformerError
from loopformer.training import graphs, reporting, trainer
from loopformer.training.distributed import Ranks
from loopformer.training.launch import launch
from loopformer.training.optimizer import ModelOptimizer
from loopformer.training.reporting import read_metrics
from loopformer.training.steps import StepCounts
from loopformer.training.trainer import can_use_graphs

from .runs import Small, go_back, make_gradients_bad

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
OBJECTIVE = """objective.trajectories=[
    {budget: full, active_range: [0, 0.3]},
    {budget: full, rows: 0.5, active_range: [0.3, 1], exits: 0.1},
    {budget: [2, 3], sampler: compositions, rows: 0.25, active_range: [0.3, 1]},
    {budget: 1, rows: 0.25, active_range: [0.3, 1]}]"""


class LaunchedAgain:
    """What stands in for a CUDA graph."""

    recorded = 0

    def __init__(self, device: Any, launch: Callable[[], None], state: list[Tensor], *_: Any) -> None:
        LaunchedAgain.recorded += 1
        before = [tensor.clone() for tensor in state]
        launch()  # as in a recording
        for tensor, value in zip(state, before, strict=True):
            tensor.copy_(value)
        self.replay = launch


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def optimizer(model: Any, config: Any, fused: bool, capturable: bool) -> ModelOptimizer:
        return ModelOptimizer(model, config, fused=True, capturable=capturable)

    monkeypatch.setattr(graphs, "record", LaunchedAgain)
    monkeypatch.setattr(trainer, "ModelOptimizer", optimizer)
    monkeypatch.setattr(trainer, "can_use_graphs", lambda run, ranks, say=None: run.training.graphs is True)
    LaunchedAgain.recorded = 0


def weights(run: Path) -> dict[str, Tensor]:
    return dict(loopformer.load(run).model.state_dict())


@pytest.fixture
def mixture(small: Small) -> Callable[..., list[str]]:
    def settings(**more: Any) -> list[str]:
        given = {"training__steps": 12, "training__batch": 8, "training__micro_batch": 8}
        given["model__loops"] = 5  # four rows share four exits, so all steps of a phase have the same shape
        given |= {"training__save_every": 5, "training__log_every": 4}
        return [*small(**{**given, **more}), OBJECTIVE, "objective.draws=row"]

    return settings


@pytest.mark.parametrize(("optimizer", "near"), [("adamw", 1e-6), ("muon", 5e-3)])
@pytest.mark.usefixtures("without_gpu")
def test_steps_are_those_without_graphs(
    optimizer: str, near: float, mixture: Callable[..., list[str]], tmp_path: Path
) -> None:
    settings = partial(mixture, training__optimizer=optimizer)
    launch("demo", settings(), tmp_path / "plain", quiet=True)
    launch("demo", settings(training__graphs=True), tmp_path / "graphs", quiet=True)
    assert LaunchedAgain.recorded == 3  # the full trajectory alone, the mixture, and the update
    expected = weights(tmp_path / "plain")
    for name, tensor in weights(tmp_path / "graphs").items():
        # Rates are rounded to float32 here, which Muon's steps in bfloat16 enlarge.
        torch.testing.assert_close(tensor, expected[name], atol=near, rtol=1e-3)
    plain, mine = (read_metrics(tmp_path / name) for name in ("plain", "graphs"))
    assert [record["step"] for record in plain] == [record["step"] for record in mine]
    for one, two in zip(plain, mine, strict=True):
        assert one.keys() == two.keys()
        for key in one:
            if "loss" in key or key in ("gradient_norm", "skipped"):
                assert two[key] == pytest.approx(one[key], rel=1e-4), key


@pytest.mark.usefixtures("without_gpu")
def test_a_resumed_run_ends_with_the_same_bits(mixture: Callable[..., list[str]], tmp_path: Path) -> None:
    same_bits_after_resuming(mixture(training__graphs=True, training__optimizer="muon"), tmp_path)


def same_bits_after_resuming(settings: list[str], tmp_path: Path) -> None:
    launch("demo", settings, tmp_path / "whole", quiet=True)
    launch("demo", settings, tmp_path / "cut", quiet=True)
    for checkpoint in sorted((tmp_path / "cut" / "checkpoints").glob("step-*"))[1:]:
        checkpoint.rename(tmp_path / checkpoint.name)
    launch("demo", settings, tmp_path / "cut", resume=True, quiet=True)
    expected = weights(tmp_path / "whole")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(tmp_path / "cut").items())


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.usefixtures("without_gpu")
def test_bad_steps_change_nothing_and_end_the_run_at_their_step(
    optimizer: str, mixture: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_gradients_bad(monkeypatch, {2, 5, 6, 7})
    at_step: dict[int, dict[str, Tensor]] = {}

    def update(self: graphs.StepGraphs) -> Tensor:
        norm = original(self)
        count = len(at_step) + 1
        at_step[count] = {name: p.detach().clone() for name, p in enumerate(self._parameters)}  # type: ignore[misc]
        return norm

    original = graphs.StepGraphs.update
    monkeypatch.setattr(graphs.StepGraphs, "update", update)
    settings = mixture(
        training__graphs=True, training__bad_steps=3, training__optimizer=optimizer, training__log_every=11
    )
    with pytest.raises(LoopformerError, match=r"^3 steps in a row had a gradient that is not finite, at step 7;"):
        launch("demo", settings, tmp_path / "run", quiet=True)
    changed = {
        step: any(not torch.equal(tensor, at_step[step - 1][name]) for name, tensor in at_step[step].items())
        for step in range(2, len(at_step) + 1)
    }
    assert [step for step in changed if not changed[step]] == [2, *range(5, len(at_step) + 1)]
    assert all(tensor.isfinite().all() for tensor in at_step[len(at_step)].values())


@pytest.mark.usefixtures("without_gpu")
def test_a_bad_step_is_counted_once_and_later_steps_are_not_logged(
    mixture: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_gradients_bad(monkeypatch, {4})
    launch("demo", mixture(training__graphs=True, training__save_every=12), tmp_path / "run", quiet=True)
    records = [record for record in read_metrics(tmp_path / "run") if record["kind"] == "train"]
    assert [(record["step"], record["skipped"]) for record in records] == [(4, 1), (8, 1), (12, 1)]


@pytest.mark.usefixtures("without_gpu")
def test_a_run_that_had_to_end_is_logged_at_that_step_or_not_at_all(
    mixture: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that were queued after it have other losses and rates. The run resumes."""
    bad = {5, 6}
    make_gradients_bad(monkeypatch, bad)
    settings = partial(
        mixture,
        training__graphs=True,
        training__bad_steps=2,
        training__save_every=4,
        training__validate_every=12,
    )
    for log_every, logged in ((3, [3, 6]), (11, [])):
        run = tmp_path / str(log_every)
        with pytest.raises(LoopformerError, match="at step 6;"):
            launch("demo", settings(training__log_every=log_every), run, quiet=True)
        assert [record["step"] for record in read_metrics(run) if record["kind"] == "train"] == logged
    bad.clear()
    assert launch(None, [], run, resume=True, quiet=True)["finished"]


@pytest.mark.usefixtures("without_gpu")
def test_a_resumed_run_may_have_fewer_bad_steps(
    mixture: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_gradients_bad(monkeypatch, {4, 5})
    launch("demo", mixture(training__graphs=True, training__keep=9), tmp_path / "run", quiet=True)
    go_back(tmp_path / "run", 5)
    assert launch(None, ["training.bad_steps=2"], tmp_path / "run", resume=True, quiet=True)["finished"]


@pytest.mark.usefixtures("without_gpu")
def test_only_what_comes_back_in_a_later_step_is_recorded(
    mixture: Callable[..., list[str]], tmp_path: Path
) -> None:
    settings = mixture(training__graphs=True, training__steps=2, training__micro_batch=4)  # two to a step
    launch("demo", [*settings, "objective.trajectories=[{budget: full}]"], tmp_path / "two", quiet=True)
    assert LaunchedAgain.recorded == 2  # in the second step, and the update
    LaunchedAgain.recorded = 0
    changing = (
        "objective.trajectories=[{budget: full, active_range: [0, 0.5]}, {budget: 1, active_range: [0.5, 1]}]"
    )
    launch("demo", [*settings, changing], tmp_path / "each", quiet=True)
    assert LaunchedAgain.recorded == 1  # the update


@pytest.mark.usefixtures("without_gpu")
def test_waiting_for_the_gpu_counts_as_training_time(
    mixture: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second at every wait, also before a checkpoint, whose own time does not count."""
    seconds, read_counts = [0.0], graphs.StepGraphs.read_counts

    def wait(self: graphs.StepGraphs) -> StepCounts:
        seconds[0] += 1
        return read_counts(self)

    monkeypatch.setattr(graphs.StepGraphs, "read_counts", wait)
    monkeypatch.setattr(reporting, "time", SimpleNamespace(perf_counter=lambda: seconds[0]))
    settings = mixture(training__graphs=True, training__steps=4, training__validate_every=4, training__save_every=2)
    launch("demo", settings, tmp_path / "run", quiet=True)
    (record,) = (record for record in read_metrics(tmp_path / "run") if record["kind"] == "train")
    assert record["tokens_per_second"] == pytest.approx(3 * 8 * 32 / 2)  # steps 2 to 4, waits after 2 and 4


def test_graphs_are_for_a_single_gpu_and_what_cannot_be_is_said() -> None:
    def graphs_on(device: str, world: int, setting: str, *more: str) -> tuple[bool, list[str]]:
        said: list[str] = []
        run = load_run("demo", [f"training.graphs={setting}", *more])[0]
        ranks = Ranks(0, world, torch.device(device))
        return can_use_graphs(run, ranks, said.append), said

    reason = "training.graphs needs a single GPU, not 2 ranks"
    assert graphs_on("cuda", 1, "auto") == graphs_on("cuda", 1, "true") == (True, [])
    assert graphs_on("cuda", 1, "false") == graphs_on("cpu", 1, "auto") == (False, [])
    assert graphs_on("cuda", 2, "auto") == (False, [f"training without CUDA graphs: {reason}"])
    with pytest.raises(LoopformerError, match=rf"^{reason}; set it to auto\.$"):
        graphs_on("cuda", 2, "true")
    for more in ("data.documents=true", "objective.trajectory_groups=2"):  # little comes back, for twice the memory
        uses, said = graphs_on("cuda", 1, "auto", more)
        assert (uses, len(said)) == (False, 1)
        assert graphs_on("cuda", 1, "true", more) == (True, [])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_machine_without_a_gpu_says_so(small: Small, tmp_path: Path) -> None:
    with pytest.raises(LoopformerError, match=r"^training.graphs needs a CUDA GPU, not cpu; set it to auto\.$"):
        launch("demo", small(training__graphs=True), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


@NO_GPU
@pytest.mark.cuda
@pytest.mark.parametrize("fused", [True, False])
def test_a_resumed_run_ends_with_the_same_bits_on_a_gpu(
    fused: bool, mixture: Callable[..., list[str]], tmp_path: Path
) -> None:
    """After the resume, a pass that was a graph runs once call by call."""
    more = {"training__dtype": "bfloat16", "training__steps": 40, "training__device": "cuda"}
    more |= {"training__optimizer": "muon", "training__fused": fused, "training__compile": False}
    same_bits_after_resuming(mixture(training__graphs=True, **more), tmp_path)


@NO_GPU
@pytest.mark.cuda
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("fused", [True, False])
def test_graphs_train_what_single_calls_do(
    optimizer: str, fused: bool, mixture: Callable[..., list[str]], tmp_path: Path
) -> None:
    settings = partial(
        mixture,
        training__device="cuda",
        training__optimizer=optimizer,
        training__fused=fused,
        training__compile=False,
    )
    launch("demo", settings(), tmp_path / "plain", quiet=True)
    launch("demo", settings(training__graphs=True), tmp_path / "graphs", quiet=True)
    expected = weights(tmp_path / "plain")
    for name, tensor in weights(tmp_path / "graphs").items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-4, rtol=1e-3)
    again = launch("demo", settings(training__graphs=True), tmp_path / "again", quiet=True)
    assert again["finished"]
    assert all(
        torch.equal(t, weights(tmp_path / "graphs")[name]) for name, t in weights(tmp_path / "again").items()
    )
