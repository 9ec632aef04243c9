"""What models and files are called in what we write: short, and without the places of one machine.

model_names(["runs/a/elastic", "runs/b/elastic"])     # ("a/elastic", "b/elastic")
short_path("/home/me/texts/news.jsonl")               # "news.jsonl"

Prompts of one length out of any text: the first windows of a source that `prepare` reads or has prepared.

    prompts = read_prompts("data/demo", tokenizer, count=64, length=128)     # of the validation split
    prompts = read_prompts("books/*.txt", tokenizer, count=64, length=128)

Windows lie inside documents and do not overlap. Every document gives its first one; only where there are too few
documents do they give a second, a third, … So 64 prompts are 64 documents if the text has them.

What the states of one model do along one trajectory, measured over prompts.

    found = analyze(lm.model, prompts, "runs/demo", trajectory="4-2-1-1")
    found.metrics["curvature"].mean       # [M + 1]: the embedding, then after each loop
    found.to_json(); Dynamics.from_json(plain)

Prompts run in batches; of each batch only numbers per prompt and the sums of CKA are kept, so memory does not grow
with the text.

Results on disk: analysis.json (everything), metrics.csv and cka.csv (one number per line, for other tools).

write_results(results, Path("analysis"))
results = read_results(Path("analysis/analysis.json"))
"""

import csv
import dataclasses
import hashlib
import io
import itertools
import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from loopformer.analysis.metrics import LinearCKA, anisotropy, curvature, lens, movement, prompt_entropy
from loopformer.data.tokenizer import Tokenizer
from loopformer.errors import FileProblem, LoopformerError, RunFailed, require
from loopformer.evaluation.store import weights_hash
from loopformer.evaluation.text import Ids, Text, read_text
from loopformer.files import write_atomic
from loopformer.model import LoopedLM
from loopformer.model.looped import TrajectoryLike
from loopformer.trajectory import Trajectory


def model_names(models: Sequence[str]) -> tuple[str, ...]:
    """The shortest ends of the paths that tell the models apart."""
    paths = [Path(model).resolve() if Path(model).exists() else Path(model) for model in models]
    require(len(set(paths)) == len(paths), "A model is given twice; give each one once.")
    for depth in range(1, max(len(path.parts) for path in paths)):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return tuple(names)
    return tuple(map(str, paths))


def short_path(given: str | Path) -> str:
    """A path as it can be shown to others: relative as it is, otherwise only its last part."""
    path = Path(given)
    return path.name if path.is_absolute() or ".." in path.parts else str(given)


SHORTEST = 4  # tokens; fewer have no curvature, and one prompt of fewer no debiased CKA


_FIRST_LOOK = 16  # how many times the tokens of all prompts are read at first; most documents are long enough


@dataclass(frozen=True)
class Prompts:
    """Token ids, and where they come from."""

    ids: Tensor  # [N, T] int64
    text: str  # the source as the user wrote it
    part: str  # which part of it, in words
    documents: int  # how many different ones the prompts come from

    @property
    def hash(self) -> str:
        """The sha256 of the ids, prompt after prompt, as little-endian int32."""
        return hashlib.sha256(self.ids.numpy().astype("<i4").tobytes()).hexdigest()


def read_prompts(given: str, tokenizer: Tokenizer, count: int, length: int, field: str = "text") -> Prompts:
    """The first `count` windows of `length` tokens; refused where the text has fewer."""
    require(count >= 1, f"The number of prompts must be 1 or more, got {count}.")
    require(length >= SHORTEST, f"A prompt must have {SHORTEST} tokens or more, got {length}.")
    limit = _FIRST_LOOK * count * length
    while True:
        text = read_text(given, tokenizer, field, max_tokens=limit)
        found = _windows(text, count, length)
        if len(found) == count or text.tokens <= limit:  # enough documents, or that was all of it
            break
        limit *= 8
    total = sum(map(len, found))
    require(total > 0, f"{given} has no document of {length} tokens; choose another text or a smaller length.")
    require(
        total >= count,
        f"{given} has {total} windows of {length} tokens where {count} prompts were asked for; "
        "ask for fewer or shorter ones, or give more text.",
    )
    rounds = itertools.zip_longest(*found)
    chosen = [window for one in rounds for window in one if window is not None][:count]
    return Prompts(torch.from_numpy(np.stack(chosen)), given, text.part, len(found))


