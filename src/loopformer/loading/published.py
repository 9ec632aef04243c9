"""The published weights of the paper, loaded into `LoopedLM` without running any code that comes with them.

    load_published("armenjeddi/LoopFormer-3block-8iterations", loops=8)    # a Hub id, a file or a folder
    from_state_dict(tensors, heads=32, loops=8)

The kind of model and its sizes are inferred from the tensors. These do not show the numbers of heads and loops,
which come from the config or metadata stored with the weights, else from the caller.

Safetensors hold no code. A `.pt` is read with `weights_only=True`. The settings object that the published training
script pickles is replaced by an inert record. A file that needs any other class or function is refused.
"""

from __future__ import annotations

import re
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from loopformer.config import Conditioning, ModelConfig
from loopformer.errors import FileProblem, LoopformerError, nearest, require
from loopformer.files import read_json
from loopformer.loading.folder import (
    CONFIG,
    SETTINGS,
    build,
    check_dtypes,
    check_finite,
    checkpoints,
    read_safetensors,
)
from loopformer.model import LoopedLM

Tensors = dict[str, Tensor]
Settings = dict[str, Any]
HEAD_KEYS = ("n_head", "heads", "num_attention_heads")
LOOP_KEYS = ("max_model_loops", "max_loops", "loops", "num_loops")
PICKLED = (".pt", ".pth", ".bin", ".ckpt")
GPT2_TOKENS, GPT2_ROWS = 50257, 50304  # GPT-2's vocabulary, and the embedding rows that it is padded to
_WRAPPER_PREFIXES = re.compile(r"^((gpt|module|_orig_mod)\.)+|_orig_mod\.")
_NAMES = {  # the published name → the name in `LoopedLM`
    "transformer.wte.weight": "tokens.weight",
    "transformer.wpe.weight": "places.weight",
    "transformer.norm_f.weight": "final_norm.weight",
    "time_embedder.mlp.0.weight": "conditioner.time.up.weight",
    "time_embedder.mlp.0.bias": "conditioner.time.up.bias",
    "time_embedder.mlp.2.weight": "conditioner.time.out.weight",
    "time_embedder.mlp.2.bias": "conditioner.time.out.bias",
    "dt_embedder.mlp.0.weight": "conditioner.step.up.weight",
    "dt_embedder.mlp.0.bias": "conditioner.step.up.bias",
    "dt_embedder.mlp.2.weight": "conditioner.step.out.weight",
    "dt_embedder.mlp.2.bias": "conditioner.step.out.bias",
}
_BLOCK_NAMES = {  # the same for the tensors of block n
    "norm_1.weight": "stack.blocks.{n}.norm_1.weight",
    "norm_2.weight": "stack.blocks.{n}.norm_2.weight",
    "attn.c_attn.weight": "stack.blocks.{n}.attention.qkv.weight",
    "attn.c_proj.weight": "stack.blocks.{n}.attention.out.weight",
    "mlp.c_fc.weight": "stack.blocks.{n}.ffn.up.weight",
    "mlp.c_proj.weight": "stack.blocks.{n}.ffn.down.weight",
    "adaLN_modulation.1.weight": "conditioner.modulators.{n}.weight",
    "adaLN_modulation.1.bias": "conditioner.modulators.{n}.bias",
}
_BLOCK = re.compile(r"(transformer\.h\.(?:blocks\.)?)(\d{1,9})\.")
_IGNORED = re.compile(r"transformer\.h\.(?:blocks\.)?\d+\.attn\.bias")  # a causal mask kept as a buffer


def load_published(source: str | Path, heads: int | None = None, loops: int | None = None) -> LoopedLM:
    """Published weights from a file, a folder or a Hub id, in fp32."""
    tensors, settings = read_weights(source)
    check_finite(tensors)
    return from_state_dict(
        tensors,
        heads=_stored_or_given("heads", settings, HEAD_KEYS, heads),
        loops=_stored_or_given("loops", settings, LOOP_KEYS, loops),
    )


