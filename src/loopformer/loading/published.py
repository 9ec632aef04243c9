"""The authors' published weights: names, kinds and sizes, mapped onto `LoopedLM`.

    load_published("armenjeddi/LoopFormer-3block-8iterations", loops=8)
    from_state_dict(tensors, heads=32, loops=8)

The kind of model and all sizes are inferred from the tensors. The number of heads and of loops are not in
them: they come from the config or metadata beside the weights, else from the caller.

Find a model whatever the user points at: a run, a model folder of ours, or published weights.
"""

import re
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from loopformer.config import Conditioning, ModelConfig
from loopformer.errors import FileProblem, LoopformerError
from loopformer.loading.folder import (
    TOKENIZER,
    build,
    is_model_folder,
    is_run_folder,
    load_model,
    newest_model,
    read,
    read_config,
)
from loopformer.model import LoopedLM

HEAD_KEYS = ("n_head", "heads", "num_attention_heads")


LOOP_KEYS = ("max_model_loops", "max_loops", "loops", "num_loops")


GPT2_TOKENS, GPT2_ROWS = 50257, 50304  # the published models pad GPT-2's vocabulary to this many rows


_WRAPPERS = re.compile(r"^((gpt|module|_orig_mod)\.)+|_orig_mod\.")


_NAMES = (  # theirs (one group at most: the block's number) → ours
    (r"transformer\.wte\.weight", "tokens.weight"),
    (r"transformer\.wpe\.weight", "places.weight"),
    (r"transformer\.norm_f\.weight", "final_norm.weight"),
    (r"transformer\.h\.(?:blocks\.)?(\d+)\.norm_1\.weight", r"stack.blocks.\1.norm_1.weight"),
    (r"transformer\.h\.(?:blocks\.)?(\d+)\.norm_2\.weight", r"stack.blocks.\1.norm_2.weight"),
    (r"transformer\.h\.(?:blocks\.)?(\d+)\.attn\.c_attn\.weight", r"stack.blocks.\1.attention.qkv.weight"),
    (r"transformer\.h\.(?:blocks\.)?(\d+)\.attn\.c_proj\.weight", r"stack.blocks.\1.attention.out.weight"),
    (r"transformer\.h\.(?:blocks\.)?(\d+)\.mlp\.c_fc\.weight", r"stack.blocks.\1.ffn.up.weight"),
    (r"transformer\.h\.(?:blocks\.)?(\d+)\.mlp\.c_proj\.weight", r"stack.blocks.\1.ffn.down.weight"),
    (r"transformer\.h\.blocks\.(\d+)\.adaLN_modulation\.1\.weight", r"conditioner.modulators.\1.weight"),
    (r"transformer\.h\.blocks\.(\d+)\.adaLN_modulation\.1\.bias", r"conditioner.modulators.\1.bias"),
    (r"time_embedder\.mlp\.0\.(weight|bias)", r"conditioner.time.up.\1"),
    (r"time_embedder\.mlp\.2\.(weight|bias)", r"conditioner.time.out.\1"),
    (r"dt_embedder\.mlp\.0\.(weight|bias)", r"conditioner.step.up.\1"),
    (r"dt_embedder\.mlp\.2\.(weight|bias)", r"conditioner.step.out.\1"),
)


_IGNORED = re.compile(r"transformer\.h\.(?:blocks\.)?\d+\.attn\.bias")  # a causal mask kept as a buffer


def load_published(source: str | Path, heads: int | None = None, loops: int | None = None) -> LoopedLM:
    """Published weights from a file, a folder or a Hub id, in fp32."""
    tensors, facts = read(source)
    return from_state_dict(
        tensors,
        heads=_settle("heads", facts, HEAD_KEYS, heads),
        loops=_settle("loops", facts, LOOP_KEYS, loops),
    )


def from_state_dict(tensors: dict[str, Tensor], heads: int | None = None, loops: int | None = None) -> LoopedLM:
    """A `LoopedLM` from tensors under the published names, with or without `gpt.`, `module.`, `_orig_mod.`."""
    theirs = {_WRAPPERS.sub("", name): tensor for name, tensor in tensors.items()}
    theirs = {name: tensor for name, tensor in theirs.items() if not _IGNORED.fullmatch(name)}
    _drop_tied_head(theirs)
    ours = {_translate(name): tensor for name, tensor in theirs.items()}
    config = _infer(theirs, heads, loops)
    return build(config, ours, lambda name: _published_name(name, theirs))


