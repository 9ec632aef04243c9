"""Starting and continuing a run: its settings, its data and its folder."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml
from cli.models import seal

import loopformer
from loopformer import LoopformerError
from loopformer.config import load_run, run_from_mapping
from loopformer.data.prepare import prepare
from loopformer.evaluation.text import default_text
from loopformer.files import read_yaml
from loopformer.loading.folder import checkpoints
from loopformer.training.launch import launch, plan

Small = Callable[..., list[str]]


def weights(run: Path) -> bytes:
    return (checkpoints(run)[-1] / "model.safetensors").read_bytes()


def test_padded_rows_are_checked_against_the_datas_vocabulary(small: Small, tmp_path: Path) -> None:
    launch("demo", small(model__padded_vocab=320, training__steps=1), tmp_path / "run", quiet=True)
    model = loopformer.load(tmp_path / "run").model
    assert (model.config.vocab, model.config.vocab_rows) == (300, 320)
    with pytest.raises(LoopformerError, match=r"model.padded_vocab 256 is smaller than model.vocab 300"):
        launch("demo", small(model__padded_vocab=256), tmp_path / "other", quiet=True)


def test_a_refused_start_leaves_no_folder(small: Small, tmp_path: Path) -> None:
    for overrides in (
        small(data__path=tmp_path / "none", data__prepare="null"),
        small(data__path=tmp_path / "none", data__prepare=tmp_path / "nothing.txt"),
        small(model__context=4096),
    ):
        with pytest.raises(LoopformerError):
            launch("demo", overrides, tmp_path / "runs" / "mine", quiet=True, say=lambda _: None)
        assert not list(tmp_path.iterdir())


def test_a_file_is_no_folder_for_a_run(small: Small, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("mine")
    with pytest.raises(LoopformerError, match=r"run is a file; name a folder with --out\."):
        launch("demo", small(), tmp_path / "run", quiet=True)
    assert (tmp_path / "run").read_text() == "mine"


def test_a_misspelt_data_path_is_not_filled_with_what_the_preset_prepares(tmp_path: Path) -> None:
    with pytest.raises(
        LoopformerError, match=r"frist.index.json is missing; make the folder with loopformer prepare"
    ):
        launch("demo", [f"data.path={tmp_path / 'frist'}"], tmp_path / "run", quiet=True, say=lambda _: None)
    assert not list(tmp_path.iterdir())
    own = [f"data.path={tmp_path / 'own'}", "data.prepare=stdlib"]
    assert load_run("demo", own)[0].data.prepare == load_run("demo")[0].data.prepare == "stdlib"


def test_a_first_run_without_data_is_told_of_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = r"^data/index\.json is missing; set data\.path=… to a folder that `loopformer prepare` made, or try `"
    with pytest.raises(LoopformerError, match=said):
        launch(None, [], tmp_path / "run", quiet=True)
    assert not list(tmp_path.iterdir())


def test_damaged_checkpoints_are_set_aside_and_never_deleted(
    small: Small, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    launch("demo", small(), run, quiet=True)
    contents = {}
    for name in ("step-00000006.damaged", "step-00000006.damaged-2"):
        newest = checkpoints(run)[-1]
        (newest / "checksums.json").write_text("{}")
        contents[name] = (newest / "optimizer" / "optimizer.safetensors").read_bytes()
        launch(None, [], run, resume=True)
        assert f"A damaged checkpoint is kept as {newest.with_name(name)}." in capsys.readouterr().err
    for name, content in contents.items():
        assert (run / "checkpoints" / name / "optimizer" / "optimizer.safetensors").read_bytes() == content
    assert checkpoints(run)[-1].name == "step-00000006"
    launch(None, ["training.steps=5"], run, resume=True)
    assert "the run is already finished: step 6 of training.steps=5" in capsys.readouterr().err


def test_an_unreadable_checkpoint_stops_a_resume(small: Small, tmp_path: Path) -> None:
    launch("demo", small(), tmp_path / "run", quiet=True)
    before = checkpoints(tmp_path / "run")
    sums = before[-1] / "checksums.json"
    content = sums.read_bytes()
    sums.unlink()
    sums.mkdir()  # a name that no one can read a file under
    with pytest.raises(LoopformerError, match=r"step-00000006 cannot be read .* make it readable"):
        launch(None, [], tmp_path / "run", resume=True, quiet=True)
    assert checkpoints(tmp_path / "run") == before
    sums.rmdir()
    sums.write_bytes(content)
    assert launch(None, [], tmp_path / "run", resume=True, quiet=True)["step"] == 6


@pytest.mark.parametrize("split", ["train", "val"])
def test_rewritten_shards_are_noticed_before_training(
    split: str, small: Small, corpus: Path, tmp_path: Path
) -> None:
    data = Path(shutil.copytree(corpus, tmp_path / "data"))
    launch("demo", small(data__path=data, training__steps=2), tmp_path / "run", quiet=True)
    (shard,) = data.glob(f"*-{split}-*.bin")
    ids = np.fromfile(shard, np.uint16)
    ((ids + 1) % 300).astype(np.uint16).tofile(shard)
    before = weights(tmp_path / "run")
    for resume, out in ((True, tmp_path / "run"), (False, tmp_path / "new")):
        with pytest.raises(LoopformerError, match=f"{shard.name} has changed since it was made"):
            launch("demo", small(data__path=data), out, resume=resume, quiet=True)
    assert weights(tmp_path / "run") == before
    ids.tofile(shard)
    assert launch("demo", small(data__path=data), tmp_path / "run", resume=True, quiet=True)["finished"]


@pytest.fixture
def project(tmp_path: Path, small: Small, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with data/mine and runs/mine, made as users do: with relative paths, from inside it."""
    project = tmp_path / "project"
    shutil.copytree(corpus, project / "data" / "mine")
    monkeypatch.chdir(project)
    launch("demo", small(data__path="data/mine", training__steps=2), Path("runs") / "mine", quiet=True)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return project


