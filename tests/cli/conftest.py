"""The command line as a user meets it."""

import sys
from collections.abc import Callable

import pytest
import torch

from loopformer.cli import main


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