def from_state_dict(tensors: dict[str, Tensor], heads: int | None = None, loops: int | None = None) -> LoopedLM:
    """A `LoopedLM` from tensors under the published names, with or without `gpt.`, `module.`, `_orig_mod.`."""
    published = {_WRAPPER_PREFIXES.sub("", name): tensor for name, tensor in tensors.items()}
    published = {name: tensor for name, tensor in published.items() if not _IGNORED.fullmatch(name)}
    blocks = {match[0]: int(match[2]) for name in published if (match := _BLOCK.match(name))}
    names = dict(_NAMES)
    for prefix, number in blocks.items():
        names |= {prefix + name: renamed.format(n=number) for name, renamed in _BLOCK_NAMES.items()}
    for name in published:
        if name not in names and name != "lm_head.weight":
            raise FileProblem(
                f"The tensor {name} is not one of a published LoopFormer, TMLT, Base-Loop or Base model."
            )
    check_dtypes(published)
    head, tokens = published.pop("lm_head.weight", None), published.get("transformer.wte.weight")
    if head is not None and tokens is not None and not torch.equal(head, tokens):
        raise FileProblem("lm_head.weight differs from transformer.wte.weight; only tied embeddings are supported.")
    published_names = {renamed: name for name, renamed in names.items()}
    config = _infer_config(published, blocks, heads, loops)
    return build(
        config,
        {names[name]: tensor for name, tensor in published.items()},
        lambda name: published_names.get(name, name),
    )


def _stored_or_given(option: str, settings: Settings, keys: tuple[str, ...], given: int | None) -> int | None:
    """The value stored with the weights, else the value given by the caller; a contradiction is an error."""
    for key in keys:
        if isinstance(stored := settings.get(key), int):
            contradiction = f"The weights' own config says {key} = {stored}, not {given}"
            require(given in (None, stored), f"{contradiction}; leave --{option} out.")
            return int(stored)
    return given


def _infer_config(
    tensors: dict[str, Tensor], blocks: dict[str, int], heads: int | None, loops: int | None
) -> ModelConfig:
    """The config, from the names and shapes of the tensors; `blocks` maps the prefix of each block to its index."""
    if not blocks:
        raise FileProblem("These are not the tensors of a published LoopFormer, TMLT, Base-Loop or Base model.")
    numbers = set(blocks.values())
    if max(numbers) >= len(numbers):
        missing = min(set(range(len(numbers))) - numbers)
        raise FileProblem(f"The weights have block {max(numbers)} but no block {missing}; the file is incomplete.")
    conditioning: Conditioning = "none"
    if any(name.startswith("dt_embedder.") for name in tensors):
        conditioning = "trajectory"
    elif any(name.startswith("time_embedder.") for name in tensors):
        conditioning = "index"
    first_prefix = next(iter(blocks))
    is_looped = first_prefix.startswith("transformer.h.blocks.")
    rows, width = _shape(tensors, "transformer.wte.weight")
    context, _ = _shape(tensors, "transformer.wpe.weight")
    ffn, _ = _shape(tensors, f"{first_prefix}mlp.c_fc.weight")
    if heads is None:
        raise LoopformerError("The number of attention heads is not in the weights; give --heads (heads=…).")
    advice = "give --loops (loops=…), 8 for a 3⊗8 model"
    require(loops is not None or not is_looped, f"The number of loops L is not in the weights; {advice}.")
    return ModelConfig(
        conditioning=conditioning,
        blocks=len(numbers),
        loops=loops if is_looped and loops is not None else 1,
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
        raise FileProblem(f"The weights lack the tensor {name}; the file is incomplete.")
    shape = tensors[name].shape
    if len(shape) != 2:
        raise FileProblem(f"The tensor {name} has shape {list(shape)}, not a matrix; the file is damaged.")
    return shape[0], shape[1]


def read_weights(source: str | Path) -> tuple[Tensors, Settings]:
    """Tensors and settings from a `.safetensors` or `.pt` file, a folder that holds one, or a Hub id."""
    path = Path(source)
    if path.is_dir():
        return read_folder(path)
    if path.is_file():
        if path.suffix == ".safetensors":
            return read_safetensors(path)
        if path.suffix in PICKLED:
            return read_pt(path)
        raise FileProblem(
            f"{path} is neither .safetensors nor .pt; give a weights file or the folder that holds one."
        )
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", str(source)) and not path.parent.is_dir():
        return read_folder(fetch(str(source)))
    candidates: list[str] = []  # models and runs that the user may have meant
    with suppress(OSError):
        suffixes = (".safetensors", *PICKLED)
        candidates = [str(other) for other in path.parent.iterdir() if other.is_dir() or other.suffix in suffixes]
    hint = nearest(str(path), candidates, otherwise="check the path.")
    raise FileProblem(f"There is no file or folder {source}; {hint}")


def fetch(hub_id: str) -> Path:
    """The folder of a model's safetensors and JSON files from the Hub or its cache; code is never fetched."""
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(hub_id, allow_patterns=["*.safetensors", "*.json"]))
    except Exception as error:  # the Hub client raises many kinds, also from the HTTP library below it
        # Keep only the first sentence: "Got: ConnectError: …" is followed by a paragraph of advice.
        line = str(error).strip().partition("\n")[0].removeprefix("Got: ")
        reason = re.split(r"(?<=\w)[.;] ", line)[0].rstrip(".") or type(error).__name__
        raise FileProblem(
            f"{hub_id} is not a local path and could not be fetched from the Hugging Face Hub ({reason}); "
            "check the name and the connection."
        ) from error


