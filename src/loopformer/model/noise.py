"""Random numbers that follow from where they are used, and not from what was drawn before.

bits = hashed(key + counter)         # int64 → 64 bits that look random, one for one (splitmix64)
normal(keys, positions, width)       # N(0, 1) for every channel of every token

So a token's noise is the same in a prompt, in a step of decoding and among other rows, and a run that is resumed
draws what it would have drawn.
"""

import torch
from torch import Tensor

# splitmix64's constants
GOLDEN, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def hashed(bits: Tensor) -> Tensor:
    """splitmix64's finisher."""
    bits = (bits ^ shifted(bits, 30)) * signed(MIX_1)
    bits = (bits ^ shifted(bits, 27)) * signed(MIX_2)
    return bits ^ shifted(bits, 31)


def normal(keys: Tensor, positions: Tensor, width: int) -> Tensor:
    """N(0, 1) in fp32 [B, T, D] for rows of these keys [B or 1], at positions [B or 1, T]."""
    counter = positions[:, :, None] * width + torch.arange(width, device=positions.device)
    bits = hashed(keys[:, None, None] + counter * signed(GOLDEN))
    uniform = (shifted(bits, 41).float() + 0.5) * 2.0**-23  # never 0 and never 1
    noise: Tensor = torch.special.ndtri(uniform)
    return noise


def shifted(bits: Tensor, places: int) -> Tensor:
    """A logical shift to the right: PyTorch's keeps the sign."""
    return (bits >> places) & ((1 << (64 - places)) - 1)


def signed(bits: int) -> int:
    """The same 64 bits as a tensor of int64 holds them."""
    return bits - (1 << 64) if bits >> 63 else bits