def as_stored_by_version_0_1_0(run: Path) -> None:
    """The path as the user wrote it, in the run's settings and in each checkpoint's."""
    for file in (run / "run.yaml", *(path / "run.yaml" for path in checkpoints(run))):
        path = run_from_mapping(read_yaml(file)).data.path
        file.write_text(file.read_text().replace(path, "data/mine"))


@pytest.mark.parametrize(
    ("stored", "moved"),
    [
        ("absolute", "nothing"),
        ("absolute", "run"),
        ("absolute", "both"),
        ("relative", "nothing"),
        ("relative", "both"),  # the run alone could not be moved: where its data is was never written down
    ],
)
def test_a_run_finds_its_data_from_anywhere(project: Path, stored: str, moved: str, small: Small) -> None:
    run, data = project / "runs" / "mine", project / "data" / "mine"
    if stored == "relative":
        as_stored_by_version_0_1_0(run)
        for checkpoint in checkpoints(run):
            seal(checkpoint)
    if moved == "run":
        run = run.rename(project.parent / "mine")
    elif moved == "both":
        moved_to = project.rename(project.parent / "deep")
        run, data = moved_to / "runs" / "mine", moved_to / "data" / "mine"
    assert default_text(run) == default_text(checkpoints(run)[-1]) == str(data)
    assert launch(None, ["training.steps=3"], run, resume=True, quiet=True)["step"] == 3
    own = [word for word in small(training__steps=4) if not word.startswith("data.path")]
    assert launch("demo", own, run, resume=True, quiet=True)["step"] == 4
    assert run_from_mapping(read_yaml(run / "run.yaml")).data.path == str(data)


def test_another_text_in_its_place_is_not_taken_for_a_runs_data(
    project: Path, corpus: Path, tmp_path: Path
) -> None:
    run, data = project / "runs" / "mine", project / "data" / "mine"
    shutil.rmtree(data)
    assert default_text(run) is None
    with pytest.raises(LoopformerError, match=r"Cannot find this run.s data, .*mine; give .* data.path="):
        launch(None, [], run, resume=True, quiet=True)
    text = tmp_path / "other.txt"
    text.write_text("\n\n".join(f"another text, paragraph {number}" for number in range(900)))
    prepare([str(text)], data, tokenizer=str(corpus), val_fraction=0.1)
    assert default_text(run) is None
    with pytest.raises(LoopformerError, match="not what this run was trained on"):
        launch(None, [], run, resume=True, quiet=True)
    moved = Path(shutil.copytree(corpus, tmp_path / "far"))
    assert launch(None, [f"data.path={moved}"], run, resume=True, quiet=True)["finished"]
    assert default_text(run) == str(moved)