def _windows(text: Text, count: int, length: int) -> list[list[Ids]]:
    """The windows of each of the first `count` documents that have any."""
    cut = (
        [ids[start : start + length] for start in range(0, len(ids) - length + 1, length)] for ids in text.documents
    )
    return list(itertools.islice(filter(None, cut), count))


States = Literal["before", "after"]


STATES: tuple[States, ...] = get_args(States)


Progress = Callable[[int, int], None]  # prompts done, prompts in all


Number = float | None  # None where a value has no meaning


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


_TOKENS = 2048  # in a batch: some hundred MB of states for the paper's models


@dataclass(frozen=True)
class Series:
    """A metric at the embedding and after each loop: mean and standard deviation over prompts."""

    mean: list[Number]  # [M + 1]
    std: list[Number]


@dataclass(frozen=True)
class Dynamics:
    """Everything measured for one model along one trajectory, and what it was measured on."""

    model: str
    shape: str  # k⊗L
    weights: str  # hash of settings and weights
    trajectory: str
    depth: list[float]  # i / M
    states: States  # geometry before or after the final norm; the lens always goes through it
    text: str
    part: str  # of the text
    prompts: int
    documents: int
    length: int
    tokens: int
    tokens_sha256: str  # of the prompts' ids as little-endian int32
    seed: None  # nothing is drawn
    device: str
    dtype: str
    seconds: float
    metrics: dict[str, Series]
    cka: list[list[Number]]  # [M + 1, M + 1]
    cka_debiased: list[list[Number]]

    @property
    def trajectory_name(self) -> str:
        """The trajectory for people: M = 4, 2-1-1, or rounded steps where they have no short form."""
        if self.trajectory.isdigit():
            return f"M = {self.trajectory}"
        steps = Trajectory.parse(self.trajectory).steps
        if len(self.trajectory) <= 3 * len(steps):
            return self.trajectory
        return " ".join(f"{float(step):.2f}" for step in steps)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, plain: dict[str, Any]) -> "Dynamics":
        metrics = {name: Series(**series) for name, series in plain["metrics"].items()}
        return cls(**{**plain, "metrics": metrics})


