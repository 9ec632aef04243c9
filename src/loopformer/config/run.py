"""What a run is: one validated tree of model, data, objective and training, and the presets that ship with us.

    run, keys = load_run("demo", ["training.steps=100", "data.path=data/mine"])
    load_preset("paper/loopformer-1x24")     # plain data: a preset, at one of the sizes that its file lists

The defaults are the paper's recipe. A preset or a YAML file gives some keys, `key=value` overrides others.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Literal

import yaml

from loopformer.config.model import ModelConfig, as_number, check_types, from_mapping, setting_names
from loopformer.errors import FileProblem, LoopformerError, nearest, require
from loopformer.files import parse_yaml, read_yaml
from loopformer.trajectory import SAMPLERS

GroupName = Literal["S3", "A5", "S5"]
GROUP_ORDERS: dict[GroupName, int] = {"S3": 6, "A5": 60, "S5": 120}


@dataclass(frozen=True)
class DataConfig:
    """Where the prepared tokens are and how they are read, or the group whose states are to be tracked."""

    path: str = "data"  # the folder that `loopformer prepare` wrote
    documents: bool = False  # mask attention and restart positions at document borders
    prepare: str | None = None  # a source to prepare into `path` first, where it is not there yet
    train_tokenizer: int | None = None  # the size of the tokenizer to train on it
    states: GroupName | None = None  # words over this group instead of text; nothing is read from `path`

    def __post_init__(self) -> None:
        check_types(self, "data")
        if self.states is not None:
            for name in ("documents", "prepare", "train_tokenizer"):
                require(
                    not getattr(self, name),
                    f"data.{name} is for text and data.states draws words; set one of both.",
                )


@dataclass(frozen=True)
class TrainedTrajectory:
    """A trajectory that training follows: when and how it is drawn, and what it counts in the loss."""

    budget: str | int | tuple[int, ...]  # full (L), short (from 1…L-1), any (from 1…L), a number, or [low, high]
    sampler: Literal["compositions", "sequential", "uniform", "continuous"] = "uniform"  # of its steps
    weight: float = 1.0  # of its cross-entropy
    match: float = 0.0  # of its match to the full trajectory, which gets no gradient from it
    rows: float = 1.0  # share of the rows that follow it; shares lie side by side
    during: tuple[float, ...] = (0.0, 1.0)  # the part of training in which it is followed

    def __post_init__(self) -> None:
        for name in ("budget", "during"):  # YAML has lists
            if isinstance(value := getattr(self, name), list):
                object.__setattr__(self, name, tuple(value))
        where = f"objective.trajectories, budget {self.label}"
        bounds = self.budget if isinstance(self.budget, tuple) else (self.budget,)
        whole = all(type(bound) is int and bound >= 1 for bound in bounds)
        require(
            self.budget in ("full", "short", "any")
            or (whole and len(bounds) in (1, 2) and list(bounds) == sorted(bounds)),
            f"{where}: a budget is full, short, any, a number or [low, high].",
        )
        check_types(self, where)
        require(self.budget != "full" or self.match == 0, f"{where}: it is what the others are matched with.")
        for name in ("weight", "match"):
            require(getattr(self, name) >= 0, f"{where}: {name} must be 0 or more, got {getattr(self, name)}.")
        require(0 < self.rows <= 1, f"{where}: rows must lie in (0, 1], got {self.rows}.")
        spanned = [as_number(bound) for bound in self.during]
        numbers = [bound for bound in spanned if bound is not None]
        require(
            len(numbers) == 2 == len(spanned) and 0 <= numbers[0] < numbers[1] <= 1,
            f"{where}: during must be two shares of training, such as [0, 0.5], got {self.during}.",
        )
        object.__setattr__(self, "during", tuple(numbers))

    @property
    def label(self) -> str:
        """Its name in what is logged."""
        return "-".join(map(str, self.budget)) if isinstance(self.budget, tuple) else str(self.budget)

    def budgets(self, loops: int) -> tuple[int, int]:
        """The smallest and the largest budget that it has with so many loops."""
        if isinstance(self.budget, int):
            return self.budget, self.budget
        if isinstance(self.budget, tuple):
            return self.budget[0], self.budget[-1]
        return {"full": (loops, loops), "short": (1, loops - 1), "any": (1, loops)}[self.budget]

    def covers(self, other: TrainedTrajectory) -> bool:
        """Whether it is followed wherever and whenever another one is."""
        return self.rows == 1 and self.during[0] <= other.during[0] and other.during[1] <= self.during[1]

    def shares_with(self, other: TrainedTrajectory) -> bool:
        """Whether the rows of each step are shared out between the two."""
        at_once = max(self.during[0], other.during[0]) < min(self.during[1], other.during[1])
        return self.rows < 1 > other.rows and at_once

    def active(self, progress: float) -> bool:
        """Whether it is followed when this share of training is behind."""
        return self.during[0] <= progress < self.during[1]


@dataclass(frozen=True)
class ObjectiveConfig:
    """A weighted sum over trajectories: the cross-entropy of each, and its match to the full one.

    The default is the paper's: the full trajectory and a short one, λ₁ = λ₂ = 0.1. `short_weight` (λ₁),
    `consistency_weight` (λ₂), `sampler` and `short_fraction` are another way to write such a pair.
    """

    trajectories: tuple[TrainedTrajectory, ...] = ()  # docs/training.md; none: the paper's two
    consistency: Literal["hidden", "logits", "distribution"] = "hidden"  # what is matched with the full one's
    route_draws: int = 1  # equal parts of the global batch, each with drawn trajectories of its own
    chunk: int = 1024  # tokens whose logits exist at a time
    short_weight: InitVar[float | None] = None
    consistency_weight: InitVar[float | None] = None
    sampler: InitVar[str | None] = None
    short_fraction: InitVar[float | None] = None

    def __post_init__(
        self,
        short_weight: float | None,
        consistency_weight: float | None,
        sampler: str | None,
        short_fraction: float | None,
    ) -> None:
        pair = (short_weight, consistency_weight, sampler, short_fraction)
        written = [name for name, value in zip(PAIR, pair, strict=True) if value is not None]
        require(
            not self.trajectories or not written,
            f"objective.trajectories says what objective.{''.join(written[:1])} says; leave one of them out.",
        )
        given: Any = self.trajectories
        require(
            isinstance(given, list | tuple) and given != [],
            "objective.trajectories must be a list of trajectories, each with its budget.",
        )
        entries = [_trajectory(entry) for entry in self.trajectories] or _pair(*pair)
        object.__setattr__(self, "trajectories", tuple(entries))
        check_types(self, "objective")
        require(self.route_draws >= 1, f"objective.route_draws must be 1 or more, got {self.route_draws}.")
        require(self.chunk >= 1, f"objective.chunk must be 1 or more, got {self.chunk}.")
        teachers = [entry for entry in entries if entry.budget == "full"]
        for entry in entries:
            require(
                entry.match == 0 or any(teacher.covers(entry) for teacher in teachers),
                f"objective.trajectories: budget {entry.label} is matched with the full trajectory, "
                "which must be in the list, on all rows, always and for as long.",
            )
        borders = sorted({0.0, 1.0, *(bound for entry in entries for bound in entry.during)})
        for start in borders[:-1]:
            weighty = [entry for entry in entries if entry.active(start) and entry.weight > 0]
            shared = sum(entry.rows for entry in weighty if entry.rows < 1)  # side by side
            require(
                bool(weighty),
                f"objective.trajectories: from {start:g} of training on no trajectory with a weight is followed; "
                "let one begin there, or give one a weight.",
            )
            require(
                any(entry.rows == 1 for entry in weighty) or shared > 1 - 1e-9,
                f"objective.trajectories: from {start:g} of training on not all rows are trained; "
                "leave rows out of one of them, or let them add up to 1.",
            )

    @property
    def elastic(self) -> bool:
        """Whether more than one budget is trained."""
        budgets = {tuple(entry.budgets(1 << 30)) for entry in self.trajectories}
        return len(budgets) > 1 or any(low < high for low, high in budgets)


MOST_THREADS = 1024  # more than any machine has cores for one process
PAIR = ("short_weight", "consistency_weight", "sampler", "short_fraction")  # the paper's two trajectories, by λ


def _trajectory(entry: Any) -> TrainedTrajectory:
    if isinstance(entry, TrainedTrajectory):
        return entry
    if (
        isinstance(entry, Mapping) and entry.get("chance") == 1
    ):  # a setting that is gone; files of runs still say it
        entry = {key: value for key, value in entry.items() if key != "chance"}
    return from_mapping(TrainedTrajectory, entry, "each of objective.trajectories")


def _as_pair(trajectories: Any) -> dict[str, Any]:
    """The keys that write such a list of trajectories as the paper's pair; none where it is no pair."""
    try:
        full, *rest = ObjectiveConfig(trajectories=trajectories).trajectories
    except (LoopformerError, TypeError):
        return {}
    short = rest[0] if rest else TrainedTrajectory("short", "compositions", 0.0, 0.0)
    alone = dataclasses.replace(short, sampler="uniform", weight=1.0, match=0.0, rows=1.0)
    if full != TrainedTrajectory("full") or len(rest) > 1 or alone != TrainedTrajectory("short"):
        return {}
    return dict(zip(PAIR, (short.weight, short.match, short.sampler, short.rows), strict=True))


