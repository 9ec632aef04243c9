"""Peak memory of head and cross-entropy, forward and backward: all logits at once against chunks.

    python benchmarks/head_loss_memory.py [--tokens 12288] [--width 2048] [--vocab 50304] [--out results/…json]

On CUDA the allocator's own peak in bf16, on the CPU the process's peak resident memory in fp32, each variant in a
process of its own. What the inputs and their gradients take is in both figures. The last line is JSON.
"""

import argparse
import json
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from loopformer.benchmark.machine import publish
from loopformer.training.objective import LossWeights, head_losses


def measure(variant: str, tokens: int, width: int, vocab: int, chunk: int) -> dict[str, float]:
    """Peak memory and time of one forward and backward."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    weight = (torch.randn(vocab, width, device=device) * 0.02).requires_grad_()
    hidden = torch.randn(tokens, width, device=device).requires_grad_()
    targets = torch.randint(vocab, (tokens,), device=device)

    def once() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            if variant == "plain":
                loss = F.cross_entropy(F.linear(hidden, weight).float(), targets)
            else:
                loss = head_losses(weight, [hidden], targets, [LossWeights(1 / tokens)], None, chunk).total
        torch.autograd.backward(loss)
        weight.grad = hidden.grad = None

    if device == "cuda":
        once()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    started = time.perf_counter()
    once()
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    if device == "cuda":
        peak = torch.cuda.max_memory_allocated() / 2**30
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {"peak_gib": peak, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=12288)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=50304)
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--variant", choices=["plain", "chunked"], help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if asked.variant:
        print(json.dumps(measure(asked.variant, asked.tokens, asked.width, asked.vocab, asked.chunk)))
        return
    found: dict[str, dict[str, float]] = {}
    for variant in ("plain", "chunked"):
        done = subprocess.run(
            [sys.executable, *sys.argv, "--variant", variant], capture_output=True, text=True, check=True
        )
        found[variant] = json.loads(done.stdout.splitlines()[-1])
        print(f"{variant:8s} {found[variant]['peak_gib']:.2f} GiB  {found[variant]['seconds'] * 1e3:.1f} ms")
    report = {
        "benchmark": "head_loss_memory",
        "command": " ".join(["python", *sys.argv]),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU {platform.machine()}",
        "dtype": "bfloat16" if torch.cuda.is_available() else "float32",
        "torch": torch.__version__,
        "seed": 0,
        "tokens": asked.tokens,
        "width": asked.width,
        "vocab": asked.vocab,
        "chunk": asked.chunk,
        **found,
        "memory_ratio": found["chunked"]["peak_gib"] / found["plain"]["peak_gib"],
        "time_ratio": found["chunked"]["seconds"] / found["plain"]["seconds"],
    }
    publish(report, asked.out)


if __name__ == "__main__":
    main()
