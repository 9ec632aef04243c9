"""The tools people already use: lm-eval's own command line, PEFT."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from loopformer import LM, LoopedLM, Trajectory
from loopformer.evaluation.tasks import encode_pairs
from loopformer.hf import LoopFormerForCausalLM
from loopformer.hf.export import export
from loopformer.scoring import loglikelihoods

TASK = """
task: local_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


@pytest.mark.slow
def test_lm_eval_takes_the_budget_from_its_command_line(folder: Path, lm: LM, tmp_path: Path) -> None:
    export(folder, tmp_path / "exported", self_contained=True)
    question, choices = "every pass is", ["told its time", "its step"]
    (tmp_path / "tasks").mkdir()
    (tmp_path / "data.jsonl").write_text(json.dumps({"question": question, "choices": choices, "answer": 0}) + "\n")
    (tmp_path / "tasks" / "local.yaml").write_text(TASK.format(data=tmp_path / "data.jsonl"))
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    given = f"pretrained={tmp_path / 'exported'},trust_remote_code=True,budget=2"
    words = ["--model", "hf", "--model_args", given, "--device", "cpu", "--tasks", "local_choice"]
    words += ["--include_path", str(tmp_path / "tasks"), "--output_path", str(tmp_path / "out"), "--log_samples"]
    done = subprocess.run(
        [sys.executable, "-m", "lm_eval", *words],
        env={**os.environ, **offline},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (samples,) = (tmp_path / "out").rglob("samples_*.jsonl")
    found = [float(answer[0][0]) for answer in json.loads(samples.read_text())["resps"]]

    def expected(budget: int) -> list[float]:
        spans = encode_pairs(lm.need_tokenizer(), [(question, f" {choice}") for choice in choices])
        trajectory = Trajectory.uniform(budget)
        return [total for total, _ in loglikelihoods(lm.model, spans, [trajectory])[trajectory].answers]

    assert found == pytest.approx(expected(2), abs=1e-3)
    assert found != pytest.approx(expected(4), abs=1e-1)


def test_a_lora_is_trained_at_every_pass_saved_and_loaded(model: LoopedLM, tmp_path: Path) -> None:
    base = LoopFormerForCausalLM.wrap(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    targets = ["attention.qkv", "attention.out", "ffn.up", "ffn.down"]
    tuned = get_peft_model(base, LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM"))
    assert sum(one.requires_grad for one in tuned.parameters()) == 2 * len(targets) * model.config.blocks
    seen: list[int] = []
    adapter = tuned.get_submodule("base_model.model.model.stack.blocks.0.attention.qkv.lora_A.default")
    adapter.register_forward_hook(lambda *_: seen.append(1))
    ids = torch.randint(96, (4, 12))
    optimizer = torch.optim.AdamW((one for one in tuned.parameters() if one.requires_grad), lr=3e-2)
    losses = []
    for _ in range(8):
        loss = tuned.train()(input_ids=ids, labels=ids, budget=3).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert len(seen) == 8 * 3  # the weights are shared, so the adapter works in each pass
    assert losses[-1] < losses[0] - 0.2
    tuned.eval().save_pretrained(tmp_path)
    logits = tuned(input_ids=ids, budget=3).logits
    drawn = tuned.generate(input_ids=ids[:1, :5], max_new_tokens=6, do_sample=False, budget=2)

    fresh = LoopedLM(model.config).eval()
    fresh.load_state_dict(before)
    loaded = PeftModel.from_pretrained(LoopFormerForCausalLM.wrap(fresh), str(tmp_path))
    assert torch.equal(loaded(input_ids=ids, budget=3).logits, logits)
    assert torch.equal(loaded.generate(input_ids=ids[:1, :5], max_new_tokens=6, do_sample=False, budget=2), drawn)
    bare = loaded.unload().model.state_dict()
    assert all(torch.equal(tensor, before[name]) for name, tensor in bare.items())
    kept = tuned.unload().model.state_dict()
    assert all(torch.equal(tensor, before[name]) for name, tensor in kept.items())
