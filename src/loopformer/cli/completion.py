"""What a shell completes: presets, models, budgets, and words of a fixed list. Nothing here imports torch, since
every press of TAB is a process of its own.

    budget: Annotated[int | None, Option(autocompletion=budgets)]

Where nothing fits, the shell completes file names as usual.
"""

from collections.abc import Callable, Iterator
from glob import escape, iglob
from itertools import islice
from pathlib import Path

from typer import Context

from loopformer.config import load_run
from loopformer.config.model import BOX, box_folder
from loopformer.config.run import preset_summaries
from loopformer.errors import LoopformerError
from loopformer.files import read_json, read_yaml

RUN, MODEL = "run.yaml", "config.json"  # what makes a folder a run, or a model
_LOOK_AT = 2000  # folders at most, where a path is hardly begun


def words(*choices: str) -> Callable[[str], list[str]]:
    def complete(incomplete: str) -> list[str]:
        return [word for word in choices if word.startswith(incomplete)]

    return complete


def presets(incomplete: str) -> list[str]:
    """Those that ship with the package; their sizes where one is already typed."""
    names = []
    for preset in preset_summaries():
        sizes = preset.sizes if incomplete.startswith(preset.name) else ()
        names += [preset.name, *(f"{preset.name}-{size}" for size in sizes)]
    return words(*names)(incomplete)


def models(incomplete: str) -> list[str]:
    """The model in the box, and runs and model folders up to two levels below what is typed."""
    return [*words(BOX)(incomplete), *sorted(_folders(incomplete))]


def models_and_presets(incomplete: str) -> list[str]:
    return [*models(incomplete), *presets(incomplete)]


def budgets(context: Context, incomplete: str) -> list[str]:
    """1 to L of the model that is named before, or of the one in the box."""
    model = context.params.get("model") or next(iter(context.args), BOX)  # an option, or the first argument
    try:
        return words(*map(str, range(1, _loops(str(model)) + 1)))(incomplete)
    except (LoopformerError, OSError, KeyError, TypeError):
        return []


def _folders(typed: str) -> Iterator[str]:
    for below in ("*", "*/*"):
        for path in islice(iglob(escape(typed) + below), _LOOK_AT):
            if (Path(path) / RUN).is_file() or (Path(path) / MODEL).is_file():
                yield path


def _loops(model: str) -> int:
    folder = box_folder() if model == BOX else Path(model)
    if (folder / RUN).is_file():
        settings = read_yaml(folder / RUN)
    elif (folder / MODEL).is_file():
        settings = read_json(folder / MODEL)
    else:
        return load_run(model)[0].model.loops
    loops: int = settings["model"]["loops"]
    return loops
