"""From a run or model folder to a folder that Transformers loads, and loopformer too.

    export("runs/mine", "exported", self_contained=True, budget=4)

In it are the weights, settings, the tokenizer as `AutoTokenizer` reads it, a model card, and with `self_contained`
the model's own source files, for places where loopformer is not installed.

Everything is written beside the place and put there when it is whole. A folder that holds an earlier export is
brought up to date; files that are not ours stay in it. Any other folder with files in it is refused.
"""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import GenerationConfig

import loopformer
from loopformer.config import ModelConfig
from loopformer.data.tokenizer import Tokenizer
from loopformer.errors import FileProblem, LoopformerError, require
from loopformer.files import read_json, sha256_of
from loopformer.hf.configuration import LoopFormerConfig
from loopformer.hf.modeling import LoopFormerForCausalLM
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
    is_export,
    is_model_folder,
    put_model,
    run_of,
    staged,
    step_of,
    write_safetensors,
)
from loopformer.model import LoopedLM
from loopformer.model.cost import Cost
from loopformer.training.reporting import read_metrics

PACKAGE = "loopformer"
CONFIGURATION, MODELING = f"{PACKAGE}.hf.configuration", f"{PACKAGE}.hf.modeling"
_ROOT = Path(__file__).parents[2]


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
    special: dict[str, Any] = {}
    if tokenizer:  # the end token also begins and pads
        special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), tokenizer.eot)
    classes: dict[str, Any] = {"auto_map": _AUTO_MAP} if self_contained else {}
    config = LoopFormerConfig(
        model=model.config,
        budget=budget,
        trajectory=trajectory,
        source={**known, "exported_with": f"{PACKAGE} {loopformer.__version__}"},
        dtype="float32",
        architectures=[LoopFormerForCausalLM.__name__],
        **special,
        **classes,
    )
    LoopFormerForCausalLM(config, model)  # refuses a default that the model cannot follow

    try:
        with staged(place) as stage:
            tensors = {PREFIX + name: tensor.contiguous() for name, tensor in model.state_dict().items()}
            write_safetensors(tensors, stage / WEIGHTS)
            if measured:
                config.source["validation"] = measured.plain(sha256_of(stage / WEIGHTS))
            config.save_pretrained(stage)
            GenerationConfig(**special).save_pretrained(stage)
            if tokenizer:
                template = find_chat_template(folder, run_of(folder))
                save_tokenizer(tokenizer, stage, model.config.context, template)
            for name, text in (flatten([CONFIGURATION, MODELING]) if self_contained else {}).items():
                (stage / name).write_text(text, encoding="utf-8")
            card = write_card(place.name, config, measured, tokenizer is not None, self_contained)
            (stage / CARD).write_text(card, encoding="utf-8")
            files = sorted(path.name for path in stage.iterdir())
            put_model(stage, place)
    except SafetensorError as error:
        raise FileProblem(f"The weights could not be written to {place} ({error}); free some space.") from error
    return Exported(Path(out), model, config, files)


def _check_place(place: Path) -> None:
    require(not place.is_file(), f"{place} is a file; name a folder to write to.")
    if place.is_dir() and any(place.iterdir()):
        require(is_export(place), f"{place} holds files that are no export of ours; choose another folder.")


# The tokenizer, in the files that `AutoTokenizer.from_pretrained` reads.


