"""Find a model whatever the user points at: a run, a model folder of ours, or published weights."""

import sys
from pathlib import Path

from loopformer.config import ModelConfig
from loopformer.loading.folder import TOKENIZER, is_model_folder, load_model, read_config
from loopformer.loading.published import load_published
from loopformer.loading.runs import is_run_folder, newest_model
from loopformer.model import LoopedLM


def find_model(
    source: str | Path, heads: int | None = None, loops: int | None = None
) -> tuple[LoopedLM, Path | None]:
    """The model, in fp32 on the CPU, and the folder of its tokenizer where there is one."""
    folder = model_folder(source)
    model = load_model(folder) if is_model_folder(folder) else load_published(source, heads, loops)
    return model, _tokenizer_folder(folder)


def find_config(
    source: str | Path, heads: int | None = None, loops: int | None = None
) -> tuple[ModelConfig, Path | None]:
    """The same without the weights, where their sizes are written beside them."""
    folder = model_folder(source)
    config = read_config(folder) if is_model_folder(folder) else load_published(source, heads, loops).config
    return config, _tokenizer_folder(folder)


def _tokenizer_folder(folder: Path) -> Path | None:
    return folder if (folder / TOKENIZER).is_file() else None


def model_folder(source: str | Path) -> Path:
    """The folder that holds the model of a run; anything else as it is."""
    return newest_model(source, _warn) if is_run_folder(source) else Path(source)


def _warn(sentence: str) -> None:
    print(sentence, file=sys.stderr)
