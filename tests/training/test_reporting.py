"""metrics.jsonl: what is whole in it is read, whatever else is there; and those who get the records, too."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from loopformer import plots
from loopformer.plots import Panel
from loopformer.training import reporting
from loopformer.training.launch import launch
from loopformer.training.reporting import METRICS, read_metrics

from .runs import Small

ODD = {
    "a byte that is no text": b'{"kind": "train", "step": 2, "loss_\xff": 1.0}\n',
    "zeros of a lost block": bytes(4096) + b"\n",
    "no JSON": b"step 2: loss 3.1\n",
    "no object": b"[1, 2]\n17\nnull\n",
    "deep": b"[" * 100_000 + b"\n",
    "no step": b'{"kind": "train", "loss_full": 1.0, "loss_short": 1.0}\n',
    "a step that is a word": b'{"kind": "train", "step": "two", "loss_full": 1.0, "loss_short": 1.0}\n',
    "a loss that is a word": b'{"kind": "validation", "step": 2, "loss_at_1": "low"}\n',
    "a kind that is a list": b'{"kind": [], "step": 2}\n',
    "lines apart within a text": b'{"kind": "train\x0b\xe2\x80\xa8", "step": 2}\n',
    "an empty line": b"\n",
}


def losses(run: Path) -> list[tuple[object, ...]]:
    return [(record["kind"], record["step"], record.get("loss_full")) for record in read_metrics(run)]


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD.keys())
def test_odd_lines_are_left_out_and_the_records_after_them_stay(odd: bytes, tmp_path: Path) -> None:
    records = [{"kind": "train", "step": step, "loss_full": 3.0, "loss_short": 0} for step in range(1, 4)]
    lines = [json.dumps(record).encode() + b"\n" for record in records]
    (tmp_path / METRICS).write_bytes(lines[0] + odd + lines[1] + odd + lines[2][:-9])
    assert read_metrics(tmp_path) == records[:2]


def test_a_run_goes_on_over_odd_lines_and_keeps_its_records(small: Small, tmp_path: Path) -> None:
    run = tmp_path / "run"
    launch("demo", small(training__steps=4), run, quiet=True)
    before = losses(run)
    lines = (run / METRICS).read_bytes().splitlines(keepends=True)
    no_losses = b'{"kind": "train", "step": 9}\n'  # beyond the checkpoint, and a picture can do without
    (run / METRICS).write_bytes(lines[0] + b"".join(ODD.values()) + b"".join(lines[1:]) + no_losses)
    result = launch("demo", small(), run, resume=True, quiet=True)
    assert Path(result["curves"]).is_file()
    assert losses(run)[: len(before)] == before
    assert [step for kind, step, _ in losses(run) if kind == "train"] == [1, 2, 3, 4, 5, 6]
    assert all(json.loads(line) for line in (run / METRICS).read_text().splitlines())


def test_losses_are_labelled_by_their_budgets(
    small: Small, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On stderr and in the legend of curves.png; the first step has a line, however rarely steps are logged."""
    entries = (
        "[{budget: full}, {budget: [2, 3]}, {budget: [2, 3], sampler: compositions}, {budget: 1}, {budget: 1}, "
        "{budget: 1, weight: 0.5}]"
    )
    drawn: list[Panel] = []

    def line_figure(panels: list[Panel], **options: Any) -> Any:
        drawn.extend(panels)
        return plots.line_figure(panels, **options)

    monkeypatch.setattr(reporting, "line_figure", line_figure)
    settings = small(objective__trajectories=entries, training__log_every=6)
    launch("demo", settings, tmp_path / "run")
    said = [line for line in capsys.readouterr().err.splitlines() if "tok/s" in line]
    labels = ["full", "M=2–3", "M=2–3 uneven", "M=1", "M=1 #5", "M=1 weight 0.5"]
    columns = "loss " + " · ".join(rf"{label} \d+\.\d\d" for label in labels) + "  "
    assert re.match(rf"step 1/6  {columns}.* tok/s  lr \S+$", said[0])
    assert re.match(rf"step 6/6  {columns}.* tok/s  lr \S+  0:00:00 left$", said[1])
    assert len(said) == 2
    assert [kind for kind, step, _ in losses(tmp_path / "run") if step == 1] == []
    assert [line.label for line in drawn[0].lines] == labels
    assert [line.label for line in drawn[1].lines] == ["M=1", "M=2", "M=4"]


def test_what_reports_need_does_not_bring_the_trainer() -> None:
    program = """
import sys
import loopformer.training.plan, loopformer.training.reporting
assert "loopformer.training.trainer" not in sys.modules
assert "loopformer.training.objective" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_weights_and_biases_gets_the_records_offline(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    launch("demo", small(training__wandb="tests"), tmp_path / "run", quiet=True)
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))


def test_a_run_that_wandb_refuses_is_a_sentence_and_leaves_no_folder(small: Small, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    keyless = {**os.environ, "WANDB_MODE": "online", "WANDB_API_KEY": "", "HOME": str(tmp_path)}
    words = ["train", "demo", *small(training__wandb="project"), "--out", str(tmp_path / "run")]
    command = [sys.executable, "-m", "loopformer", *words]
    done = subprocess.run(command, env=keyless, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "wandb could not be started" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()