def _settle(what: str, facts: dict[str, Any], keys: tuple[str, ...], given: int | None) -> int | None:
    """The value that stands beside the weights, else the caller's; a contradiction is an error."""
    for key in keys:
        if isinstance(facts.get(key), int):
            if given is not None and given != facts[key]:
                raise LoopformerError(
                    f"The weights' own config says {key} = {facts[key]}, not {given}; leave --{what} out."
                )
            return int(facts[key])
    return given


def _infer(tensors: dict[str, Tensor], heads: int | None, loops: int | None) -> ModelConfig:
    """Kind and sizes from the tensors' names and shapes."""
    blocks = {int(match[2]) for name in tensors if (match := re.match(r"transformer\.h\.(blocks\.)?(\d+)\.", name))}
    looped = _is_looped(tensors)
    if not blocks:
        raise FileProblem("These tensors are no published LoopFormer, TMLT, Base-Loop or Base model.")
    kind: Conditioning = "none"
    if any(name.startswith("dt_embedder.") for name in tensors):
        kind = "trajectory"
    elif any(name.startswith("time_embedder.") for name in tensors):
        kind = "index"
    first = f"transformer.h.{'blocks.' if looped else ''}{min(blocks)}"
    rows, width = _shape(tensors, "transformer.wte.weight")
    context, _ = _shape(tensors, "transformer.wpe.weight")
    ffn, _ = _shape(tensors, f"{first}.mlp.c_fc.weight")
    if heads is None:
        raise LoopformerError("The number of attention heads is not in the weights; give --heads (heads=…).")
    if loops is None and looped:
        raise LoopformerError(
            "The number of loops L is not in the weights; give --loops (loops=…), 8 for a 3⊗8 model."
        )
    return ModelConfig(
        conditioning=kind,
        blocks=max(blocks) + 1,
        loops=loops if looped and loops is not None else 1,
        width=width,
        heads=heads,
        ffn=ffn,
        context=context,
        vocab=GPT2_TOKENS if rows == GPT2_ROWS else rows,
        padded_vocab=rows,
        modulator_start="normal",
    )


def _shape(tensors: dict[str, Tensor], name: str) -> tuple[int, int]:
    if name not in tensors:
        raise FileProblem(f"The weights lack the tensor {name}; the file is not whole.")
    shape = tensors[name].shape
    if len(shape) != 2:
        raise FileProblem(f"The tensor {name} has shape {list(shape)}, not a matrix; the file is damaged.")
    return shape[0], shape[1]


def _translate(name: str) -> str:
    for pattern, replacement in _NAMES:
        if match := re.fullmatch(pattern, name):
            return match.expand(replacement)
    raise FileProblem(f"The tensor {name} is not one of a published LoopFormer, TMLT, Base-Loop or Base model.")


def _published_name(ours: str, tensors: dict[str, Tensor]) -> str:
    """The published name of one of our tensors, for messages."""
    for pattern, replacement in _NAMES:
        back = re.escape(replacement).replace(r"\\1", r"(\w+)")
        if match := re.fullmatch(back, ours):
            plain = pattern.replace("\\.", ".").replace("(?:blocks.)?", "blocks." if _is_looped(tensors) else "")
            return re.sub(r"\(.*?\)", match[1] if match.groups() else "", plain)
    return ours


def _is_looped(tensors: dict[str, Tensor]) -> bool:
    return any(name.startswith("transformer.h.blocks.") for name in tensors)


def _drop_tied_head(tensors: dict[str, Tensor]) -> None:
    head, tokens = tensors.pop("lm_head.weight", None), tensors.get("transformer.wte.weight")
    if head is not None and tokens is not None and not torch.equal(head, tokens):
        raise FileProblem("lm_head.weight differs from transformer.wte.weight; only tied embeddings are supported.")


def find_model(
    source: str | Path, heads: int | None = None, loops: int | None = None
) -> tuple[LoopedLM, Path | None]:
    """The model, in fp32 on the CPU, and the folder of its tokenizer where there is one."""
    folder = model_folder(source)
    model = load_model(folder) if is_model_folder(folder) else load_published(source, heads, loops)
    return model, _tokenizer_folder(folder)


def find_config(
    source: str | Path, heads: int | None = None, loops: int | None = None
) -> tuple[ModelConfig, Path | None]:
    """The same without the weights, where their sizes are written beside them."""
    folder = model_folder(source)
    config = read_config(folder) if is_model_folder(folder) else load_published(source, heads, loops).config
    return config, _tokenizer_folder(folder)


def _tokenizer_folder(folder: Path) -> Path | None:
    return folder if (folder / TOKENIZER).is_file() else None


def model_folder(source: str | Path) -> Path:
    """The folder that holds the model of a run; anything else as it is."""
    return newest_model(source, _warn) if is_run_folder(source) else Path(source)


def _warn(sentence: str) -> None:
    print(sentence, file=sys.stderr)
