"""Golden outputs on disk, and where two of them differ: floats beyond a tolerance, anything else at all.

for line in compare(expected, found): print(line)      # eval/documents/perplexity/0/nats: 14521.5 -> 14520.9
"""

import json
import math
import os
from collections.abc import Iterator, Set
from typing import Any

TOLERANCE = 1e-5  # relative; for numbers near 0 a tenth of it, absolute
LOOSER = {  # by what a path has in it
    "train/": 1e-4,  # steps amplify rounding
    "/logprobs/": 1e-4,  # near 0, a small difference of large logits
    "/spread/": 1e-3,  # a difference of large numbers
    "/lambada_openai/metrics/perplexity": 1e-3,  # the exponential of one
}
EXACT = "LOOPFORMER_GOLDEN_EXACT"  # set to 1, the hashes of trained weights count, where they can be the same
_LONGEST = 160  # characters of a value that are shown
_MISSING = object()


def compare(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """One line for each difference, with its path. Hashes of trained weights depend on the machine."""
    exact = os.environ.get(EXACT) == "1" and expected["made_with"] == found["made_with"]
    before, after = _outputs(expected, exact), _outputs(found, exact)
    return list(_differences(before, after))


def dumped(value: Any, indent: str = "") -> str:
    """JSON with sorted keys; what holds no list or dict is on one line."""
    if isinstance(value, dict) and value:
        inner = [f"{json.dumps(key)}: {dumped(value[key], indent + ' ')}" for key in sorted(value)]
    elif isinstance(value, list) and any(isinstance(one, dict | list) for one in value):
        inner = [dumped(one, indent + " ") for one in value]
    else:
        return json.dumps(value, ensure_ascii=False)
    first, last = "{}" if isinstance(value, dict) else "[]"
    return f"{first}\n{indent} " + f",\n{indent} ".join(inner) + f"\n{indent}{last}"


def without(value: Any, keys: Set[str]) -> Any:
    """Plain data without some keys, at any depth."""
    if isinstance(value, dict):
        return {key: without(one, keys) for key, one in value.items() if key not in keys}
    return [without(one, keys) for one in value] if isinstance(value, list) else value


def _outputs(recorded: dict[str, Any], exact: bool) -> dict[str, Any]:
    """What is compared of a record."""
    sections = without(recorded, {"made_with"})
    if not exact:
        runs = sections["train"]["runs"]
        for name in runs:
            runs[name]["weights"] = without(runs[name]["weights"], {"sha256"})
    return dict(sections)


def _differences(expected: Any, found: Any, path: str = "") -> Iterator[str]:
    """A list of whole numbers or words is one place."""
    pairs: dict[Any, tuple[Any, Any]]
    if isinstance(expected, dict) and isinstance(found, dict):
        pairs = {key: (expected.get(key, _MISSING), found.get(key, _MISSING)) for key in {**expected, **found}}
    elif _is_branch(expected) and _is_branch(found) and len(expected) == len(found):
        pairs = dict(enumerate(zip(expected, found, strict=True)))
    else:
        if not _same(expected, found, _tolerance(path)):
            yield f"{path}: {_shown(expected)} -> {_shown(found)}"
        return
    for key, (before, after) in pairs.items():
        yield from _differences(before, after, f"{path}/{key}" if path else key)


def _tolerance(path: str) -> float:
    return next((looser for part, looser in LOOSER.items() if part in path), TOLERANCE)


def _is_branch(value: Any) -> bool:
    """Whether it is a list to look into."""
    return isinstance(value, list) and any(isinstance(one, dict | list | float) for one in value)


def _same(expected: Any, found: Any, tolerance: float) -> bool:
    if isinstance(expected, float) and isinstance(found, float):
        return math.isclose(expected, found, rel_tol=tolerance, abs_tol=tolerance / 10)
    return type(expected) is type(found) and bool(expected == found)


def _shown(value: Any) -> str:
    text = "nothing" if value is _MISSING else repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