@torch.no_grad()
def analyze(
    model: LoopedLM,
    prompts: Prompts,
    name: str,
    trajectory: TrajectoryLike = None,
    *,
    states: str = "before",
    progress: Progress | None = None,
) -> Dynamics:
    """Run all prompts along a trajectory (None: the full one) and measure the state after each loop."""
    kind = checked_states(states)
    started = time.perf_counter()
    trajectory = model.resolve(trajectory)
    device = model.tokens.weight.device
    exact = torch.device("cpu") if device.type == "mps" else device  # where float64 exists
    cka = LinearCKA(trajectory.budget + 1, model.config.width, exact)
    found: list[dict[str, Tensor]] = []
    count, length = prompts.ids.shape
    rows = max(1, _TOKENS // length)
    for start in range(0, count, rows):
        seen = _states(model, prompts.ids[start : start + rows].to(device), trajectory)  # [S, B, T, D]
        shown = model.final_norm(seen) if kind == "after" else seen
        said = _lens(model, seen)
        found.append(_geometry(shown.to(exact)) | said)
        cka.add(shown.flatten(1, 2))
        if progress:
            progress(min(start + rows, count), count)
    return Dynamics(
        model=name,
        shape=f"{model.config.blocks}⊗{model.config.loops}",
        weights=weights_hash(model),
        trajectory=str(trajectory),
        depth=[i / trajectory.budget for i in range(trajectory.budget + 1)],
        states=kind,
        text=prompts.text,
        part=prompts.part,
        prompts=count,
        documents=prompts.documents,
        length=length,
        tokens=count * length,
        tokens_sha256=prompts.hash,
        seed=None,
        device=device.type,
        dtype=model.dtype_name,
        seconds=time.perf_counter() - started,
        metrics={name: _series(torch.cat([one[name] for one in found], dim=1)) for name in found[0]},
        cka=[_numbers(row) for row in cka.matrix()],
        cka_debiased=[_numbers(row) for row in cka.matrix(debiased=True)],
    )


def checked_states(given: str) -> States:
    """`before` or `after` (the final norm); anything else is refused."""
    for known in STATES:
        if given == known:
            return known
    raise LoopformerError(f"States are taken before or after the final norm; choose one of them, not {given!r}.")


def _states(model: LoopedLM, ids: Tensor, trajectory: TrajectoryLike) -> Tensor:
    """ids [B, T] → the embedding and the state after each loop, before the final norm [S, B, T, D]."""
    embedded, _, _ = model.embed(ids)
    return torch.stack([embedded, *model(ids, trajectory, logits=False, states=True).states])


def _geometry(states: Tensor) -> dict[str, Tensor]:
    """[S, B, T, D] → each metric [S, B]; one state at a time, because float64 takes room."""
    start = torch.full(states.shape[1:2], math.nan, dtype=torch.float64)  # nothing moves before the first loop
    return {
        "curvature": torch.stack([curvature(one) for one in states]).cpu(),
        "anisotropy": torch.stack([anisotropy(one) for one in states]).cpu(),
        "prompt_entropy": torch.stack([prompt_entropy(one) for one in states]).cpu(),
        "movement": torch.stack([start, *(movement(*pair).cpu() for pair in pairwise(states))]),
    }


def _lens(model: LoopedLM, states: Tensor) -> dict[str, Tensor]:
    """[S, B, T, D] before the final norm → both sides of the lens, means over the tokens of each prompt [S, B]."""
    divergence, agreement = (
        found.cpu().double().reshape(states.shape[:3]).mean(dim=-1) for found in lens(model, states.flatten(1, 2))
    )
    if not divergence.isfinite().all():  # which shows whatever is wrong with states, final norm and head
        raise RunFailed("This model gives no finite numbers; its weights are damaged or its training diverged.")
    return {"lens_divergence": divergence, "lens_agreement": agreement}


def _series(values: Tensor) -> Series:
    """[S, P] → mean and standard deviation over the prompts that have a value."""
    mean = values.nanmean(dim=1)
    count = (~values.isnan()).sum(dim=1)
    std = ((values - mean[:, None]).square().nansum(dim=1) / (count - 1)).sqrt()
    return Series(_numbers(mean), _numbers(torch.where(count > 1, std, math.nan)))


def _numbers(values: Tensor) -> list[Number]:
    """Plain numbers; JSON knows no nan."""
    return [value if math.isfinite(value) else None for value in values.tolist()]


FILE, METRICS, CKA = "analysis.json", "metrics.csv", "cka.csv"


def to_json(results: Sequence[Dynamics]) -> dict[str, Any]:
    """Everything as plain data, with what each number means."""
    return {
        "torch": torch.__version__,
        "definitions": DEFINITIONS,
        "results": [result.to_json() for result in results],
    }


def write_results(results: Sequence[Dynamics], folder: Path) -> list[Path]:
    """Write all three files, each whole or not at all."""
    metrics = (
        (one.model, one.shape, one.trajectory, one.states, loop, depth, name, mean, std)
        for one in results
        for name, series in one.metrics.items()
        for loop, (depth, mean, std) in enumerate(zip(one.depth, series.mean, series.std, strict=True))
    )
    similar = (
        (one.model, one.shape, one.trajectory, one.states, i, j, plain, debiased)
        for one in results
        for i, (row, debiased_row) in enumerate(zip(one.cka, one.cka_debiased, strict=True))
        for j, (plain, debiased) in enumerate(zip(row, debiased_row, strict=True))
    )
    model = ("model", "shape", "trajectory", "states")
    content = {
        FILE: json.dumps(to_json(results), indent=1, ensure_ascii=False) + "\n",
        METRICS: _table((*model, "loop", "depth", "metric", "mean", "std"), metrics),
        CKA: _table((*model, "loop_i", "loop_j", "cka", "cka_debiased"), similar),
    }
    for name, text in content.items():
        write_atomic(folder / name, text.encode())
    return [folder / name for name in content]


def read_results(path: Path) -> list[Dynamics]:
    """The results of an analysis.json."""
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
        return [Dynamics.from_json(one) for one in plain["results"]]
    except OSError as error:
        raise FileProblem(f"{path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise FileProblem(f"{path} is no result of loopformer analyze; make it again.") from error


def _table(header: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """CSV; an empty cell is a value that has no meaning."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return text.getvalue()
