"""Counter-based random numbers: a pure function of key and position, without generator state.

bits = hashed(key + counter)             # int64 → 64 pseudorandom bits (splitmix64, a bijection)
normal_noise(keys, positions, width)     # N(0, 1) for every channel of every token

So the noise of a token is the same in prefill, in decode and in any batch, and a resumed run draws the same
numbers.
"""

import torch
from torch import Tensor

# The constants of splitmix64.
GOLDEN, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def hashed(bits: Tensor) -> Tensor:
    """64 pseudorandom bits for each int64: the output function of splitmix64."""
    bits = (bits ^ logical_shift(bits, 30)) * as_int64(MIX_1)
    bits = (bits ^ logical_shift(bits, 27)) * as_int64(MIX_2)
    return bits ^ logical_shift(bits, 31)


def normal_noise(keys: Tensor, positions: Tensor, width: int) -> Tensor:
    """N(0, 1) in fp32 [B, T, D] for rows with keys [B or 1], at positions [B or 1, T]."""
    counter = positions[:, :, None] * width + torch.arange(width, device=positions.device)
    bits = hashed(keys[:, None, None] + counter * as_int64(GOLDEN))
    uniform = (logical_shift(bits, 41).float() + 0.5) * 2.0**-23  # 23 bits, never 0 or 1: ndtri is finite
    noise: Tensor = torch.special.ndtri(uniform)
    return noise


def logical_shift(bits: Tensor, by: int) -> Tensor:
    """A right shift that fills with zeros. PyTorch's >> copies the sign bit."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def as_int64(bits: int) -> int:
    """The signed int64 with the same 64 bits, because tensors hold no larger integers."""
    return bits - (1 << 64) if bits >> 63 else bits
