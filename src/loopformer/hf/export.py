"""Write a folder that both Transformers and loopformer load, from a run or a model folder.

    export("runs/mine", "exported", self_contained=True, budget=4)

The folder holds the weights, the settings, the tokenizer as `AutoTokenizer` reads it, and a model card.
`self_contained` adds the model's source files, for machines without loopformer.

Everything is written to a temporary folder and moved when it is complete. An earlier export is replaced, and
files that were added to it stay. Any other folder with files in it is refused.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from safetensors import SafetensorError
from transformers import GenerationConfig

import loopformer
from loopformer.data.tokenizer import Tokenizer
from loopformer.errors import FileProblem, require
from loopformer.files import read_json, sha256_of
from loopformer.hf.configuration import LoopFormerConfig
from loopformer.hf.modeling import LoopFormerForCausalLM
from loopformer.inference.chat import TUNED, was_tuned_to_answer
from loopformer.loading import find_model, model_folder
from loopformer.loading.folder import (
    CARD,
    CONFIG,
    PREFIX,
    SPECIAL,
    TEMPLATE,
    TOKENIZER_CONFIG,
    WEIGHTS,
    find_chat_template,
    install_model,
    is_export,
    is_model_folder,
    run_folder_of,
    staging_folder,
    step_of,
    write_safetensors,
)
from loopformer.model.cost import Cost
from loopformer.training.reporting import read_metrics

PACKAGE = "loopformer"
CONFIGURATION, MODELING = f"{PACKAGE}.hf.configuration", f"{PACKAGE}.hf.modeling"
_ROOT = Path(__file__).parents[2]


def export(
    source: str | Path,
    out: str | Path,
    *,
    self_contained: bool = False,
    budget: int | None = None,
    trajectory: str | None = None,
    heads: int | None = None,
    loops: int | None = None,
) -> tuple[LoopFormerConfig, list[str]]:
    """Write a model for Transformers. Returns its config and the names of its files.

    self_contained      add the model's source files, for `trust_remote_code=True` without loopformer
    budget, trajectory  the default of the exported model; the full budget if neither is given
    heads, loops        for published weights without a config
    """
    target = Path(out).resolve()
    require(not target.is_file(), f"{target} is a file; name a folder to write to.")
    if target.is_dir() and any(target.iterdir()):
        require(is_export(target), f"{target} holds files that are not an export; choose another folder.")
    folder = model_folder(source)
    model, tokenizer_folder = find_model(folder, heads, loops)
    tokenizer = Tokenizer.load(tokenizer_folder) if tokenizer_folder else None
    provenance: dict[str, Any] = {"imported_from": str(source)}
    if is_model_folder(folder):
        provenance = read_json(folder / CONFIG).get("source", {})
    if was_tuned_to_answer(folder):
        provenance[TUNED] = True
    validation = find_validation(folder, provenance.pop("validation", None))
    special: dict[str, Any] = {}
    if tokenizer:  # the end token is also the beginning and padding token
        special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), tokenizer.eot)
    classes: dict[str, Any] = {"auto_map": _AUTO_MAP} if self_contained else {}
    config = LoopFormerConfig(
        model=model.config,
        budget=budget,
        trajectory=trajectory,
        source={**provenance, "exported_with": f"{PACKAGE} {loopformer.__version__}"},
        dtype="float32",
        architectures=[LoopFormerForCausalLM.__name__],
        **special,
        **classes,
    )
    LoopFormerForCausalLM(config, model)  # refuses a default trajectory that the model cannot follow

    try:
        with staging_folder(target) as stage:
            tensors = {PREFIX + name: tensor.contiguous() for name, tensor in model.state_dict().items()}
            write_safetensors(tensors, stage / WEIGHTS)
            if validation:
                config.source["validation"] = {**validation, "weights_sha256": sha256_of(stage / WEIGHTS)}
            config.save_pretrained(stage)
            GenerationConfig(**special).save_pretrained(stage)
            if tokenizer:
                template = find_chat_template(folder, run_folder_of(folder))
                save_tokenizer(tokenizer, stage, model.config.context, template)
            for name, text in (flatten([CONFIGURATION, MODELING]) if self_contained else {}).items():
                (stage / name).write_text(text, encoding="utf-8")
            card = write_card(target.name, config, validation, tokenizer is not None, self_contained)
            (stage / CARD).write_text(card, encoding="utf-8")
            files = sorted(path.name for path in stage.iterdir())
            install_model(stage, target)
    except SafetensorError as error:
        raise FileProblem(f"The weights could not be written to {target} ({error}); free some space.") from error
    return config, files


# The tokenizer, in the files that `AutoTokenizer.from_pretrained` reads.


def save_tokenizer(tokenizer: Tokenizer, folder: Path, context: int, chat_template: str | None = None) -> None:
    """Write tokenizer.json unchanged, and the settings files that Transformers reads with it.

    Padding goes to the left, because generation appends to the right end of every row. In Transformers, unlike in
    loopformer, the text of a special token is encoded as that token.
    """
    tokenizer.save(folder)
    end = tokenizer.decode([tokenizer.eot], special=True)
    special = {"bos_token": end, "eos_token": end, "pad_token": end}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": context,
        "padding_side": "left",
    }
    for name, content in ((TOKENIZER_CONFIG, settings), (SPECIAL, special)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    if chat_template is not None:
        (folder / TEMPLATE).write_text(chat_template, encoding="utf-8")


# The validation losses of these exact weights, as the run recorded them at the checkpoint's step.

_LOSS = "loss_at_"  # followed by the budget


def find_validation(folder: Path, exported: dict[str, Any] | None) -> dict[str, Any] | None:
    """The training step and the validation loss by budget, from the model's run or else from its earlier export."""
    if run := run_folder_of(folder):
        step = step_of(folder)
        for record in read_metrics(run):
            if record.get("kind") == "validation" and record.get("step") == step:
                measured = {name: loss for name, loss in record.items() if loss is not None}
                losses = {name.removeprefix(_LOSS): measured[name] for name in measured if name.startswith(_LOSS)}
                return {"step": step, "loss": losses} if losses else None
        return None
    if not exported or exported["weights_sha256"] != sha256_of(folder / WEIGHTS):  # losses of other weights
        return None
    return exported


