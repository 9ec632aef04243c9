"""The model card, README.md: what the model is, what each budget costs and was measured to give, how to load it.

    measured = find_measured(Path("runs/x/checkpoints/step-00001500"))    # step 1500, losses by budget
    text = write_card("mine", config, measured, has_tokenizer=True, self_contained=False)

Only numbers of the very weights are shown: the validation that the run recorded at the checkpoint's step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loopformer.config import ModelConfig
from loopformer.files import sha256_of
from loopformer.hf.configuration import LoopFormerConfig
from loopformer.loading.folder import FOLDER, WEIGHTS, is_run_folder, step_of
from loopformer.model.cost import Cost
from loopformer.training.reporting import read_metrics

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


def run_of(folder: Path) -> Path | None:
    """The run that a checkpoint belongs to."""
    run = folder.resolve().parent.parent
    return run if folder.resolve().parent.name == FOLDER and is_run_folder(run) else None


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


def write_card(
    name: str, config: LoopFormerConfig, measured: Measured | None, has_tokenizer: bool, self_contained: bool
) -> str:
    """The text of README.md."""
    model, parameters = config.settings, Cost(config.settings).parameters
    default = config.trajectory or config.budget or model.loops
    told = f"told {_TOLD[model.conditioning]}"
    trust = ", trust_remote_code=True" if self_contained else ""
    lm_eval = _LM_EVAL.format(name=name) if self_contained else "."
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
applied up to {_count(model.loops, "time")}; each pass is {told}.
The number of passes M is the compute budget. It is chosen at each call; the default here is {default}.

| | |
|---|---|
| parameters | {parameters.total:,}; without embeddings {parameters.without_embeddings:,} |
| width, heads, FFN | {model.width}, {model.heads}, {model.ffn} |
| context, positions | {model.context} tokens, {model.positions} |
| vocabulary | {model.vocab:,} ids{"" if has_tokenizer else "; no tokenizer came with the weights"} |
| weights | {str(config.dtype).removeprefix("torch.")}, embedding and head tied |

## Budgets

{_table(model, measured)}

FLOPs are those of the forward pass, averaged over a full context, a multiply-add counted as two; KV is what the
cache keeps, in bfloat16. {_said(measured, model.loops)}

## Use

```python
{"" if self_contained else _REGISTER}{_IMPORT}

model = AutoModelForCausalLM.from_pretrained("{name}"{trust})
{_example(name, model, trust, has_tokenizer)}
```

`from_pretrained(…, budget=1)` changes the default, which serves tools that only pass settings on{lm_eval}
`loopformer.load("{name}")` reads this folder too.
"""


_TOLD = {
    "none": "nothing of its place",
    "index": "its number",
    "time": "its time t",
    "step": "its step Δ",
    "trajectory": "its time t and its step Δ",
}
_LM_EVAL = ":\n`lm_eval --model hf --model_args pretrained={name},trust_remote_code=True,budget=1`."
_REGISTER = "import loopformer.hf  # pip install 'loopformer[hf]'; makes the model known to Transformers\n"
_IMPORT = "from transformers import AutoModelForCausalLM, AutoTokenizer"


def _example(name: str, model: ModelConfig, trust: str, has_tokenizer: bool) -> str:
    """How to generate, with a budget and a schedule that this model can follow."""
    schedule = model.loops > 2 and model.conditioning not in ("none", "index")
    call = f"max_new_tokens=32, budget={max(1, model.loops // 2)})"
    call += '  # or trajectory="2-1-1"' if schedule else ""
    if not has_tokenizer:
        return f"model.generate(ids, {call}"
    return f"""tokenizer = AutoTokenizer.from_pretrained("{name}"{trust})
inputs = tokenizer("Once upon a time", return_tensors="pt")
ids = model.generate(**inputs, {call}
print(tokenizer.decode(ids[0]))"""


def _table(model: ModelConfig, measured: Measured | None) -> str:
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


def _said(measured: Measured | None, loops: int) -> str:
    if measured is None:
        return "No validation of these weights was recorded,\nso the table holds costs only."
    left_out = "" if len(measured.losses) == loops else "; – where a budget was not measured"
    return f"Loss and perplexity are per token, from the\nrun's own validation at step {measured.step}{left_out}."


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")
