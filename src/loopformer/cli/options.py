"""Options that several verbs share, each declared once; a verb gives its own default.

    def search(model: Model, budget: …, device: Device = "auto", as_json: Json = False) -> None: …

An option that only one verb has, or that means something else there, stands in that verb's file.
"""

from pathlib import Path
from typing import Annotated

from typer import Option, echo

from loopformer.cli.completion import budgets, models, words
from loopformer.errors import require


def _refuse_int8(given: bool) -> None:
    require(not given, "--int8 was removed; leave it out, and on a GPU decode in bfloat16, its default.")


# The model, and where it runs.
MODEL = "A run, a model folder, published weights, or box, the model that comes with loopformer"
Model = Annotated[str, Option("--model", "-m", help=f"{MODEL}.", autocompletion=models)]
Heads = Annotated[int | None, Option(help="Attention heads, for weights without a config.")]
Loops = Annotated[int | None, Option(help="Loops L, for weights without a config.")]
DEVICES, DTYPES = words("auto", "cpu", "cuda", "mps"), words("float32", "bfloat16", "float16")
Device = Annotated[str, Option(help="auto, cpu, cuda or mps.", autocompletion=DEVICES)]
Dtype = Annotated[str, Option(help="float32, bfloat16 or float16.", autocompletion=DTYPES)]
BatchTokens = Annotated[int, Option(help="Tokens in a batch.")]

# What it follows.
Budgets = Annotated[str | None, Option(help="Loops: 1,2,4,8; 1, L/4, L/2 and L by default.")]
Trajectories = Annotated[
    list[str] | None, Option("--trajectory", help="A schedule, such as 4-2-1-1; may be given several times.")
]

# How it makes text.
BudgetOption = Annotated[
    int | None, Option("--budget", help="Loops per token, 1 to L; L by default.", autocompletion=budgets)
]
TrajectoryOption = Annotated[str | None, Option("--trajectory", help="A schedule: 4-2-1-1, 1/2,1/4,1/4, cosine:4.")]
CertaintyOption = Annotated[
    float | None,
    Option("--certainty", help="A token whose next one is likelier than this takes no further pass: 0.9."),
]
NewTokens = Annotated[int, Option("--max-tokens", help="New tokens at most.")]
Temperature = Annotated[float, Option(help="0 is greedy.")]
TopK = Annotated[int | None, Option(help="Only the k most likely tokens.")]
TopP = Annotated[float, Option(help="Only the most likely that make up this probability.")]
MinP = Annotated[float, Option(help="Only those this fraction as likely as the most likely.")]
RepetitionPenalty = Annotated[float, Option(help="Above 1 makes repetition less likely.")]
Seed = Annotated[int | None, Option(help="The same seed gives the same text.")]
FastOption = Annotated[
    bool | None,
    Option("--fast/--no-fast", help="Fused kernels as CUDA graphs, compiled at first use; by default on a GPU."),
]
RemovedInt8 = Annotated[bool, Option("--int8", hidden=True, callback=_refuse_int8)]
DecodeDtype = Annotated[
    str | None,
    Option(
        "--dtype",
        help="float32, bfloat16 or float16; by default bfloat16 for fused kernels, else float32.",
        autocompletion=DTYPES,
    ),
]

# What it is measured on: text.
TEXT = (
    "Files, folders or globs of .txt .md .jsonl .parquet (also .gz .xz .zst), hf:DATASET[:config][:split], a "
    "prepared folder (its validation split), or the held-out part of stdlib, pile, fineweb-edu or openwebtext"
)
Field = Annotated[str, Option(help="The field of .jsonl, .parquet and datasets that is text.")]
Window = Annotated[int | None, Option(help="Tokens the model sees at a time; its context.")]
Join = Annotated[bool, Option("--join", help="Join documents into one stream, as in training.")]
MaxTokens = Annotated[int | None, Option(help="Score only the first so many tokens of a text.")]

# What it is measured on: benchmarks.
TaskData = Annotated[
    Path | None, Option("--data", help="A folder with the paper's benchmarks as files, instead of the Hub.")
]
Examples = Annotated[int | None, Option(help="Only the first so many examples of each task.")]

# What comes out.
OutFolder = Annotated[Path, Option("--out", "-o", help="The folder to write.")]
OutFile = Annotated[Path | None, Option("--out", "-o", help="Also write the results to this file.")]
Json = Annotated[bool, Option("--json", help="Print JSON.")]


def warn_of_certainty(certainty: float | None, model: str) -> None:
    """Say what a model that learned to be read after its last pass alone makes of a certainty."""
    if certainty is not None and certainty < 1:
        echo(
            "Note: a model may predict nothing before its last pass, and then a certainty spoils its text; "
            f"`loopformer eval --model {model} --certainty {certainty:g}` measures it.",
            err=True,
        )


def own_text(model: str) -> str:
    """What --text is where it is not given: the data that a run was trained with, for its validation split."""
    from loopformer.errors import FileProblem, LoopformerError
    from loopformer.evaluation.states import own_group
    from loopformer.evaluation.text import default_text
    from loopformer.loading.folder import run_of

    if prepared := default_text(model):
        return prepared
    if group := own_group(model):
        raise LoopformerError(
            f"{model} was trained on words over {group}, not on text; give a text with --text, or see how it does "
            f"there with loopformer eval --model {model}."
        )
    if run_of(model) is not None:
        raise FileProblem(
            f"The data that {model} was trained on cannot be found; give its folder or another text with --text."
        )
    raise LoopformerError(f"{model} has no prepared data of its own; say what to measure on with --text.")