# The model card: what the model is, what each budget costs, its measured losses, and how to load it.


def write_card(
    name: str,
    config: LoopFormerConfig,
    validation: dict[str, Any] | None,
    has_tokenizer: bool,
    self_contained: bool,
) -> str:
    """The text of README.md."""
    model, cost = config.settings, Cost(config.settings)
    losses = {} if validation is None else validation["loss"]
    full = cost.forward_flops()
    unit, size = ("GFLOP", 1e9) if full >= 1e9 else ("MFLOP", 1e6)
    budgets = []
    for budget in range(1, model.loops + 1):
        flops, loss = cost.forward_flops(budget), losses.get(str(budget))
        row = {"budget": budget, "flops": f"{flops / size:.4g}", "share": f"{flops / full:.0%}"}
        row["kv"] = f"{cost.kv_bytes(budget) / 1024:.4g} KiB"
        row["loss"] = "–" if loss is None else f"{loss:.4f}"
        row["perplexity"] = "–" if loss is None else f"{math.exp(min(loss, 700)):.4g}"
        budgets.append(row)
    templates = Environment(
        loader=PackageLoader("loopformer.hf", ""),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    return templates.get_template("card.md.j2").render(
        name=name,
        model=model,
        parameters=cost.parameters,
        default=config.trajectory or config.budget or model.loops,
        dtype=str(config.dtype).removeprefix("torch."),
        flops_unit=unit,
        budgets=budgets,
        losses=losses,
        step=None if validation is None else validation["step"],
        has_schedules=model.loops > 2 and model.conditioning not in ("none", "index"),
        has_tokenizer=has_tokenizer,
        self_contained=self_contained,
        # AutoTokenizer reads config.json first, and would ask whether it may run the code that a self-contained
        # config.json names. The tokenizer has no code, so its class is loaded directly.
        tokenizer_class="PreTrainedTokenizerFast" if self_contained else "AutoTokenizer",
    )


# The model's source files in one flat folder.
#
# Transformers copies a file and, for `from .name import …`, the files beside it. So each module becomes a file with
# a flat name, and its imports of loopformer modules become relative. Only `from module import …` is rewritten. No
# `__init__.py` is copied, so these modules import each name from the module that defines it.

_HEADER = f"# A module of {PACKAGE} (MIT licence), copied by `{PACKAGE} export`; only its imports are changed.\n"
_IMPORT = re.compile(rf"^( *)from ({PACKAGE}[.\w]*) import", re.MULTILINE)


def _flat(module: str) -> str:
    """The name of a module in the flat folder."""
    return module.replace(".", "_")


_AUTO_MAP = {  # where Transformers finds the classes
    "AutoConfig": f"{_flat(CONFIGURATION)}.{LoopFormerConfig.__name__}",
    "AutoModelForCausalLM": f"{_flat(MODELING)}.{LoopFormerForCausalLM.__name__}",
}


def flatten(modules: Iterable[str], root: Path = _ROOT) -> dict[str, str]:
    """Source texts by flat file name, of modules and the loopformer modules they import, found under `root`."""
    texts: dict[str, str] = {}
    pending = list(modules)
    while pending:
        module = pending.pop()
        if module not in texts:
            texts[module] = root.joinpath(*module.split(".")).with_suffix(".py").read_text(encoding="utf-8")
            pending += [imported for _, imported in _IMPORT.findall(texts[module])]
    return {
        f"{_flat(module)}.py": _HEADER + _IMPORT.sub(lambda line: f"{line[1]}from .{_flat(line[2])} import", text)
        for module, text in sorted(texts.items())
    }
