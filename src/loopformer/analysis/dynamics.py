"""Measures how the hidden states of a model change from loop to loop, and writes the results.

    prompts = read_prompts("data/demo", lm.tokenizer, count=64, length=128)     # of the validation split
    result = analyze(lm.model, prompts, "runs/demo", trajectory="2-1-2-3")
    result["metrics"]["curvature"]["mean"]              # [M + 1]: the embedding, then after each loop
    write_results([result], Path("analysis"))           # analysis.json, metrics.csv and cka.csv, and figures

Prompts are windows of one length that lie inside documents and do not overlap. The first windows of all documents
come first, then their second windows, and so on. So 64 prompts come from 64 documents if the text has that many.
Prompts run in batches. Only numbers per prompt and the sums of CKA outlive a batch, so more prompts need hardly
more memory. Results are plain JSON, in which None stands for an undefined value.
"""

from __future__ import annotations

import csv
import hashlib
import io
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from loopformer.analysis.metrics import LinearCKA, anisotropy, curvature, lens, movement, prompt_entropy
from loopformer.errors import LoopformerError, RunFailed, require
from loopformer.evaluation.store import JsonDict, weights_hash
from loopformer.evaluation.text import read_text
from loopformer.files import json_bytes, write_together
from loopformer.plots import figure_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from loopformer.data.tokenizer import Tokenizer
    from loopformer.model import LoopedLM
    from loopformer.model.looped import TrajectoryLike

Row = Mapping[str, Any]  # a row of a table: column → value

DEFINITIONS = {
    "curvature": "mean angle between successive differences of token states, radians (Hosseini & Fedorenko 2023)",
    "anisotropy": "mean cosine between two different tokens of a prompt, states not centred (Godey et al. 2024)",
    "prompt_entropy": "entropy of the spectrum of the tokens' Gram matrix over log min(T, D), alpha = 1; "
    "tokens centred over their prompt, then of unit length (Skean et al. 2025)",
    "movement": "|h_i - h_(i-1)| / |h_(i-1)|, mean over tokens",
    "lens_divergence": "KL(final || after loop i) through final norm and head, nats per token",
    "lens_agreement": "share of tokens whose most likely next token is already the final one",
    "cka": "linear CKA between states, all tokens of all prompts pooled, float64 (Kornblith et al. 2019)",
    "cka_debiased": "the same with Song's unbiased HSIC",
}

PROMPT_LENGTH = 128  # tokens; fixed, because entropy depends on the length and models are compared
MIN_PROMPT_LENGTH = 4  # tokens; curvature needs 3, and debiased CKA over a single prompt needs 4

_READ_FACTOR = 16  # read this many times the tokens of all prompts first: documents are longer than a prompt
_BATCH_TOKENS = 2048  # tokens × states take a few hundred MB for the paper's models


def model_names(models: Sequence[str]) -> tuple[str, ...]:
    """A distinct name for each model: as few trailing parts of its path as tell the models apart."""
    paths = [Path(model).resolve() if Path(model).exists() else Path(model) for model in models]
    if len(set(paths)) < len(paths):
        raise LoopformerError("A model is given twice; give each one once.")
    for depth in range(1, max(len(path.parts) for path in paths)):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return tuple(names)
    return tuple(map(str, paths))


def metric_rows(results: Sequence[JsonDict]) -> list[Row]:
    """One row for each result, metric and loop."""
    return [
        {**_identity_columns(result), "loop": loop, "depth": depth, "metric": metric, "mean": mean, "std": std}
        for result in results
        for metric, series in result["metrics"].items()
        for loop, (depth, mean, std) in enumerate(zip(result["depth"], series["mean"], series["std"], strict=True))
    ]


def cka_rows(results: Sequence[JsonDict]) -> list[Row]:
    """One row for each result and pair of its states."""
    return [
        {**_identity_columns(result), "loop_i": i, "loop_j": j, "cka": plain, "cka_debiased": debiased}
        for result in results
        for i, rows in enumerate(zip(result["cka"], result["cka_debiased"], strict=True))
        for j, (plain, debiased) in enumerate(zip(*rows, strict=True))
    ]


