"""Options that several verbs share, each declared once; how --help shows flags; what a shell completes.

    def search(model: Model = BOX, budget: …, device: Device = "auto", as_json: Json = False) -> None: …

Each verb sets its own default. An option of only one verb is declared in that verb's file. This module must not
import torch: every press of TAB starts a process.
"""

import secrets
from collections.abc import Callable, Mapping
from glob import escape, iglob
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, BadParameter, Context, Option
from typer.core import TyperCommand, TyperGroup

from loopformer.config import ModelConfig, from_mapping, load_run
from loopformer.config.model import BOX, bundled_model_dir
from loopformer.config.run import list_presets
from loopformer.errors import REMOVED, FileProblem, LoopformerError, require
from loopformer.files import read_json

RUN_FILE, MODEL_FILE = "run.yaml", "config.json"  # a folder with one of these is a run or a model
MAX_FOLDERS = 2000  # paths that completion looks at on each level


# How --help shows options.


class _BareFlags:
    """Shows a flag as `--json`, without the type that typer writes behind it."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]  # of the command that this is mixed into
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


_UsageError: type[Exception] = BadParameter.__mro__[1]  # typer does not export it


class Verb(_BareFlags, TyperCommand):
    """A verb of the command line. A wrong option or argument is one sentence, like any other mistake."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except _UsageError as error:
            removed = str(getattr(error, "option_name", "")).removeprefix("--")
            if removed in REMOVED:
                raise LoopformerError(f"--{REMOVED[removed]}") from error
            problem: str = error.format_message().rstrip(".")  # type: ignore[attr-defined]
            names = {param.name for param in self.params}
            path = ctx.command_path.removeprefix(ctx.find_root().command_path)  # however it was started
            remedy = f"`loopformer{path} --help` lists what it takes"
            if "extra argument" in problem and "model" in names:
                remedy = "give the model with --model, and put quotes around a text"
            elif "No such option" in problem and "settings" in names:
                problem = problem.partition(" (")[0]
                remedy = f"write settings without dashes, as in training.steps=100; {remedy}"
            raise LoopformerError(f"{problem}; {remedy}.") from error


