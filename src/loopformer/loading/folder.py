"""The package's own folders on disk: a model, and a run with its checkpoints.

    save_model(model, "models/mine")         # model.safetensors and config.json; no tokenizer
    model = load_model("models/mine")
    newest_model("runs/x", print)            # the newest intact checkpoint of a run

config.json holds all settings of the model, including those that no tensor shows, such as loops and heads. Exports
of `loopformer.hf` are model folders, too. So is every checkpoint, which also has the checksums of its files:

    runs/x/run.yaml, metrics.jsonl, checkpoints/step-00000100/{model.safetensors, config.json, …, checksums.json}
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from loopformer.config import ModelConfig, from_mapping, load_run
from loopformer.config.model import BOX, FORMAT, VERSION, bundled_model_dir
from loopformer.data.shards import INDEX_FILE, is_prepared
from loopformer.errors import FileProblem, LoopformerError, unreadable
from loopformer.files import DamagedFile, read_json, sha256_of
from loopformer.model import LoopedLM

WEIGHTS, CONFIG, TOKENIZER = "model.safetensors", "config.json", "tokenizer.json"  # of a model
TOKENIZER_CONFIG, TEMPLATE = "tokenizer_config.json", "chat_template.jinja"  # in Transformers' own file names
CARD, GENERATION, SPECIAL = "README.md", "generation_config.json", "special_tokens_map.json"  # of an export
FOLDER, CHECKSUMS, STATE, SETTINGS = "checkpoints", "checksums.json", "state.json", "run.yaml"  # of a run
HELD_OUT = "held-out.jsonl"  # text in a model folder that the model was not trained on
WEIGHT_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_STEP = re.compile(r"step-\d+")
MODEL_TYPE = "loopformer"  # of an export, in Transformers' sense; its source files begin with this name
PREFIX = "model."  # of tensor names in exports: the attribute of the Transformers wrapper that holds the model


def resolve_model_path(source: str | Path) -> Path:
    """The folder that a user means: the bundled model for `box`, else a path; for a weights file, its folder."""
    if str(source) == BOX:
        return bundled_model_dir()
    path = Path(source)
    return path.parent if path.name == WEIGHTS and path.is_file() and is_model_folder(path.parent) else path


def is_model_folder(path: str | Path) -> bool:
    config = Path(path) / CONFIG
    return config.is_file() and read_json(config).get("format") == FORMAT


def read_config(folder: str | Path) -> ModelConfig:
    """The model settings of a model folder."""
    path = Path(folder) / CONFIG
    content = read_json(path)
    if (version := content.get("version")) != VERSION:
        raise FileProblem(f"{path} has version {version!r}, this loopformer reads {VERSION}; update it.")
    if not isinstance(content.get("source", {}), dict):
        raise FileProblem(f"{path} is damaged: its source is no mapping; fetch it again.")
    return from_mapping(ModelConfig, content.get("model"), "model")


def default_trajectory(folder: str | Path) -> str | int | None:
    """The default trajectory or budget of a model folder, if it has one, as exports may."""
    if not is_model_folder(folder):
        return None
    content = read_json(Path(folder) / CONFIG)
    default: str | int | None = content.get("trajectory") or content.get("budget")
    return default


def find_chat_template(*folders: Path | None) -> str | None:
    """The chat template of the first folder that has one, in chat_template.jinja or tokenizer_config.json."""
    for folder in filter(None, folders):
        if (folder / TEMPLATE).is_file():
            try:
                return (folder / TEMPLATE).read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise FileProblem(f"{folder / TEMPLATE} is not UTF-8 text; convert it or leave it out.") from error
        if (folder / TOKENIZER_CONFIG).is_file():
            template = read_json(folder / TOKENIZER_CONFIG).get("chat_template")
            if isinstance(template, str):
                return template
    return None


def load_model(folder: str | Path) -> LoopedLM:
    """The model of a model folder, in fp32 on the CPU."""
    config = read_config(folder)
    tensors, _ = read_safetensors(Path(folder) / WEIGHTS)
    return build(config, {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()})


def build(config: ModelConfig, tensors: Mapping[str, Tensor], alias: Callable[[str], str] = str) -> LoopedLM:
    """A model that owns these tensors, in fp32 on their device.

    `alias` maps the name of a parameter to its name in the file, for error messages.
    """
    with torch.device("meta"):
        model = LoopedLM(config)
    expected = model.state_dict()
    check_dtypes({alias(name): tensor for name, tensor in tensors.items()})
    for name, tensor in expected.items():
        if name not in tensors:
            raise FileProblem(f"The weights lack the tensor {alias(name)}; the file is incomplete.")
        if tensors[name].shape != tensor.shape:
            raise FileProblem(
                f"The tensor {alias(name)} has shape {list(tensors[name].shape)} where {list(tensor.shape)} is "
                "expected from the model's sizes; the file is damaged or mixes models."
            )
    if extra := sorted(set(tensors) - set(expected)):
        raise FileProblem(f"The tensor {alias(extra[0])} does not belong to a {config.conditioning!r} model.")
    # Copy the tensors instead of keeping views of the file, which may be aligned differently. CPU kernels round
    # differently on such memory, and a resumed run must be bit-exact.
    owned = {name: tensor.to(torch.float32, copy=True) for name, tensor in tensors.items()}
    model.load_state_dict(owned, assign=True)
    return model.requires_grad_(True)


def read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a file, and the settings in its metadata."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            metadata = file.metadata() or {}
    except OSError as error:
        raise unreadable(path, error) from error
    except (SafetensorError, RuntimeError) as error:  # RuntimeError: the file was removed while it was read
        raise FileProblem(
            f"{path} is not a complete safetensors file ({error}); it may be truncated, so fetch it again."
        ) from error
    settings: dict[str, Any] = {}
    for key, text in metadata.items():
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = text
        settings |= value if isinstance(value, dict) and key in ("config", "model_args") else {key: value}
    return tensors, settings


def check_dtypes(tensors: Mapping[str, Tensor]) -> None:
    """Raise an error if weights are not floats of 16 bits or more. The scales of smaller floats are unknown."""
    for name, tensor in tensors.items():
        if tensor.dtype not in WEIGHT_DTYPES:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise FileProblem(f"The tensor {name} has dtype {kind}; convert it to float32, float16 or bfloat16.")


def check_finite(tensors: Mapping[str, Tensor]) -> None:
    """Raise an error if weights are not finite: the file is damaged, or training diverged."""
    for name, tensor in tensors.items():
        if tensor.dtype in WEIGHT_DTYPES and not bool(torch.isfinite(tensor).all()):
            raise FileProblem(f"The tensor {name} has values that are no finite numbers; fetch or save it again.")


def save_model(
    model: LoopedLM,
    folder: str | Path,
    source: dict[str, Any] | None = None,
    default: str | int | None = None,
    state: Mapping[str, Tensor] | None = None,
) -> Path:
    """Write a model folder; each file appears complete or not at all.

    `source` records where the model comes from. `default` is the trajectory or budget used when a call gives none.
    `state` replaces the model's own tensors, such as shards by what was gathered from all ranks.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    state = model.state_dict() if state is None else state
    tensors = {name: tensor.detach().contiguous().cpu() for name, tensor in state.items()}
    config = {"format": FORMAT, "version": VERSION, "model": model.config.plain(), "source": source or {}}
    if default is not None:
        config["budget" if isinstance(default, int) else "trajectory"] = default
    weights_part, config_part = folder / f"{WEIGHTS}.part", folder / f"{CONFIG}.part"
    try:
        write_safetensors(tensors, weights_part)
        config_part.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        os.replace(weights_part, folder / WEIGHTS)
        os.replace(config_part, folder / CONFIG)
    except Exception as error:
        for part in (weights_part, config_part):
            with suppress(OSError):
                part.unlink()
        raise FileProblem(f"The model could not be written to {folder} ({error}).") from error
    return folder


