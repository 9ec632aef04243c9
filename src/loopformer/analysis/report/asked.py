"""What a report is asked for, checked before anything is measured.

asked = Asked(("runs/a", "runs/b"), texts=read_texts(["news=news.jsonl"]), budgets=read_budgets("1,2,4"))
asked.names                       # ("a", "b"): the shortest ends of the paths that tell them apart
asked.budgets_of(ModelConfig())   # those of the budgets that this model can follow
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from loopformer.analysis.names import model_names, short_path
from loopformer.config import ModelConfig, whole_numbers
from loopformer.errors import nearest, require
from loopformer.evaluation.loglikelihood import BATCH_TOKENS
from loopformer.evaluation.text import default_text
from loopformer.training.validation import validation_budgets

PARTS = ("perplexity", "tasks", "search", "analysis")


@dataclass(frozen=True)
class Source:
    """A text: the name it has in the report, and where it is."""

    name: str
    source: str


@dataclass(frozen=True)
class Asked:
    """Which models, measured on what, and how."""

    models: tuple[str, ...]
    texts: tuple[Source, ...] = ()  # none: the data of the first run that has any
    tasks: str | None = None  # names, separated by commas; `paper` for its ten
    data: Path | None = None  # a folder with the paper's tasks as files
    limit: int | None = None  # examples of a task
    budgets: tuple[int, ...] | None = None  # None: 1, L/4, L/2 and L of each model
    search: int | None = None  # the budget whose schedules are searched; None: L/2 of each model
    search_tasks: bool = False  # measure the schedules by the tasks, too
    prompts: int = 64
    skip: frozenset[str] = frozenset()  # of PARTS
    max_tokens: int | None = None  # of a text
    field: str = "text"
    device: str = "auto"
    dtype: str = "float32"
    batch_tokens: int = BATCH_TOKENS

    def __post_init__(self) -> None:
        require(len(self.models) > 0, "Name at least one run or model.")
        require(self.prompts >= 1, f"--prompts must be 1 or more, got {self.prompts}.")
        require(self.limit is None or self.limit >= 1, f"--limit must be 1 or more examples, got {self.limit}.")
        require(
            self.search is None or self.search >= 1, f"--search takes a budget of 1 or more, got {self.search}."
        )
        require(
            self.max_tokens is None or self.max_tokens >= 1, f"--max-tokens must be 1 or more: {self.max_tokens}."
        )
        require(
            not self.search_tasks or (self.wanted_tasks is not None and not self.skip & {"tasks", "search"}),
            "--search-tasks needs tasks and a search; give --data or --tasks and skip neither.",
        )
        model_names(self.models)  # refuses a model that is given twice

    @cached_property
    def names(self) -> tuple[str, ...]:
        return model_names(self.models)

    @property
    def wanted_tasks(self) -> str | None:
        """The tasks by name: the paper's where only their data is given."""
        return self.tasks or ("paper" if self.data is not None else None)

    @cached_property
    def sources(self) -> tuple[Source, ...]:
        """The texts that are measured on."""
        if self.texts:
            return self.texts
        own = next((found for model in self.models if (found := default_text(model))), None)
        return () if own is None else (Source(short_path(own), own),)

    def check_depths(self, depths: Sequence[int]) -> None:
        """Refuse a budget that no model can follow."""
        deepest = max(depths)
        name = self.names[list(depths).index(deepest)]
        for option, budget in [("--budgets", one) for one in self.budgets or ()] + [("--search", self.search or 1)]:
            require(
                budget <= deepest,
                f"{option} {budget} is above the {deepest} loops of {name}"
                + (", the deepest model; " if len(depths) > 1 else "; ")
                + f"choose 1 to {deepest}.",
            )

    def budgets_of(self, config: ModelConfig) -> list[int]:
        """The budgets of one model: those asked for that it has, its full depth where it has none of them."""
        if self.budgets is None:
            return validation_budgets(config.loops)
        return [one for one in self.budgets if one <= config.loops] or [config.loops]


def read_texts(given: Sequence[str]) -> tuple[Source, ...]:
    """Texts as NAME=SOURCE or SOURCE; a text without a name has the last part of its path."""
    found: list[Source] = []
    for one in given:
        name, equals, source = one.partition("=")
        if not equals or Path(one).exists():
            name, source = Path(one).name if Path(one).exists() else one, one
        require(
            bool(name.strip()) and bool(source), f"{one!r} is no text; write NAME=SOURCE, as in news=news.jsonl."
        )
        require(
            name not in [other.name for other in found],
            f"Two texts are named {name}; give each a name of its own, as in first={source}.",
        )
        found.append(Source(name.strip(), source))
    return tuple(found)


def read_budgets(given: str | None) -> tuple[int, ...] | None:
    """Loops such as 1,2,4, in order and each once."""
    if given is None:
        return None
    return tuple(sorted(set(whole_numbers(given, "--budgets"))))


def read_skip(given: str | None) -> frozenset[str]:
    """Parts such as tasks,search."""
    parts = [part.strip() for part in (given or "").split(",") if part.strip()]
    for part in parts:
        require(part in PARTS, f"There is no part {part!r} to skip; {nearest(part, list(PARTS))}")
    return frozenset(parts)
