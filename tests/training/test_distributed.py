"""Two processes train what one does: gloo on the CPU."""

import json
import os
import random
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from loopformer.loading.folder import checkpoints
from loopformer.training.launch import launch
from loopformer.training.reporting import read_metrics

from .runs import PAIR, Small, go_back


def free_port() -> int:
    """A free port below those that the system gives to connections, so that none takes it before rank 0 listens."""
    for port in random.Random(os.getpid()).sample(range(20_000, 30_000), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("100 ports are in use")


def two_ranks(out: Path, overrides: list[str], *more: str) -> None:
    port = free_port()
    words = [sys.executable, "-m", "loopformer", "train", "demo", *overrides, "--out", str(out), "--json", *more]
    base = os.environ | {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            words, env=base | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    for process in ranks:
        _, error = process.communicate(timeout=800)  # of a hang; a busy machine is many times as slow
        assert process.returncode == 0, error


def losses(run: Path) -> list[float]:
    return [
        value
        for record in read_metrics(run)
        for name, value in record.items()
        if name.startswith(("loss", "consistency", "gradient"))
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "fused", "optimizer"),
    [("ddp", "false", "adamw"), ("ddp", "true", "muon"), ("fsdp", "auto", "adamw"), ("fsdp", "auto", "muon")],
)
def test_two_ranks_train_what_one_does_and_one_goes_on_from_two(
    strategy: str, fused: str, optimizer: str, small: Small, tmp_path: Path
) -> None:
    near = 1e-5 if optimizer == "adamw" else 2e-3  # Muon's updates are rounded to bf16
    overrides = small(training__batch=8, objective__trajectory_groups=2, training__optimizer=optimizer)
    if optimizer == "adamw":
        overrides += [f"objective.trajectories={PAIR.replace('match: 0.1', 'match: 0.1, rows: 0.5')}"]
    else:  # steps of one pass inject nothing, on one rank or on both
        overrides += ["model.inject=gated", "objective.trajectories=[{budget: any}]"]
    launch("demo", overrides, tmp_path / "one", quiet=True)
    two_ranks(tmp_path / "two", [*overrides, f"training.strategy={strategy}", f"training.fused={fused}"])
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=near)
    files = sorted(path.name for path in (checkpoints(tmp_path / "two")[-1] / "optimizer").iterdir())
    assert len(files) == (2 if strategy == "fsdp" else 1)

    # Two ranks stop after 3 of 6 steps; one goes on with the same order of data.
    half = [*overrides, f"training.strategy={strategy}", f"training.fused={fused}"]
    go_back(tmp_path / "two", 3)
    launch("demo", half, tmp_path / "two", resume=True, quiet=True)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=near)
    state = json.loads((checkpoints(tmp_path / "two")[-1] / "state.json").read_text())
    assert state["world"] == 1
