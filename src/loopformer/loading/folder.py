"""Read tensors from a file, a folder or a Hub id without running anything that comes with them.

    tensors, facts = read(path)      # {name: tensor}, {"n_head": 32, …} from configs and metadata beside them

Safetensors hold no code. A `.pt` is read with `weights_only=True`; the settings object that the authors'
training pickles becomes an inert record, and a file that asks for anything else is refused.

From settings and tensors to a model, with every tensor accounted for.

Our own model folder: `model.safetensors`, `config.json` and, where there is one, `tokenizer.json`.

    save_model(model, "models/mine")
    model = load_model("models/mine")

The config holds the model's settings, so that loops, heads and switches are never lost. A folder that
`loopformer.hf` wrote is one of ours too.

A run folder: its checkpoints, and which of them can be trusted.

    runs/x/run.yaml, metrics.jsonl, checkpoints/step-00000100/…

Each checkpoint is also a model folder of ours, with checksums over all its files.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from loopformer.config import ModelConfig, from_mapping
from loopformer.config.model import FORMAT, VERSION
from loopformer.errors import FileProblem
from loopformer.files import read_json, sha256_of
from loopformer.model import LoopedLM

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


def build(config: ModelConfig, tensors: Mapping[str, Tensor], called: Callable[[str], str] = str) -> LoopedLM:
    """A model that owns these tensors, in fp32 on their device.

    `called` turns our name of a tensor into that of the file, so that an error names what the user can look for.
    """
    with torch.device("meta"):
        model = LoopedLM(config)
    expected = model.state_dict()
    for name, tensor in expected.items():
        if name not in tensors:
            raise FileProblem(f"The weights lack the tensor {called(name)}; the file is not whole.")
        if tensors[name].shape != tensor.shape:
            raise FileProblem(
                f"The tensor {called(name)} has shape {list(tensors[name].shape)} where {list(tensor.shape)} is "
                "expected from the model's sizes; the file is damaged or mixes models."
            )
    if extra := sorted(set(tensors) - set(expected)):
        raise FileProblem(f"The tensor {called(extra[0])} does not belong to a {config.conditioning!r} model.")
    # Copies, not views of the file: CPU kernels round differently on memory that is not aligned as fresh tensors
    # are, and a resumed run must repeat every bit.
    owned = {name: tensor.to(torch.float32, copy=True) for name, tensor in tensors.items()}
    model.load_state_dict(owned, assign=True)
    return model.requires_grad_(True)


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


def default_trajectory(folder: str | Path) -> str | int | None:
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


FOLDER, CHECKSUMS, STATE, SETTINGS = "checkpoints", "checksums.json", "state.json", "run.yaml"


def is_run_folder(path: str | Path) -> bool:
    return (Path(path) / SETTINGS).is_file() and (Path(path) / FOLDER).is_dir()


def checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run, oldest first; unfinished ones are not among them."""
    found = (run / FOLDER).glob("step-*") if (run / FOLDER).is_dir() else []
    return sorted(path for path in found if re.fullmatch(r"step-\d+", path.name))


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def problem(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint: None when every file is there and matches its checksum."""
    try:
        sums = read_json(checkpoint / CHECKSUMS)
    except FileProblem:
        return f"{CHECKSUMS} is missing or unreadable"
    for name, expected in sums.items():
        if not (checkpoint / name).is_file():
            return f"{name} is missing"
        if sha256_of(checkpoint / name) != expected:
            return f"{name} does not match its checksum"
    return None


def latest_good(run: Path, say: Callable[[str], None]) -> Path | None:
    """The newest checkpoint that is whole; damaged ones on the way are named."""
    for path in reversed(checkpoints(run)):
        wrong = problem(path)
        if wrong is None:
            return path
        say(f"The checkpoint {path} is damaged ({wrong}).")
    return None


def newest_model(run: str | Path, say: Callable[[str], None]) -> Path:
    """The model folder to use of a run: its newest whole checkpoint."""
    notes: list[str] = []
    found = latest_good(Path(run), notes.append)
    if found is None:
        raise FileProblem(
            f"No checkpoint of {run} is whole: {' '.join(notes)}"
            if notes
            else f"The run {run} has no checkpoint yet; let it train to its first one."
        )
    for note in notes:
        say(note)
    return found