def _pair(
    short_weight: float | None, consistency_weight: float | None, sampler: str | None, short_fraction: float | None
) -> list[TrainedTrajectory]:
    """CE(full) + λ₁·CE(short) + λ₂·match, or the full trajectory alone where both are 0."""

    def number(name: str, given: Any, default: float) -> float:
        value = default if given is None else as_number(given)
        require(value is not None and value >= 0, f"objective.{name} must be a number of 0 or more, got {given!r}.")
        assert value is not None
        return value

    weight, match = number("short_weight", short_weight, 0.1), number("consistency_weight", consistency_weight, 0.1)
    rows = number("short_fraction", short_fraction, 1.0)
    require(0 < rows <= 1, "objective.short_fraction must lie in (0, 1].")
    drawn = "compositions" if sampler is None else sampler
    require(
        drawn in SAMPLERS,
        f"objective.sampler must be one of {', '.join(SAMPLERS)}, got {sampler!r}.",
    )
    short = TrainedTrajectory("short", drawn, weight, match, rows)  # type: ignore[arg-type]
    return [TrainedTrajectory("full"), *([short] if weight > 0 or match > 0 else [])]


@dataclass(frozen=True)
class TrainingConfig:
    """Optimizer, schedule, precision, parallelism and what is kept of it."""

    steps: int = 50_000  # of the optimizer
    batch: int = 480  # sequences per optimizer step, over all ranks
    micro_batch: int | Literal["auto"] = "auto"  # sequences at a time on one device
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: of the blocks' matrices; the rest is always AdamW's
    learning_rate: float = 6e-4  # after the warmup; then it falls along a cosine
    min_learning_rate: float = 6e-5  # at the end
    matrix_learning_rate: float = 0.02  # Muon's; it follows the schedule of learning_rate in proportion
    warmup: int = 4000  # steps in which the rate rises
    weight_decay: float = 0.2  # of matrices; with Muon only of its own
    beta1: float = 0.9  # AdamW's
    beta2: float = 0.95
    clip: float = 1.0  # the largest norm of a gradient
    dtype: Literal["float32", "bfloat16", "float8"] = "bfloat16"  # of matmuls; float8: of the stack's
    device: str = "auto"  # cpu, cuda, mps; auto: the best there is
    fused: bool | Literal["auto"] = "auto"  # passes through training/fused; auto: on CUDA below fp32
    compile: bool | Literal["auto"] = "auto"  # the step, not the loop; auto: on CUDA where it is not fused
    checkpoint_loops: bool = False  # keep only the state between loops, recompute inside
    strategy: Literal["ddp", "fsdp"] = "ddp"  # with more than one rank
    seed: int = 0  # of the start, the samples and the trajectories
    threads: int | None = None  # CPU threads; fixed for a run, since bits depend on it
    save_every: int = 1000  # steps from one checkpoint to the next
    keep: int = 3  # newest checkpoints kept, the best beside them
    validate_every: int = 1000  # steps
    validation_windows: int = 256  # windows of the context, spread evenly over the validation split
    log_every: int = 10  # steps
    bad_steps: int = 10  # non-finite steps in a row that end the run
    tensorboard: bool = False  # write its files, too
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
            0 < self.matrix_learning_rate <= 100,
            f"training.matrix_learning_rate must lie in (0, 100], got {self.matrix_learning_rate}.",
        )
        require(0 <= self.seed < 2**63, f"training.seed must lie in 0…2^63-1, got {self.seed}.")
        require(
            self.threads is None or 1 <= self.threads <= MOST_THREADS,
            f"training.threads must be 1 or more, and {MOST_THREADS:,} at most; got {self.threads}.",
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
        draws, batch, loops = self.objective.route_draws, self.training.batch, self.model.loops
        require(batch % draws == 0, f"training.batch {batch} must be a multiple of objective.route_draws {draws}.")
        for entry in self.objective.trajectories:
            low, high = entry.budgets(loops)
            require(
                1 <= low <= high <= loops,
                "A model of one loop has no shorter trajectory; follow only the full one: "
                "objective.trajectories=[{budget: full}]."
                if loops == 1 and entry.budget == "short"
                else f"objective.trajectories: budget {entry.label} is beyond the model's {loops} loops.",
            )
            require(
                int(batch // draws * entry.rows + 1e-9) >= 1,
                f"objective.trajectories, budget {entry.label}: rows {entry.rows} (objective.short_fraction) of "
                f"{batch // draws} rows is no row; raise it, or training.batch to {math.ceil(draws / entry.rows)}.",
            )
            require(
                entry.sampler == "uniform"
                or entry.budget in ("full", 1)
                or self.model.conditioning not in ("none", "index"),
                f"A model with conditioning {self.model.conditioning!r} only follows uniform trajectories; "
                f"set the sampler of budget {entry.label} to uniform (without a list, objective.sampler).",
            )


def validation_budgets(loops: int) -> list[int]:
    """1, L/4, L/2 and L."""
    return sorted({1, max(1, loops // 4), max(1, loops // 2), loops})


DEFAULT_PRESET = "elastic"  # what is trained where nothing is named
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
        if "data.path" in keys and "prepare" in settings.get("data", {}):  # it belongs into the preset's own folder
            del settings["data"]["prepare"]
    else:
        raise LoopformerError(f"{source} is neither a preset nor a .yaml file.")
    for override in overrides:
        _apply(settings, override)
    return run_from_mapping(settings), keys


def with_expected_vocab(run: RunConfig, keys: set[str]) -> RunConfig:
    """Where data is still to be prepared, its tokenizer's size is the model's vocabulary; a group has its own."""
    states = run.data.states
    vocab = run.data.train_tokenizer if states is None else GROUP_ORDERS[states] + 1
    if vocab is None or "model.vocab" in keys:
        return run
    return dataclasses.replace(run, model=dataclasses.replace(run.model, vocab=vocab))


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
        settings["init_from"] = None if text in ("", "~", "null") else text
        return
    section, dot, key = name.partition(".")
    if section not in SECTIONS or not dot:
        keys = [f"{section}.{key}" for section, cls in SECTIONS.items() for key in setting_names(cls)]
        full = next((key for key in keys if key.endswith(f".{name}")), None)
        hint = f"did you mean {full}?" if full else nearest(name, keys, f"sections are {', '.join(SECTIONS)}.")
        raise LoopformerError(f"Unknown setting {name}; {hint}")
    try:
        value = parse_yaml(text)
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise LoopformerError(f"The value of {name} is not readable: {text!r}.") from error
    if not isinstance(settings.setdefault(section, {}), dict):
        require(settings[section] is None, f"{section} must be a mapping of settings, got {settings[section]!r}.")
        settings[section] = {}
    if section == "objective":  # the list and the pair are two ways to write one thing: the last one counts
        if key == "trajectories":
            settings[section] = {name: old for name, old in settings[section].items() if name not in PAIR}
        elif key in PAIR and "trajectories" in settings[section]:
            settings[section] |= _as_pair(settings[section].pop("trajectories"))
    settings[section][key] = value


def preset_names() -> list[str]:
    """Every preset that ships with the package, each of its sizes included."""
    names: list[str] = []
    for name, file in _preset_files().items():
        names.append(name)
        names += [f"{name}-{size}" for size in read_yaml(file, name).get("sizes", [])]
    return names


@dataclass(frozen=True)
class PresetSummary:
    """A preset, what its file says of it first, and the sizes it also comes in."""

    name: str
    about: str
    sizes: tuple[str, ...]


def preset_summaries() -> list[PresetSummary]:
    summaries = []
    for name, file in _preset_files().items():
        lines = itertools.takewhile(lambda line: line.startswith("#"), file.read_text("utf-8").splitlines())
        about = re.split(r"(?<=\.) |; ", " ".join(line.removeprefix("#").strip() for line in lines))[0]
        summaries.append(PresetSummary(name, about.rstrip("."), tuple(read_yaml(file, name).get("sizes", []))))
    return summaries


def described_settings() -> Iterator[tuple[str, str, str]]:
    """Every setting: its name, what may stand there with its default first, and what it means; all of it is read
    from the lines that define it."""
    written = re.compile(r"    (\w+): (.+?) = (?:beyond_paper\((.+?)\)|(.+?))(?:  # (.*))?")
    for section, cls in SECTIONS.items():
        for line in inspect.getsource(cls).split("    def ")[0].splitlines():
            if (match := written.fullmatch(line)) and "InitVar" not in match[2]:
                name, kind, beyond, default, meaning = match.groups()
                choices = re.search(r"Literal\[(.*)\]", kind)
                allowed = f" ({choices[1]})" if choices else ""
                yield f"{section}.{name}", ((beyond or default) + allowed).replace('"', ""), meaning or ""


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
