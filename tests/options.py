"""Every setting of the model beyond the paper, at each of its other values: what many tests run through.

OPTIONS                              # [{"inject": "gated"}, …], each a change of a conditioned model
draw_model(draw, context=16)         # a small model with some of them together, and a trajectory it can follow
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

from hypothesis import strategies as st

from loopformer import LoopformerError, Trajectory
from loopformer.config import Conditioning, ModelConfig

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
        if "beyond_paper" in known.metadata:
            values = get_args(hints[known.name])
            yield from ({known.name: value} for value in values if value != known.default)


def _options() -> Iterator[Option]:
    """Each alone, or with the first other one that it needs."""
    single = list(_single())
    for option in single:
        yield next(each for other in [{}, *single] if allowed(each := {**other, **option}))


OPTIONS = list(_options())


def draw_model(draw: st.DrawFn, context: int) -> tuple[ModelConfig, st.SearchStrategy[str]]:
    """A small model of any kind, and the trajectories that it can follow."""
    kind = draw(st.sampled_from(get_args(Conditioning)))
    loops = draw(st.integers(1, 4))
    config = ModelConfig(
        conditioning=kind,
        blocks=draw(st.integers(1, 2)),
        loops=loops,
        width=16,
        heads=draw(st.sampled_from([1, 2, 4])),
        ffn=24,
        context=context,
        vocab=50,
        positions=draw(st.sampled_from(["learned", "rotary"])),
        time_scale=30.0,
        **_draw_options(draw, kind),
    )
    grid = [trajectory for budget in range(1, loops + 1) for trajectory in Trajectory.enumerate(loops, budget)]
    uniform_only = kind in ("none", "index")
    return config, st.sampled_from([str(each) for each in grid if each.is_uniform or not uniform_only])


def _draw_options(draw: st.DrawFn, conditioning: str) -> Option:
    """Up to three together."""
    chosen: Option = {}
    for option in draw(st.lists(st.sampled_from(OPTIONS), max_size=3)):
        if allowed({**chosen, **option}, conditioning):
            chosen |= option
    return chosen
