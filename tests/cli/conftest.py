"""The command line as a user meets it."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from loopformer.cli import main

from .models import save_small


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Run `loopformer` with some words on the CPU: its exit code, stdout and stderr."""

    def command(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["loopformer", *words, "--device", "cpu"])
        with pytest.raises(SystemExit) as left:
            main()
        torch.set_num_threads(1)
        said = capsys.readouterr()
        code = left.value.code or 0
        assert isinstance(code, int)
        return code, said.out, said.err

    return command


@pytest.fixture
def model(tmp_path: Path) -> str:
    return save_small(tmp_path / "m", context=16, modulator_start="normal")


@pytest.fixture
def text(tmp_path: Path) -> str:
    (tmp_path / "a.txt").write_text("its time and its step, " * 9)
    return str(tmp_path / "a.txt")
