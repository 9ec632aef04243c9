"""Our own model folder: `model.safetensors`, `config.json` and, where there is one, `tokenizer.json`.

    save_model(model, "models/mine")
    model = load_model("models/mine")

The config holds the model's settings, so that loops, heads and switches are never lost. A folder that
`loopformer.hf` wrote is one of ours too.
"""

import dataclasses
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from loopformer.config import ModelConfig, from_mapping
from loopformer.config.model import FORMAT, VERSION
from loopformer.errors import FileProblem
from loopformer.loading.build import build
from loopformer.loading.tensors import read_json, read_safetensors
from loopformer.model import LoopedLM

WEIGHTS, CONFIG, TOKENIZER = "model.safetensors", "config.json", "tokenizer.json"
PREFIX = "model."  # what Transformers puts before our names, as its wrapper holds our model under this one


def is_model_folder(path: str | Path) -> bool:
    config = Path(path) / CONFIG
    return config.is_file() and read_json(config).get("format") == FORMAT


def save_model(model: LoopedLM, folder: str | Path, source: dict[str, Any] | None = None) -> Path:
    """Write a model; `source` says where it comes from. Files appear whole or not at all."""
    return save_tensors(model.state_dict(), model.config, folder, source)


def save_tensors(
    state: Mapping[str, Tensor], model: ModelConfig, folder: str | Path, source: dict[str, Any] | None = None
) -> Path:
    """Write a model that is in hand as tensors and settings."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().contiguous().cpu() for name, tensor in state.items()}
    config = {
        "format": FORMAT,
        "version": VERSION,
        "model": dataclasses.asdict(model),
        "source": source or {},
    }
    try:
        write_safetensors(tensors, folder / (WEIGHTS + ".part"))
        (folder / (CONFIG + ".part")).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        for name in (WEIGHTS, CONFIG):
            os.replace(folder / (name + ".part"), folder / name)
    except Exception as error:
        for name in (WEIGHTS, CONFIG):
            with suppress(OSError):
                (folder / (name + ".part")).unlink()
        raise FileProblem(f"The model could not be written to {folder} ({error}).") from error
    return folder


def read_config(folder: str | Path) -> ModelConfig:
    """The model settings of one of our folders."""
    path = Path(folder) / CONFIG
    content = read_json(path)
    if content.get("version") != VERSION:
        raise FileProblem(
            f"{path} has version {content.get('version')!r}, this loopformer reads {VERSION}; update it."
        )
    return from_mapping(ModelConfig, content.get("model"), "model")


def default_route(folder: str | Path) -> str | int | None:
    """The trajectory or budget that an export names as its default."""
    if not is_model_folder(folder):
        return None
    content = read_json(Path(folder) / CONFIG)
    found: str | int | None = content.get("trajectory") or content.get("budget")
    return found


def load_model(folder: str | Path) -> LoopedLM:
    """The model of one of our folders, in fp32 on the CPU."""
    config = read_config(folder)
    tensors, _ = read_safetensors(Path(folder) / WEIGHTS)
    return build(config, {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()})


def write_safetensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a file that others may read as far as the umask allows; the library's own only we could."""
    save_file(tensors, path, metadata={"format": "pt"})  # what Hugging Face's tools look for
    mask = os.umask(0o022)  # a umask can only be read by setting it
    os.umask(mask)
    path.chmod(0o666 & ~mask)
