"""The kernel that chooses tokens equals sampling.py: on a GPU, or in Triton's interpreter (TRITON_INTERPRET=1)."""

import math
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from loopformer.inference.request import Choice, Draw, Sampling
from loopformer.inference.sampling import hashed_seed, kernel_settings, sample

pytest.importorskip("triton")
from loopformer.inference.fused import kernels
from loopformer.inference.fused.kernels import choice_kernel
from loopformer.training.fused import kernels as training_kernels

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="no GPU"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of NumPy's, in the interpreter
]
DEVICE = "cpu" if INTERPRETED else "cuda"
VOCAB = 130


def chosen(logits: Tensor, draws: list[Draw], single_row: bool = False) -> list[Choice]:
    """The choices of the kernel. Slots are in another order than rows, and padding follows the vocabulary."""
    rows, vocab = logits.shape
    slot_of_row = [0] if single_row else random.Random(rows).sample(range(rows + 2), rows)
    settings = torch.full((rows + 2, 4), math.nan, dtype=torch.float64)
    seeds, lengths = (torch.zeros(rows + 2, dtype=torch.int64) for _ in range(2))
    for slot, draw in zip(slot_of_row, draws, strict=True):
        settings[slot] = torch.tensor(kernel_settings(draw.sampling, vocab), dtype=torch.float64)
        seeds[slot], lengths[slot] = hashed_seed(draw.seed), draw.position - (not single_row)
    padded = torch.full((rows, vocab + 6), 99.0)
    padded[:, :vocab] = logits
    slots, *tensors = (tensor.to(DEVICE) for tensor in (torch.tensor(slot_of_row), lengths, settings, seeds))
    choices = torch.full((rows, 2), -1.0, device=DEVICE)
    padded = padded.to(DEVICE)
    choice_kernel[(rows,)](
        padded, slots, *tensors, choices, padded.stride(0), vocab, SINGLE_ROW=single_row, BLOCK_N=64, num_warps=1
    )
    return [Choice(int(token), logprob) for token, logprob in choices.tolist()]


def same(logits: Tensor, draws: list[Draw], single_row: bool = False) -> None:
    expected, choices = sample(logits, draws), chosen(logits, draws, single_row)
    assert [choice.token for choice in choices] == [choice.token for choice in expected], draws
    assert [choice.logprob for choice in choices] == pytest.approx(
        [choice.logprob for choice in expected], abs=1e-5
    )


@pytest.mark.parametrize("kind", ["fp32", "bf16", "halves"])
def test_it_draws_what_sampling_draws_even_with_equal_logits(kind: str) -> None:
    rng, noise = random.Random(kind), torch.Generator().manual_seed(1)
    for _ in range(8):
        logits = torch.randn(4, VOCAB, generator=noise) * rng.choice([0.5, 3, 8])
        logits = {"fp32": logits, "bf16": logits.bfloat16().float(), "halves": (2 * logits).round() / 2}[kind]
        draws = [
            Draw(
                Sampling(
                    temperature=rng.choice([0, 0.3, 1.0, 2.0]),
                    top_k=rng.choice([None, 1, 3, 40, 1000]),
                    top_p=rng.choice([1.0, 0.9, 0.5, 0.05]),
                    min_p=rng.choice([0, 0, 0.1]),
                ),
                seed=rng.randrange(2**64),
                position=rng.randrange(1, 1000),
            )
            for _ in range(4)
        ]
        same(logits, draws)


@pytest.mark.parametrize("temperature", [1e-320, 1e-9, 1e300])
def test_any_temperature_is_accepted(temperature: float) -> None:
    logits = torch.tensor([[-3.0, 5.0, -math.inf, 4.0, 0.0, -0.0] * 20])
    for top_p, top_k in ((1.0, None), (0.6, None), (0.6, 50)):
        same(logits, [Draw(Sampling(temperature=temperature, top_p=top_p, top_k=top_k), seed=4, position=9)])


def test_a_vocabulary_may_begin_with_excluded_tokens() -> None:
    logits = torch.arange(float(VOCAB))[None] / 9
    logits[:, :100] = -math.inf  # more than a block of the kernel's
    for sampling in (Sampling(), Sampling(temperature=1.0), Sampling(temperature=1.0, top_k=60, top_p=0.9)):
        same(logits, [Draw(sampling, seed=4, position=9)])


def test_a_single_row_gives_the_position_of_the_next_token() -> None:
    same(
        torch.arange(20.0)[None] / 9, [Draw(Sampling(temperature=1.0), seed=2**70 - 1, position=7)], single_row=True
    )


def test_nan_shows_and_leaves_other_rows_alone() -> None:
    logits = torch.arange(20.0).repeat(4, 1)
    logits[1], logits[2, 4], logits[3, 7] = math.nan, math.nan, math.inf
    for sampling in (Sampling(), Sampling(temperature=1.0), Sampling(temperature=1.0, top_p=0.9, top_k=4)):
        draws = [Draw(sampling, seed=1, position=3)] * 4
        good, *bad = chosen(logits, draws)
        assert good.token == sample(logits[:1], draws[:1])[0].token
        assert all(math.isnan(choice.logprob) for choice in bad)
        assert all(0 <= choice.token < 20 for choice in bad)


def test_every_launch_compiles_for_an_h100(tmp_path: Path) -> None:
    """In a process without the interpreter, which accepts what the compiler refuses."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("compile_kernels.py"))],
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    sources = [kernels.__file__, training_kernels.__file__]
    names = [name for source in sources for name in re.findall(r"def (\w+_kernel)\(", Path(source).read_text())]
    assert run.stdout.split() == sorted(names)
