"""The settings of a run: model, data, objective and training as one checked tree, and the presets of the package.

    run, keys = load_run("demo", ["training.steps=100", "data.path=data/mine"])
    load_preset("paper/loopformer-1x24")     # a dict: this preset with 1 block and 24 loops

The defaults are the paper's recipe. A preset or a YAML file gives some keys, and `key=value` overrides them.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml

from loopformer.config.model import (
    RENAMED_KEYS,
    ModelConfig,
    as_number,
    check_keys,
    check_settings,
    from_mapping,
    setting,
    setting_names,
    with_current_keys,
)
from loopformer.errors import FileProblem, LoopformerError, nearest, require
from loopformer.files import parse_yaml, read_yaml
from loopformer.trajectory import Sampler

GroupName = Literal["S3", "A5", "S5"]
GROUP_ORDERS: dict[GroupName, int] = {"S3": 6, "A5": 60, "S5": 120}


@dataclass(frozen=True)
class DataConfig:
    """What to train on: prepared tokens, random words over a group, or stories of a small world."""

    path: str = setting("data", "The folder that `loopformer prepare` wrote.")
    documents: bool = setting(False, "Mask attention and restart positions at document borders.")
    prepare: str | None = setting(None, "A source to prepare into path if the folder is not there.")
    train_tokenizer: int | None = setting(None, "Vocabulary size of a tokenizer to train on that source.")
    states: GroupName | None = setting(None, "Track states of this group instead of reading text.")  # noqa: RUF009
    stories: str | None = setting(None, "Tell stories of this world: its name or file.")
    story_rows: float = setting(1.0, "Share of the rows that are stories; the others are text.", above=0, maximum=1)
    loss: Literal["answers", "text"] = setting(
        "answers", "What stories train: their answers, or all of their text."
    )
    workers: int = setting(0, "Processes that draw stories; 0: the trainer itself.", minimum=0, maximum=256)
    curriculum: float = setting(0.4, "Share of the steps until stories have all hops.", minimum=0, maximum=1)

    def __post_init__(self) -> None:
        check_settings(self, "data")
        both = "data.states and data.stories exclude each other; leave one of them out."
        require(self.states is None or self.stories is None, both)
        for name in ("documents", "prepare", "train_tokenizer"):
            is_unused = not self.is_generated or not getattr(self, name)
            source = "data.stories" if self.states is None else "data.states"
            require(is_unused, f"data.{name} applies to text, not to {source}; leave one of them out.")
        is_unused = self.stories is not None or (self.story_rows == 1 and self.workers == 0)
        require(is_unused, "data.story_rows and data.workers need data.stories; set it too.")
        both = "data.documents does not apply where data.story_rows mixes text with stories; leave it out."
        require(not self.documents or self.stories is None, both)

    @property
    def is_generated(self) -> bool:
        """Whether the data is drawn, so that nothing is read from `path`."""
        return self.states is not None or (self.stories is not None and self.story_rows == 1)


@dataclass(frozen=True)
class TrainedTrajectory:
    """One entry of the objective: a budget, how its steps are drawn, and its weight in the loss."""

    budget: str | int | tuple[int, ...]  # full (L), short (1…L-1), any (1…L), a number, or [low, high]
    sampler: Sampler = setting("uniform", "Draws steps.")  # noqa: RUF009
    weight: float = setting(1.0, "Weight of its cross-entropy.", minimum=0)
    match: float = setting(0.0, "Weight of its distance to the full trajectory.", minimum=0)
    rows: float = setting(1.0, "Share of the rows that train on it.", above=0, maximum=1)
    active_range: tuple[float, ...] = setting((0.0, 1.0), "The part of training that uses it.")
    exits: float = setting(0.0, "Weight of the cross-entropy after one of its loops before the last.", minimum=0)

    def __post_init__(self) -> None:
        where = f"objective.trajectories, budget {self}"
        bounds = list(self.budget) if isinstance(self.budget, list | tuple) else [self.budget]
        is_range = len(bounds) in (1, 2) and all(type(bound) is int and bound >= 1 for bound in bounds)
        is_budget = self.budget in ("full", "short", "any") or (is_range and bounds == sorted(bounds))
        require(is_budget, f"{where}: a budget is full, short, any, a number or [low, high].")
        check_settings(self, where)
        require(self.budget != "full" or self.match == 0, f"{where}: match compares others with it; leave it out.")
        active = self.active_range
        is_interval = len(active) == 2 and 0 <= active[0] < active[1] <= 1
        require(is_interval, f"{where}: active_range must be two shares, such as [0, 0.5], got {active}.")

    def __str__(self) -> str:
        """The budget as it appears in logs, such as `short` or `2-4`."""
        return "-".join(map(str, self.budget)) if isinstance(self.budget, list | tuple) else str(self.budget)

    def budgets(self, loops: int) -> tuple[int, int]:
        """The smallest and the largest budget that can be drawn in a model with this many loops."""
        if isinstance(self.budget, int):
            return self.budget, self.budget
        if isinstance(self.budget, tuple):
            return self.budget[0], self.budget[-1]
        return {"full": (loops, loops), "short": (1, loops - 1), "any": (1, loops)}[self.budget]

    def covers(self, other: TrainedTrajectory) -> bool:
        """Whether this entry trains on all rows, in every step in which the other is active."""
        start, stop = self.active_range
        return self.rows == 1 and start <= other.active_range[0] and other.active_range[1] <= stop

    def splits_rows_with(self, other: TrainedTrajectory) -> bool:
        """Whether both train on fewer than all rows and are active in the same steps."""
        starts, stops = zip(self.active_range, other.active_range, strict=True)
        return max(self.rows, other.rows) < 1 and max(starts) < min(stops)

    def is_active(self, progress: float) -> bool:
        """Whether the entry is used once this share of training is done."""
        return self.active_range[0] <= progress < self.active_range[1]


PAPER_TRAJECTORIES = (TrainedTrajectory("full"), TrainedTrajectory("short", "compositions", 0.1, 0.1))


@dataclass(frozen=True)
class ObjectiveConfig:
    """The loss: a weighted sum over trajectories of cross-entropy and distance to the full trajectory."""

    trajectories: tuple[TrainedTrajectory, ...] = setting(PAPER_TRAJECTORIES, "Budgets, samplers and weights.")
    consistency: Literal["hidden", "logits", "distribution"] = setting("hidden", "What match compares.")
    draws: Literal["part", "row"] = setting("part", "Who draws trajectories: each part of the batch, or each row.")
    trajectory_groups: int = setting(1, "Equal parts of the batch; with draws=part each draws its own.", minimum=1)
    chunk: int = setting(1024, "Tokens with logits in memory at a time.", minimum=1)

    def __post_init__(self) -> None:
        is_list = isinstance(self.trajectories, list | tuple) and len(self.trajectories) > 0
        require(is_list, "objective.trajectories must be a list of trajectories, each with its budget.")
        check_settings(self, "objective")
        conflict = "objective.draws=row draws for every row; leave objective.trajectory_groups at 1."
        require(self.draws == "part" or self.trajectory_groups == 1, conflict)
        teachers = [entry for entry in self.trajectories if entry.budget == "full"]
        for entry in self.trajectories:
            has_teacher = entry.match == 0 or any(teacher.covers(entry) for teacher in teachers)
            need = "the full trajectory must be in the list, on all rows and for at least as long"
            require(has_teacher, f"objective.trajectories: to match budget {entry}, {need}.")
        for start in self.phase_starts:
            phase = f"objective.trajectories: from {start:g} of training on"
            shares = [entry.rows for entry in self.trajectories if entry.is_active(start) and entry.weight > 0]
            require(bool(shares), f"{phase} no active trajectory has a weight; add one or give one a weight.")
            # 0.7 + 0.2 + 0.1 is just below 1 in floating point.
            is_covered = max(shares) == 1 or sum(shares) > 1 - 1e-9
            require(is_covered, f"{phase} not all rows are trained; give one all rows, or let them add up to 1.")

    @property
    def phase_starts(self) -> list[float]:
        """The shares of training at which entries become active or inactive. Between them nothing changes."""
        return sorted({0.0, *(bound for entry in self.trajectories for bound in entry.active_range)} - {1.0})

    @property
    def is_elastic(self) -> bool:
        """Whether more than one budget is trained."""
        # The objective does not know L. A number above all fixed budgets stands in for it.
        budgets = {tuple(entry.budgets(1 << 30)) for entry in self.trajectories}
        return len(budgets) > 1 or any(low < high for low, high in budgets)


@dataclass(frozen=True)
class TrainingConfig:
    """Optimizer, learning rate schedule, precision, parallelism, checkpoints and logs."""

    steps: int = setting(50_000, "Optimizer steps.", minimum=1)
    batch: int = setting(480, "Sequences per optimizer step, over all ranks.", minimum=1, maximum=1 << 32)
    micro_batch: int | Literal["auto"] = setting("auto", "Sequences at a time on one device.", minimum=1)
    optimizer: Literal["adamw", "muon"] = setting("adamw", "Muon updates the blocks' matrices, AdamW the rest.")
    learning_rate: float = setting(6e-4, "Peak after the warmup; decays along a cosine.", above=0, maximum=100)
    min_learning_rate: float = setting(6e-5, "The learning rate of the last step.", minimum=0)
    matrix_learning_rate: float = setting(0.02, "Peak for Muon; same schedule.", above=0, maximum=100)
    warmup: int = setting(4000, "Steps of linear warmup.", minimum=0)
    weight_decay: float = setting(0.2, "Of matrices; with muon, only of those it updates.", minimum=0)
    beta1: float = setting(0.9, "AdamW's first beta.", minimum=0, below=1)
    beta2: float = setting(0.95, "AdamW's second beta.", minimum=0, below=1)
    clip: float = setting(1.0, "Largest gradient norm.", above=0)
    dtype: Literal["float32", "bfloat16", "float8"] = setting("bfloat16", "For matmuls; float8: stack only.")
    device: str = setting("auto", "cpu, cuda, mps, or auto for the best available.")
    fused: bool | Literal["auto"] = setting("auto", "Use the fused kernels; auto: on CUDA below float32.")
    compile: bool | Literal["auto"] = setting("auto", "Compile the stack; auto: on CUDA without fused kernels.")
    graphs: bool | Literal["auto"] = setting("auto", "Run steps as CUDA graphs; auto: on one CUDA GPU.")
    checkpoint_loops: bool = setting(False, "Keep only the state between loops and recompute the rest in backward.")
    strategy: Literal["ddp", "fsdp"] = setting("ddp", "Parallelism with more than one rank.")
    seed: int = setting(0, "Seed of initial weights, samples and trajectories.", minimum=0, below=2**63)
    threads: int | None = setting(None, "CPU threads; null for PyTorch's own.", minimum=1, maximum=1024)
    save_every: int = setting(1000, "Steps between checkpoints.", minimum=1)
    keep: int = setting(3, "Newest checkpoints to keep, besides the best.", minimum=1)
    validate_every: int = setting(1000, "Steps between validations.", minimum=1)
    validation_windows: int = setting(256, "Sequences of the validation split, spread evenly.", minimum=1)
    log_every: int = setting(10, "Steps between log records.", minimum=1)
    bad_steps: int = setting(10, "Stop after this many consecutive non-finite gradients.", minimum=1)
    tensorboard: bool = setting(False, "Also write TensorBoard files.")
    wandb: str | None = setting(None, "Also log to this Weights & Biases project.")

    def __post_init__(self) -> None:
        check_settings(self, "training")
        low, high, micro_batch = self.min_learning_rate, self.learning_rate, self.micro_batch
        require(low <= high, f"training.min_learning_rate {low} is above learning_rate {high}.")
        fits = micro_batch == "auto" or micro_batch <= self.batch
        require(fits, f"training.micro_batch {micro_batch} is above training.batch {self.batch}; lower it.")

    @property
    def is_sharded(self) -> bool:
        """Whether each rank holds a shard of the weights.

        Ranks then gather weights together in every block, so all must run the same trajectory at the same time, or
        they deadlock.
        """
        return self.strategy == "fsdp"


@dataclass(frozen=True)
class RunConfig:
    """One run. `init_from` names a model to start from: a run, a model folder or published weights."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    init_from: str | None = None

    def __post_init__(self) -> None:
        groups, batch, loops = self.objective.trajectory_groups, self.training.batch, self.model.loops
        is_multiple, group_rows = batch % groups == 0, batch // groups
        require(is_multiple, f"training.batch {batch} must be a multiple of objective.trajectory_groups {groups}.")
        # Rounding may leave a share just below a whole number of rows.
        fewest_rows = math.ceil(1 / min(entry.rows for entry in self.objective.trajectories) - 1e-9)
        remedy = f"raise it, or training.batch to {groups * fewest_rows}, the smallest for this objective"
        knows_step = self.model.conditioning not in ("none", "index")
        no_short = "A model of one loop has no shorter trajectory; set objective.trajectories=[{budget: full}]."
        for entry in self.objective.trajectories:
            where = f"objective.trajectories, budget {entry}"
            require(loops > 1 or entry.budget != "short", no_short)
            low, high = entry.budgets(loops)
            require(high <= loops, f"{where} is beyond the model's {loops} loops.")
            require(entry.exits == 0 or low > 1, f"{where}: exits needs 2 loops or more; set it to 0.")
            has_row = int(group_rows * entry.rows + 1e-9) >= 1  # rounding may leave just below 1
            require(has_row, f"{where}: rows {entry.rows} of {group_rows} rows is less than one row; {remedy}.")
            require(
                knows_step or entry.sampler == "uniform" or entry.budget in ("full", 1),
                f"A model with conditioning {self.model.conditioning!r} only follows uniform trajectories; "
                f"set the sampler of budget {entry} to uniform.",
            )


