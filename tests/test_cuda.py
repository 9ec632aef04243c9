"""What must also hold on a GPU: skipped without one."""

import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import get_args

import pytest
import torch

from loopformer import LoopedLM, LoopformerError, Trajectory
from loopformer.config import Conditioning, ModelConfig, ObjectiveConfig
from loopformer.data.tokenizer import Tokenizer
from loopformer.device import available_bytes
from loopformer.evaluation.schedules import search
from loopformer.evaluation.text import Protocol, Text, perplexity
from loopformer.training.objective import Objective
from loopformer.training.packing import pack_rows

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("kind", get_args(Conditioning))
def test_gpu_follows_cpu(tiny: ModelConfig, kind: Conditioning) -> None:
    model = LoopedLM(replace(tiny, conditioning=kind, modulator_start="one"))
    ids = torch.randint(tiny.vocab, (4, 20))
    for trajectory in (4, 1, [1, 4, 2, 3]):
        expected = model.cpu()(ids, trajectory).logits
        got = model.cuda()(ids.cuda(), trajectory).logits.cpu()
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    low = model.to(torch.bfloat16)(ids.cuda()).logits.float().cpu()
    full = model.float().cpu()(ids).logits
    assert float(((low - full).norm() / full.norm()).detach()) < 0.03


def test_compiled_step_is_one_graph_and_equals_eager(tiny: ModelConfig) -> None:
    torch._dynamo.reset()
    model = LoopedLM(replace(tiny, width=64, modulator_start="one")).cuda()
    ids = torch.randint(tiny.vocab, (4, 32), device="cuda")
    trajectories = [trajectory for budget in range(1, 5) for trajectory in Trajectory.enumerate(4, budget)]
    expected = [model(ids, trajectory).logits for trajectory in trajectories]
    torch._dynamo.utils.counters.clear()
    model.compile(fullgraph=True)
    for trajectory, logits in zip(trajectories, expected, strict=True):
        torch.testing.assert_close(model(ids, trajectory).logits, logits, atol=1e-4, rtol=1e-3)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_gradients_follow_cpu(tiny: ModelConfig) -> None:
    objective = Objective(
        LoopedLM(replace(tiny, modulator_start="one")), ObjectiveConfig(consistency="distribution")
    )
    ids = torch.randint(tiny.vocab, (4, 21))
    found = []
    for device in ("cpu", "cuda"):
        objective.to(device).zero_grad()
        inputs, targets = ids[:, :-1].to(device), ids[:, 1:].to(device)
        followed = [dict.fromkeys(range(4), Trajectory.uniform(budget)) for budget in (tiny.loops, 2)]
        packed = pack_rows(tiny, followed).to(inputs.device)
        objective(inputs, targets, None, packed, [80.0, 80.0]).total.backward()
        found.append({name: p.grad.cpu().clone() for name, p in objective.named_parameters() if p.grad is not None})
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, atol=1e-5, rtol=1e-3)


def test_training_runs_and_resumes(tmp_path: Path) -> None:
    from loopformer.data.prepare import prepare
    from loopformer.loading.folder import checkpoints
    from loopformer.training.launch import launch

    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"paragraph {n} of a text that is long enough" for n in range(2000)))
    prepare([str(text)], tmp_path / "data", train_tokenizer=300, val_fraction=0.1)
    overrides = ["model.context=32", f"data.path={tmp_path / 'data'}", "training.steps=6", "training.batch=4"]
    overrides += [
        "training.dtype=bfloat16",
        "training.save_every=3",
        "training.validate_every=3",
        "training.warmup=1",
    ]
    assert launch("demo", overrides, tmp_path / "run", quiet=True)["finished"]
    checkpoints(tmp_path / "run")[-1].rename(tmp_path / "gone")
    assert launch("demo", overrides, tmp_path / "run", resume=True, quiet=True)["finished"]


SHARE = 0.02  # of the card that a process may take: 3 GB of an H200


def test_out_of_memory_ends_with_advice_and_auto_finds_what_fits(tmp_path: Path) -> None:
    """In a process of its own: what other tests of a worker still hold would count against its share."""
    device = torch.device("cuda")
    torch.cuda.empty_cache()
    needed = 2 * SHARE * torch.cuda.get_device_properties(device).total_memory
    until = time.monotonic() + 60
    while available_bytes(device) < needed and time.monotonic() < until:  # other workers may be at work
        time.sleep(1)
    if available_bytes(device) < needed:
        pytest.skip(f"needs {needed / 2**30:.0f} GiB of free memory on the card")
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as apart:
        apart.submit(run_out_of_memory, tmp_path).result()


def run_out_of_memory(folder: Path) -> None:
    from loopformer.data.prepare import prepare
    from loopformer.training.launch import launch

    text = folder / "text.txt"
    text.write_text("\n\n".join(f"paragraph {n} of a text that is long enough" for n in range(9000)))
    prepare([str(text)], folder / "data", train_tokenizer=300, val_fraction=0.1)
    overrides = ["model.context=256", "model.width=512", "model.ffn=2048", f"data.path={folder / 'data'}"]
    overrides += ["training.steps=2", "training.batch=256", "training.warmup=1", "training.compile=false"]
    torch.cuda.set_per_process_memory_fraction(SHARE)
    with pytest.raises(LoopformerError, match=r"lower training\.micro_batch"):
        launch("demo", [*overrides, "training.micro_batch=256"], folder / "much", quiet=True)
    assert launch("demo", overrides, folder / "auto", quiet=True)["finished"]


@pytest.fixture(autouse=True)
def _full_precision() -> None:
    torch.set_float32_matmul_precision("highest")


def test_perplexity_and_schedules_on_the_gpu(tiny: ModelConfig) -> None:
    tokenizer = Tokenizer.train(["its time and its step"] * 20, 280)
    ids = tuple(torch.randint(1, 90, (length,)).numpy() for length in (5, 40, 100))
    text = Text("random", "all of it", ids, "0", tokenizer)
    model = LoopedLM(replace(tiny, modulator_start="one"))
    trajectories = ["1", "2-1-1", "4"]
    expected = [row["nats"] for row in perplexity(model, text, trajectories, Protocol(stride=16))]
    found = [row["nats"] for row in perplexity(model.cuda(), text, trajectories, Protocol(stride=16))]
    assert found == pytest.approx(expected, rel=1e-4)
    searched = search(model, 2, text=text, protocol=Protocol(stride=16))
    assert searched["measured"] == 3
    low = [row["nats"] for row in perplexity(model.to(torch.bfloat16), text, trajectories, Protocol(stride=16))]
    assert low == pytest.approx(expected, rel=0.02)
