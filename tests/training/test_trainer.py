"""A run as a user has it: it ends, it can be stopped and continued, and it says what is wrong."""

import json
import math
import os
import pty
import random
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

import loopformer
from loopformer import LoopedLM, LoopformerError, ModelConfig
from loopformer.config import load_run, preset_names
from loopformer.data.loader import Windows
from loopformer.data.prepare import prepare
from loopformer.data.shards import TokenData
from loopformer.evaluation.text import Protocol, perplexity, read_text
from loopformer.loading import save_model
from loopformer.loading.folder import checkpoints, step_of, write_safetensors
from loopformer.training import checkpoint, trainer
from loopformer.training.distributed import Ranks
from loopformer.training.launch import launch
from loopformer.training.reporting import read_metrics
from loopformer.training.steps import Steps
from loopformer.training.trainer import Trainer, fused_precision, make_model

from .runs import PAIR, Small, go_back, make_gradients_bad, training_losses, weights

PAPER = [name for name in preset_names() if name.startswith("paper/") and "x" not in name.rpartition("-")[2]]


def silent(sentence: str) -> None:
    pass


@pytest.mark.parametrize("preset", PAPER)
def test_every_model_of_the_paper_trains(preset: str, small: Small, tmp_path: Path) -> None:
    extra = {"model__blocks": 1, "training__steps": 3, "training__save_every": 3}
    result = launch(preset, small(**extra), tmp_path / "run", quiet=True)
    assert result["finished"]
    losses = training_losses(tmp_path / "run")
    assert len(losses) == 3
    assert losses[-1] < losses[0]


def test_a_run_is_whole_and_loads(small: Small, tmp_path: Path) -> None:
    result = launch("demo", small(training__tensorboard="true"), tmp_path / "run", quiet=True)
    assert result["finished"]
    assert Path(result["curves"]).stat().st_size > 10_000
    lm = loopformer.load(tmp_path / "run")
    assert lm.tokenizer is not None
    ids = torch.tensor([lm.tokenizer.encode("one shared stack")])
    assert lm.model(ids, "2-1-1").logits.shape[-1] == lm.model.config.vocab_rows
    records = read_metrics(tmp_path / "run")
    trained = [record for record in records if record["kind"] == "train"]
    assert {
        "loss_full",
        "loss_2-3",
        "loss_1",
        "consistency",
        "gradient_norm",
        "learning_rate",
        "tokens_per_second",
        "mfu",
    } <= set(trained[-1])
    tested = [record for record in records if record["kind"] == "validation"]
    assert [record["step"] for record in tested] == [3, 6]
    assert {"loss_at_1", "loss_at_2", "loss_at_4"} <= set(tested[0])
    assert list((tmp_path / "run" / "tensorboard").iterdir())
    assert len(checkpoints(tmp_path / "run")) <= 4


LIST = "[{budget: any, sampler: compositions}, {budget: 1, weight: 0.2, active_range: [0.5, 1]}]"
RESUMED: dict[str, dict[str, str]] = {
    "demo": {},
    "paper": {"training__optimizer": "adamw", "objective__trajectories": PAIR},
    "muon": {"training__optimizer": "muon", "objective__trajectories": LIST, "model__inject": "gated"},
    "recurrent depth": {
        "model__conditioning": "none",
        "model__norms": "sandwich",
        "model__start": "random",
        "model__inject": "adapter",
        "objective__trajectories": "[{budget: full}, {budget: short, weight: 0.1, match: 0.1}]",
    },
}


@pytest.mark.parametrize("more", RESUMED.values(), ids=RESUMED.keys())
def test_resuming_is_the_same_as_never_stopping(more: dict[str, str], small: Small, tmp_path: Path) -> None:
    settings = small(**more)
    launch("demo", settings, tmp_path / "whole", quiet=True)
    launch("demo", settings, tmp_path / "cut", quiet=True)
    go_back(tmp_path / "cut", 2)
    launch(None, [], tmp_path / "cut", resume=True, quiet=True)
    assert weights(tmp_path / "cut") == weights(tmp_path / "whole")
    kept = [{k: r[k] for k in r if "loss" in k or k == "step"} for r in read_metrics(tmp_path / "cut")]
    assert kept == [{k: r[k] for k in r if "loss" in k or k == "step"} for r in read_metrics(tmp_path / "whole")]