def paper_run(model: ModelConfig) -> RunConfig:
    """A run of the paper's objective, as far as this model can follow it."""
    if model.loops == 1:
        return RunConfig(model, objective=ObjectiveConfig((TrainedTrajectory("full"),)))
    sampler: Sampler = "uniform" if model.conditioning in ("none", "index") else "compositions"
    return RunConfig(
        model, objective=ObjectiveConfig((TrainedTrajectory("full"), TrainedTrajectory("short", sampler, 0.1, 0.1)))
    )


def validation_budgets(loops: int) -> list[int]:
    """The budgets that validation measures: 1, L/4, L/2 and L."""
    return sorted({1, max(1, loops // 4), max(1, loops // 2), loops})


DEFAULT_PRESET = "elastic"
SECTIONS: dict[str, type[Any]] = {
    "model": ModelConfig,
    "data": DataConfig,
    "objective": ObjectiveConfig,
    "training": TrainingConfig,
}
# Earlier versions had these keys instead of a list of trajectories, and files that have them still load. The order
# matters: `_with_current_settings` unpacks the values.
OLD_DEFAULTS = {"short_weight": 0.1, "consistency_weight": 0.1, "sampler": "compositions", "short_fraction": 1.0}


def load_run(source: str | Path, overrides: Sequence[str] = ()) -> tuple[RunConfig, set[str]]:
    """The settings from a preset's name or a YAML file, and the dotted keys that the user set."""
    path, keys = Path(source), {override.partition("=")[0] for override in overrides}
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise FileProblem(f"There is no config file {path}; check the path, or name a preset.")
        settings = _with_current_settings(read_yaml(path))
        keys |= {f"{name}.{key}" for name in SECTIONS for key in settings[name]}
    elif str(source) in preset_names() or not path.exists():
        settings = _with_current_settings(load_preset(str(source)))
        # If the user's data.path does not exist, that is an error. Do not prepare the preset's source into it.
        if "data.path" in keys:
            settings["data"].pop("prepare", None)
    else:
        raise LoopformerError(f"{source} is neither a preset nor a .yaml file.")
    for override in overrides:
        _apply(settings, override)
    return run_from_mapping(settings), keys


def with_expected_vocab(run: RunConfig, keys: set[str]) -> RunConfig:
    """The run with the vocabulary that its data will have, unless the user set model.vocab (in `keys`)."""
    states = run.data.states
    vocab = run.data.train_tokenizer if states is None else GROUP_ORDERS[states] + 1  # and the end token
    if vocab is None or "model.vocab" in keys:
        return run
    return dataclasses.replace(run, model=dataclasses.replace(run.model, vocab=vocab))


def run_from_mapping(settings: Mapping[str, Any]) -> RunConfig:
    """The checked settings from a mapping, which may come from an earlier version."""
    settings = _with_current_settings(settings)
    model, init_from = settings["model"], settings.get("init_from")
    if "vocab" not in model and isinstance(rows := model.get("padded_vocab"), int):
        # The data decides the vocabulary when it is opened. Until then it is the size of the embedding matrix.
        settings["model"] = {**model, "vocab": max(1, rows)}
    require(init_from is None or isinstance(init_from, str), f"init_from must be a path, got {init_from!r}.")
    sections: dict[str, Any] = {name: from_mapping(cls, settings[name], name) for name, cls in SECTIONS.items()}
    return RunConfig(**sections, init_from=init_from)


def _with_current_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of settings from any version, with every section and with today's keys."""
    # `sizes` is in the files of presets only. It is not a setting of a run.
    check_keys(settings, [*SECTIONS, "init_from", "sizes"])
    sections = {name: settings.get(name) or {} for name in SECTIONS}
    for name, section in sections.items():
        require(isinstance(section, Mapping), f"{name} must be a mapping of settings, got {section!r}.")
        sections[name] = with_current_keys(section)
    objective = sections["objective"]
    old = {key: value for key in OLD_DEFAULTS if (value := objective.pop(key, None)) is not None}
    if old:
        conflict = f"objective.trajectories replaces objective.{next(iter(old))}; leave one of them out."
        require("trajectories" not in objective, conflict)
        weight, match, sampler, rows = (OLD_DEFAULTS | old).values()
        short = {"budget": "short", "sampler": sampler, "weight": weight, "match": match, "rows": rows}
        has_short = as_number(weight) != 0 or as_number(match) != 0
        objective["trajectories"] = [{"budget": "full"}, *([short] if has_short else [])]
    return {**settings, **sections}


def run_to_mapping(run: RunConfig) -> dict[str, Any]:
    """The settings as a dict that JSON and YAML can hold. `run_from_mapping` reads it back."""
    return {**dataclasses.asdict(run), "model": run.model.plain()}


def run_to_yaml(run: RunConfig) -> str:
    return yaml.safe_dump(run_to_mapping(run), sort_keys=False, allow_unicode=True)


def _apply(settings: dict[str, Any], override: str) -> None:
    """Set one `section.key=value`; the value is read as YAML."""
    name, equals, text = override.partition("=")
    require(bool(equals), f"{override!r} is not a setting; write key=value, as in training.steps=100.")
    if name == "init_from":
        settings["init_from"] = None if text in ("", "~", "null") else text
        return
    section, dot, key = name.partition(".")
    if section not in SECTIONS or not dot:
        keys = [f"{section}.{key}" for section, cls in SECTIONS.items() for key in setting_names(cls)]
        full = next((key for key in keys if key.endswith(f".{name}")), None)
        hint = f"did you mean {full}?" if full else nearest(name, keys, f"sections are {', '.join(SECTIONS)}.")
        raise LoopformerError(f"Unknown setting {name}; {hint}")
    require(
        section != "objective" or key not in OLD_DEFAULTS,
        f"{name} was removed; write the list of trajectories instead, as in "
        "objective.trajectories='[{budget: full}, {budget: short, sampler: compositions, weight: 0.1}]'.",
    )
    try:
        value = parse_yaml(text)
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise LoopformerError(f"The value of {name} is not readable: {text!r}.") from error
    settings[section][RENAMED_KEYS.get(key, key)] = value


@dataclass(frozen=True)
class PresetSummary:
    """A preset: its name, the first sentence of its file, and the sizes that it can be loaded in."""

    name: str
    about: str
    sizes: tuple[str, ...]


def list_presets() -> list[PresetSummary]:
    summaries = []
    for name, file in _preset_files().items():
        comment = itertools.takewhile(lambda line: line.startswith("#"), file.read_text("utf-8").splitlines())
        about = re.split(r"(?<=\.) |; ", " ".join(line.removeprefix("#").strip() for line in comment))[0]
        summaries.append(PresetSummary(name, about.rstrip("."), tuple(read_yaml(file, name).get("sizes", []))))
    return summaries


def preset_names() -> list[str]:
    """The names of all presets, with and without a size."""
    names = [(preset.name, *(f"{preset.name}-{size}" for size in preset.sizes)) for preset in list_presets()]
    return list(itertools.chain(*names))


def describe_settings() -> Iterator[tuple[str, str, str]]:
    """Every setting: its name, its default with the other choices, and its help text."""
    for section, cls in SECTIONS.items():
        hints = get_type_hints(cls)
        for entry in dataclasses.fields(cls):
            default = json.dumps(entry.default, default=str, ensure_ascii=False).replace('"', "")
            hint = hints[entry.name]
            choices = f" ({', '.join(get_args(hint))})" if get_origin(hint) is Literal else ""
            yield f"{section}.{entry.name}", default + choices, entry.metadata["help"]


def load_preset(name: str) -> dict[str, Any]:
    """The settings of a preset as a dict. A size, as in `paper/loopformer-1x24`, sets its blocks and loops."""
    files = _preset_files()
    family, _, size = (name, "", "") if name in files else name.rpartition("-")
    settings = read_yaml(files[family], name) if family in files else {}
    if size in settings.pop("sizes", []):
        blocks, loops = map(int, size.split("x"))
        settings["model"] |= {"blocks": blocks, "loops": loops}
    elif family != name:
        hint = nearest(name, preset_names(), "`loopformer info` lists them.")
        raise LoopformerError(f"There is no preset {name!r}; {hint}")
    return settings


def _preset_files() -> dict[str, Path]:
    root = Path(str(resources.files("loopformer"))) / "presets"
    return {path.relative_to(root).with_suffix("").as_posix(): path for path in sorted(root.rglob("*.yaml"))}