def _identity_columns(result: JsonDict) -> Row:
    """The columns that identify the states which a row describes."""
    return {name: result[name] for name in ("model", "shape", "trajectory", "states")}


@dataclass(frozen=True)
class Prompts:
    """Token ids and their source."""

    ids: Tensor  # [N, T] int64
    text: str  # the source as the user wrote it
    part: str  # which part of the text was read, in words
    documents: int  # number of documents that the prompts come from

    @property
    def hash(self) -> str:
        """The sha256 of the ids, prompt after prompt, as little-endian int32."""
        return hashlib.sha256(self.ids.numpy().astype("<i4").tobytes()).hexdigest()


def read_prompts(source: str, tokenizer: Tokenizer, count: int, length: int, field: str = "text") -> Prompts:
    """The first `count` windows of `length` tokens from anything that `prepare` reads."""
    require(count >= 1, f"The number of prompts must be 1 or more, got {count}.")
    require(length >= MIN_PROMPT_LENGTH, f"A prompt must have {MIN_PROMPT_LENGTH} tokens or more, got {length}.")
    limit = _READ_FACTOR * count * length
    while True:
        text = read_text(source, tokenizer, field, max_tokens=limit)
        by_document = (
            [ids[start : start + length] for start in range(0, len(ids) - length + 1, length)]
            for ids in text.documents
        )
        windows = list(itertools.islice(filter(None, by_document), count))
        if len(windows) == count or text.tokens <= limit:  # enough documents, or the whole text was read
            break
        limit *= 8
    total = sum(map(len, windows))
    require(total > 0, f"{source} has no document of {length} tokens; choose another text or a smaller length.")
    require(
        total >= count,
        f"{source} has {total} windows of {length} tokens where {count} prompts were asked for; "
        "ask for fewer or shorter ones, or give more text.",
    )
    rounds = itertools.zip_longest(*windows)  # the first of each document, then the second of each, …
    chosen = [window for same_round in rounds for window in same_round if window is not None][:count]
    return Prompts(torch.from_numpy(np.stack(chosen)), source, text.part, len(windows))


