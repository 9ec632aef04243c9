"""Parity with the published implementation, and what can be wrong with a file of weights."""

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import loopformer
from loopformer import LoopedLM, LoopformerError, ModelConfig, Trajectory
from loopformer.loading import find_config, find_model, save_model
from loopformer.loading.folder import read_safetensors
from loopformer.loading.published import from_state_dict

REFERENCE = Path(__file__).parent.parent / "reference"
KINDS = {"base": "none", "base_loop": "none", "tmlt": "index", "loopformer": "trajectory"}
LOOPS = 8


def weights(kind: str) -> dict[str, Tensor]:
    tensors = load_file(REFERENCE / f"{kind}.safetensors")
    return {name.removeprefix("weights."): t for name, t in tensors.items() if name.startswith("weights.")}


@pytest.mark.parametrize("kind", KINDS)
def test_parity_with_the_authors_code(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    tensors, settings = read_safetensors(REFERENCE / f"{kind}.safetensors")
    model = from_state_dict(weights(kind), heads=settings["n_head"], loops=LOOPS)
    assert model.config.conditioning == KINDS[kind]
    assert model.config.loops == (1 if kind == "base" else LOOPS)
    ids, worst = tensors["input_ids"], 0.0
    for run, steps in settings["runs"].items():
        with torch.no_grad():
            out = model(ids, Trajectory(steps) if isinstance(steps, list) else steps)
        logits = out.logits
        worst = max(worst, float((logits - tensors[f"expect.{run}.logits"]).abs().max()))
        if f"expect.{run}.hidden" in tensors:
            worst = max(worst, float((out.hidden - tensors[f"expect.{run}.hidden"]).abs().max()))
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        assert float(loss) == pytest.approx(float(tensors[f"expect.{run}.loss"]), abs=1e-5)
    with capsys.disabled():
        print(f"\nparity {kind}: largest absolute difference {worst:.2e} over {len(settings['runs'])} runs")
    assert worst < 1e-4


def _pt(path: Path, content: Any) -> Path:
    torch.save(content, path)
    return path


class GPTConfig:
    """Pickles as the published settings object does: a class that the reader does not have."""

    def __init__(self) -> None:
        self.n_head = 4
        self.max_model_loops = 6


class Mischief:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return (print, ("ran",))


@pytest.mark.parametrize("prefix", ["", "gpt.", "module.", "_orig_mod.", "module._orig_mod."])
def test_wrapped_names(prefix: str) -> None:
    model = from_state_dict({prefix + name: t for name, t in weights("tmlt").items()}, heads=4, loops=4)
    assert torch.equal(model.tokens.weight, weights("tmlt")["transformer.wte.weight"])


def test_every_container_gives_the_same_model(tmp_path: Path) -> None:
    tensors = weights("loopformer")
    config = json.dumps({"n_head": 4, "max_model_loops": 6})
    plain, folder = tmp_path / "plain.safetensors", tmp_path / "hub"
    save_file(tensors, plain, metadata={"config": config})
    folder.mkdir()
    names = sorted(tensors)
    for shard, part in enumerate((names[:9], names[9:])):
        file = folder / f"model-{shard}.safetensors"
        save_file({f"gpt.{n}": tensors[n] for n in part}, file)
    (folder / "config.json").write_text(config)
    checkpoint = {"model": tensors, "model_args": GPTConfig(), "best_val_loss": np.float64(3.2), "iter_num": 5}
    tied = _pt(tmp_path / "tied.pt", {**tensors, "lm_head.weight": tensors["transformer.wte.weight"]})
    loaded = [
        loopformer.load_official(plain),
        loopformer.load_official(folder),
        loopformer.load_official(_pt(tmp_path / "ckpt.pt", checkpoint)),
        loopformer.load_official(tied, heads=4, loops=6),
        loopformer.load(plain),
    ]
    ids = torch.randint(96, (2, 9))
    for lm in loaded:
        assert lm.model.config == loaded[0].model.config
        assert torch.equal(lm.model(ids, "3-2-1").logits, loaded[0].model(ids, "3-2-1").logits)


def test_a_hub_id_is_read_from_the_cache_without_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    commit = "0" * 40
    repo = tmp_path / "models--someone--model"
    snapshot = repo / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    save_file(weights("loopformer"), snapshot / "model.safetensors")
    (snapshot / "config.json").write_text(json.dumps({"n_head": 4, "auto_map": {"AutoModel": "evil.Model"}}))
    (snapshot / "evil.py").write_text("raise SystemExit('ran')")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert loopformer.load_official("someone/model", loops=4).model.config.loops == 4
    with pytest.raises(LoopformerError, match="not a local path and could not be fetched"):
        loopformer.load_official("someone/else")


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (
            "Got: ConnectError: [Errno -2] Name not known\nAn error happened.",
            "ConnectError: [Errno -2] Name not known",
        ),
        ("401 Client Error. (Request ID: 1)\n\nRepository Not Found for url: x.", "401 Client Error"),
        ("Cannot have -- or .. in repo_id: 'a..b/c'.", "Cannot have -- or .. in repo_id: 'a..b/c'"),
        ("", "RuntimeError"),
    ],
)
def test_why_the_hub_gives_nothing_is_said_in_short(
    said: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError(said)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(LoopformerError) as caught:
        loopformer.load_official("someone/else")
    assert f"from the Hugging Face Hub ({reason}); check the name" in str(caught.value)


def test_bf16_files_load_in_fp32(tmp_path: Path) -> None:
    save_file({n: t.bfloat16() for n, t in weights("base").items()}, tmp_path / "m.safetensors")
    assert loopformer.load_official(tmp_path / "m.safetensors", heads=4).model.tokens.weight.dtype == torch.float32


def _edited(**changes: Tensor | None) -> dict[str, Tensor]:
    tensors = weights("loopformer")
    for name, tensor in changes.items():
        full = next(n for n in tensors if n.endswith(name.replace("__", ".")))
        if tensor is None:
            del tensors[full]
        else:
            tensors[full] = tensor
    return tensors


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        (_edited(wte__weight=None), r"lack the tensor transformer\.wte\.weight"),
        (
            _edited(blocks__1__mlp__c_proj__weight=None),
            r"lack the tensor transformer\.h\.blocks\.1\.mlp\.c_proj\.weight",
        ),
        (_edited(dt_embedder__mlp__2__bias=None), r"lack the tensor dt_embedder\.mlp\.2\.bias"),
        (
            _edited(blocks__1__attn__c_attn__weight=torch.zeros(9, 32)),
            r"h\.blocks\.1\.attn\.c_attn\.weight has shape \[9, 32\]",
        ),
        (_edited(wte__weight=torch.zeros(4)), r"wte\.weight has shape \[4\], not a matrix"),
        (_edited() | {"transformer.h.blocks.0.attn.rope": torch.zeros(1)}, r"blocks\.0\.attn\.rope is not one of"),
        (_edited() | {"lm_head.weight": torch.zeros(96, 32)}, "only tied embeddings"),
        ({"a": torch.zeros(1)}, "The tensor a is not one of"),
        (_edited() | {"position_ids": torch.zeros(1, dtype=torch.int64)}, "The tensor position_ids is not one of"),
        (
            _edited() | {"transformer.h.blocks.999999999.norm_1.weight": torch.ones(32)},
            "have block 999999999 but no block 2",
        ),
        (_edited(wte__weight=torch.zeros(96, 32, dtype=torch.int8)), r"wte\.weight has dtype int8"),
        (_edited(wte__weight=torch.zeros(96, 32, dtype=torch.complex64)), r"wte\.weight has dtype complex64"),
        (
            _edited() | {"lm_head.weight": torch.zeros(96, 32, dtype=torch.float8_e4m3fn)},
            r"lm_head\.weight has dtype float8_e4m3fn",
        ),
        ({}, "not the tensors of a published LoopFormer"),
    ],
)
def test_damage_is_named(tensors: dict[str, Tensor], said: str) -> None:
    with pytest.raises(LoopformerError, match=said):
        from_state_dict(tensors, heads=4, loops=8)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float8_e4m3fn,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2,
        torch.float8_e5m2fnuz,
        torch.float8_e8m0fnu,
        torch.float4_e2m1fn_x2,
        torch.uint8,
        torch.int8,
        torch.int64,
        torch.uint64,
        torch.bool,
        torch.complex64,
    ],
)
def test_safetensors_of_other_dtypes_are_refused_in_one_sentence(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = weights("loopformer")
    tensors["transformer.wte.weight"] = torch.zeros(96, 32, dtype=dtype)
    save_file(tensors, tmp_path / "m.safetensors")
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(LoopformerError, match=rf"wte\.weight has dtype {name}; convert it to float32"):
        loopformer.load_official(tmp_path / "m.safetensors", heads=4, loops=8)


def test_a_mask_of_any_dtype_is_ignored(tmp_path: Path) -> None:
    mask = {"transformer.h.blocks.0.attn.bias": torch.zeros(4, 4, dtype=torch.float8_e4m3fn)}
    save_file(weights("loopformer") | mask, tmp_path / "m.safetensors")
    assert loopformer.load_official(tmp_path / "m.safetensors", heads=4, loops=8).model.config.blocks == 2


def test_weights_that_are_no_numbers_or_not_stored_are_refused(tmp_path: Path) -> None:
    spoilt = weights("loopformer")
    spoilt["transformer.wte.weight"][3, 1] = float("nan")
    with pytest.raises(LoopformerError, match=r"wte\.weight has values that are no finite numbers"):
        loopformer.load_official(_pt(tmp_path / "nan.pt", spoilt), heads=4, loops=8)
    repeated = {"transformer.wte.weight": torch.zeros(1).expand(1 << 15, 1 << 15)}
    with pytest.raises(LoopformerError, match="larger than its data"):
        loopformer.load_official(_pt(tmp_path / "repeated.pt", repeated), heads=4, loops=8)
    with pytest.raises(LoopformerError, match=r"^The tensor x+…?x* is not one of a published"):
        loopformer.load_official(_pt(tmp_path / "named.pt", {"x" * 10_000: torch.zeros(1)}), heads=4, loops=8)
    with pytest.raises(LoopformerError, match="under 3, which is not a name"):
        loopformer.load_official(_pt(tmp_path / "numbered.pt", {3: torch.zeros(1)}), heads=4, loops=8)


class Allocated:
    """Pickles as a call that allocates a tensor, which the reader allows."""

    def __reduce__(self) -> tuple[type[Tensor], tuple[int, int]]:
        return (torch.FloatTensor, (1 << 13, 1 << 13))


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(64, 32, device="meta"),
        lambda: torch.zeros(64, 32).to_sparse(),
        lambda: torch.zeros(64, 32).to_sparse_csr(),
        lambda: torch.nested.nested_tensor([torch.zeros(3, 2), torch.zeros(2, 2)]),
        Allocated,
    ],
    ids=["meta", "coo", "csr", "nested", "allocated"],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested tensors")
