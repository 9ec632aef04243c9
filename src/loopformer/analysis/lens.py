"""The logit lens: what the model would say if it stopped after each loop, against what it says in the end.

    divergence, agreement = lens(model, states)     # states [S, n, D] before the final norm; the last is the final

Each state goes through the final norm and the head. Logits exist for one state and one chunk of tokens at a time,
beside those of the final state.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from loopformer.model import LoopedLM

_LOGITS = 1 << 22  # numbers in a chunk of logits: 16 MB in float32


@torch.no_grad()
def lens(model: LoopedLM, states: Tensor, chunk: int | None = None) -> tuple[Tensor, Tensor]:
    """For states [S, n, D]: KL(final ‖ state) in nats, and 1 where the most likely token is the same, both [S, n].

    chunk  tokens at a time; by default as many as keep the logits of a chunk at 16 MB
    """
    size = chunk or max(1, _LOGITS // model.config.vocab)
    divergence = torch.zeros(states.shape[:2], device=states.device)
    agreement = torch.ones_like(divergence)
    for start in range(0, states.shape[1], size):
        part = slice(start, start + size)
        final = _log_probabilities(model, states[-1, part])  # [c, V]
        for number, state in enumerate(states[:-1]):
            found = _log_probabilities(model, state[part])
            each = F.kl_div(found, final, reduction="none", log_target=True).sum(dim=-1)
            divergence[number, part] = each.clamp_min(0)  # below zero it can only be by rounding
            agreement[number, part] = (found.argmax(dim=-1) == final.argmax(dim=-1)).float()
    return divergence, agreement


def _log_probabilities(model: LoopedLM, state: Tensor) -> Tensor:
    """[c, D] before the final norm → [c, V]; padded rows of the head are no tokens."""
    return model.head(model.final_norm(state))[:, : model.config.vocab].float().log_softmax(dim=-1)
