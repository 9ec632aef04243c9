"""The paths that decoding can take, each made ready to be timed.

run = PATHS["plain"](model, budget, ids, tokens)   # runs the prompts [B, T] and chooses the first token of each
run()                                              # [B, tokens]: those that follow, the same every time

naive         the whole sequence again for every token, without a cache, as the authors' code does
plain         one token at a time through the cache, as generate.py does, but without its sampling and text
fused         the kernels of decoder.py, on a GPU; `fused int8` with int8 weights
transformers  Transformers' GPT-2 of as many blocks as the budget applies, through its own cache
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from loopformer.config import ModelConfig
from loopformer.inference.fast import Fast
from loopformer.inference.generate import prefill
from loopformer.inference.quantise import quantised
from loopformer.model import LoopedLM
from loopformer.trajectory import Trajectory

Run = Callable[[], Tensor]
Path = Callable[[LoopedLM, int, Tensor, int], Run]


def absent(model: LoopedLM, paths: Sequence[str]) -> dict[str, str]:
    """Those of the paths that cannot run here, each with what it needs."""
    needs = {}
    if not Fast.ready(model):
        needs["fused"] = "it needs a CUDA device and Triton"
    if find_spec("transformers") is None:
        needs["transformers"] = "it needs Transformers: pip install 'loopformer[hf]'"
    return {path: need for path, need in needs.items() if path in paths}


def left_out(model: LoopedLM, paths: Sequence[str], int8: bool, batches: Sequence[int]) -> dict[str, str]:
    """All that is asked for and not measured here, each with the reason: paths, and batches of int8 weights."""
    missing = absent(model, paths)
    if int8 and "fused" not in paths:
        missing["fused int8"] = "it needs the path fused"
    elif int8 and "fused" in missing:
        missing["fused int8"] = missing["fused"]
    elif int8 and (large := [str(batch) for batch in batches if batch > most_int8_rows()]):
        missing["fused int8"] = f"it takes at most {most_int8_rows()} rows, so not {', '.join(large)}"
    return missing


def most_int8_rows() -> int:
    """Rows that int8 weights serve at once."""
    from loopformer.inference.decoder import MOST_INT8_ROWS  # needs Triton

    return MOST_INT8_ROWS


@torch.no_grad()
def _naive(model: LoopedLM, budget: int, ids: Tensor, tokens: int) -> Run:
    route = Trajectory.uniform(budget)

    def longer(text: Tensor) -> Tensor:
        """One more token: the whole sequence [B, T] is run, the head on its last place."""
        return torch.cat([text, _best(model, model(text, route, logits=False, check=False).hidden[:, -1])], 1)

    begun = longer(ids)

    @torch.no_grad()
    def run() -> Tensor:
        text = begun
        for _ in range(tokens):
            text = longer(text)
        return text[:, -tokens:]

    return run


@torch.no_grad()
def _plain(model: LoopedLM, budget: int, ids: Tensor, tokens: int) -> Run:
    cache, hidden = prefill(model, ids.tolist(), [Trajectory.uniform(budget)] * len(ids))
    first, lengths = _best(model, hidden), list(cache.lengths)

    @torch.no_grad()
    def run() -> Tensor:
        cache.lengths, found = list(lengths), [first]
        for _ in range(tokens):
            found.append(_best(model, model.extend(found[-1], cache, check=False)[:, 0]))
        return torch.cat(found[1:], 1)

    return run


@torch.no_grad()
def _fused(model: LoopedLM, budget: int, ids: Tensor, tokens: int, int8: bool = False) -> Run:
    from loopformer.inference.decoder import Decoder

    decoder = Decoder(model, Trajectory.uniform(budget), len(ids), quantised(model) if int8 else None)
    first = _best(model, decoder.prefill(ids.tolist()))[:, 0]
    lengths = list(decoder.cache.lengths)

    def run() -> Tensor:
        decoder.cache.lengths = list(lengths)
        decoder.lengths.copy_(torch.tensor(lengths))
        decoder.ids.copy_(first)
        return decoder.greedy(tokens).t()

    return run


@torch.no_grad()
def _transformers(model: LoopedLM, budget: int, ids: Tensor, tokens: int) -> Run:
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
        found = [first]
        for _ in range(tokens):
            found.append(following(found[-1]))
        cache.crop(-tokens)  # back to the prompt; below zero it means how many go
        return torch.cat(found[1:], 1)

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


PATHS: dict[str, Path] = {
    "naive": _naive,
    "plain": _plain,
    "fused": _fused,
    "fused int8": partial(_fused, int8=True),
    "transformers": _transformers,
}
