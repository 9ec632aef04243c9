"""Decoding speed of every path against budget, context and batch.

    report = decode(model, budgets=(1, 2, 4, 8), batches=(1, 64), contexts=(512,))

    naive         the whole sequence again for every token, without a cache, as the authors' code does
    plain         one token at a time through the KV cache, as generation does, but without its sampling and text
    fused         our kernels, on a GPU
    transformers  Transformers' GPT-2 of as many blocks as the budget applies, through its own cache

Greedy, from random prompts; `tokens` new ones are timed after prefill and a warm-up, and the best of three counts.
The naive path is timed over few tokens, and it and Transformers' GPT-2 at the largest budget alone.

FLOPs and bytes are what a token takes with a cache, and so the same for every path: the matmuls of one new token
per row, the weights read once per loop and step and the keys of each row (`model.cost`). MFU is over the device's
peak in bf16, MBU over what a copy reaches on it. The peak of memory is that of the timed tokens, weights included.
Where a row does not fit, its figures are None; what was wanted and not measured is in `left_out`, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from itertools import product
from typing import Any

import torch
from torch import Tensor

from loopformer.benchmark.machine import Measurement, best_of, describe, free_memory
from loopformer.config import ModelConfig
from loopformer.errors import LoopformerError, nearest
from loopformer.inference.decode import prefill
from loopformer.inference.fused.backend import obstacle
from loopformer.model import LoopedLM
from loopformer.trajectory import Trajectory

Decode = Callable[[], Tensor]  # the tokens [B, tokens] after the first one of each prompt, the same every time
DecodePath = Callable[[LoopedLM, int, Tensor, int], Decode]  # model, budget, prompts [B, T], tokens: after prefill

CHOICES = ("naive", "plain", "fused", "transformers")
NAIVE_TOKENS = 4  # each runs the whole sequence
AT_LARGEST_BUDGET = ("naive", "transformers")
FIGURES = ("ms_per_step", "tokens_per_second", "tflops", "mfu", "gb_per_second", "mbu", "peak_gib")


def left_out(model: LoopedLM, paths: Sequence[str]) -> dict[str, str]:
    """Those of the paths that cannot be measured here, each with what it needs."""
    needs = {}
    if (why := obstacle(model)) is not None:
        needs["fused"] = f"it {why}"
    if find_spec("transformers") is None:
        needs["transformers"] = "it needs Transformers: pip install 'loopformer[hf]'"
    return {path: need for path, need in needs.items() if path in paths}


@torch.no_grad()
def _naive(model: LoopedLM, budget: int, ids: Tensor, tokens: int) -> Decode:
    trajectory = Trajectory.uniform(budget)

    def longer(text: Tensor) -> Tensor:
        """One more token: the whole sequence [B, T] is run, the head on its last place."""
        return torch.cat([text, _best(model, model(text, trajectory, logits=False, check=False).hidden[:, -1])], 1)

    begun = longer(ids)

    @torch.no_grad()
    def run() -> Tensor:
        text = begun
        for _ in range(tokens):
            text = longer(text)
        return text[:, -tokens:]

    return run


@torch.no_grad()
def _plain(model: LoopedLM, budget: int, ids: Tensor, tokens: int) -> Decode:
    cache, hidden = prefill(model, ids.tolist(), [Trajectory.uniform(budget)] * len(ids))
    first, lengths = _best(model, hidden), list(cache.lengths)

    @torch.no_grad()
    def run() -> Tensor:
        cache.lengths, chosen = list(lengths), [first]
        for _ in range(tokens):
            chosen.append(_best(model, model.extend(chosen[-1], cache, check=False)[:, 0]))
        return torch.cat(chosen[1:], 1)

    return run


@torch.no_grad()
def _fused(model: LoopedLM, budget: int, ids: Tensor, tokens: int) -> Decode:
    from loopformer.inference.fused.decoder import Decoder

    decoder = Decoder(model, Trajectory.uniform(budget), len(ids))
    first = _best(model, decoder.prefill(ids.tolist()))[:, 0]
    lengths = list(decoder.cache.lengths)

    def run() -> Tensor:
        decoder.cache.lengths = list(lengths)
        decoder.lengths.copy_(torch.tensor(lengths))
        decoder.ids.copy_(first)
        return decoder.greedy(tokens).t()

    return run


@torch.no_grad()
def _transformers(model: LoopedLM, budget: int, ids: Tensor, tokens: int) -> Decode:
    from transformers import DynamicCache

    theirs, cache = gpt2(model.config, budget, model.tokens.weight), DynamicCache()

    def following(ids: Tensor) -> Tensor:
        """The next token [B, 1] after new ones [B, T]."""
        out = theirs(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        best: Tensor = out.logits[:, -1].argmax(-1, keepdim=True)
        return best

    first = following(ids)

    @torch.no_grad()
    def run() -> Tensor:
        chosen = [first]
        for _ in range(tokens):
            chosen.append(following(chosen[-1]))
        cache.crop(-tokens)  # back to the prompt; below zero it means how many go
        return torch.cat(chosen[1:], 1)

    return run


def gpt2(config: ModelConfig, budget: int, like: Tensor) -> Any:
    """A GPT-2 of the same compute and random weights, on the device and in the dtype of a tensor."""
    from transformers import AutoModelForCausalLM, GPT2Config

    torch.manual_seed(0)
    shape = GPT2Config(
        vocab_size=config.vocab_rows,
        n_positions=config.context,
        n_embd=config.width,
        n_layer=config.blocks * budget,
        n_head=config.heads,
        n_inner=config.ffn,
        bos_token_id=0,
        eos_token_id=0,
    )
    with like.device:
        return AutoModelForCausalLM.from_config(shape, dtype=like.dtype).eval()


def _best(model: LoopedLM, hidden: Tensor) -> Tensor:
    """The most likely tokens [B, 1] after states [B, D]."""
    return model.head(hidden)[:, : model.config.vocab].argmax(-1, keepdim=True)


PATHS: dict[str, DecodePath] = {
    "naive": _naive,
    "plain": _plain,
    "fused": _fused,
    "transformers": _transformers,
}


def decode(
    model: LoopedLM,
    budgets: Sequence[int],
    batches: Sequence[int],
    contexts: Sequence[int],
    tokens: int = 32,
    paths: Sequence[str] = CHOICES,
    say: Callable[[Measurement], object] = lambda row: None,
) -> dict[str, Any]:
    """Measure every combination by every path that can run here; `say` gets each row as it comes."""
    machine = describe(model.device)
    rows: list[Measurement] = []
    for path in _paths_here(model, paths):
        timed = min(tokens, NAIVE_TOKENS) if path == "naive" else tokens
        measured = [max(budgets)] if path in AT_LARGEST_BUDGET else budgets
        for batch, context, budget in product(batches, contexts, measured):
            row: Measurement = {"path": path, "budget": budget, "batch": batch, "context": context, "tokens": timed}
            row |= {"bytes": _bytes(model, budget, batch, context), **dict.fromkeys(FIGURES)}
            try:
                row |= _measure(model, path, budget, batch, context, timed)
                row |= _rates(model, row, machine)
            except torch.OutOfMemoryError:
                pass
            rows.append(row)
            say(row)
    report = {"benchmark": "decode", **machine, "dtype": model.dtype_name, "tokens": tokens, "rows": rows}
    return {**report, "left_out": left_out(model, paths)}


def _paths_here(model: LoopedLM, paths: Sequence[str]) -> list[str]:
    """Those of the wanted paths that can be measured here, in their order."""
    for path in paths:
        if path not in CHOICES:
            raise LoopformerError(f"There is no path {path!r} of decoding; {nearest(path, list(CHOICES))}")
    missing = left_out(model, paths)
    here = [path for path in dict.fromkeys(paths) if path not in missing]
    if not here:
        reasons = "; ".join(f"{path}: {need}" for path, need in missing.items())
        raise LoopformerError(f"No path of decoding that was asked for can run here ({reasons}); ask for plain.")
    return here


def _measure(model: LoopedLM, path: str, budget: int, batch: int, context: int, tokens: int) -> Measurement:
    """Milliseconds of a step, and the peak of memory on a GPU."""
    device = model.device
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab, (batch, context), generator=generator).to(device)
    free_memory(device)
    own_weights = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    run = PATHS[path](model, budget, ids, tokens)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds = best_of(3, device, run)
    peak = None
    if device.type == "cuda":  # our weights, which lie there, too, are no part of theirs
        peak = (torch.cuda.max_memory_allocated(device) - (own_weights if path == "transformers" else 0)) / 2**30
    return {"ms_per_step": seconds / tokens * 1e3, "peak_gib": peak}


def _rates(model: LoopedLM, row: Measurement, machine: dict[str, Any]) -> Measurement:
    """Tokens, FLOPs and bytes a second, and their shares of what the device can do."""
    seconds, peak = row["ms_per_step"] / 1e3, machine["peak_tflops"]
    flops = row["batch"] * model.cost.forward_flops(row["budget"], row["context"], causal=False)
    tflops, bandwidth = flops / seconds / 1e12, row["bytes"] / seconds / 1e9
    return {
        "tokens_per_second": row["batch"] / seconds,
        "tflops": tflops,
        "mfu": tflops / peak if peak and model.dtype_name == "bfloat16" else None,
        "gb_per_second": bandwidth,
        "mbu": bandwidth / machine["copy_gb_per_second"],
    }


def _bytes(model: LoopedLM, budget: int, batch: int, context: int) -> int:
    """What a step must read."""
    cost, size = model.cost, model.tokens.weight.element_size()
    return cost.decode_bytes(budget, 0, size) + batch * context * cost.kv_bytes(budget, size)
