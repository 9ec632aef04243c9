"""What models and files are called in what we write: short, and without the places of one machine.

model_names(["runs/a/elastic", "runs/b/elastic"])     # ("a/elastic", "b/elastic")
short_path("/home/me/texts/news.jsonl")               # "news.jsonl"
"""

from collections.abc import Sequence
from pathlib import Path

from loopformer.errors import require


def model_names(models: Sequence[str]) -> tuple[str, ...]:
    """The shortest ends of the paths that tell the models apart."""
    paths = [Path(model).resolve() if Path(model).exists() else Path(model) for model in models]
    require(len(set(paths)) == len(paths), "A model is given twice; give each one once.")
    for depth in range(1, max(len(path.parts) for path in paths)):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return tuple(names)
    return tuple(map(str, paths))


def short_path(given: str | Path) -> str:
    """A path as it can be shown to others: relative as it is, otherwise only its last part."""
    path = Path(given)
    return path.name if path.is_absolute() or ".." in path.parts else str(given)
