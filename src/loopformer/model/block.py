"""The shared stack: k pre-norm Transformer blocks, each with scales γ and gates α.

    x ← x + α₁ ⊙ Attention(RMSNorm(x) ⊙ (1 + γ₁))
    x ← x + α₂ ⊙ FFN(RMSNorm(x) ⊙ (1 + γ₂))

With `model.norms` sandwich, a learned norm follows each of the two sums (Geiping et al. 2025).
γ and α of a loop are its modulation. Unconditioned models have learned norm weights instead.

`Stack` is one loop through all k blocks: the unit that `torch.compile` sees. `mask` [B or 1, 1, T, keys] is True
where a query may attend to a key; None is causal. `kvs`, one per block, store new keys and values and return all
stored ones. The lists `states` and `maps` receive the state after each block and its attention map [B, H, T, keys].
"""

import math
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loopformer.config.model import ModelConfig
from loopformer.model.packed import Linear

# The machine epsilon of fp32, used at every dtype. The default of nn.RMSNorm depends on the dtype of its input.
EPSILON = 1.1920929e-07
ROTARY_BASE = 10_000.0

Rotary = tuple[Tensor, Tensor]  # cos and sin, each [B or 1, 1, T, head_width / 2]


class KVStore(Protocol):
    """Where one (loop, block) stores its keys and values: `LayerKV` in cache.py, or a cache of Transformers."""

    def store(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store new keys and values [B, H, T, D/H]; return all stored ones [B, H, keys, D/H]."""


class RMSNorm(nn.Module):
    """x / rms(x), with a learned weight or none."""

    weight: nn.Parameter | None

    def __init__(self, width: int, learned: bool) -> None:
        super().__init__()
        self.width = width
        if learned:
            self.weight = nn.Parameter(torch.ones(width))
        else:
            self.register_parameter("weight", None)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (self.width,), self.weight, EPSILON)


class Attention(nn.Module):
    """Causal multi-head self-attention without biases."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = Linear(config.width, 3 * config.width)
        self.out = Linear(config.width, config.width)

    def forward(
        self,
        x: Tensor,
        rotary: Rotary | None,
        mask: Tensor | None,
        kv: KVStore | None,
        maps: list[Tensor] | None = None,
    ) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        out: Tensor = self.out(self.attend(q, k, v, rotary, mask, kv, maps))
        return out

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rotary: Rotary | None,
        mask: Tensor | None,
        kv: KVStore | None,
        maps: list[Tensor] | None = None,
    ) -> Tensor:
        """Attention without its two projections: queries, keys and values [B, T, D] each → [B, T, D]."""
        batch, length, width = q.shape
        shape = batch, length, self.heads, width // self.heads
        q, k, v = [part.view(shape).transpose(1, 2) for part in (q, k, v)]  # [B, H, T, D/H] each
        if rotary is not None:
            q, k = rotate(q, *rotary), rotate(k, *rotary)
        if kv is not None:
            k, v = kv.store(k, v)  # [B, H, keys, D/H], earlier tokens included
        # A single new token attends to all stored ones. Without a mask, several tokens start a sequence: nothing is
        # stored yet, so causal attention is right.
        is_causal = mask is None and (kv is None or length > 1)
        if maps is None:
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal)
        else:
            maps.append(attention_map(q, k, mask, is_causal))
            attended = maps[-1] @ v
        return attended.transpose(1, 2).reshape(batch, length, width)


class FeedForward(nn.Module):
    """Two projections around an exact GELU, without biases."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up = Linear(config.width, config.ffn)
        self.down = Linear(config.ffn, config.width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x)))
        return out


class Block(nn.Module):
    """One Transformer block. `modulation` [B or 1, 4, D] holds gate 1, gate 2, scale 1, scale 2, in this order."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        learned = config.conditioning == "none"
        self.norm_1 = RMSNorm(config.width, learned)
        self.attention = Attention(config)
        self.norm_2 = RMSNorm(config.width, learned)
        self.ffn = FeedForward(config)
        # The sandwich norms, named as in weight files.
        sandwich = config.norms == "sandwich"
        self.after_1 = RMSNorm(config.width, learned=True) if sandwich else nn.Identity()
        self.after_2 = RMSNorm(config.width, learned=True) if sandwich else nn.Identity()

    def forward(
        self,
        x: Tensor,
        modulation: Tensor | None,
        rotary: Rotary | None,
        mask: Tensor | None,
        kv: KVStore | None,
        maps: list[Tensor] | None = None,
    ) -> Tensor:
        if modulation is None:
            x = self.after_1(x + self.attention(self.norm_1(x), rotary, mask, kv, maps))
            out: Tensor = self.after_2(x + self.ffn(self.norm_2(x)))
            return out
        gate_1, gate_2, scale_1, scale_2 = modulation.unsqueeze(2).unbind(1)  # each [B or 1, 1, D]
        x = self.after_1(x + gate_1 * self.attention(self.norm_1(x) * (1 + scale_1), rotary, mask, kv, maps))
        out = self.after_2(x + gate_2 * self.ffn(self.norm_2(x) * (1 + scale_2)))
        return out


class Stack(nn.Module):
    """One loop through the k shared blocks: x [B, T, D], modulation [B or 1, k, 4, D] or None."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.blocks))

    def typed_blocks(self) -> Iterator[Block]:
        """The blocks, typed as `Block` for mypy."""
        for block in self.blocks:
            assert isinstance(block, Block)
            yield block

    def forward(
        self,
        x: Tensor,
        modulation: Tensor | None,
        rotary: Rotary | None = None,
        mask: Tensor | None = None,
        kvs: Sequence[KVStore] | None = None,
        states: list[Tensor] | None = None,
        maps: list[Tensor] | None = None,
    ) -> Tensor:
        for index, block in enumerate(self.blocks):
            block_modulation = None if modulation is None else modulation[:, index]  # [B or 1, 4, D]
            x = block(x, block_modulation, rotary, mask, None if kvs is None else kvs[index], maps)
            if states is not None:
                states.append(x)
        return x


def attention_map(q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    """Attention weights [B, H, T, keys] of queries [B, H, T, D/H] over keys [B, H, keys, D/H]; rows sum to 1."""
    scores = (q @ k.transpose(-2, -1)).float() / math.sqrt(q.shape[-1])
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(-1).to(q.dtype)


def rotary_angles(positions: Tensor, head_width: int, dtype: torch.dtype) -> Rotary:
    """cos and sin [B, 1, T, head_width / 2] of positions [B, T]."""
    half = head_width // 2
    frequencies = ROTARY_BASE ** -(torch.arange(half, device=positions.device, dtype=torch.float32) / half)
    angles = positions[:, None, :, None].float() * frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x_i, x_{i + w/2}) of a head of width w, in x [B, H, T, w], by its angle.

    cos and sin may have a higher dtype than x. The result has the dtype of x.
    """
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1).to(x.dtype)