@torch.no_grad()
def analyze(
    model: LoopedLM,
    prompts: Prompts,
    name: str,
    trajectory: TrajectoryLike = None,
    *,
    states: str = "before",
    progress: Callable[[int, int], None] | None = None,
) -> JsonDict:
    """Run all prompts along a trajectory (None: the full one) and measure the state after each loop.

    states    before or after the final norm, for geometry and CKA; the lens always goes through the norm
    progress  called after each batch with the prompts done so far and their total
    """
    require(states in ("before", "after"), f"States are before or after the final norm; {states!r} is neither.")
    started = time.perf_counter()
    trajectory = model.resolve(trajectory)
    device = model.device
    float64_device = torch.device("cpu") if device.type == "mps" else device  # mps has no float64
    cka = LinearCKA(trajectory.budget + 1, model.config.width, float64_device)
    batches: list[dict[str, Tensor]] = []
    count, length = prompts.ids.shape
    rows = max(1, _BATCH_TOKENS // length)
    for start in range(0, count, rows):
        raw = _states(model, prompts.ids[start : start + rows].to(device), trajectory)  # [S, B, T, D]
        measured = model.final_norm(raw) if states == "after" else raw
        # The lens comes first: it reports states that are not finite, on which the geometry may crash.
        through_lens = _lens(model, raw)
        batches.append(_geometry(measured.to(float64_device)) | through_lens)
        cka.add(measured.flatten(1, 2))
        if progress:
            progress(min(start + rows, count), count)
    return {
        "model": name,
        "shape": f"{model.config.blocks}⊗{model.config.loops}",
        "weights": weights_hash(model),
        "trajectory": str(trajectory),
        "depth": [i / trajectory.budget for i in range(trajectory.budget + 1)],
        "states": states,
        "text": prompts.text,
        "part": prompts.part,
        "prompts": count,
        "documents": prompts.documents,
        "length": length,
        "tokens": count * length,
        "tokens_sha256": prompts.hash,
        "seed": None,  # nothing is drawn
        "device": device.type,
        "dtype": model.dtype_name,
        "seconds": time.perf_counter() - started,
        "metrics": {name: _mean_std(torch.cat([batch[name] for batch in batches], dim=1)) for name in batches[0]},
        "cka": [_finite_or_none(row) for row in cka.matrix()],
        "cka_debiased": [_finite_or_none(row) for row in cka.matrix(debiased=True)],
    }


def _states(model: LoopedLM, ids: Tensor, trajectory: TrajectoryLike) -> Tensor:
    """ids [B, T] → the state before the first loop and after each, before the final norm [S, B, T, D]."""
    start = model.embed(ids)[3]
    return torch.stack([start, *model(ids, trajectory, logits=False, states=True).states])


def _geometry(states: Tensor) -> dict[str, Tensor]:
    """[S, B, T, D] → each metric [S, B]; one state at a time to save memory, because states are in float64."""
    geometry = {
        "curvature": [curvature(state) for state in states],
        "anisotropy": [anisotropy(state) for state in states],
        "prompt_entropy": [prompt_entropy(state) for state in states],
        "movement": [movement(before, after) for before, after in pairwise(states)],
    }
    # Nothing moves before the first loop.
    geometry["movement"].insert(0, torch.full_like(geometry["curvature"][0], math.nan))
    return {name: torch.stack(values).cpu() for name, values in geometry.items()}


def _lens(model: LoopedLM, states: Tensor) -> dict[str, Tensor]:
    """[S, B, T, D] before the final norm → divergence and agreement of the lens, means over each prompt [S, B]."""
    divergence, agreement = (
        values.cpu().double().reshape(states.shape[:3]).mean(dim=-1) for values in lens(model, states.flatten(1, 2))
    )
    if not divergence.isfinite().all():  # a fault in the states, the final norm or the head ends up here
        raise RunFailed("This model gives no finite numbers; its weights are damaged or its training diverged.")
    return {"lens_divergence": divergence, "lens_agreement": agreement}


def _mean_std(values: Tensor) -> dict[str, list[float | None]]:
    """[S, P] → mean and standard deviation over the prompts that have a value, each [S]."""
    mean = values.nanmean(dim=1)
    count = (~values.isnan()).sum(dim=1)
    std = ((values - mean[:, None]).square().nansum(dim=1) / (count - 1)).sqrt()
    return {"mean": _finite_or_none(mean), "std": _finite_or_none(torch.where(count > 1, std, math.nan))}


def _finite_or_none(values: Tensor) -> list[float | None]:
    """Plain numbers, with None for nan and infinities, which JSON lacks."""
    return [value if math.isfinite(value) else None for value in values.tolist()]


def to_json(results: Sequence[JsonDict]) -> JsonDict:
    """The content of analysis.json, with the definition of each metric."""
    return {"torch": torch.__version__, "definitions": DEFINITIONS, "results": list(results)}


def write_results(
    results: Sequence[JsonDict], folder: Path, figures: Mapping[str, Figure] | None = None
) -> list[Path]:
    """Write all files, or none if one cannot be made; figures become .png and .svg files."""
    contents = {
        "analysis.json": json_bytes(to_json(results)),
        "metrics.csv": to_csv(metric_rows(results)),
        "cka.csv": to_csv(cka_rows(results)),
    }
    for name, figure in (figures or {}).items():
        contents |= {name + ending: figure_bytes(figure, ending) for ending in (".png", ".svg")}
    return write_together(folder, contents)


def to_csv(rows: Sequence[Row], columns: Sequence[str] | None = None) -> bytes:
    """A CSV file of the columns, by default those of the first row; a missing value is an empty cell."""
    text = io.StringIO()
    names = list(rows[0]) if columns is None else columns
    writer = csv.DictWriter(text, names, restval="", extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()
