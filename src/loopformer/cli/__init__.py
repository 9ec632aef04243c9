"""The command line: one short file per verb. Heavy imports happen inside a verb, so that --help is quick.

Shared options are in options.py. Tables, progress and output files are in output.py.
Exit codes: 0 done, 1 failed, 2 wrong usage, 130 stopped by Ctrl-C. A user's mistake is one sentence on stderr.
"""

import sys
from typing import Annotated

import typer

import loopformer
from loopformer.cli.analyze import analyze
from loopformer.cli.bench import bench
from loopformer.cli.chat import chat
from loopformer.cli.eval import evaluate
from loopformer.cli.export import export
from loopformer.cli.generate import generate
from loopformer.cli.import_ import import_
from loopformer.cli.info import info
from loopformer.cli.options import Verb, VerbGroup
from loopformer.cli.prepare import prepare
from loopformer.cli.report import report
from loopformer.cli.search import search
from loopformer.cli.serve import serve
from loopformer.cli.train import train
from loopformer.cli.verify import verify
from loopformer.errors import LoopformerError, remedy

app = typer.Typer(
    name="loopformer",
    cls=VerbGroup,
    help="Train, evaluate, analyse and serve elastic-depth language models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for verb in (prepare, train, generate, chat, search, analyze, report, info, serve, import_, export, verify):
    app.command(verb.__name__.removesuffix("_"), cls=Verb)(verb)
app.add_typer(evaluate, name="eval")
app.add_typer(bench, name="bench")


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"loopformer {loopformer.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line. A user's mistake becomes one sentence and an exit code."""
    try:
        app()
    except LoopformerError as error:
        print(f"loopformer: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt:  # pressed before a verb started, or twice
        print("loopformer: stopped.", file=sys.stderr)
        raise SystemExit(130) from None
    except OSError as error:
        problem = f"{error.strerror or error}" + (f": {error.filename}" if error.filename else "")
        print(f"loopformer: {problem}; {remedy(error)}.", file=sys.stderr)
        raise SystemExit(1) from None