def test_tensors_without_data_in_the_file_are_refused(tmp_path: Path, make: Callable[[], object]) -> None:
    path = _pt(tmp_path / "m.pt", {"transformer.wte.weight": make()})
    with pytest.raises(LoopformerError, match=rf"wte\.weight of {path} is larger than its data; save a full copy"):
        loopformer.load_official(path, heads=4, loops=8)


def test_a_checkpoint_that_unpacks_to_more_than_its_size_is_refused_unread(tmp_path: Path) -> None:
    saved = _pt(tmp_path / "saved.pt", {"transformer.wte.weight": torch.zeros(1 << 20)})
    with zipfile.ZipFile(saved) as stored, zipfile.ZipFile(tmp_path / "m.pt", "w", zipfile.ZIP_DEFLATED) as packed:
        for name in stored.namelist():
            packed.writestr(name, stored.read(name))
    assert (tmp_path / "m.pt").stat().st_size < 1 << 16
    with pytest.raises(LoopformerError, match=r"m\.pt is compressed, as torch\.save never does; save it again"):
        loopformer.load_official(tmp_path / "m.pt", heads=4, loops=8)


def test_a_checkpoint_of_an_unreadable_version_is_one_sentence(tmp_path: Path) -> None:
    saved = _pt(tmp_path / "saved.pt", weights("tmlt"))
    with zipfile.ZipFile(saved) as stored, zipfile.ZipFile(tmp_path / "m.pt", "w") as changed:
        for name in stored.namelist():
            changed.writestr(name, b"9" * 40 if name.endswith("version") else stored.read(name))
    with pytest.raises(LoopformerError, match="not a complete PyTorch checkpoint"):
        loopformer.load_official(tmp_path / "m.pt", heads=4, loops=8)


