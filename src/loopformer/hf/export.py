"""From a run or model folder to a folder that Transformers loads, and loopformer too.

    export("runs/mine", "exported", self_contained=True, budget=4)

Everything is written beside the place and put there when it is whole. A folder that holds an earlier export is
brought up to date; files that are not ours stay in it. Any other folder with files in it is refused.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import GenerationConfig

import loopformer
from loopformer.data.tokenizer import Tokenizer
from loopformer.errors import FileProblem, require
from loopformer.files import read_json, sha256_of
from loopformer.hf.card import find_measured, run_of, write_card
from loopformer.hf.configuration import LoopFormerConfig
from loopformer.hf.modeling import LoopFormerForCausalLM
from loopformer.hf.sources import CONFIGURATION, MODELING, PACKAGE, flat, flatten
from loopformer.hf.tokenizer import CONFIG as TOKENIZER_CONFIG
from loopformer.hf.tokenizer import SPECIAL, TEMPLATE, find_chat_template, save_tokenizer
from loopformer.loading.folder import CONFIG, PREFIX, TOKENIZER, WEIGHTS, is_model_folder, write_safetensors
from loopformer.loading.published import find_model, model_folder
from loopformer.model import LoopedLM

CARD, GENERATION = "README.md", "generation_config.json"
_FILES = {WEIGHTS, CONFIG, GENERATION, CARD, TOKENIZER, TOKENIZER_CONFIG, SPECIAL, TEMPLATE}


@dataclass(frozen=True)
class Exported:
    """What was written."""

    out: Path
    model: LoopedLM
    config: LoopFormerConfig
    files: list[str]


def export(
    source: str | Path,
    out: str | Path,
    *,
    self_contained: bool = False,
    budget: int | None = None,
    trajectory: str | None = None,
    heads: int | None = None,
    loops: int | None = None,
) -> Exported:
    """Write a model for Transformers.

    self_contained      also the model's source files, for `trust_remote_code=True` without loopformer
    budget, trajectory  what the model follows where a call does not say; the full budget by default
    heads, loops        for published weights without a config
    """
    place = Path(out).resolve()
    _check_place(place)
    folder = model_folder(source)
    model, with_tokenizer = find_model(folder, heads, loops)
    tokenizer = Tokenizer.load(with_tokenizer) if with_tokenizer else None
    known: dict[str, Any] = {"imported_from": str(source)}
    if is_model_folder(folder):
        known = read_json(folder / CONFIG).get("source", {})
    measured = find_measured(folder, known.pop("validation", None))
    config = LoopFormerConfig(
        model=model.config,
        budget=budget,
        trajectory=trajectory,
        source={**known, "exported_with": f"{PACKAGE} {loopformer.__version__}"},
        dtype="float32",
        architectures=[LoopFormerForCausalLM.__name__],
        **_options(tokenizer, self_contained),
    )
    LoopFormerForCausalLM(config, model)  # refuses a default that the model cannot follow

    stage = place.with_name(f".{place.name}.{os.getpid()}.part")
    try:
        stage.mkdir(parents=True)
        tensors = {PREFIX + name: tensor.contiguous() for name, tensor in model.state_dict().items()}
        write_safetensors(tensors, stage / WEIGHTS)
        if measured:
            config.source["validation"] = measured.plain(sha256_of(stage / WEIGHTS))
        config.save_pretrained(stage)
        GenerationConfig(**_special(tokenizer)).save_pretrained(stage)
        if tokenizer:
            template = find_chat_template([one for one in (folder, run_of(folder)) if one])
            save_tokenizer(tokenizer, stage, model.config.context, template)
        for name, text in (flatten([CONFIGURATION, MODELING]) if self_contained else {}).items():
            (stage / name).write_text(text, encoding="utf-8")
        card = write_card(place.name, config, measured, tokenizer is not None, self_contained)
        (stage / CARD).write_text(card, encoding="utf-8")
        files = sorted(path.name for path in stage.iterdir())
        _put(stage, place)
    except SafetensorError as error:
        raise FileProblem(f"The weights could not be written to {place} ({error}); free some space.") from error
    finally:
        shutil.rmtree(stage, ignore_errors=True)
    return Exported(Path(out), model, config, files)


def _special(tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The end token also begins and pads."""
    return dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), tokenizer.eot) if tokenizer else {}


def _options(tokenizer: Tokenizer | None, self_contained: bool) -> dict[str, Any]:
    """What only Transformers reads of config.json: special tokens, and where the classes are."""
    if not self_contained:
        return _special(tokenizer)
    classes = {
        "AutoConfig": f"{flat(CONFIGURATION)}.{LoopFormerConfig.__name__}",
        "AutoModelForCausalLM": f"{flat(MODELING)}.{LoopFormerForCausalLM.__name__}",
    }
    return {**_special(tokenizer), "auto_map": classes}


def _check_place(place: Path) -> None:
    require(not place.is_file(), f"{place} is a file; name a folder to write to.")
    if place.is_dir() and any(place.iterdir()):
        ours = is_model_folder(place) and read_json(place / CONFIG).get("model_type") == LoopFormerConfig.model_type
        require(ours, f"{place} holds files that are no export of ours; choose another folder.")


def _put(stage: Path, place: Path) -> None:
    """Move a finished export to its place: in one go where nothing is there, else file by file, settings last."""
    if not place.exists() or not any(place.iterdir()):
        os.replace(stage, place)
        return
    new = {path.name for path in stage.iterdir()}
    for old in place.iterdir():
        ours = old.name in _FILES or (old.name.startswith(f"{PACKAGE}_") and old.suffix == ".py")
        if ours and old.name not in new:
            old.unlink()
    for name in sorted(new, key=lambda name: name == CONFIG):
        os.replace(stage / name, place / name)
