from collections.abc import Iterable

import pytest
import torch
import torch.nn.functional as F
from inference.models import spread
from torch import Tensor

from loopformer import Trajectory
from loopformer.config import ModelConfig, ObjectiveConfig, load_run
from loopformer.config.run import TrainedTrajectory
from loopformer.data.loader import IGNORE_INDEX
from loopformer.training import objective
from loopformer.training.objective import LossWeights, Match, Objective, head_losses
from loopformer.training.packing import pack_rows

from .runs import pair

FULL, SHORT = Trajectory.uniform(4), Trajectory.parse("2-1-1")


def on(rows: Iterable[int], trajectory: Trajectory) -> dict[int, Trajectory]:
    """The same trajectory for these rows."""
    return dict.fromkeys(rows, trajectory)


def make(
    tiny: ModelConfig, config: ObjectiveConfig, checkpoint_loops: bool = False
) -> tuple[Objective, Tensor, Tensor]:
    model = spread(tiny, std=0.1)
    ids = torch.randint(tiny.vocab, (4, 9))
    targets = ids[:, 1:].clone()
    targets[1, 3] = IGNORE_INDEX
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
    config = ObjectiveConfig(pair(0.2, 0.3), consistency=kind, chunk=5)  # type: ignore[arg-type]
    objective, inputs, targets = make(tiny, config)
    counted = float((targets != IGNORE_INDEX).sum())
    got = objective(
        inputs, targets, None, pack_rows(tiny, [on(range(4), FULL), on(range(4), SHORT)]), [counted] * 2
    )
    got.total.backward()
    mine = grads(objective)

    full, short = objective.model(inputs), objective.model(inputs, SHORT)
    ours = targets != IGNORE_INDEX
    ce = [F.cross_entropy(out.logits[ours], targets[ours]) for out in (full, short)]
    teacher = (full.hidden if kind == "hidden" else full.logits).detach()[ours]
    student = (short.hidden if kind == "hidden" else short.logits)[ours]
    if kind == "distribution":
        consistency = F.cross_entropy(student, teacher.softmax(-1))
    else:
        consistency = (student - teacher).square().mean()
    total = ce[0] + 0.2 * ce[1] + 0.3 * consistency
    torch.autograd.backward(total)
    torch.testing.assert_close(got.total, total)
    assert not got.terms.requires_grad
    none = torch.zeros(())
    expected = torch.stack([ce[0], ce[1], none, consistency, none, none]).detach().view(3, 2)
    torch.testing.assert_close(got.terms / counted, expected)
    assert_same(mine, grads(objective))


def test_micro_batches_sum_to_the_batch(tiny: ModelConfig) -> None:
    config = ObjectiveConfig(consistency="distribution")
    objective, inputs, targets = make(tiny, config)
    divisors = [31.0, 23.0]
    objective(
        inputs, targets, None, pack_rows(tiny, [on(range(4), FULL), on((0, 1, 3), SHORT)]), divisors
    ).total.backward()
    together = grads(objective)
    for rows, short_rows in ((slice(0, 2), (0, 1)), (slice(2, 4), (1,))):
        trajectories = [on(range(2), FULL), on(short_rows, SHORT)]
        objective(inputs[rows], targets[rows], None, pack_rows(tiny, trajectories), divisors).total.backward()
    assert_same(grads(objective), together)


def test_recomputing_loops_changes_nothing(tiny: ModelConfig) -> None:
    results = []
    for recompute in (False, True):
        objective, inputs, targets = make(tiny, ObjectiveConfig(), recompute)
        losses = objective(
            inputs, targets, None, pack_rows(tiny, [on(range(4), FULL), on(range(4), SHORT)]), [31.0, 31.0]
        )
        losses.total.backward()
        results.append(grads(objective))
    assert_same(*results)


def test_fixed_depth_has_one_route(tiny: ModelConfig) -> None:
    objective, inputs, targets = make(tiny, ObjectiveConfig((TrainedTrajectory("full"),)))
    seen: list[int] = []
    objective.model.stack.register_forward_hook(lambda *_: seen.append(1))
    losses = objective(inputs, targets, None, pack_rows(tiny, [on(range(4), FULL)]), [31.0])
    assert len(seen) == tiny.loops
    assert losses.terms.shape == (3, 1)
    assert losses.terms[1].tolist() == [0.0]


