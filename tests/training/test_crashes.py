"""SIGKILL at random moments: the weights at the end are those of a run that was never touched."""

import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from loopformer.loading.folder import checkpoints
from loopformer.training.launch import launch

KILLS = 6


def start(out: Path, overrides: list[str]) -> subprocess.Popen[bytes]:
    words = [
        sys.executable,
        "-m",
        "loopformer",
        "train",
        "demo",
        *overrides,
        "--out",
        str(out),
        "--resume",
        "--json",
    ]
    return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@pytest.mark.slow
def test_sigkill_at_random_moments_changes_no_bit(small: Callable[..., list[str]], tmp_path: Path) -> None:
    overrides = small(training__steps=400, training__save_every=3, training__validate_every=50, training__keep=2)
    launch("demo", overrides, tmp_path / "whole", quiet=True)
    rng, out = random.Random(0), tmp_path / "killed"
    reached: list[int] = []
    for _ in range(KILLS):
        process = start(out, overrides)
        before = len(reached) and reached[-1]
        while process.poll() is None:  # until it has taken a few steps of its own
            now = checkpoints(out)
            if now and int(now[-1].name[5:]) > before:
                break
            time.sleep(0.02)
        time.sleep(rng.random() * 0.25)  # anywhere: in a step, in a save, in validation
        assert process.poll() is None, "it finished before it could be killed; give it more steps"
        process.kill()
        process.wait()
        reached.append(int(checkpoints(out)[-1].name[5:]))
    assert start(out, overrides).wait() == 0
    assert sorted(set(reached)) == reached, "every start went further than the one before"
    assert (checkpoints(out)[-1] / "model.safetensors").read_bytes() == (
        checkpoints(tmp_path / "whole")[-1] / "model.safetensors"
    ).read_bytes()