def test_a_path_that_is_not_there_is_looked_for_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *args, **more: pytest.fail("asked the Hub"))
    with pytest.raises(LoopformerError, match=r"no file or folder runs/mein; did you mean runs/mine\?"):
        loopformer.load("runs/mein")


def test_heads_and_loops_must_be_known(tmp_path: Path) -> None:
    with pytest.raises(LoopformerError, match="--heads"):
        from_state_dict(weights("loopformer"), loops=8)
    with pytest.raises(LoopformerError, match="--loops"):
        from_state_dict(weights("loopformer"), heads=4)
    with pytest.raises(LoopformerError, match=r"multiple of model\.heads"):
        from_state_dict(weights("loopformer"), heads=5, loops=8)
    save_file(weights("tmlt"), tmp_path / "m.safetensors", metadata={"config": '{"n_head": 4}'})
    with pytest.raises(LoopformerError, match="says n_head = 4, not 8"):
        loopformer.load_official(tmp_path / "m.safetensors", heads=8, loops=4)


def test_heads_and_loops_of_a_model_folder_are_its_own(tiny: ModelConfig, tmp_path: Path) -> None:
    folder = save_model(LoopedLM(tiny), tmp_path / "m")
    for find in (find_model, find_config):
        find(folder, heads=4, loops=4)
        with pytest.raises(LoopformerError, match=r"config\.json says 4 heads; leave --heads out\."):
            find(folder, heads=2)
        with pytest.raises(LoopformerError, match=r"config\.json says 4 loops; leave --loops out\."):
            find(folder, loops=8)