@pytest.mark.parametrize("kind", ["hidden", "logits", "distribution"])
def test_a_list_is_the_sum_of_its_trajectories(tiny: ModelConfig, kind: str) -> None:
    """A sandwich, with the one-step trajectory on some rows, against one loss at a time on the plain model."""
    entries = (
        TrainedTrajectory("full", weight=0.7),
        TrainedTrajectory("short", "compositions", weight=0.2, match=0.3),
        TrainedTrajectory(1, weight=0.1, match=0.4, rows=0.5),
    )
    config = ObjectiveConfig(trajectories=entries, consistency=kind, chunk=5)  # type: ignore[arg-type]
    objective, inputs, targets = make(tiny, config)
    followed, rows, divisors = (
        [FULL, SHORT, Trajectory.uniform(1)],
        [range(4), range(4), (1, 3)],
        [31.0, 31.0, 15.0],
    )
    got = objective(inputs, targets, None, pack_rows(tiny, list(map(on, rows, followed))), divisors)
    got.total.backward()
    mine = grads(objective)
    full = objective.model(inputs)
    total = torch.zeros(())
    for entry, trajectory, own, divisor in zip(entries, followed, rows, divisors, strict=True):
        out, counted = objective.model(inputs[list(own)], trajectory), targets[list(own)] != IGNORE_INDEX
        total = total + entry.weight / divisor * F.cross_entropy(
            out.logits[counted], targets[list(own)][counted], reduction="sum"
        )
        if kind == "hidden":
            apart = (out.hidden - full.hidden[list(own)].detach()).square().mean(-1)
        elif kind == "logits":
            apart = (out.logits - full.logits[list(own)].detach()).square().mean(-1)
        else:
            apart = -(full.logits[list(own)].detach().softmax(-1) * out.logits.log_softmax(-1)).sum(-1)
        total = total + entry.match / divisor * apart[counted].sum()
    torch.autograd.backward(total)
    torch.testing.assert_close(got.total, total)
    assert_same(mine, grads(objective))


@pytest.mark.parametrize("recompute", [False, True])
def test_exits_are_the_cross_entropy_after_their_loop(tiny: ModelConfig, recompute: bool) -> None:
    entries = (TrainedTrajectory("full", exits=0.3), TrainedTrajectory("short", weight=0.2, exits=0.1, rows=0.5))
    objective, inputs, targets = make(tiny, ObjectiveConfig(trajectories=entries, chunk=5), recompute)
    trajectories = [on(range(4), FULL), on((1, 2), SHORT)]
    exits, divisors = [{0: 3, 1: 1, 2: 3, 3: 2}, {2: 2}], [31.0, 15.0]
    got = objective(inputs, targets, None, pack_rows(tiny, trajectories, exits), divisors)
    got.total.backward()
    mine = grads(objective)
    without = objective(inputs, targets, None, pack_rows(tiny, trajectories), divisors)
    total, sums = without.total, [0.0, 0.0]
    for index, (entry, divisor) in enumerate(zip(exits, divisors, strict=True)):
        for row, loop in entry.items():
            state = objective.model(inputs[[row]], trajectories[index][row], states=True).states[loop - 1]
            logits = objective.model.head(objective.model.final_norm(state))[0]
            loss = F.cross_entropy(logits, targets[row], ignore_index=IGNORE_INDEX, reduction="sum")
            total = total + entries[index].exits / divisor * loss
            sums[index] += float(loss.detach())
    torch.autograd.backward(total)
    torch.testing.assert_close(got.total, total)
    torch.testing.assert_close(got.terms[2], torch.tensor(sums))
    assert torch.equal(got.terms[:2], without.terms[:2])
    assert_same(mine, grads(objective))


def test_a_rank_that_needs_fewer_loops_runs_as_many_as_the_others(tiny: ModelConfig) -> None:
    """Weights that are sharded are gathered in every loop, by all ranks together."""
    config = ObjectiveConfig(trajectories=(TrainedTrajectory("any"),))
    objective, inputs, targets = make(tiny, config)
    seen: list[int] = []
    objective.model.stack.register_forward_hook(lambda *_: seen.append(1))
    trajectories = [on(range(4), Trajectory.uniform(2))]
    objective(inputs, targets, None, pack_rows(tiny, trajectories), [31.0]).total.backward()
    alone = grads(objective)
    losses = objective(inputs, targets, None, pack_rows(tiny, trajectories, loops=4), [31.0])
    losses.total.backward()
    assert len(seen) == 2 + 4
    assert_same(grads(objective), alone)


def test_a_trajectory_that_is_not_followed_costs_nothing(tiny: ModelConfig) -> None:
    config = ObjectiveConfig(trajectories=(TrainedTrajectory("any"), TrainedTrajectory(2, active_range=(0.5, 1.0))))
    objective, inputs, targets = make(tiny, config)
    seen: list[int] = []
    objective.model.stack.register_forward_hook(lambda *_: seen.append(1))
    losses = objective(inputs, targets, None, pack_rows(tiny, [on(range(4), SHORT), {}]), [31.0, 31.0])
    assert len(seen) == SHORT.budget
    assert losses.terms[:, 1].tolist() == [0.0] * 3