@contextmanager
def staging_folder(target: Path) -> Iterator[Path]:
    """An empty folder for files that will move to `target`; it is removed at the end.

    An existing target cannot be replaced if it is a mounted disk or somebody's working directory. So the folder is
    made inside it, where files can be moved one by one.
    """
    stage = (target if target.is_dir() else target.parent) / f".{target.name}.{os.getpid()}.part"
    try:
        stage.mkdir(parents=True)
        yield stage
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def install_model(stage: Path, target: Path, others: Iterable[str] = ()) -> None:
    """Move a finished model to `target`: by one rename if that does not exist, else file by file, config.json last.

    The files of a previous model are removed, and so are `others`. All other files stay.
    """
    if not target.exists():
        os.replace(stage, target)
        return
    new = {path.name for path in stage.iterdir()}
    old = {WEIGHTS, CONFIG, TOKENIZER, TOKENIZER_CONFIG, TEMPLATE, *others}
    if is_export(target):
        old |= {CARD, GENERATION, SPECIAL, *(path.name for path in target.glob(f"{MODEL_TYPE}_*.py"))}
    for name in old - new:
        (target / name).unlink(missing_ok=True)
    for name in sorted(new, key=lambda name: name == CONFIG):
        os.replace(stage / name, target / name)


def is_export(folder: str | Path) -> bool:
    """Whether `loopformer.hf` wrote a model folder."""
    return is_model_folder(folder) and read_json(Path(folder) / CONFIG).get("model_type") == MODEL_TYPE