def read_folder(folder: Path) -> tuple[Tensors, Settings]:
    """All safetensors of a folder (sharded or not), or its only `.pt`; config.json overrides their settings."""
    config = folder / CONFIG
    settings: Settings = read_json(config) if config.is_file() else {}
    tensors: Tensors = {}
    if files := sorted(folder.glob("*.safetensors")):
        for file in files:
            shard, metadata = read_safetensors(file)
            tensors |= shard
            settings = metadata | settings
        return tensors, settings
    pickled = sorted(folder.glob("*.pt"))
    if len(pickled) == 1:
        tensors, more = read_pt(pickled[0])
        return tensors, more | settings
    if not pickled and (run := checkpoints(folder)):
        newest = run[-1]
        copied = f"copy {newest / SETTINGS} there, or " if (newest / SETTINGS).is_file() else ""
        raise FileProblem(f"The run {folder} has lost its {SETTINGS}; {copied}name the checkpoint {newest} itself.")
    content = "more than one .pt file; name one of them" if pickled else "no .safetensors or .pt file"
    raise FileProblem(f"The folder {folder} holds {content}.")


def read_pt(path: Path) -> tuple[Tensors, Settings]:
    """Tensors and settings of a checkpoint of the published training script, or of a bare state dict."""
    try:
        size = path.stat().st_size
        with zipfile.ZipFile(path) as archive:
            if sum(member.file_size for member in archive.infolist()) > size:
                raise FileProblem(f"{path} is compressed, as torch.save never does; save it again with torch.save.")
        inert_classes: list[Any] = [
            _inert_class(name, path) for name in torch.serialization.get_unsafe_globals_in_checkpoint(path)
        ]
        with torch.serialization.safe_globals(inert_classes):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except FileProblem:
        raise
    except Exception as error:  # unpickling damaged bytes can raise anything
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise FileProblem(
            f"{path} is not a complete PyTorch checkpoint ({reason}); fetch or save it again."
        ) from error
    if not isinstance(content, dict):
        raise FileProblem(f"{path} holds {type(content).__name__}, not a dictionary of tensors; save a state dict.")
    settings: Settings = {}
    for key in ("config", "model_args"):
        value = content.get(key)
        settings |= vars(value) if isinstance(value, _InertRecord) else value if isinstance(value, dict) else {}
    weights = content.get("model", content)
    if not isinstance(weights, dict):
        raise FileProblem(f"{path} holds no state dict under 'model'; save model.state_dict() there.")
    tensors = {name: value for name, value in weights.items() if isinstance(value, Tensor)}
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            raise FileProblem(f"{path} has a tensor under {name!r}, which is not a name; save a state dict.")
        # A small file can declare a huge tensor (stride 0, sparse layout). Copying it would exhaust the memory.
        is_plain = tensor.layout == torch.strided and tensor.device.type == "cpu" and not tensor.is_nested
        if not is_plain or tensor.numel() * tensor.element_size() > min(size, tensor.untyped_storage().nbytes()):
            raise FileProblem(f"The tensor {name} of {path} is larger than its data; save a full copy of it.")
    return tensors, settings


def _inert_class(name: str, path: Path) -> tuple[Any, str]:
    """A class without behaviour to unpickle instead of `name`; only settings and NumPy scalars are allowed."""
    numpy_scalar = r"numpy\.(core|_core)\.multiarray\.scalar|numpy\.dtype|numpy\.dtypes\.\w+"
    if name.rpartition(".")[2] == "GPTConfig" or re.fullmatch(numpy_scalar, name):
        return type("Record", (_InertRecord,), {}), name
    raise FileProblem(
        f"{path} would run {name} when loaded, so it is refused; convert it to safetensors where you trust it: "
        "safetensors.torch.save_file(torch.load(path)['model'], 'model.safetensors')."
    )


class _InertRecord:
    """Replaces a pickled object: it has the object's attributes and no behaviour."""

    def __init__(self, *args: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