WEIGHTS = [LossWeights(0.5), LossWeights(0.3), LossWeights(0.2)]
MATCHED = [LossWeights(0.5), LossWeights(0.3, 2.0), LossWeights(0.2, 0.7)]


def plain(
    weight: Tensor, hidden: list[Tensor], targets: Tensor, weights: list[LossWeights], match: Match | None = None
) -> Tensor:
    """The same sum with all logits at once."""
    logits, counted = [one @ weight.T for one in hidden], targets != IGNORE_INDEX
    total = torch.zeros((), device=weight.device)
    for own, one in zip(weights, logits, strict=False):
        total = total + own.cross_entropy * F.cross_entropy(one, targets, reduction="sum")
        if match is not None and match.kind == "logits":
            total = total + own.match * ((one - logits[0].detach()).square().mean(-1) * counted).sum()
        elif match is not None:
            soft = -(logits[0].detach().softmax(-1) * one.log_softmax(-1)).sum(-1)
            total = total + own.match * (soft * counted).sum()
    return total


def made(count: int, device: str = "cpu", vocab: int = 50, tokens: int = 13) -> tuple[list[Tensor], Tensor]:
    """The head and the hidden states of some trajectories, and targets."""
    tensors = [torch.randn(rows, 16, device=device, requires_grad=True) for rows in [vocab, *[tokens] * count]]
    targets = torch.randint(vocab, (tokens,), device=device)
    targets[[2, 5]] = IGNORE_INDEX
    return tensors, targets


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
@pytest.mark.parametrize("match", [None, Match("logits"), Match("distribution")], ids=["ce", "logits", "kl"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_chunks_equal_the_plain_loss_and_its_gradients(chunk: int, match: Match | None, count: int) -> None:
    tensors, targets = made(count)
    weights = (MATCHED if match else WEIGHTS)[:count]
    expected = plain(tensors[0], tensors[1:], targets, weights, match)
    wanted = torch.autograd.grad(3 * expected, tensors)
    got = head_losses(tensors[0], tensors[1:], targets, weights, match, chunk)
    torch.testing.assert_close(got.total, expected)
    for mine, theirs in zip(torch.autograd.grad(3 * got.total, tensors), wanted, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


def test_no_gradients_without_need_and_all_ignored_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, full = torch.randn(50, 8, requires_grad=True), torch.randn(4, 8, requires_grad=True)
    assert (
        float(head_losses(weight, [full], torch.full((4,), IGNORE_INDEX), [LossWeights()], None, 2).terms[0]) == 0
    )
    monkeypatch.setattr(torch.autograd, "grad", None)  # calling it would fail
    with torch.no_grad():
        sums = head_losses(weight, [full], torch.randint(50, (4,)), [LossWeights()], None, 2)
    assert not sums.total.requires_grad


def test_autocast_products_are_bf16_and_losses_fp32() -> None:
    weight, full = torch.randn(50, 8, requires_grad=True), torch.randn(6, 8, requires_grad=True)
    targets = torch.randint(50, (6,))
    expected = plain(weight, [full], targets, [LossWeights()])
    with torch.autocast("cpu", torch.bfloat16):
        sums = head_losses(weight, [full], targets, [LossWeights()], None, 4)
    assert sums.total.dtype == torch.float32
    torch.testing.assert_close(sums.total, expected, rtol=0.02, atol=0.1)
    torch.autograd.backward(sums.total)
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32


def test_a_run_computes_products_in_its_dtype() -> None:
    for dtype, expected in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        run, _ = load_run("demo", [f"training.dtype={dtype}"])
        with objective.autocast(torch.device("cpu"), run):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == expected


def test_only_a_gpu_runs_the_fused_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objective, "find_spec", lambda name: object())  # Triton may be installed without a GPU
    monkeypatch.setattr(objective, "_fused_loss", None)  # calling it would fail
    (weight, full), targets = made(1)
    sums = head_losses(weight, [full], targets, [LossWeights()], None, 4)
    torch.testing.assert_close(sums.total, plain(weight, [full], targets, [LossWeights()]))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_fused_kernel_equals_the_plain_loss(count: int) -> None:
    pytest.importorskip("triton")
    torch.set_float32_matmul_precision("highest")
    tensors, targets = made(count, "cuda", vocab=1003, tokens=50)
    expected = plain(tensors[0], tensors[1:], targets, WEIGHTS[:count])
    wanted = torch.autograd.grad(3 * expected, tensors)
    got = head_losses(tensors[0], tensors[1:], targets, WEIGHTS[:count], None, 3)
    torch.testing.assert_close(got.total, expected)
    for mine, theirs in zip(torch.autograd.grad(3 * got.total, tensors), wanted, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
