"""What the benchmarks on the CPU run: one LoopFormer of random weights; and what their reports say first.

model = random_model(context=576)                # 3⊗8, width 512, vocabulary 16,384, fp32
report = {**header("decode_cpu", threads=2), …}
"""

import platform
import sys
from typing import Any

import torch

from loopformer import LoopedLM, ModelConfig

VOCAB = 16384


def random_model(context: int, width: int = 512) -> LoopedLM:
    """Of seed 0, with open gates: behind closed ones matmuls are of zeros."""
    torch.manual_seed(0)
    config = ModelConfig(
        blocks=3,
        loops=8,
        width=width,
        heads=width // 64,
        ffn=width * 5 // 2,
        context=context,
        vocab=VOCAB,
        modulator_start="one",
    )
    return LoopedLM(config).eval()


def header(name: str, threads: int) -> dict[str, Any]:
    return {
        "benchmark": name,
        "command": " ".join(["python", *sys.argv]),
        "hardware": f"{platform.processor() or platform.machine()}, {threads} threads, fp32",
        "torch": torch.__version__,
        "seed": 0,
    }
