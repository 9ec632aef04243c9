"""Fill README and docs/box.md with the figures of the stored results.

    python tools/fill_figures.py     # after a result has changed; tests/test_figures.py fails until then

A part of a page between `<!-- figures: NAME -->` and `<!-- end -->` is written by a function of FIGURES, from files
in `results/`. Edit its words here, and the rest of the page there.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "docs/box.md")
PART = re.compile(r"(<!-- figures: ([\w-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
BUDGETS = (1, 2, 4, 8)
NUMBERS = (
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
)
ELASTIC = ("normed", "elastic-time-10")
PAPER_RATES = (("final", "paper"), ("final", "paper-adamw-2e-3"), ("rest", "paper-adamw-4e-3"))  # one seed each
LOOPED = {  # rows of the comparison: one model each, of suite and name, with their seeds
    "the paper's objective, our optimizer": ("normed", "paper-ours", (0, 1, 2)),
    "Recurrent Depth, our optimizer": ("baselines", "recurrent-depth", (0, 1, 2)),
    "naive early exit, our optimizer, normalised start": ("normed", "early-exit", (0, 1, 2)),
    "the paper's recipe, AdamW {rate} (best of {rates}; the paper has 6e-4)": ("final", "paper-adamw-2e-3", (0,)),
}


def main() -> None:
    for name in PAGES:
        page = ROOT / name
        page.write_text(fill(page.read_text("utf-8")), encoding="utf-8")


def fill(text: str) -> str:
    """The text of a page with each marked part written from the results."""
    return PART.sub(lambda part: f"{part[1]}{FIGURES[part[2]]()}\n{part[4]}", text)


def load(name: str) -> Any:
    return json.loads((ROOT / "results" / name).read_text("utf-8"))


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [f"| {' | '.join(map(str, cells))} |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def three_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}"


def rate(run: Any) -> str:
    """A learning rate as the settings write it: 2e-3."""
    return re.sub(r"\.?0*e-0", "e-", f"{run['settings']['training']['learning_rate']:e}")


def listed(numbers: Iterable[object]) -> str:
    *first, last = map(str, numbers)
    return f"{', '.join(first)} and {last}"


# README: models of one block of width 512


def runs_of(suite: str, name: str, seeds: Sequence[int] = (0, 1, 2)) -> list[Any]:
    return [load(f"elastic/{suite}-{name}-s{seed}.json") for seed in seeds]


def mean_perplexity(runs: Sequence[Any], budget: int) -> float:
    """Over the held-out windows of each run, then over the runs."""
    return fmean(math.exp(fmean(run["windows"]["nats"][str(budget)]) / run["windows"]["tokens"]) for run in runs)


def petaflops(runs: Sequence[Any]) -> float:
    return float(runs[0]["plan"]["total_flops"]) / 1e15


def specialists(tokens: str = "") -> dict[int, list[Any]]:
    """Runs of one budget by that budget. `tokens` is "-twice" for as many tokens as `elastic`, with one seed."""
    seeds = (0,) if tokens else (0, 1, 2)
    return {budget: runs_of("normed", f"specialist-{budget}{tokens}", seeds) for budget in BUDGETS}


def plain_runs() -> dict[int, list[Any]]:
    """Runs of plain Transformers by their number of blocks."""
    return {blocks: runs_of("baselines", f"plain-{blocks}") for blocks in BUDGETS}


def recipes() -> str:
    """The comparison at about equal training FLOPs of each looped model."""
    rates = [runs_of(suite, name, (0,))[0] for suite, name in PAPER_RATES]
    named = {"rate": rate(runs_of(*PAPER_RATES[1], (0,))[0]), "rates": ", ".join(map(rate, rates))}
    rows: list[list[object]] = []
    looped = {"**`elastic`**": (*ELASTIC, (0, 1, 2)), **LOOPED}
    for label, (suite, name, seeds) in looped.items():
        runs = runs_of(suite, name, seeds)
        values = [three_digits(mean_perplexity(runs, budget)) for budget in BUDGETS]
        rows.append([label.format(**named), 1, *values, f"{petaflops(runs):.1f}", len(seeds)])
    separate = {
        "looped specialists, one budget and half the tokens of `elastic` each": (specialists(), BUDGETS),
        "looped specialists, one budget and the tokens of `elastic` each": (specialists("-twice"), BUDGETS),
        "plain Transformers of 1, 2, 4 and 8 blocks": (plain_runs(), (1, 1, 1, 1)),
    }
    for label, (models, loops) in separate.items():
        values = [
            three_digits(mean_perplexity(runs, budget)) for runs, budget in zip(models.values(), loops, strict=True)
        ]
        total = sum(petaflops(runs) for runs in models.values())
        rows.append([label, len(models), *values, f"{total:.1f}", len(models[1])])
    head = ["", "models", "1 loop", "2 loops", "4 loops", "8 loops", "training PFLOP, all models", "seeds"]
    explained = (
        "The last rows have a separate model in each column. A plain Transformer has as many blocks as the "
        "others have loops.\n`experiments/elastic.py` repeats the table on one H200 "
        "([all runs](docs/experiments/recipe.md))."
    )
    return f"{table(head, rows)}\n\n{explained}\n\n{verdict()}"


def verdict() -> str:
    """What the comparison says: where one model is not the best, where depth does not pay, and where it does."""
    elastic, plain, special = runs_of(*ELASTIC), plain_runs(), specialists("-twice")
    less = [
        f"{100 * (1 - mean_perplexity(special[budget], budget) / mean_perplexity(elastic, budget)):.0f}"
        for budget in BUDGETS
    ]
    deep = mean_perplexity(elastic, 8)
    one, two = (mean_perplexity(plain[blocks], 1) for blocks in (1, 2))
    ours, theirs = (runs[0]["plan"]["parameters"] / 1e6 for runs in (elastic, plain[2]))
    return (
        "- **Where a specialist is better.** A model for one budget that has seen as many tokens as `elastic` has "
        f"{listed(less)} %\n  less perplexity at {listed(BUDGETS)} loops (one seed).\n"
        "- **Where depth does not pay.** Eight loops of one block beat one plain block "
        f"({deep:.1f} against {one:.1f}). But two plain\n  blocks, with about as many parameters "
        f"({theirs:.1f} M against {ours:.1f} M), beat eight loops ({two:.1f}). At this scale\n"
        "  looping gives every budget from one model. It saves neither training compute nor parameters.\n"
        f"- **Where depth pays.** {state_tracking()}"
    )


def state_tracking() -> str:
    """What loops are worth on S3."""
    runs = [load(f"state_tracking/s3-elastic-and-one-seed{seed}.json") for seed in (0, 1, 2)]
    one, five = (
        100
        * fmean(
            row["mean_accuracy"]
            for run in runs
            for row in run["states"]["trajectories"]
            if row["trajectory"] == name
        )
        for name in ("1", "5")
    )
    return (
        "Tasks with sequential steps need depth: on S3, accuracy rises from "
        f"{one:.1f} % at one loop to\n  {five:.1f} % at five ({NUMBERS[len(runs)]} seeds, "
        "[state tracking](docs/experiments/state-tracking.md))."
    )


def default_preset() -> str:
    tokens = runs_of(*ELASTIC)[0]["plan"]["tokens"] / 1e6
    return (
        f"The default is the preset `elastic`: {tokens:.0f} M tokens, minutes on a large GPU and days on a CPU.\n"
        "`loopformer train demo` is small enough for a laptop, and `loopformer info` lists all presets."
    )


def first_texts() -> str:
    """What the bundled model says at one loop and at eight."""
    samples = {sample["budget"]: sample["text"] for sample in load("box/samples.json")["rows"][0]["samples"]}
    rows = {row["budget"]: row for row in load("box/held_out.json")["perplexity"]}
    lines = [[budget, f"{rows[budget]['perplexity']:.2f}", one_line(samples[budget])] for budget in (1, 8)]
    minutes = NUMBERS[round(load("demo/demo.json")["seconds"] / 60)]
    parameters = load("box/training.json")["plan"]["parameters"] / 1e6
    return (
        "The bundled model needs no download. "
        f"It is a {parameters:.1f} M-parameter toy: good for trying budgets, not for facts.\n\n"
        f"{table(['loops', 'held-out perplexity', 'continuation'], lines)}\n\n"
        "The perplexity is that of [held-out text](docs/box.md#by-budget). "
        "The command prints that of the prompt, and times.\n\nOn a task that needs depth the difference is clear. "
        f"`make demo` installs all it needs and trains such a\nmodel in {minutes} minutes on two CPU cores. "
        "`make test` installs and runs all tests."
    )


def one_line(text: str) -> str:
    return text.strip().replace("\n", " ⏎ ")


# docs/box.md: the bundled model


def box_size() -> str:
    training = load("box/training.json")
    plan = training["plan"]
    speed = fmean(record["tokens_per_second"] for record in training["training"] if record["kind"] == "train")
    return (
        f"The package includes a model of {plan['parameters'] / 1e6:.2f} M parameters. It was trained on "
        f"{plan['tokens'] / 1e6:.0f} M tokens, {plan['epochs']:.1f} times over its text.\nIt is one run of about "
        f"{NUMBERS[round(plan['tokens'] / speed / 60)]} minutes on an H200."
    )


def box_budgets() -> str:
    rows = load("box/held_out.json")["perplexity"]
    perplexity = {row["budget"]: row["perplexity"] for row in rows}
    flops = {row["budget"]: row["flops_per_token"] for row in rows}
    lines = [
        ["perplexity", *(f"{row['perplexity']:.2f}" for row in rows)],
        ["bits per byte", *(f"{row['bits_per_byte']:.3f}" for row in rows)],
        ["MFLOP per token", *(f"{row['flops_per_token'] / 1e6:.1f}" for row in rows)],
    ]
    windows = load("box/training.json")["windows"]
    own = {budget: math.exp(fmean(windows["nats"][str(budget)]) / windows["tokens"]) for budget in (1, 8)}
    return "\n".join(
        [
            f"The held-out text has {rows[0]['documents']} documents and {rows[0]['tokens']:,} tokens.",
            "",
            table(["loops", *(str(row["budget"]) for row in rows)], lines),
            "",
            f"- Eight loops have {1 - perplexity[8] / perplexity[1]:.0%} less perplexity than one.".replace(
                "%", " %"
            ),
            f"- On held-out windows of its own training sources they have {1 - own[8] / own[1]:.0%} less.".replace(
                "%", " %"
            ),
            f"- Four loops are {100 * (perplexity[4] / perplexity[8] - 1):.1f} % above eight, at "
            f"{100 * flops[4] / flops[8]:.0f} % of the compute.",
            f"- Seven loops are {100 * (perplexity[7] / perplexity[6] - 1):.1f} % above six.",
        ]
    )


def box_search() -> str:
    search = load("box/search.json")
    names = {"best": search["best"]["schedule"], "uniform": "equal steps", "worst": search["worst"]["schedule"]}
    rows = [[label, search[key]["rank"], f"{search[key]['perplexity']:.2f}"] for key, label in names.items()]
    noise = (
        ""
        if search["gain"]["is_significant"]
        else (
            "\n\nThe best schedule is within noise of equal steps, considering that it is the best of "
            f"{search['measured']}. Long first steps cost most."
        )
    )
    return table(["schedule", "rank", "perplexity"], rows) + noise


def box_lens() -> str:
    metrics = load("box/analysis.json")["results"][0]["metrics"]
    agreement, movement = metrics["lens_agreement"]["mean"][1:], metrics["movement"]["mean"][1:]
    certain = load("box/certainty.json")["perplexity"][-1]
    sure = certain["passes"][0] / sum(certain["passes"])
    loop = 1 + next(index for index, share in enumerate(agreement) if share > 0.5)  # that forms the prediction
    assert movement[loop - 1] == max(movement)
    settled = f"{100 * agreement[loop - 1]:.0f} %"
    rows = [
        ["tokens with their final prediction, %", *(f"{100 * share:.0f}" for share in agreement)],
        ["change of the state, relative to its norm", *(f"{change:.2f}" for change in movement)],
    ]
    return (
        f"**The model forms its prediction in loop {loop}.** Up to loop {loop - 1} it echoes the token that it has "
        f"just read. In loop {loop} the state changes\nmost. After it {settled} of the predictions are final:\n\n"
        f"{table(['after loop', *map(str, range(1, len(agreement) + 1))], rows)}\n\n"
        "So early exit does not work on this model. After the first loop it is more than "
        f"{certain['certainty']} sure of {100 * sure:.0f} % of the tokens, and the\nprediction is wrong."
    )


def box_samples() -> str:
    rows = [
        [seed["seed"], sample["budget"], one_line(sample["text"])]
        for seed in load("box/samples.json")["rows"]
        for sample in seed["samples"]
    ]
    return table(["seed", "loops", "The history of the city begins …"], rows)


FIGURES: dict[str, Callable[[], str]] = {
    "recipes": recipes,
    "default-preset": default_preset,
    "first-texts": first_texts,
    "box-size": box_size,
    "box-budgets": box_budgets,
    "box-search": box_search,
    "box-lens": box_lens,
    "box-samples": box_samples,
}

if __name__ == "__main__":
    main()
