"""What a run is: one validated tree of model, data, objective and training, and the presets that ship with us.

    run, keys = load_run("demo", ["training.steps=100", "data.path=data/mine"])
    load_preset("paper/loopformer-1x24")     # plain data: a preset, at one of the sizes that its file lists

The defaults are the paper's recipe. A preset or a YAML file gives some keys, `key=value` overrides others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Literal

import yaml

from loopformer.config.model import ModelConfig, check_types, from_mapping
from loopformer.errors import FileProblem, LoopformerError, nearest, require
from loopformer.files import read_yaml


@dataclass(frozen=True)
class DataConfig:
    """Where the prepared tokens are and how they are read."""

    path: str = "data"
    documents: bool = False  # mask attention and restart positions at document borders
    prepare: str | None = None  # a source to prepare into `path` first, where it is not there yet
    train_tokenizer: int | None = None  # the size of the tokenizer to train on it

    def __post_init__(self) -> None:
        check_types(self, "data")


@dataclass(frozen=True)
class ObjectiveConfig:
    """CE(full) + short_weight · CE(short) + consistency_weight · consistency, stop-gradient on the full one."""

    short_weight: float = 0.1  # λ₁
    consistency_weight: float = 0.1  # λ₂
    consistency: Literal["hidden", "logits", "distribution"] = "hidden"
    sampler: Literal["compositions", "sequential", "uniform", "continuous"] = "compositions"
    route_draws: int = 1  # equal parts of the global batch, each with a short trajectory of its own
    short_fraction: float = 1.0  # share of the rows that also follow the short trajectory
    chunk: int = 1024  # tokens whose logits exist at a time

    def __post_init__(self) -> None:
        check_types(self, "objective")
        for name in ("short_weight", "consistency_weight"):
            require(getattr(self, name) >= 0, f"objective.{name} must be 0 or more, got {getattr(self, name)}.")
        require(0 < self.short_fraction <= 1, "objective.short_fraction must lie in (0, 1].")
        require(self.route_draws >= 1, f"objective.route_draws must be 1 or more, got {self.route_draws}.")
        require(self.chunk >= 1, f"objective.chunk must be 1 or more, got {self.chunk}.")

    @property
    def elastic(self) -> bool:
        """Whether a short trajectory is followed at all."""
        return self.short_weight > 0 or self.consistency_weight > 0


@dataclass(frozen=True)
class TrainingConfig:
    """Optimizer, schedule, precision, parallelism and what is kept of it."""

    steps: int = 50_000
    batch: int = 480  # sequences per optimizer step, over all ranks
    micro_batch: int | Literal["auto"] = "auto"  # sequences at a time on one device
    learning_rate: float = 6e-4
    min_learning_rate: float = 6e-5
    warmup: int = 4000
    weight_decay: float = 0.2
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 1.0
    dtype: Literal["float32", "bfloat16", "float8"] = "bfloat16"  # of matmuls; float8: of the stack's
    device: str = "auto"
    fused: bool | Literal["auto"] = "auto"  # passes through training/fused; auto: on CUDA below fp32
    compile: bool | Literal["auto"] = "auto"  # the step, not the loop; auto: on CUDA where it is not fused
    checkpoint_loops: bool = False  # keep only the state between loops, recompute inside
    strategy: Literal["ddp", "fsdp"] = "ddp"  # with more than one rank
    seed: int = 0
    threads: int | None = None  # CPU threads; fixed for a run, since bits depend on it
    save_every: int = 1000
    keep: int = 3  # newest checkpoints kept, the best beside them
    validate_every: int = 1000
    validation_windows: int = 256  # windows of the context, spread evenly over the validation split
    log_every: int = 10
    bad_steps: int = 10  # non-finite steps in a row that end the run
    tensorboard: bool = False
    wandb: str | None = None  # a Weights & Biases project

    @property
    def sharded(self) -> bool:
        """Whether several ranks share the weights, and so must follow the same trajectory at the same time."""
        return self.strategy == "fsdp"

    def __post_init__(self) -> None:
        check_types(self, "training")
        counts = ("steps", "batch", "save_every", "keep", "validate_every", "validation_windows", "log_every")
        for name in (*counts, "bad_steps"):
            require(getattr(self, name) >= 1, f"training.{name} must be 1 or more, got {getattr(self, name)}.")
        for name in ("warmup", "weight_decay", "min_learning_rate"):
            require(getattr(self, name) >= 0, f"training.{name} must be 0 or more, got {getattr(self, name)}.")
        require(
            0 < self.learning_rate <= 100, f"training.learning_rate must lie in (0, 100], got {self.learning_rate}."
        )
        require(
            self.threads is None or self.threads >= 1, f"training.threads must be 1 or more, got {self.threads}."
        )
        require(
            self.min_learning_rate <= self.learning_rate,
            f"training.min_learning_rate {self.min_learning_rate} is above learning_rate {self.learning_rate}.",
        )
        require(self.clip > 0, f"training.clip must be positive, got {self.clip}.")
        require(0 <= self.beta1 < 1 and 0 <= self.beta2 < 1, "training.beta1 and beta2 must lie in [0, 1).")
        if isinstance(self.micro_batch, int):
            require(
                1 <= self.micro_batch <= self.batch,
                f"training.micro_batch must lie in 1…{self.batch} (training.batch), got {self.micro_batch}.",
            )


@dataclass(frozen=True)
class RunConfig:
    """One run. `init_from` names a model to start from: a run, a model folder or published weights."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    init_from: str | None = None

    def __post_init__(self) -> None:
        draws, batch = self.objective.route_draws, self.training.batch
        require(batch % draws == 0, f"training.batch {batch} must be a multiple of objective.route_draws {draws}.")
        rows = int(batch // draws * self.objective.short_fraction + 1e-9)
        require(
            not self.objective.elastic or rows >= 1,
            f"objective.short_fraction {self.objective.short_fraction} of {batch // draws} rows is no row at all; "
            "raise it, or lower objective.route_draws.",
        )
        require(
            not self.objective.elastic or self.model.loops >= 2,
            "A model of one loop has no shorter trajectory; "
            "set objective.short_weight and consistency_weight to 0.",
        )
        require(
            not self.objective.elastic
            or self.objective.sampler == "uniform"
            or self.model.conditioning not in ("none", "index"),
            f"A model with conditioning {self.model.conditioning!r} only follows uniform trajectories; "
            "set objective.sampler to uniform.",
        )


def validation_budgets(loops: int) -> list[int]:
    """1, L/4, L/2 and L."""
    return sorted({1, max(1, loops // 4), max(1, loops // 2), loops})


SECTIONS: dict[str, type[Any]] = {
    "model": ModelConfig,
    "data": DataConfig,
    "objective": ObjectiveConfig,
    "training": TrainingConfig,
}


def load_run(source: str | Path, overrides: Sequence[str] = ()) -> tuple[RunConfig, set[str]]:
    """A run's settings from a preset's name or a YAML file, and the dotted keys that the user wrote themselves."""
    path, keys = Path(source), {override.partition("=")[0] for override in overrides}
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise FileProblem(f"There is no config file {path}; check the path, or name a preset.")
        settings = read_yaml(path)
        sections = {name: section for name, section in settings.items() if isinstance(section, Mapping)}
        keys |= {f"{name}.{key}" for name, section in sections.items() for key in section}
    elif str(source) in preset_names() or not path.exists():
        settings = load_preset(str(source))
    else:
        raise LoopformerError(f"{source} is neither a preset nor a .yaml file.")
    for override in overrides:
        _apply(settings, override)
    return run_from_mapping(settings), keys


def with_expected_vocab(run: RunConfig, keys: set[str]) -> RunConfig:
    """Where the data is still to be prepared, its tokenizer's size is the model's vocabulary."""
    if run.data.train_tokenizer is None or "model.vocab" in keys:
        return run
    return dataclasses.replace(run, model=dataclasses.replace(run.model, vocab=run.data.train_tokenizer))


def run_from_mapping(settings: Mapping[str, Any]) -> RunConfig:
    """The validated tree from plain data."""
    known = [*SECTIONS, "init_from", "sizes"]  # sizes: what a preset's file offers, no setting of a run
    for key in settings:
        if key not in known:
            raise LoopformerError(f"Unknown setting {key}; {nearest(str(key), known)}")
    model = settings.get("model")
    if isinstance(model, Mapping) and "vocab" not in model and isinstance(rows := model.get("padded_vocab"), int):
        # The data decides the vocabulary when it is opened; until then it is as large as the rows allow.
        settings = {**settings, "model": {**model, "vocab": max(1, rows)}}
    sections: dict[str, Any] = {
        name: from_mapping(cls, settings.get(name) or {}, name) for name, cls in SECTIONS.items()
    }
    init_from = settings.get("init_from")
    require(init_from is None or isinstance(init_from, str), f"init_from must be a path, got {init_from!r}.")
    return RunConfig(**sections, init_from=init_from)


def run_to_mapping(run: RunConfig) -> dict[str, Any]:
    """A whole run as plain data, which `run_from_mapping` reads."""
    return {**dataclasses.asdict(run), "model": run.model.plain()}


def run_to_yaml(run: RunConfig) -> str:
    return yaml.safe_dump(run_to_mapping(run), sort_keys=False, allow_unicode=True)


def _apply(settings: dict[str, Any], override: str) -> None:
    """Set one `section.key=value`; the value is read as YAML."""
    name, equals, text = override.partition("=")
    require(bool(equals), f"{override!r} is no setting; write key=value, as in training.steps=100.")
    if name == "init_from":
        settings["init_from"] = text
        return
    section, dot, key = name.partition(".")
    if section not in SECTIONS or not dot:
        keys = [f"{s}.{f.name}" for s, cls in SECTIONS.items() for f in dataclasses.fields(cls)]
        full = next((key for key in keys if key.endswith(f".{name}")), None)
        hint = f"did you mean {full}?" if full else nearest(name, keys, f"sections are {', '.join(SECTIONS)}.")
        raise LoopformerError(f"Unknown setting {name}; {hint}")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise LoopformerError(f"The value of {name} is not readable: {text!r}.") from error
    if not isinstance(settings.setdefault(section, {}), dict):
        require(settings[section] is None, f"{section} must be a mapping of settings, got {settings[section]!r}.")
        settings[section] = {}
    settings[section][key] = value


def preset_names() -> list[str]:
    """Every preset that ships with the package, each of its sizes included."""
    names: list[str] = []
    for name, file in _preset_files().items():
        names.append(name)
        names += [f"{name}-{size}" for size in read_yaml(file, name).get("sizes", [])]
    return names


def load_preset(name: str) -> dict[str, Any]:
    """The settings of a preset by name, plain data: `demo`, `paper/loopformer`, `paper/loopformer-1x24`."""
    files = _preset_files()
    if name in files:
        settings = read_yaml(files[name], name)
        settings.pop("sizes", None)
        return settings
    family, _, size = name.rpartition("-")
    if family in files:
        settings = read_yaml(files[family], name)
        if size in settings.pop("sizes", []):
            blocks, loops = map(int, size.split("x"))
            settings["model"] |= {"blocks": blocks, "loops": loops}
            return settings
    raise LoopformerError(
        f"There is no preset {name!r}; {nearest(name, preset_names(), '`loopformer info` lists them.')}"
    )


def _preset_files() -> dict[str, Traversable]:
    root = resources.files("loopformer") / "presets"

    def below(folder: Traversable, prefix: str) -> dict[str, Traversable]:
        files: dict[str, Traversable] = {}
        for entry in sorted(folder.iterdir(), key=lambda item: item.name):
            if entry.is_dir():
                files |= below(entry, f"{prefix}{entry.name}/")
            elif entry.name.endswith(".yaml"):
                files[prefix + entry.name.removesuffix(".yaml")] = entry
        return files

    return below(root, "")
