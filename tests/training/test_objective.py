import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loopformer import LoopedLM, Trajectory
from loopformer.config import ModelConfig, ObjectiveConfig
from loopformer.data.loader import NO_LOSS
from loopformer.training.objective import Divisors, Objective

SHORT = Trajectory.parse("2-1-1")


def make(
    tiny: ModelConfig, config: ObjectiveConfig, checkpoint_loops: bool = False
) -> tuple[Objective, Tensor, Tensor]:
    torch.manual_seed(0)
    model = LoopedLM(tiny)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    ids = torch.randint(tiny.vocab, (4, 9))
    targets = ids[:, 1:].clone()
    targets[1, 3] = NO_LOSS
    return Objective(model, config, checkpoint_loops), ids[:, :-1], targets


def grads(objective: Objective) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in objective.named_parameters() if p.grad is not None}
    objective.zero_grad()
    return found


def assert_same(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor, theirs[name], atol=2e-6, rtol=1e-4, msg=name)


@pytest.mark.parametrize("kind", ["hidden", "logits", "distribution"])
def test_it_is_the_papers_sum(tiny: ModelConfig, kind: str) -> None:
    config = ObjectiveConfig(short_weight=0.2, consistency_weight=0.3, consistency=kind, chunk=5)  # type: ignore[arg-type]
    objective, inputs, targets = make(tiny, config)
    divisors = Divisors(float((targets != NO_LOSS).sum()), float((targets != NO_LOSS).sum()))
    got = objective(inputs, targets, None, divisors, None, SHORT, (0, 1, 2, 3))
    got.total.backward()
    mine = grads(objective)

    full, short = objective.model(inputs), objective.model(inputs, SHORT)
    counted = targets != NO_LOSS
    ce = [F.cross_entropy(out.logits[counted], targets[counted]) for out in (full, short)]
    teacher = (full.hidden if kind == "hidden" else full.logits).detach()[counted]
    student = (short.hidden if kind == "hidden" else short.logits)[counted]
    if kind == "distribution":
        consistency = F.cross_entropy(student, teacher.softmax(-1))
    else:
        consistency = (student - teacher).square().mean()
    total = ce[0] + 0.2 * ce[1] + 0.3 * consistency
    torch.autograd.backward(total)
    torch.testing.assert_close(got.total, total)
    torch.testing.assert_close(got.terms, torch.stack([ce[0], ce[1], consistency]).detach())
    assert_same(mine, grads(objective))


def test_micro_batches_sum_to_the_batch(tiny: ModelConfig) -> None:
    config = ObjectiveConfig(consistency="distribution")
    objective, inputs, targets = make(tiny, config)
    divisors = Divisors(31.0, 23.0)
    objective(inputs, targets, None, divisors, None, SHORT, (0, 1, 3)).total.backward()
    together = grads(objective)
    for rows, short_rows in ((slice(0, 2), (0, 1)), (slice(2, 4), (1,))):
        objective(inputs[rows], targets[rows], None, divisors, None, SHORT, short_rows).total.backward()
    assert_same(grads(objective), together)


def test_recomputing_loops_changes_nothing(tiny: ModelConfig) -> None:
    results = []
    for recompute in (False, True):
        objective, inputs, targets = make(tiny, ObjectiveConfig(), recompute)
        losses = objective(inputs, targets, None, Divisors(31.0, 31.0), None, SHORT, (0, 1, 2, 3))
        losses.total.backward()
        results.append(grads(objective))
    assert_same(*results)


def test_fixed_depth_has_one_route(tiny: ModelConfig) -> None:
    objective, inputs, targets = make(tiny, ObjectiveConfig(short_weight=0, consistency_weight=0))
    seen: list[int] = []
    objective.model.stack.register_forward_hook(lambda *_: seen.append(1))
    losses = objective(inputs, targets, None, Divisors(31.0, 1.0))
    assert len(seen) == tiny.loops
    assert losses.terms[1:].tolist() == [0.0, 0.0]
