"""Our passes on top of Transformers' caches: layer loop·k + block keeps the keys and values of that pass and block.

    passes = bind(cache, model, trajectory, rows)     # refuses a cache that another model or trajectory filled
    mask = visible(attention_mask, cache, length, device)
    model.stack(x, modulation, rotary, mask, slots(cache, number, blocks))

Dynamic caches grow, static ones return all their places, filled or not; `visible` covers both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor

from loopformer.errors import LoopformerError
from loopformer.model.cache import LoopPlan
from loopformer.model.looped import LoopedLM
from loopformer.trajectory import Trajectory

_BOUND = "loopformer_bound"  # the attribute of a cache that says whose keys it holds; copies of the cache keep it


@dataclass(frozen=True)
class CacheSlot:
    """The place of one (loop, block) in a cache of Transformers."""

    cache: Any
    layer: int

    def store(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keep new keys and values [B, H, T, D/H]; return all that the cache holds."""
        keys, values = self.cache.update(k, v, self.layer)
        return keys, values


@dataclass(frozen=True)
class _Bound:
    model: ref[LoopedLM]
    trajectory: Trajectory
    passes: LoopPlan | None  # what they are told, to be computed once per sequence; None while gradients are wanted


def slots(cache: Any, number: int, blocks: int) -> list[CacheSlot]:
    """The slots of one pass."""
    return [CacheSlot(cache, number * blocks + block) for block in range(blocks)]


def bind(cache: Any, model: LoopedLM, trajectory: Trajectory, rows: int) -> LoopPlan:
    """The passes of a trajectory, for a cache (or None) that from now on belongs to it."""
    bound: _Bound | None = getattr(cache, _BOUND, None)
    if cache is not None and cache.get_seq_length() > 0:
        if bound is None or bound.model() is not model:
            raise LoopformerError("This cache was filled by another model; make a new cache.")
        if bound.trajectory != trajectory:
            raise LoopformerError(
                f"This cache follows {bound.trajectory}, not {trajectory}, and keys of one trajectory mean nothing "
                "under another; make a new cache."
            )
        if bound.passes is not None and not torch.is_grad_enabled():
            return replace(bound.passes, rows=[rows] * trajectory.budget)
    passes = model.plan_loops(trajectory, rows)
    if cache is not None:
        setattr(cache, _BOUND, _Bound(ref(model), trajectory, None if torch.is_grad_enabled() else passes))
    return passes


def visible(attention_mask: Tensor | None, cache: Any, length: int, device: torch.device) -> Tensor | None:
    """Who may look at whom [B or 1, 1, T, keys], for `length` new tokens; None where plain causal attention does.

    `attention_mask` [B, earlier and new] is 0 for padding, wherever it lies; one of four dimensions stays as it is.
    """
    if attention_mask is not None and attention_mask.ndim == 4:
        return attention_mask
    past = 0 if cache is None else cache.get_seq_length()  # an int, or a tensor on the device in static caches
    keys = length if cache is None else cache.get_mask_sizes(length, 0)[0]
    if attention_mask is None and isinstance(past, int) and keys == past + length and (past == 0 or length == 1):
        return None
    places = torch.arange(keys, device=device)
    new = (past + torch.arange(length, device=device))[:, None]  # [T, 1]
    mask = (places <= new)[None, None]
    if attention_mask is not None:
        if attention_mask.ndim != 2 or (isinstance(past, int) and attention_mask.shape[1] != past + length):
            raise LoopformerError(
                f"attention_mask has shape {list(attention_mask.shape)}; it must cover the {past} tokens in the "
                f"cache and the {length} new ones."
            )
        real = F.pad(attention_mask.to(device).bool(), (0, keys - attention_mask.shape[1]))  # [B, keys]
        # Padding looks at itself: a row of attention that may look at nothing is not a number.
        mask = (mask & real[:, None, None]) | (places == new)
    return mask


def positions_of(attention_mask: Tensor | None, cache: Any, length: int, device: torch.device) -> Tensor:
    """Positions [B or 1, T] of `length` new tokens: padding does not count."""
    if attention_mask is not None and attention_mask.ndim == 2:
        counted = attention_mask.to(device).long().cumsum(-1) - 1
        return counted.clamp(min=0)[:, -length:]
    past = 0 if cache is None else cache.get_seq_length()
    return (past + torch.arange(length, device=device))[None]