def test_unreadable_files_are_one_clear_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = (REFERENCE / "tmlt.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[:5000])
    whole_pt = _pt(tmp_path / "whole.pt", {"model": weights("tmlt")}).read_bytes()
    (tmp_path / "cut.pt").write_bytes(whole_pt[: len(whole_pt) // 2])
    (tmp_path / "empty.pt").write_bytes(b"")
    (tmp_path / "note.txt").write_text("hello")
    (tmp_path / "nothing").mkdir()
    for name, said in [
        ("cut.safetensors", "not a complete safetensors file"),
        ("cut.pt", "not a complete PyTorch checkpoint"),
        ("empty.pt", "not a complete PyTorch checkpoint"),
        (_pt(tmp_path / "list.pt", [1]).name, "not a dictionary of tensors"),
        (_pt(tmp_path / "evil.pt", {"model": weights("tmlt"), "x": Mischief()}).name, "would run builtins.print"),
        ("note.txt", "neither .safetensors nor .pt"),
        ("nothing", "no .safetensors or .pt file"),
        ("missing.pt", "There is no file or folder"),
    ]:
        with pytest.raises(LoopformerError, match=said) as caught:
            loopformer.load_official(tmp_path / name, heads=4, loops=4)
        assert "\n" not in str(caught.value)
    assert "ran" not in capsys.readouterr().out
