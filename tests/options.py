"""Every setting of the model that is on trial, at each of its other values: what many tests run through.

OPTIONS                              # [{"inject": "gated"}, …], each a change of a conditioned model
draw_options(draw, conditioning)     # some of them together, as that kind of model allows
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

from hypothesis import strategies as st

from loopformer import LoopformerError
from loopformer.config import ModelConfig

Option = dict[str, Any]


def allowed(option: Option, conditioning: str = "trajectory") -> bool:
    try:
        ModelConfig(**{"conditioning": conditioning, **option})
    except LoopformerError:
        return False
    return True


def _single() -> Iterator[Option]:
    hints = get_type_hints(ModelConfig)
    for known in dataclasses.fields(ModelConfig):
        if "on_trial" in known.metadata:
            values = get_args(hints[known.name])
            yield from ({known.name: value} for value in values if value != known.default)


def _options() -> Iterator[Option]:
    """Each alone, or with the first other one that it needs."""
    single = list(_single())
    for option in single:
        yield next(each for other in [{}, *single] if allowed(each := {**other, **option}))


OPTIONS = list(_options())


def draw_options(draw: st.DrawFn, conditioning: str) -> Option:
    """Up to three together."""
    chosen: Option = {}
    for option in draw(st.lists(st.sampled_from(OPTIONS), max_size=3)):
        if allowed({**chosen, **option}, conditioning):
            chosen |= option
    return chosen