def save_tokenizer(tokenizer: Tokenizer, folder: Path, context: int, chat_template: str | None = None) -> None:
    """Write tokenizer.json, byte for byte as it is, and what stands beside it.

    Padding goes to the left, as generation in batches needs it. Unlike ours, Transformers' tokenizers read special
    tokens out of text.
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


# What was measured of these very weights: the validation that the run recorded at the checkpoint's step.

_LOSS = "loss_at_"


@dataclass(frozen=True)
class Measured:
    """Validation losses by budget, at a step of training."""

    step: int
    losses: dict[int, float]

    def plain(self, weights: str) -> dict[str, Any]:
        """As it stands in config.json, with the sha256 of the weights file it is of."""
        losses = {str(budget): loss for budget, loss in self.losses.items()}
        return {"step": self.step, "loss": losses, "weights_sha256": weights}


def find_measured(folder: Path, kept: dict[str, Any] | None = None) -> Measured | None:
    """What was measured of the model in a folder: by its run, or as an earlier export has `kept` it."""
    if run := run_of(folder):
        step = step_of(folder)
        for record in read_metrics(run):
            if record.get("kind") == "validation" and record.get("step") == step:
                named = {name: loss for name, loss in record.items() if name.startswith(_LOSS) and loss is not None}
                losses = {int(name.removeprefix(_LOSS)): loss for name, loss in named.items()}
                return Measured(step, losses) if losses else None
        return None
    if not kept or kept["weights_sha256"] != sha256_of(folder / WEIGHTS):  # an export that was trained further
        return None
    return Measured(kept["step"], {int(budget): loss for budget, loss in kept["loss"].items()})


# The model card: what the model is, what each budget costs and was measured to give, how to load it.

_CONDITIONING = {
    "none": "nothing of its place",
    "index": "its number",
    "time": "its time t",
    "step": "its step Δ",
    "trajectory": "its time t and its step Δ",
}


def write_card(
    name: str, config: LoopFormerConfig, measured: Measured | None, has_tokenizer: bool, self_contained: bool
) -> str:
    """The text of README.md."""
    model, parameters = config.settings, Cost(config.settings).parameters
    default = config.trajectory or config.budget or model.loops
    trust = ", trust_remote_code=True" if self_contained else ""
    register = "import loopformer.hf  # pip install 'loopformer[hf]'; makes the model known to Transformers\n"
    lm_eval = f":\n`lm_eval --model hf --model_args pretrained={name},trust_remote_code=True,budget=1`."
    tokenizer_class = _tokenizer_class(self_contained)
    tools = lm_eval if self_contained else "."  # lm-eval does not import loopformer, so it needs the sources
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags:
- loopformer
- elastic-depth
- looped-transformer
---

# {name}

An elastic-depth language model, {model.blocks}⊗{model.loops}: one shared stack of {_count(model.blocks, "block")},
applied up to {_count(model.loops, "time")}; each pass is told {_CONDITIONING[model.conditioning]}.
The number of passes M is the compute budget. It is chosen at each call; the default here is {default}.

| | |
|---|---|
| parameters | {parameters.total:,}; without embeddings {parameters.without_embeddings:,} |
| width, heads, FFN | {model.width}, {model.heads}, {model.ffn} |
| context, positions | {model.context} tokens, {model.positions} |
| vocabulary | {model.vocab:,} ids{"" if has_tokenizer else "; no tokenizer came with the weights"} |
| weights | {str(config.dtype).removeprefix("torch.")}, embedding and head tied |

## Budgets

{_budget_table(model, measured)}

FLOPs are those of the forward pass, averaged over a full context, a multiply-add counted as two; KV is what the
cache keeps, in bfloat16. {_validation_note(measured, model.loops)}

## Use

```python
{"" if self_contained else register}from transformers import AutoModelForCausalLM, {tokenizer_class}

model = AutoModelForCausalLM.from_pretrained("{name}"{trust})
{_example(name, model, self_contained, has_tokenizer)}
```

`from_pretrained(…, budget=1)` changes the default, which serves tools that only pass settings on{tools}
`loopformer.load("{name}")` reads this folder too.
"""


def _budget_table(model: ModelConfig, measured: Measured | None) -> str:
    """A row for each budget: its cost, and its loss where that was measured."""
    cost = Cost(model)
    full = cost.forward_flops()
    unit, size = ("GFLOP", 1e9) if full >= 1e9 else ("MFLOP", 1e6)
    columns = ["budget M", f"{unit} per token", "of full", "KV per token"]
    columns += ["validation loss", "perplexity"] if measured else []
    rows = [columns, ["---"] * len(columns)]
    for budget in range(1, model.loops + 1):
        flops = cost.forward_flops(budget)
        row = [str(budget), f"{flops / size:.4g}", f"{flops / full:.0%}", f"{cost.kv_bytes(budget) / 1024:.4g} KiB"]
        if measured:
            loss = measured.losses.get(budget)
            row += ["–", "–"] if loss is None else [f"{loss:.4f}", f"{math.exp(min(loss, 700)):.4g}"]
        rows.append(row)
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _validation_note(measured: Measured | None, loops: int) -> str:
    if measured is None:
        return "No validation of these weights was recorded,\nso the table holds costs only."
    left_out = "" if len(measured.losses) == loops else "; – where a budget was not measured"
    return f"Loss and perplexity are per token, from the\nrun's own validation at step {measured.step}{left_out}."