def write_safetensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a file with the permissions of the umask; the library makes it readable to its owner only."""
    save_file(tensors, path, metadata={"format": "pt"})  # what Hugging Face's tools look for
    mask = os.umask(0o022)  # a umask can only be read by setting it
    os.umask(mask)
    path.chmod(0o666 & ~mask)


def is_run_folder(path: str | Path) -> bool:
    return (Path(path) / SETTINGS).is_file() and (Path(path) / FOLDER).is_dir()


def run_folder_of(model: str | Path) -> Path | None:
    """The run folder of a path to a run or to one of its checkpoints; None for any other model."""
    path = Path(os.path.abspath(resolve_model_path(model)))
    run = path.parent.parent if path.parent.name == FOLDER else path
    return run if is_run_folder(run) else None


def trained_budgets(model: str | Path, config: ModelConfig) -> frozenset[int] | None:
    """The budgets at which a model was trained to predict; None if nobody knows.

    The settings of a run list them. In any other folder, a model whose loops know their step size counts as trained
    at every budget, because short trajectories are what the step size is for.
    """
    settings = (run_folder_of(model) or resolve_model_path(model)) / SETTINGS
    if settings.is_file():
        try:
            entries = load_run(settings)[0].objective.trajectories
        except LoopformerError:  # damaged settings hide what was trained, but the model can still be used
            return None
        ranges = [entry.budgets(config.loops) for entry in entries if entry.weight > 0 or entry.match > 0]
        return frozenset(budget for low, high in ranges for budget in range(low, high + 1))
    return None if config.conditioning in ("none", "index") else frozenset(range(1, config.loops + 1))


def data_folder(run: Path, stored: str) -> Path | None:
    """The prepared folder that a run was trained on; None if it cannot be found.

    `stored` is the path in the run's settings. Run and data may have been moved together, and earlier versions
    stored the path as the user wrote it. So every tail of the path is also tried in the run's folder and in each of
    its parents. The hash of the data's index, which every checkpoint stores, proves that it is the right data.
    """
    index_hash = None
    for checkpoint in reversed(checkpoints(run)):
        with suppress(FileProblem):
            index_hash = read_json(checkpoint / STATE).get("data") or None
            break
    candidates = [Path(stored)]
    if index_hash is not None:
        names = [name for name in Path(stored).parts if name != os.sep]
        tails = [Path(*names[start:]) for start in range(len(names))]
        root = Path(os.path.abspath(run))
        candidates += [parent / tail for parent in (root, *root.parents) for tail in tails]
    for folder in candidates:
        with suppress(OSError):  # a folder without permission to read it
            if is_prepared(folder) and index_hash in (None, sha256_of(folder / INDEX_FILE)):
                return folder
    return None


def checkpoints(run: Path) -> list[Path]:
    """The finished checkpoints of a run, oldest first."""
    return sorted(path for path in (run / FOLDER).glob("step-*") if _STEP.fullmatch(path.name))


def is_checkpoint(path: Path) -> bool:
    """Whether a folder is a checkpoint of a run, or a copy of one."""
    return (path / CHECKSUMS).exists() or (path.parent.name == FOLDER and _STEP.fullmatch(path.name) is not None)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def find_damage(checkpoint: Path, names: Sequence[str] | None = None) -> str | None:
    """What is wrong with a checkpoint; None if its files, or only those in `names`, match their checksums.

    A file that cannot be read, such as for lack of permission, does not count as damage: it raises FileProblem.
    """
    name = CHECKSUMS
    try:
        sums = read_json(checkpoint / name)
        if missing := [name for name in (WEIGHTS, CONFIG) if name not in sums]:
            return f"{CHECKSUMS} does not list {missing[0]}"
        for name, expected in sums.items():
            if (names is None or name in names) and sha256_of(checkpoint / name) != expected:
                return f"{name} does not match its checksum"
    except DamagedFile:
        return f"{CHECKSUMS} is damaged"
    except (OSError, FileProblem) as error:
        cause = error if isinstance(error, OSError) else error.__cause__
        if isinstance(cause, FileNotFoundError):
            return f"{name} is missing"
        reason = getattr(cause, "strerror", None) or error
        raise FileProblem(
            f"The checkpoint {checkpoint} cannot be read ({name}: {reason}); "
            "make it readable, or move it away to use an earlier one."
        ) from error
    return None


def latest_good_checkpoint(run: Path, say: Callable[[str], None]) -> Path | None:
    """The newest intact checkpoint; `say` gets a sentence about each newer one that is damaged."""
    reported: set[Path] = set()
    while True:
        for path in reversed(checkpoints(run)):
            if (damage := find_damage(path)) is None:
                return path
            if not path.is_dir():
                break  # a running training deleted it because it saved a newer one, so list them again
            if path not in reported:
                reported.add(path)
                say(f"The checkpoint {path} is damaged ({damage}).")
        else:
            return None


def newest_model(run: str | Path, say: Callable[[str], None]) -> Path:
    """The newest intact checkpoint of a run, which is a model folder."""
    notes: list[str] = []
    if (checkpoint := latest_good_checkpoint(Path(run), notes.append)) is None:
        raise FileProblem(
            f"No checkpoint of {run} is intact: {' '.join(notes)}"
            if notes
            else f"The run {run} has no checkpoint yet; let it train to its first one."
        )
    for note in notes:
        say(note)
    return checkpoint
