"""Windows of text that a ladder with `fill=copy` is really run on, token by token.

    text = CopiedText(readings, model, rows)
    text.outcome(routes, thresholds)

What a token says then depends on where those before it stopped, so it cannot be simulated from fixed runs.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F

from loopformer.evaluation.readings import Readings
from loopformer.evaluation.simulate import Outcome, Routes, Thresholds, TokenText
from loopformer.evaluation.text import Ids
from loopformer.inference.adaptive import TokenPolicy, climb
from loopformer.inference.ladder import Ladder, LadderCache
from loopformer.inference.tally import Tally
from loopformer.model import LoopedLM


class CopiedText(TokenText):
    """Rows [W, T + 1] and the readings of the same rows."""

    def __init__(self, readings: Readings, model: LoopedLM, rows: Ids) -> None:
        super().__init__(readings, model.cost, "copy")
        self.ladder, self.rows = Ladder(model), rows

    @torch.no_grad()
    def outcome(self, routes: Routes, thresholds: Thresholds) -> Outcome:
        policy = self.policy(routes, thresholds)
        assert isinstance(policy, TokenPolicy)
        model, tally = self.ladder.model, Tally(self.ladder.model.cost)
        losses = np.empty((self.windows, self.length))
        for number, row in enumerate(self.rows.tolist()):
            cache = LadderCache(self.ladder, self.fill, self.length, tally)
            for place, (token, following) in enumerate(pairwise(row)):
                cache.feed([token])
                logits = climb(model, cache, policy, tally).float()
                losses[number, place] = F.cross_entropy(logits, torch.tensor(following, device=logits.device))
        chosen = {str(route): tally.chosen[route] for route in routes}
        return self.result(losses, tally.passes / losses.size, tally.flops, chosen)
