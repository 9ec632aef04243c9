"""Read tensors from a file, a folder or a Hub id without running anything that comes with them.

    tensors, facts = read(path)      # {name: tensor}, {"n_head": 32, …} from configs and metadata beside them

Safetensors hold no code. A `.pt` is read with `weights_only=True`; the settings object that the authors'
training pickles becomes an inert record, and a file that asks for anything else is refused.
"""

import json
import pickle
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from loopformer.errors import FileProblem

Tensors = dict[str, Tensor]
Facts = dict[str, Any]


class _InertRecord:
    """Takes the place of a pickled object: keeps its plain attributes, has no behaviour."""

    def __init__(self, *args: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)


def read(source: str | Path) -> tuple[Tensors, Facts]:
    """Tensors and settings from a `.safetensors` or `.pt` file, a folder that holds one, or a Hub id."""
    path = Path(source)
    if path.is_dir():
        return read_folder(path)
    if path.suffix == ".safetensors" and path.is_file():
        return read_safetensors(path)
    if path.suffix in (".pt", ".pth", ".bin", ".ckpt") and path.is_file():
        return read_pt(path)
    if path.is_file():
        raise FileProblem(
            f"{path} is neither .safetensors nor .pt; give a weights file or the folder that holds one."
        )
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", str(source)):
        return read_folder(fetch(str(source)))
    raise FileProblem(f"There is no file or folder {source}; check the path.")


def fetch(hub_id: str) -> Path:
    """Download (or find in the cache) a model's safetensors and JSON files; its code is never fetched."""
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(hub_id, allow_patterns=["*.safetensors", "*.json"]))
    except Exception as error:  # the Hub client raises many kinds, also from the HTTP library below it
        reason = " ".join(str(error).split())[:80]
        raise FileProblem(
            f"{hub_id} is no local path and could not be had from the Hugging Face Hub ({reason}); "
            "check the name and the connection."
        ) from error


def read_folder(folder: Path) -> tuple[Tensors, Facts]:
    """All safetensors of a folder (sharded or not), or its only `.pt`; settings from its `config.json`."""
    facts: Facts = {}
    config = folder / "config.json"
    if config.is_file():
        facts |= read_json(config)
    tensors: Tensors = {}
    if files := sorted(folder.glob("*.safetensors")):
        for file in files:
            more, metadata = read_safetensors(file)
            tensors |= more
            facts = metadata | facts
        return tensors, facts
    checkpoints = sorted(folder.glob("*.pt"))
    if len(checkpoints) == 1:
        tensors, more_facts = read_pt(checkpoints[0])
        return tensors, more_facts | facts
    found = "more than one .pt file; name one of them" if checkpoints else "no .safetensors or .pt file"
    raise FileProblem(f"The folder {folder} holds {found}.")


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise FileProblem(f"{path} is not readable JSON ({error}).") from error
    if not isinstance(value, dict):
        raise FileProblem(f"{path} must hold a JSON object.")
    return value


def read_safetensors(path: Path) -> tuple[Tensors, Facts]:
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            metadata = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise FileProblem(
            f"{path} is not a whole safetensors file ({error}); it may have been cut short, so fetch it again."
        ) from error
    facts: Facts = {}
    for key, text in metadata.items():
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        facts |= value if isinstance(value, dict) and key in ("config", "model_args") else {key: value}
    return tensors, facts


def read_pt(path: Path) -> tuple[Tensors, Facts]:
    """A training checkpoint of the authors, or a bare state dict."""
    try:
        stand_ins: list[Any] = [
            _stand_in(name, path) for name in torch.serialization.get_unsafe_globals_in_checkpoint(path)
        ]
        with torch.serialization.safe_globals(stand_ins):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except FileProblem:
        raise
    except (RuntimeError, ValueError, EOFError, OSError, KeyError, pickle.UnpicklingError) as error:
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise FileProblem(
            f"{path} is not a whole PyTorch checkpoint ({reason}); fetch or save it again."
        ) from error
    if not isinstance(content, dict):
        raise FileProblem(f"{path} holds {type(content).__name__}, not a dictionary of tensors; save a state dict.")
    facts: Facts = {}
    for key in ("config", "model_args"):
        value = content.get(key)
        facts |= vars(value) if isinstance(value, _InertRecord) else value if isinstance(value, dict) else {}
    weights = content.get("model", content)
    if not isinstance(weights, dict):
        raise FileProblem(f"{path} holds no state dict under 'model'; save model.state_dict() there.")
    return {name: value for name, value in weights.items() if isinstance(value, Tensor)}, facts


def _stand_in(name: str, path: Path) -> tuple[Any, str]:
    """What to put in the place of a name that a pickle asks for; refuse all but the settings and NumPy scalars."""
    numpy_scalar = r"numpy\.(core|_core)\.multiarray\.scalar|numpy\.dtype|numpy\.dtypes\.\w+"
    if name.rpartition(".")[2] == "GPTConfig" or re.fullmatch(numpy_scalar, name):
        return type("Record", (_InertRecord,), {}), name
    raise FileProblem(
        f"{path} would run {name} when loaded, so it is refused; convert it to safetensors where you trust it: "
        "safetensors.torch.save_file(torch.load(path)['model'], 'model.safetensors')."
    )
