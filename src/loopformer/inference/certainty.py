"""How unsure a model is of the next token: pure functions of logits […, V].

doubt("entropy", logits)             # 0 is certain; more is less so
doubt("kl", logits, before=shorter)  # how far a deeper route moved the distribution of a shorter one

All are in nats or probability, before any temperature, so a threshold means the same for every request.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

from torch import Tensor

from loopformer.errors import nearest, require

Measure = Literal["entropy", "margin", "kl"]
MEASURES: tuple[str, ...] = get_args(Measure)


def entropy(logits: Tensor) -> Tensor:
    """The entropy of the distribution in nats […]."""
    log_p = logits.float().log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)


def margin(logits: Tensor) -> Tensor:
    """The probability of the most likely token less that of the second […]."""
    first, second = logits.float().softmax(-1).topk(2).values.unbind(-1)
    return first - second


def kl(logits: Tensor, before: Tensor) -> Tensor:
    """KL(now ‖ before) in nats […]: what the deeper of two budgets knew that the shallower did not."""
    log_p, log_q = logits.float().log_softmax(-1), before.float().log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def doubt(measure: str, logits: Tensor, before: Tensor | None = None) -> Tensor:
    """One scale for all measures: 0 is certain, and a token goes deeper while its doubt is above a threshold."""
    if measure == "kl":
        assert before is not None, "kl compares two budgets"
        return kl(logits, before)
    return entropy(logits) if measure == "entropy" else 1 - margin(logits)


def check_measure(measure: str) -> None:
    """Refuse a measure that does not exist."""
    require(measure in MEASURES, f"Unknown measure of certainty {measure!r}; {nearest(measure, list(MEASURES))}")


def check_thresholds(thresholds: Sequence[float], expected: int, what: str) -> None:
    """Refuse thresholds that are no numbers, or more or fewer than there are decisions."""
    for one in thresholds:
        number = isinstance(one, int | float) and not isinstance(one, bool) and math.isfinite(one)
        require(number, f"A threshold must be a finite number, got {one!r}.")
    require(
        len(thresholds) == expected,
        f"{what} needs {expected} threshold{'s' * (expected != 1)}, got {len(thresholds)}.",
    )