def test_a_starting_model_is_found_from_anywhere(
    project: Path, small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    tuning = [word for word in small(training__steps=1) if not word.startswith("model.")]
    launch("demo", [*tuning, "init_from=runs/mine"], "runs/tuned", quiet=True)
    assert run_from_mapping(read_yaml(Path("runs/tuned/run.yaml"))).init_from == str(project / "runs" / "mine")
    again = [*tuning, "init_from=runs/mine", "training.steps=2"]
    assert launch("demo", again, "runs/tuned", resume=True, quiet=True)["step"] == 2


def test_plan_counts_what_the_paper_has(tmp_path: Path) -> None:
    made = plan("paper/loopformer", ["training.device=cpu", "training.micro_batch=12"], tmp_path)["plan"]
    assert made["parameters"] == 278_169_600
    assert made["tokens"] == 50_000 * 480 * 1024
    assert made["training_gflops_per_token"] == pytest.approx(9.84, rel=1e-3)
    assert made["hours"] > 100


@pytest.mark.parametrize("micro_batch", ["auto", 10**9])
def test_a_dry_run_takes_any_batch(small: Small, tmp_path: Path, micro_batch: object) -> None:
    overrides = small(training__batch=10**9, training__micro_batch=micro_batch)
    assert plan("elastic", overrides, tmp_path / "run")["plan"]["tokens"] == 6 * 10**9 * 32
    with pytest.raises(LoopformerError, match=r"training\.batch must be 1 or more and at most 4,294,967,296"):
        plan("elastic", small(training__batch=2**32 + 1), tmp_path / "run")


def test_a_dry_run_refuses_what_training_would(small: Small, corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(LoopformerError, match="too few for a window"):
        plan("demo", small(model__context=90_000), tmp_path / "new")
    launch("demo", small(), tmp_path / "run", quiet=True)
    with pytest.raises(LoopformerError, match="already holds a run"):
        plan("demo", small(), tmp_path / "run")
    for change, said in (
        ("training.seed=1", "started with training.seed = 0, not 1; set it back"),
        ("model.width=64", "model.width is 64 but this run has 32; leave it out"),
    ):
        with pytest.raises(LoopformerError, match=said):
            plan(None, [change], tmp_path / "run", resume=True)
    with pytest.raises(LoopformerError, match=r"started with .*; set it back, use --resume without a preset"):
        plan("paper/loopformer", [], tmp_path / "run", resume=True)
    start = f"init_from={tmp_path / 'run'}"
    for data in (corpus, tmp_path / "later"):
        with pytest.raises(LoopformerError, match=r"model.width is 64 but the starting model has 32; leave it out"):
            plan("demo", [start, f"data.path={data}", "model.width=64"], tmp_path / "new")
    again = plan(None, [], tmp_path / "run", resume=True)
    assert again["settings"]["model"]["width"] == 32
    assert not (tmp_path / "new").exists()


def test_a_run_that_was_stored_with_the_pair_goes_on(small: Small, tmp_path: Path) -> None:
    entries = "[{budget: full}, {budget: short, sampler: sequential, weight: 0.2, rows: 0.5}]"
    run = tmp_path / "run"
    launch("demo", small(objective__trajectories=entries), run, quiet=True)
    file = run / "run.yaml"
    settings, objective = read_yaml(file), load_run(file)[0].objective
    pair = {"short_weight": 0.2, "consistency_weight": 0, "sampler": "sequential", "short_fraction": 0.5}
    settings["objective"] = {**pair, "route_draws": 1, "consistency": objective.consistency}
    settings["objective"]["chunk"] = objective.chunk
    file.write_text(yaml.safe_dump(settings))
    assert load_run(file)[0].objective == objective
    assert launch(None, ["training.steps=7"], run, resume=True, quiet=True)["step"] == 7
    assert load_run(file, ["objective.trajectories=[{budget: 2}]"])[0].objective.trajectories[0].budget == 2
    settings["objective"]["trajectories"] = [{"budget": "full"}]
    file.write_text(yaml.safe_dump(settings))
    with pytest.raises(LoopformerError, match=r"trajectories replaces objective\.short_weight; leave one"):
        load_run(file)