def _tokenizer_class(self_contained: bool) -> str:
    """What loads the tokenizer, which has no code of its own: before it looks at it, `AutoTokenizer` reads
    config.json, and asks whether it may run the code that a self-contained one names."""
    return "PreTrainedTokenizerFast" if self_contained else "AutoTokenizer"


def _example(name: str, model: ModelConfig, self_contained: bool, has_tokenizer: bool) -> str:
    """How to generate, with a budget and a schedule that this model can follow."""
    schedule = model.loops > 2 and model.conditioning not in ("none", "index")
    call = f"max_new_tokens=32, budget={max(1, model.loops // 2)})"
    call += '  # or trajectory="2-1-1"' if schedule else ""
    if not has_tokenizer:
        return f"model.generate(ids, {call}"
    return f"""tokenizer = {_tokenizer_class(self_contained)}.from_pretrained("{name}")
inputs = tokenizer("Once upon a time", return_tensors="pt")
ids = model.generate(**inputs, {call}
print(tokenizer.decode(ids[0]))"""


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


# The model's own source files in one flat folder.
#
# Transformers loads such code by copying a file and, from `from .name import …`, the files beside it. So each
# module that is needed becomes a file named after it, and our imports become relative. A name that a package only
# passes on is taken from the module that has it, so that nothing else of the package comes along.

_HEADER = f"# A module of {PACKAGE} (MIT licence), copied by `{PACKAGE} export`; only its imports are changed.\n"


def _flat(module: str) -> str:
    """The name of a module's copy."""
    return module.replace(".", "_")


_AUTO_MAP = {  # where Transformers finds the classes
    "AutoConfig": f"{_flat(CONFIGURATION)}.{LoopFormerConfig.__name__}",
    "AutoModelForCausalLM": f"{_flat(MODELING)}.{LoopFormerForCausalLM.__name__}",
}


def flatten(modules: Iterable[str], root: Path = _ROOT) -> dict[str, str]:
    """The modules and all of ours that they import, as files by name; `root` is the folder of the package."""
    texts: dict[str, str] = {}
    waiting = list(modules)
    while waiting:
        module = waiting.pop()
        if module not in texts:
            texts[module], needed = _rewritten(module, root)
            waiting += needed
    files = {f"{_flat(module)}.py": _HEADER + text for module, text in sorted(texts.items())}
    if len(files) < len(texts):
        raise LoopformerError(f"Two of the modules {', '.join(sorted(texts))} would have the same flat name.")
    return files


def _rewritten(module: str, root: Path) -> tuple[str, list[str]]:
    """A module's text with its imports of ours made relative, and the modules these are."""
    text = _path(module, root).read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    needed: list[str] = []
    for node in sorted(_imports(text, module), key=lambda node: -node.lineno):  # from the end, so that numbers stay
        homes: dict[str, list[str]] = {}
        for alias in node.names:
            home, name = _home(node.module or "", alias.name, root)
            known_as = alias.asname or alias.name
            homes.setdefault(home, []).append(name if name == known_as else f"{name} as {known_as}")
        indent = " " * node.col_offset
        new = [f"{indent}from .{_flat(home)} import {', '.join(names)}\n" for home, names in homes.items()]
        lines[node.lineno - 1 : node.end_lineno] = new
        needed += homes
    return "".join(lines), needed


def _imports(text: str, module: str) -> list[ast.ImportFrom]:
    """The imports of ours in a module, wherever they stand."""
    imports = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import) and any(_is_ours(alias.name) for alias in node.names):
            raise LoopformerError(f"{module} says `import {node.names[0].name}`; write `from … import` instead.")
        if isinstance(node, ast.ImportFrom) and (node.level or _is_ours(node.module or "")):
            if node.level or any(alias.name == "*" for alias in node.names):
                raise LoopformerError(f"{module}, line {node.lineno}: only absolute imports by name can be copied.")
            imports.append(node)
    return imports


def _is_ours(module: str) -> bool:
    return module.split(".")[0] == PACKAGE


def _home(module: str, name: str, root: Path) -> tuple[str, str]:
    """Where a name that is imported from a module is: packages pass on what their modules have."""
    path = _path(module, root)
    if path.name != "__init__.py":
        return module, name
    for node in _imports(path.read_text(encoding="utf-8"), module):
        for alias in node.names:
            if (alias.asname or alias.name) == name:
                return _home(node.module or "", alias.name, root)
    raise LoopformerError(f"{name} is not passed on by the package {module}, so it cannot be copied.")


def _path(module: str, root: Path) -> Path:
    place = root.joinpath(*module.split("."))
    return place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