def test_a_signal_saves_at_the_step_border(small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launch("demo", small(), tmp_path / "whole", quiet=True)
    update = Steps.update

    def interrupted(self: Steps) -> torch.Tensor:
        if self.read_counts().steps == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return update(self)

    monkeypatch.setattr(Steps, "update", interrupted)
    result = launch("demo", small(), tmp_path / "cut", quiet=True)
    assert (result["finished"], result["signal"], result["step"]) == (False, signal.SIGTERM, 3)
    monkeypatch.setattr(Steps, "update", update)
    launch("demo", small(), tmp_path / "cut", resume=True, quiet=True)
    assert weights(tmp_path / "cut") == weights(tmp_path / "whole")


def test_a_closed_terminal_saves_the_run(small: Small, tmp_path: Path) -> None:
    settings = small(training__steps=100_000, training__log_every=100_000, training__save_every=100_000)
    words = ["-m", "loopformer", "train", "demo", *settings, "--out", str(tmp_path / "run")]
    process, terminal = pty.fork()
    if process == 0:
        signal.signal(
            signal.SIGHUP, signal.SIG_DFL
        )  # under nohup it is ignored, and the run would go on, as it should
        os.execv(sys.executable, [sys.executable, *words])
    seen = b""
    while b"tok/s" not in seen:  # the bar shows it from the first step on
        seen += os.read(terminal, 1024)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 128 + signal.SIGHUP
    assert step_of(checkpoints(tmp_path / "run")[-1]) >= 1


@pytest.mark.parametrize("damage", ["cut", "flipped", "missing", "no checksums"])
def test_a_damaged_checkpoint_is_passed_over(
    damage: str, small: Small, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launch("demo", small(), tmp_path / "run", quiet=True)
    before = weights(tmp_path / "run")
    newest = checkpoints(tmp_path / "run")[-1]
    file = newest / ("checksums.json" if damage == "no checksums" else "model.safetensors")
    content = file.read_bytes()
    if damage == "cut":
        file.write_bytes(content[: len(content) // 2])
    elif damage == "flipped":
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    else:
        file.unlink()
    launch("demo", small(), tmp_path / "run", resume=True)
    assert f"{newest} is damaged" in capsys.readouterr().err
    assert weights(tmp_path / "run") == before


def test_non_finite_steps_are_skipped_counted_and_end_the_run(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = {2}
    make_gradients_bad(monkeypatch, bad)
    launch("demo", small(), tmp_path / "once", quiet=True)
    assert [record["skipped"] for record in read_metrics(tmp_path / "once") if record["kind"] == "train"][-1] == 1
    bad |= set(range(3, 7))
    with pytest.raises(LoopformerError, match=r"3 steps in a row .* lower training.learning_rate"):
        launch("demo", small(training__bad_steps=3, training__save_every=1), tmp_path / "often", quiet=True)
    assert torch.isfinite(loopformer.load(tmp_path / "often").model.tokens.weight).all()


def test_real_infinities_are_skipped(small: Small, tmp_path: Path) -> None:
    # Decay by a hundred times a hundred turns weights around and makes them grow, whatever the device rounds to.
    overrides = small(
        training__learning_rate=100,
        training__weight_decay=100,
        training__warmup=0,
        training__steps=60,
        training__bad_steps=3,
    )
    with pytest.raises(LoopformerError, match=r"3 steps in a row .* at step \d+"):
        launch("demo", [*overrides, "training.clip=1e30"], tmp_path / "run", quiet=True)
    records = [record for record in read_metrics(tmp_path / "run") if record["kind"] == "train"]
    assert [record["gradient_norm"] for record in records[-3:]] == [None] * 3
    assert "NaN" not in (tmp_path / "run" / "metrics.jsonl").read_text()


def test_a_full_disk_leaves_the_last_good_checkpoint(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = write_safetensors

    def no_space(tensors: dict[str, torch.Tensor], path: Path) -> None:
        whole(tensors, path)
        if "step-00000004" in str(path):
            path.write_bytes(path.read_bytes()[:1000])
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_safetensors", no_space)
    with pytest.raises(LoopformerError, match=r"step 4 .*No space left.*step-00000003.*--resume"):
        launch("demo", small(), tmp_path / "run", quiet=True)
    assert [path.name for path in checkpoints(tmp_path / "run")][-1] == "step-00000003"
    assert not list((tmp_path / "run" / "checkpoints").glob("*.part"))
    monkeypatch.setattr(checkpoint, "write_safetensors", whole)
    assert launch("demo", small(), tmp_path / "run", resume=True, quiet=True)["finished"]


def test_a_full_disk_of_one_of_many_ranks_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(*args: object, **options: object) -> None:
        stack = traceback.extract_stack()
        raise CheckpointException("save", {1: (OSError(28, "No space left on device"), stack)})

    monkeypatch.setattr(checkpoint, "save", no_space)
    with pytest.raises(LoopformerError, match=r"No space left.* no earlier one\. Make room and continue") as caught:
        checkpoint.write_checkpoint(tmp_path, 1, lambda part: None, {}, Ranks(0, 1, torch.device("cpu")), True)
    assert "Traceback" not in str(caught.value)
    assert len(str(caught.value)) < 200


def test_newer_damaged_checkpoints_do_not_push_out_good_ones(small: Small, tmp_path: Path) -> None:
    launch("demo", small(training__keep=9), tmp_path / "run", quiet=True)
    for path in checkpoints(tmp_path / "run")[1:]:
        (path / "model.safetensors").write_bytes(b"")
    good = checkpoints(tmp_path / "run")[0]
    again = small(training__keep=1, training__steps=3, training__validate_every=9)
    launch("demo", again, tmp_path / "run", resume=True, quiet=True)
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["step-00000003"]
    assert good.name == "step-00000002"
    (checkpoints(tmp_path / "run")[0] / "state.json").unlink()
    with pytest.raises(LoopformerError, match=r"state.json is missing.* No checkpoint is intact"):
        launch("demo", again, tmp_path / "run", resume=True, quiet=True)


def test_what_may_change_when_a_run_goes_on(small: Small, tmp_path: Path) -> None:
    launch("demo", small(training__steps=2), tmp_path / "run", quiet=True)
    more = ["training.steps=4", "training.micro_batch=1", "training.learning_rate=1e-4"]
    launch("demo", [*small(), *more], tmp_path / "run", resume=True, quiet=True)
    assert json.loads((checkpoints(tmp_path / "run")[-1] / "state.json").read_text())["micro_batch"] == 1
    (tmp_path / "run" / "run.yaml").unlink()
    assert launch(None, ["training.steps=5"], tmp_path / "run", resume=True, quiet=True)["step"] == 5


def test_auto_is_looked_for_anew_after_a_number(small: Small, tmp_path: Path) -> None:
    launch("demo", small(training__steps=2), tmp_path / "run", quiet=True)
    launch(
        "demo", small(training__steps=4, training__micro_batch="auto"), tmp_path / "run", resume=True, quiet=True
    )
    assert json.loads((checkpoints(tmp_path / "run")[-1] / "state.json").read_text())["micro_batch"] == 4


def test_a_starting_model_without_tokenizer_must_have_the_datas_vocabulary(small: Small, tmp_path: Path) -> None:
    config = ModelConfig(blocks=1, loops=2, width=32, heads=2, ffn=64, context=32, vocab=500)
    save_model(LoopedLM(config), tmp_path / "model")
    overrides = [word for word in small() if not word.startswith("model.")]
    with pytest.raises(LoopformerError, match="500 tokens and no tokenizer, the"):
        launch("demo", [*overrides, f"init_from={tmp_path / 'model'}"], tmp_path / "run", quiet=True)


def test_a_refused_start_does_not_stay_in_the_way(small: Small, tmp_path: Path) -> None:
    with pytest.raises(LoopformerError, match="too few for a window"):
        launch("demo", small(model__context=90_000), tmp_path / "run", quiet=True)
    assert launch("demo", small(), tmp_path / "run", resume=True, quiet=True)["finished"]


def test_micro_batches_and_route_parts_train_the_same_model(small: Small, tmp_path: Path) -> None:
    losses = []
    for number, micro in enumerate((1, 4)):
        run = tmp_path / str(number)
        parts = small(training__micro_batch=micro, objective__trajectory_groups=2, objective__trajectories=PAIR)
        launch("demo", parts, run, quiet=True)
        losses.append(training_losses(run))
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_fine_tuning_keeps_the_model_and_its_tokenizer(small: Small, corpus: Path, tmp_path: Path) -> None:
    launch("demo", small(), tmp_path / "first", quiet=True)
    overrides = [f"data.path={corpus}", "training.steps=2", "training.dtype=float32", "training.batch=2"]
    file = tmp_path / "tune.yaml"
    file.write_text(f"init_from: {tmp_path / 'first'}\nobjective: {{consistency: distribution}}\n")
    result = launch(
        str(file),
        [*overrides, "training.learning_rate=1e-4", "training.device=cpu"],
        tmp_path / "tuned",
        quiet=True,
    )
    assert result["finished"]
    assert loopformer.load(tmp_path / "tuned").model.config == loopformer.load(tmp_path / "first").model.config
    with pytest.raises(LoopformerError, match=r"model.loops is 3 but the starting model has 4"):
        launch(str(file), [*overrides, "model.loops=3"], tmp_path / "other", quiet=True)


def test_document_borders_are_kept_and_change_the_loss(small: Small, corpus: Path, tmp_path: Path) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text("\n".join(json.dumps({"text": f"pass {number} is told its step"}) for number in range(2000)))
    prepare([str(texts)], tmp_path / "data", tokenizer=str(corpus), val_fraction=0.1)
    losses = []
    for documents in ("false", "true"):
        overrides = small(data__path=tmp_path / "data", data__documents=documents)
        launch("demo", overrides, tmp_path / documents, quiet=True)
        losses.append(training_losses(tmp_path / documents))
    assert losses[0] != losses[1]
    assert all(math.isfinite(loss) for loss in losses[1])


def test_supervised_examples_train_on_their_responses_only(small: Small, corpus: Path, tmp_path: Path) -> None:
    examples = tmp_path / "examples.jsonl"
    with examples.open("w") as file:
        for number in range(400):
            file.write(
                json.dumps({"prompt": f"say step {number}", "response": "every pass is told its step"}) + "\n"
            )
    prepare([str(examples)], tmp_path / "data", tokenizer=str(corpus), val_fraction=0.1, supervised=True)
    launch("demo", small(), tmp_path / "first", quiet=True)
    overrides = small(data__path=tmp_path / "data", training__learning_rate=1e-2, training__steps=40)
    tuning = [*overrides, f"init_from={tmp_path / 'first'}"]
    launch("demo", [word for word in tuning if not word.startswith("model.")], tmp_path / "run", quiet=True)
    losses = training_losses(tmp_path / "run")
    # the response is always the same; prompts, which are not, count for nothing
    assert losses[-1] < 0.5 * losses[0]


def test_mistakes_are_one_clear_sentence(small: Small, corpus: Path, tmp_path: Path) -> None:
    launch("demo", small(training__steps=2), tmp_path / "run", quiet=True)
    cases: list[tuple[str | None, list[str], dict[str, bool], str]] = [
        ("demo", small(), {}, "already holds a run; resume it with `loopformer train --resume --out"),
        ("demo", small(training__seed=1), {"resume": True}, "training.seed = 0, not 1"),
        ("demo", small(training__stesp=1), {}, r"Unknown setting training.stesp; did you mean training.steps\?"),
        ("demo", ["trainin.steps=1"], {}, "did you mean training.steps"),
        ("demo", ["steps=1"], {}, "did you mean training.steps"),
        ("demo", small(training__threads=0), {}, "training.threads must be 1 or more"),
        ("demo", small(training__threads=100_000), {}, "training.threads must be 1 or more and at most 1,024, got"),
        ("demo", small(training__device="meta"), {}, "does not run on 'meta'"),
        ("demo", small(training__learning_rate="inf"), {}, "must be a finite number"),
        ("demo", small(training__seed=-1), {}, "training.seed must be 0 or more and below"),
        ("demo", small(training__optimizer="mu"), {}, "one of adamw, muon"),
        ("demo", ["training.steps"], {}, "write key=value"),
        ("demo", small(training__batch=0), {}, "training.batch must be 1 or more"),
        ("demo", small(training__dtype="float16"), {}, "one of float32, bfloat16"),
        ("demo", small(model__vocab=10), {}, "tokenizer has 300 tokens but model.vocab is 10"),
        ("demo", small(training__device="cud"), {}, "is not a device"),
        ("demo", small(data__path=tmp_path / "none", data__prepare="null"), {}, "loopformer prepare"),
        ("nope.yaml", [], {}, "There is no config file"),
        ("nope", [], {}, "There is no preset"),
        (
            None,
            small(data__path=tmp_path / "none", training__batch=16),
            {},
            "make the folder with loopformer prepare",
        ),
        ("demo", small(model__context=4096), {}, "too few for a window"),
    ]
    for source, overrides, options, said in cases:
        out = tmp_path / "run" if "holds a run" in said or "seed" in said else tmp_path / "new"
        with pytest.raises(LoopformerError, match=said) as caught:
            launch(source, overrides, out, quiet=True, say=silent, **options)
        assert "\n" not in str(caught.value)
    with pytest.raises(LoopformerError, match="holds no run to resume"):
        launch(None, [], tmp_path / "none", resume=True)


def test_data_that_changed_is_noticed(small: Small, corpus: Path, tmp_path: Path) -> None:
    launch("demo", small(training__steps=2), tmp_path / "run", quiet=True)
    text = tmp_path / "other.txt"
    text.write_text("\n\n".join(f"another text, paragraph {number}" for number in range(900)))
    prepare([str(text)], tmp_path / "other", tokenizer=str(corpus), val_fraction=0.1)
    with pytest.raises(LoopformerError, match="not what this run was trained on"):
        launch("demo", small(data__path=tmp_path / "other"), tmp_path / "run", resume=True, quiet=True)
    assert launch(None, [], tmp_path / "run", resume=True, quiet=True)["finished"]


def fail(error: BaseException) -> Callable[..., None]:
    def failing(*arguments: object, **options: object) -> None:
        raise error

    return failing


@pytest.mark.parametrize(
    "settings",
    [
        {"training__dtype": "float8", "training__fused": "false"},
        {"model__context": 90_000},
        {"model__vocab": 10},
        {"training__tensorboard": "true", "training__wandb": "tests"},  # the second is not there
    ],
)
def test_what_is_refused_leaves_no_folder(
    settings: dict[str, object], small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(LoopformerError):
        launch("demo", small(**settings), tmp_path / "runs" / "mine", quiet=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("too large"), KeyboardInterrupt()])
def test_what_fails_before_the_first_step_leaves_no_folder(
    error: BaseException, small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "choose_micro_batch", fail(error))
    with pytest.raises((LoopformerError, KeyboardInterrupt)):
        launch("demo", small(training__micro_batch="auto"), tmp_path / "runs" / "mine", quiet=True)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_was_there_stays(small: Small, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(LoopformerError):
        launch("demo", small(model__vocab=10), tmp_path / "mine", quiet=True)
    assert (tmp_path / "mine").is_dir()


def test_what_runs_out_of_memory_in_its_first_step_can_go_on(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", fail(torch.OutOfMemoryError("too large")))
        with pytest.raises(LoopformerError, match=r"lower training\.micro_batch .* then --resume"):
            launch("demo", small(), tmp_path / "run", quiet=True)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["metrics.jsonl", "run.yaml"]
    assert launch(None, [], tmp_path / "run", resume=True, quiet=True)["finished"]


def test_a_first_checkpoint_that_fails_leaves_no_folder_for_them(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "write_safetensors", fail(OSError(28, "No space left on device")))
    with pytest.raises(LoopformerError, match="there is no earlier one"):
        launch("demo", small(), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run" / "checkpoints").exists()


KILLS, CALLS = 6, 100_000
# Kills itself at the so-manyth call of a function, of Python or C, after its first checkpoint.
_DIE = """
import os, signal, sys
from loopformer.training.trainer import Trainer
calls, save = int(sys.argv.pop(1)), Trainer.save
def count(frame, event, argument):
    global calls
    calls -= 1
    if not calls:
        os.kill(os.getpid(), signal.SIGKILL)
def save_and_count(self):
    Trainer.save = save
    save(self)
    sys.setprofile(count)
Trainer.save = save_and_count
from loopformer.cli import main
main()
"""


@pytest.mark.slow
def test_sigkill_at_random_moments_changes_no_bit(small: Small, tmp_path: Path) -> None:
    """The weights at the end are those of a run that was never touched."""
    overrides = small(training__steps=400, training__save_every=3, training__validate_every=50, training__keep=2)
    launch("demo", overrides, tmp_path / "whole", quiet=True)
    rng, out = random.Random(0), tmp_path / "killed"
    words = ["train", "demo", *overrides, "--out", str(out), "--resume", "--json"]
    reached: list[int] = []
    for _ in range(KILLS):
        moment = str(rng.randrange(1, CALLS))  # anywhere in the steps after it
        died = subprocess.run([sys.executable, "-c", _DIE, moment, *words], stdout=subprocess.DEVNULL, check=False)
        assert died.returncode == -signal.SIGKILL
        reached.append(step_of(checkpoints(out)[-1]))
    subprocess.run([sys.executable, "-m", "loopformer", *words], stdout=subprocess.DEVNULL, check=True)
    assert sorted(set(reached)) == reached, "every start went further than the one before"
    assert weights(out) == weights(tmp_path / "whole")


def test_a_fused_run_trains_what_a_plain_one_does(small: Small, tmp_path: Path) -> None:
    launch("demo", small(), tmp_path / "plain", quiet=True)
    launch("demo", small(training__fused="true"), tmp_path / "fused", quiet=True)
    assert training_losses(tmp_path / "fused") == pytest.approx(training_losses(tmp_path / "plain"), abs=2e-5)


def test_a_plain_run_goes_on_fused(small: Small, tmp_path: Path) -> None:
    launch("demo", small(), tmp_path / "whole", quiet=True)
    launch("demo", small(), tmp_path / "cut", quiet=True)
    go_back(tmp_path / "cut", 2)
    launch(None, ["training.fused=true"], tmp_path / "cut", resume=True, quiet=True)
    assert training_losses(tmp_path / "cut") == pytest.approx(training_losses(tmp_path / "whole"), abs=2e-5)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_fp8_learns(optimizer: str, small: Small, tmp_path: Path) -> None:
    steps = {
        "training__steps": 12,
        "training__learning_rate": 0.003,
        "training__min_learning_rate": 0.003,
        "training__optimizer": optimizer,
    }
    launch("demo", small(**steps), tmp_path / "fp32", quiet=True)
    launch("demo", small(**steps, training__dtype="float8"), tmp_path / "fp8", quiet=True)
    exact, low = training_losses(tmp_path / "fp32"), training_losses(tmp_path / "fp8")
    assert low[-1] < low[0] - 0.5
    assert low == pytest.approx(exact, abs=0.1)
    assert low != exact


def test_what_is_refused_leaves_nothing_behind(small: Small, tmp_path: Path) -> None:
    with pytest.raises(LoopformerError, match=r"float8 needs training\.fused"):
        launch("demo", small(training__dtype="float8", training__fused="false"), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    assert launch("demo", small(), tmp_path / "run", quiet=True)["finished"]


def precision_on(device: str, world: int = 1, *overrides: str, said: list[str] | None = None) -> object:
    ranks = Ranks(0, world, torch.device(device))
    return fused_precision(load_run("demo", list(overrides))[0], ranks, ([] if said is None else said).append)


def test_auto_is_for_gpus_and_what_cannot_be_is_said() -> None:
    assert precision_on("cpu", 1, "training.dtype=bfloat16") is None
    assert precision_on("cuda", 1, "training.dtype=float32") is None
    assert precision_on("cpu", 1, "training.fused=true") is not None
    assert precision_on("cpu", 1, "training.dtype=float8") is not None
    with pytest.raises(LoopformerError, match=r"float8 needs training\.fused"):
        precision_on("cpu", 1, "training.dtype=float8", "training.fused=false")
    with pytest.raises(LoopformerError, match="multiples of 16"):
        precision_on("cpu", 1, "training.dtype=float8", "model.ffn=200")
    with pytest.raises(LoopformerError, match="use ddp"):
        precision_on("cpu", 2, "training.fused=true", "training.strategy=fsdp")
    with pytest.raises(LoopformerError, match="not on mps"):
        precision_on("mps", 1, "training.fused=true")


def test_auto_names_what_keeps_passes_from_being_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loopformer.training.fused.passes.find_spec", lambda name: name)
    said: list[str] = []
    settings = ("training.dtype=bfloat16", "model.norms=sandwich")
    assert precision_on("cuda", 1, *settings, said=said) is None
    assert said == [
        "training without fused kernels: its kernels have no norms after residual sums; leave model.norms at pre"
    ]
    assert precision_on("cpu", 1, *settings, said=said) is None
    assert precision_on("cuda", 1, *settings, "training.fused=false", said=said) is None
    assert len(said) == 1  # nobody asked for it there


def test_weights_that_are_not_finite_are_no_start(small: Small, tmp_path: Path) -> None:
    model = LoopedLM(ModelConfig(blocks=1, loops=4, width=32, heads=2, ffn=64, context=32, vocab=400))
    torch.nn.init.constant_(model.tokens.weight, float("nan"))
    save_model(model, tmp_path / "model")
    with pytest.raises(LoopformerError, match=r"tokens\.weight has values that are no finite numbers"):
        make_model(replace(load_run("demo", small())[0], init_from=str(tmp_path / "model")))


def test_trajectories_of_one_budget_are_logged_apart(small: Small, tmp_path: Path) -> None:
    twice = "[{budget: full}, {budget: short, weight: 0.1}, {budget: short, sampler: compositions, weight: 0.1}]"
    launch("demo", small(objective__trajectories=twice, training__steps=2), tmp_path / "run", quiet=True)
    names = {name for record in read_metrics(tmp_path / "run") for name in record if name.startswith("loss_")}
    assert names >= {"loss_full", "loss_short", "loss_short_3"}


def test_a_specialist_is_validated_at_its_own_budget(small: Small, tmp_path: Path) -> None:
    settings = small(objective__trajectories="[{budget: 3}]", training__steps=3)
    result = launch("demo", settings, tmp_path / "run", quiet=True)
    validated = [record for record in read_metrics(tmp_path / "run") if record["kind"] == "validation"]
    assert result["best_loss"] == validated[-1]["loss_at_3"]


def test_validation_is_evals_loss_without_the_rows_that_pad_the_vocabulary(
    small: Small, corpus: Path, tmp_path: Path
) -> None:
    data = TokenData.open(corpus, "val")
    windows, vocab = len(Windows(data, 32)), data.tokenizer.vocab_size
    padded = small(model__vocab=vocab, model__padded_vocab=4096, training__validation_windows=windows)
    launch("demo", padded, tmp_path / "run", quiet=True)
    (*_, record) = (record for record in read_metrics(tmp_path / "run") if record["kind"] == "validation")
    lm = loopformer.load(tmp_path / "run")
    assert lm.model.config.vocab == vocab < lm.model.config.vocab_rows == 4096
    text = read_text(str(corpus), lm.need_tokenizer())
    budgets = [1, 2, 4]
    rows = perplexity(lm.model, text, budgets, Protocol(join=True, max_tokens=32 * windows))
    expected = [math.exp(record[f"loss_at_{budget}"]) for budget in budgets]
    assert [row["perplexity"] for row in rows] == pytest.approx(expected, rel=1e-5)