class VerbGroup(_BareFlags, TyperGroup):
    """A verb with subcommands."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        command = args[0] if ctx.parent is None else f"{ctx.info_name} {args[0]}"
        if command in REMOVED:
            raise LoopformerError(REMOVED[command])
        return super().resolve_command(ctx, args)


# Completion. If nothing matches, the shell completes file names as usual.


def complete_from(*choices: str) -> Callable[[str], list[str]]:
    """A completer for a fixed list of words."""

    def complete(incomplete: str) -> list[str]:
        return [choice for choice in choices if choice.startswith(incomplete)]

    return complete


def complete_preset(incomplete: str) -> list[str]:
    """Presets of the package. The sizes of a preset are offered once its name is typed."""
    names = []
    for preset in list_presets():
        sizes = preset.sizes if incomplete.startswith(preset.name) else ()
        names += [preset.name, *(f"{preset.name}-{size}" for size in sizes)]
    return complete_from(*names)(incomplete)


def complete_model(incomplete: str) -> list[str]:
    """The bundled model, and runs and model folders up to two levels below the typed path."""
    paths = [path for pattern in ("*", "*/*") for path in islice(iglob(escape(incomplete) + pattern), MAX_FOLDERS)]
    models = [path for path in paths if any((Path(path) / name).is_file() for name in (RUN_FILE, MODEL_FILE))]
    return [*complete_from(BOX)(incomplete), *sorted(models)]


def complete_model_or_preset(incomplete: str) -> list[str]:
    return [*complete_model(incomplete), *complete_preset(incomplete)]


def complete_budget(context: Context, incomplete: str) -> list[str]:
    """1 to L of the model on the command line, or of the bundled model."""
    model = str(context.params.get("model") or next(iter(context.args), BOX))  # --model, or the first argument
    folder = bundled_model_dir() if model == BOX else Path(model)
    try:
        if (folder / MODEL_FILE).is_file():
            config = from_mapping(ModelConfig, read_json(folder / MODEL_FILE).get("model"), "model")
        else:
            config = load_run(folder / RUN_FILE if (folder / RUN_FILE).is_file() else model)[0].model
        return complete_from(*(str(budget) for budget in range(1, config.loops + 1)))(incomplete)
    except (LoopformerError, OSError):
        return []


# The model and where it runs.
MODEL = "A run, a model folder, published weights, or box, the bundled model"
Model = Annotated[str, Option("--model", "-m", help=f"{MODEL}.", autocompletion=complete_model)]
# For verbs that also take the model as their first argument; see `the_model`.
ModelArgument = Annotated[str | None, Argument(metavar="MODEL", help=f"{MODEL}.", autocompletion=complete_model)]
ModelOption = Annotated[
    str | None, Option("--model", "-m", help="The model, instead of the argument.", autocompletion=complete_model)
]
ModelsOption = Annotated[
    list[str] | None,
    Option("--model", "-m", help="A model; may be given several times.", autocompletion=complete_model),
]
Heads = Annotated[int | None, Option(help="Attention heads, for weights without a config.")]
Loops = Annotated[int | None, Option(help="Loops L, for weights without a config.")]
complete_dtype = complete_from("float32", "bfloat16", "float16", "int8")
Device = Annotated[
    str, Option(help="auto, cpu, cuda or mps.", autocompletion=complete_from("auto", "cpu", "cuda", "mps"))
]
Dtype = Annotated[str, Option(help="float32, bfloat16, float16, or int8 on a CPU.", autocompletion=complete_dtype)]
BatchTokens = Annotated[int, Option(help="Tokens in a batch.")]

# Budgets and schedules to measure.
BudgetsOption = Annotated[str | None, Option(help="Budgets, such as 1,2,4,8. Default: 1, L/4, L/2 and L.")]
TrajectoriesOption = Annotated[
    list[str] | None, Option("--trajectory", help="A schedule, such as 2-1-2-3; may be given several times.")
]

# Generation.
# Text for reading is sampled: small models that always take the most likely token soon repeat themselves.
SAMPLED_TEMPERATURE, SAMPLED_TOP_P = 0.8, 0.95
MAX_SEED = 1_000_000  # of seeds that are drawn here; short ones are easy to type
BudgetOption = Annotated[
    int | None, Option("--budget", help="Loops per token, 1 to L. Default: L.", autocompletion=complete_budget)
]
TrajectoryOption = Annotated[
    str | None, Option("--trajectory", help="A schedule, such as 2-1-2-3, 1/4,1/4,1/2 or cosine:4.")
]
NewTokens = Annotated[int, Option("--max-tokens", help="Maximum number of new tokens.")]
Temperature = Annotated[float, Option(help="Sampling temperature; 0 is greedy.")]
TopK = Annotated[int | None, Option(help="Sample from the k most likely tokens.")]
TopP = Annotated[float, Option(help="Sample from the most likely tokens that reach this total probability.")]
MinP = Annotated[float, Option(help="Drop tokens below this fraction of the highest probability.")]
RepetitionPenalty = Annotated[float, Option(help="Values above 1 make repeated tokens less likely.")]
Seed = Annotated[
    int | None, Option(help="The same seed gives the same text. Default: a random one, printed with the text.")
]
FastOption = Annotated[
    bool | None, Option("--fast/--no-fast", help="Decode with fused CUDA kernels. Default: on a GPU.")
]
DecodeDtype = Annotated[
    str | None,
    Option(
        "--dtype",
        help="float32, bfloat16, float16, or int8 on a CPU. Default: bfloat16 with fused kernels, else float32.",
        autocompletion=complete_dtype,
    ),
]


# Text to measure on.
TEXT = (
    "Files, folders or globs of .txt .md .jsonl .parquet (also .gz .xz .zst), hf:DATASET[:config][:split], a "
    "prepared folder (its validation split), or the held-out part of stdlib, pile, fineweb-edu or openwebtext"
)
Field = Annotated[str, Option(help="The text field of .jsonl, .parquet and datasets.")]
Window = Annotated[int | None, Option(help="Tokens the model sees at a time. Default: its context.")]
Join = Annotated[bool, Option("--join", help="Join documents into one stream, as in training.")]
MaxTokens = Annotated[int | None, Option(help="Score only the first N tokens of a text.")]

# Tasks to measure on.
TaskData = Annotated[
    Path | None, Option("--data", help="A folder with the paper's tasks as files, instead of the Hub.")
]
Examples = Annotated[int | None, Option(help="Use only the first N examples of each task.")]

# Output.
OutFolder = Annotated[Path, Option("--out", "-o", help="The folder to write.")]
OutFile = Annotated[Path | None, Option("--out", "-o", help="Also write the results to this file.")]
Json = Annotated[bool, Option("--json", help="Print JSON.")]


def draw_seed() -> int:
    """A random seed for a text that was asked for without one."""
    return secrets.randbelow(MAX_SEED)


def the_model(argument: str | None, option: str | None, default: str = BOX) -> str:
    """The model of a verb that takes it as its first argument or as --model."""
    require(
        argument is None or option is None, "The model was given twice; use either the first argument or --model."
    )
    return argument or option or default


def check_at_most_one(options: Mapping[str, object]) -> None:
    """Refuse options that exclude each other. None and False mean that an option was not given."""
    used = [name for name, value in options.items() if value not in (None, False)]
    require(len(used) <= 1, f"{' and '.join(used)} exclude each other; give only one of them.")


def text_of_model(model: str) -> str:
    """The text to measure on without --text: the validation split of the data that a run was trained on."""
    from loopformer.evaluation.states import trained_on
    from loopformer.evaluation.text import default_text
    from loopformer.loading.folder import run_folder_of

    if prepared := default_text(model):
        return prepared
    data = trained_on(model)
    if data is not None and data.is_generated:
        source, own = f"stories of {data.stories}", "questions with loopformer eval stories"
        if data.states is not None:
            source, own = f"words over {data.states}", "task with loopformer eval states"
        raise LoopformerError(
            f"{model} was trained on {source}, not on text; give a text with --text, or measure it on "
            f"its own {own} {model}."
        )
    if run_folder_of(model) is not None:
        raise FileProblem(
            f"The data that {model} was trained on cannot be found; give its folder or another text with --text."
        )
    raise LoopformerError(f"{model} has no prepared data of its own; say what to measure on with --text.")
