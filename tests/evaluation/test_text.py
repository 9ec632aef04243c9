"""Held-out text: what is read, how it is cut into windows, and perplexity against a slow direct computation."""

import dataclasses
import gzip
import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loopformer import LM, LoopedLM
from loopformer.config import load_run, run_to_yaml
from loopformer.data.corpus import PRESETS, Preset
from loopformer.data.loader import Windows
from loopformer.data.prepare import prepare
from loopformer.data.shards import TokenData
from loopformer.data.splits import make_splitter
from loopformer.data.tokenizer import Tokenizer
from loopformer.errors import LoopformerError
from loopformer.evaluation.early_exit import early_exit, early_exit_flops
from loopformer.evaluation.store import Store
from loopformer.evaluation.text import CutText, Protocol, Text, cut_text, default_text, perplexity, read_text
from loopformer.scoring import score_texts
from loopformer.trajectory import Trajectory

from .small import DOCUMENTS, Scored, by_rule, make_text

MANY = [f"document {i}: its time, its step\n\nnaïve ☕ {i * i}" for i in range(60)]


def write_jsonl(path: Path, documents: list[str], field: str = "text") -> Path:
    lines = "".join(json.dumps({field: document}) + "\n" for document in documents)
    path.write_bytes(gzip.compress(lines.encode()) if path.suffix == ".gz" else lines.encode())
    return path


def sha256(documents: list[str]) -> str:
    return hashlib.sha256(b"\0".join(document.encode() for document in documents)).hexdigest()


def test_a_file_of_text_is_one_document_with_its_own_hash(file: Path, tokenizer: Tokenizer) -> None:
    text = read_text(str(file), tokenizer)
    assert [ids.tolist() for ids in text.documents] == [tokenizer.encode(file.read_text())]
    assert text.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    assert (text.name, text.part) == (str(file), "all of it")


def test_packed_records_of_another_field(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write_jsonl(tmp_path / "a.jsonl.gz", [*MANY, "", "  "], field="body")
    text = read_text(str(path), tokenizer, field="body")
    assert [tokenizer.decode(ids.tolist()) for ids in text.documents] == MANY
    assert text.sha256 == sha256(MANY)
    assert text.tokens == sum(len(tokenizer.encode(document)) for document in MANY)


def test_borders_of_documents_are_in_the_hash(tmp_path: Path, tokenizer: Tokenizer) -> None:
    one = read_text(str(write_jsonl(tmp_path / "a.jsonl", ["ab", "c"])), tokenizer)
    other = read_text(str(write_jsonl(tmp_path / "b.jsonl", ["a", "bc"])), tokenizer)
    assert one.sha256 != other.sha256


def test_reading_stops_when_there_is_enough(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", MANY)
    said: list[int] = []
    text = read_text(str(path), tokenizer, max_tokens=50, report=lambda _, done, total: said.append(done))
    assert text.tokens > 50
    assert text.tokens - len(text.documents[-1]) <= 50
    assert said[-1] == text.tokens
    assert text.sha256 == sha256(MANY[: len(text.documents)])


def test_a_prepared_folder_gives_its_held_out_documents(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = str(write_jsonl(tmp_path / "a.jsonl", MANY))
    tokenizer.save(tmp_path)
    prepare([path], tmp_path / "data", tokenizer=str(tmp_path), val_fraction=0.3)
    splitter = make_splitter(lambda: iter(MANY), 0.3, path)
    held = [piece for text in MANY for split, piece in splitter.split(text) if split == "val"]
    text = read_text(str(tmp_path / "data"), tokenizer)
    assert [tokenizer.decode(ids.tolist()) for ids in text.documents] == held
    assert (text.part, text.sha256) == ("validation split", sha256(held))
    other = Tokenizer.train(MANY, 400)  # a model with another tokenizer gets the same text in its own tokens
    again = read_text(str(tmp_path / "data"), other)
    assert [ids.tolist() for ids in again.documents] == other.encode_batch(held)
    assert again.sha256 == text.sha256


def test_a_preset_is_what_prepare_holds_out_of_it(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "set").mkdir()
    write_jsonl(tmp_path / "set" / "train.jsonl", MANY)
    monkeypatch.setitem(PRESETS, "pile", Preset(str(tmp_path / "set"), "", 0.4, 10_000, 150))
    tokenizer.save(tmp_path)
    index = prepare(["pile"], tmp_path / "data", tokenizer=str(tmp_path))
    assert index["tokens"]["val"] == 150
    text, prepared = read_text("pile", tokenizer), read_text(str(tmp_path / "data"), tokenizer)
    assert [ids.tolist() for ids in text.documents] == [ids.tolist() for ids in prepared.documents]
    assert text.sha256 == prepared.sha256
    assert text.part == "held out: 40.0% of the documents, by hash; the first 150 tokens"


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("fineweb_edu", "There is no file, folder or text fineweb_edu; did you mean fineweb-edu"),
        ("nothing.txt", "no file, folder or text nothing.txt; check the path; named texts are stdlib, pile"),
        ("none/*.txt", "holds no file that prepare reads"),
        ("stdlib=2", "A weight, as in 'stdlib=2', is for training"),
    ],
)
def test_what_is_not_there(given: str, sentence: str, tokenizer: Tokenizer) -> None:
    with pytest.raises(LoopformerError, match=sentence):
        read_text(given, tokenizer)


def test_empty_text_and_limits(tmp_path: Path, tokenizer: Tokenizer) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text(" \n")
    with pytest.raises(LoopformerError, match=r"empty\.txt holds no text"):
        read_text(str(empty), tokenizer)
    with pytest.raises(LoopformerError, match="--max-tokens must be 1 or more, got 0"):
        read_text(str(empty), tokenizer, max_tokens=0)


def test_supervised_examples_are_no_plain_text(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i}?", "response": "its time"}) + "\n" for i in range(60)))
    tokenizer.save(tmp_path)
    prepare([str(path)], tmp_path / "data", tokenizer=str(tmp_path), val_fraction=0.3, supervised=True)
    with pytest.raises(LoopformerError, match="holds supervised examples"):
        read_text(str(tmp_path / "data"), tokenizer)


def test_a_run_has_its_own_data(tmp_path: Path, tokenizer: Tokenizer) -> None:
    run, data = tmp_path / "run", tmp_path / "data"
    assert default_text(tmp_path) is None
    (run / "checkpoints").mkdir(parents=True)
    settings, _ = load_run("demo", [f"data.path={data}"])
    (run / "run.yaml").write_text(run_to_yaml(settings))
    assert default_text(run) is None
    tokenizer.save(tmp_path)
    prepare([str(write_jsonl(tmp_path / "a.jsonl", MANY))], data, tokenizer=str(tmp_path))
    assert default_text(run) == str(data)


TOKENIZER = Tokenizer.train(["every pass is told its time and its step"] * 9, 257)


def scored(cut: CutText) -> Scored:
    found: Scored = []
    for row in cut.windows:
        ids = row.tokens
        found += [(ids[:place], ids[place]) for place in range(len(ids) - row.scored, len(ids))]
    return found


@given(
    st.lists(st.lists(st.integers(1, 256), min_size=1, max_size=40), min_size=1, max_size=6),
    st.integers(1, 12),
    st.integers(1, 12),
    st.booleans(),
    st.none() | st.integers(1, 60),
)
def test_each_token_once_given_what_the_rule_says(
    documents: list[list[int]], window: int, stride: int, join: bool, most: int | None
) -> None:
    text = Text("t", "", tuple(np.array(ids) for ids in documents), "0", TOKENIZER)
    protocol = Protocol(window, min(stride, window), join, most)
    expected = by_rule(text, protocol, 12)
    if len(expected) < 2:
        with pytest.raises(LoopformerError, match="a perplexity needs 2 or more"):
            cut_text(text, protocol, 12)
        return
    cut = cut_text(text, protocol, 12)
    assert scored(cut) == expected
    targets = [target for _, target in expected]
    assert cut.tokens == len(expected)
    assert cut.ends == targets.count(TOKENIZER.eot)
    assert cut.bytes == TOKENIZER.byte_count(targets)
    assert all(len(row.inputs) <= window for row in cut.windows)


def test_bytes_are_those_of_the_text(tokenizer: Tokenizer) -> None:
    text = make_text(DOCUMENTS, tokenizer)
    apart = cut_text(text, Protocol(), 16)
    assert apart.bytes == sum(len(document.encode()) for document in DOCUMENTS)
    assert (apart.documents, apart.ends) == (5, 0)
    joined = cut_text(text, Protocol(join=True), 16)
    assert joined.bytes == apart.bytes - tokenizer.byte_count([tokenizer.encode(DOCUMENTS[0])[0]])
    assert (joined.documents, joined.ends) == (5, 4)
    assert joined.tokens == apart.tokens - 1 + 4


def test_a_cut_document_counts_its_part(tokenizer: Tokenizer) -> None:
    text = make_text(DOCUMENTS, tokenizer)
    first = len(text.documents[0])
    cut = cut_text(text, Protocol(max_tokens=first + 3), 4)
    assert (cut.documents, cut.tokens) == (2, first + 3)
    assert cut.bytes == len(DOCUMENTS[0].encode()) + tokenizer.byte_count(text.documents[1][:3].tolist())
    at_the_end = cut_text(text, Protocol(join=True, max_tokens=first), 4)  # the last one scored is an end token
    assert (at_the_end.documents, at_the_end.ends) == (1, 1)


@pytest.mark.parametrize(
    ("protocol", "sentence"),
    [
        (Protocol(window=17), "--window must be 1 to the model's context of 16, got 17"),
        (Protocol(window=0), "--window must be 1"),
        (Protocol(stride=0), "--stride must be 1 to the window of 16, got 0"),
        (Protocol(window=8, stride=9), "--stride must be 1 to the window of 8, got 9"),
    ],
)
def test_impossible_windows(text: Text, protocol: Protocol, sentence: str) -> None:
    with pytest.raises(LoopformerError, match=sentence):
        cut_text(text, protocol, 16)


def test_too_little_text(tokenizer: Tokenizer) -> None:
    for limit, join, said in ((1, False, "has 1 token to score, and"), (None, True, "has 0 tokens to score, and")):
        with pytest.raises(
            LoopformerError, match=rf"test\.txt {said} a perplexity needs 2 or more; give more text"
        ):
            cut_text(make_text(["x"], tokenizer), Protocol(join=join, max_tokens=limit), 16)


def test_a_text_shorter_than_a_window_is_a_window(tokenizer: Tokenizer) -> None:
    short = make_text(["time flies"], tokenizer)
    for protocol in (Protocol(), Protocol(stride=8), Protocol(max_tokens=500)):
        cut = cut_text(short, protocol, 16)
        assert cut.tokens == short.tokens < 16
        assert cut.window == short.tokens
        assert len(cut.windows) == 1


@torch.no_grad()
def directly(lm: LM, text: Text, protocol: Protocol, trajectory: str) -> tuple[float, float]:
    """Perplexity and bits per byte, one forward pass for each token."""
    nats, text_nats, size = [], 0.0, 0
    for before, target in by_rule(text, protocol, lm.model.config.context):
        logits = lm.model(torch.tensor([before]), trajectory).logits
        assert logits is not None
        one = -float(logits[0, -1, : lm.model.config.vocab].log_softmax(0)[target])
        nats.append(one)
        if target != text.tokenizer.eot:
            text_nats += one
            size += text.tokenizer.byte_count([target])
    return math.exp(sum(nats) / len(nats)), text_nats / math.log(2) / size


@pytest.mark.parametrize("trajectory", ["4", "2-1-1"])
@pytest.mark.parametrize(
    "protocol",
    [
        Protocol(),
        Protocol(stride=5),
        Protocol(window=7, stride=1),
        Protocol(join=True),
        Protocol(join=True, stride=8),
        Protocol(max_tokens=30),
    ],
    ids=str,
)
def test_equals_a_direct_computation(lm: LM, text: Text, protocol: Protocol, trajectory: str) -> None:
    (row,) = perplexity(lm.model, text, [trajectory], protocol)
    expected, bits = directly(lm, text, protocol, trajectory)
    assert row["perplexity"] == pytest.approx(expected, rel=1e-5)
    assert row["bits_per_byte"] == pytest.approx(bits, rel=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("trajectory", ["4", "2-1-1"])
@pytest.mark.parametrize("protocol", [Protocol(), Protocol(stride=5), Protocol(join=True)], ids=str)
def test_certainty_equals_a_direct_computation(lm: LM, text: Text, protocol: Protocol, trajectory: str) -> None:
    (row,) = perplexity(lm.model, text, [trajectory], protocol, certainty=0.008)
    nats, passes = [], []
    for span in cut_text(text, protocol, lm.model.config.context).windows:
        out = early_exit(lm.model, torch.tensor([span.inputs]), 0.008, trajectory)
        logprobs = lm.model.head(out.hidden)[0, -span.scored :, : lm.model.config.vocab].log_softmax(-1)
        nats += [-float(one[target]) for one, target in zip(logprobs, span.targets, strict=True)]
        passes += out.loops[0].tolist()
    assert row["perplexity"] == pytest.approx(math.exp(sum(nats) / len(nats)), rel=1e-5)
    assert row["mean_passes"] == pytest.approx(sum(passes) / len(passes))
    assert len(set(passes)) > 2
    assert row["certainty"] == 0.008
    assert row["passes"] == [passes.count(taken) for taken in range(1, row["budget"] + 1)]
    flops = [early_exit_flops(lm.model.cost, taken, row["budget"], row["window"]) for taken in passes]
    assert row["flops_per_token"] == pytest.approx(sum(flops) / len(flops))
    (never,) = perplexity(lm.model, text, [trajectory], protocol, certainty=1.0)
    (fixed,) = perplexity(lm.model, text, [trajectory], protocol)
    assert (never["nats"], never["mean_passes"]) == (fixed["nats"], row["budget"])
    assert "mean_passes" not in fixed


def test_what_is_kept_knows_its_certainty(lm: LM, text: Text, tmp_path: Path) -> None:
    store = Store(tmp_path)
    rows = [
        perplexity(lm.model, text, [4], certainty=one, store=store)[0] for one in (None, 0.008, 0.006, 0.008, None)
    ]
    assert [row["reused"] for row in rows] == [False, False, False, True, True]
    assert len({row["nats"] for row in rows}) == 3
    assert rows[3] == {**rows[1], "reused": True}


@pytest.mark.parametrize("batch_tokens", [1, 16, 40, 100_000])
def test_batches_change_nothing(lm: LM, text: Text, batch_tokens: int) -> None:
    trajectories = ["1", "3-1", "4"]
    once = perplexity(lm.model, text, trajectories, Protocol(stride=3))
    again = perplexity(lm.model, text, trajectories, Protocol(stride=3), batch_tokens=batch_tokens)
    assert [row["nats"] for row in again] == pytest.approx([row["nats"] for row in once], rel=1e-6)


def test_a_document_is_scored_as_score_does_after_an_end_token(lm: LM) -> None:
    assert lm.tokenizer is not None
    text = make_text(["every pass is told"], lm.tokenizer)
    ids = text.documents[0].tolist()
    (row,) = perplexity(lm.model, text, ["2-1-1"], Protocol(window=len(ids)))
    (scored,) = score_texts(lm.model, [ids], [Trajectory.parse("2-1-1")], lm.tokenizer.eot)
    assert row["nats"] == pytest.approx(-scored.total, rel=1e-6)


@torch.no_grad()
def test_joined_is_what_training_validates_on(lm: LM, tmp_path: Path) -> None:
    source = tmp_path / "many.jsonl"
    source.write_text("".join(f'{{"text": "its time {i} and its step {i * i}, ☕"}}\n' for i in range(99)))
    assert lm.tokenizer is not None
    lm.tokenizer.save(tmp_path)
    prepare([str(source)], tmp_path / "data", tokenizer=str(tmp_path), val_fraction=0.3)
    batch = Windows(TokenData.open(tmp_path / "data", "val"), 16).batch(0, 10_000)
    logits = lm.model(batch.inputs, 2).logits
    assert logits is not None
    loss = torch.nn.functional.cross_entropy(
        logits[..., : lm.model.config.vocab].flatten(0, 1), batch.targets.flatten()
    )
    text = read_text(str(tmp_path / "data"), lm.tokenizer)
    (row,) = perplexity(lm.model, text, [2], Protocol(join=True, max_tokens=batch.targets.numel()))
    assert row["perplexity"] == pytest.approx(math.exp(float(loss)), rel=1e-5)
    assert row["tokens"] == batch.targets.numel()


def test_cost_and_facts_stand_beside_the_number(lm: LM, text: Text) -> None:
    (row,) = perplexity(lm.model, text, [2], Protocol(stride=8))
    assert row["flops_per_token"] == lm.model.cost.forward_flops(2, 16)
    assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["seconds"])
    assert row["forward_tokens"] > row["tokens"] == text.tokens
    assert (row["trajectory"], row["budget"], row["sha256"]) == ("2", 2, "0")
    assert row["part"] == "all of it"
    assert (row["dtype"], row["device"], row["window"], row["stride"]) == ("float32", "cpu", 16, 8)


def test_a_limit_is_said(lm: LM, text: Text) -> None:
    (row,) = perplexity(lm.model, text, [1], Protocol(max_tokens=20))
    assert (row["tokens"], row["part"]) == (20, "all of it, up to 20 tokens")


def test_only_what_is_new_is_computed(lm: LM, text: Text, loops_run: Callable[[], int], tmp_path: Path) -> None:
    store = Store(tmp_path)
    first = perplexity(lm.model, text, [1, 2], store=store, batch_tokens=100_000)
    assert loops_run() == 1 + 2
    again = perplexity(lm.model, text, [1, 2], store=store)
    assert loops_run() == 0
    assert [row.pop("reused") for row in again] == [True, True]
    assert [row.pop("reused") for row in first] == [False, False]
    assert again == first
    perplexity(lm.model, text, [1, 2, "3-1", 4], store=store, batch_tokens=100_000)
    assert loops_run() == 2 + 4
    perplexity(lm.model, text, [1], Protocol(join=True), store=store)
    assert loops_run() == 1
    perplexity(lm.model, make_text(["its time " * 9], text.tokenizer, "1"), [1], store=store)
    assert loops_run() == 1
    with torch.no_grad():
        lm.model.tokens.weight += 1
    perplexity(lm.model, text, [1], store=store)
    assert loops_run() == 1


def test_interrupted_it_keeps_what_is_finished(
    lm: LM, text: Text, loops_run: Callable[[], int], tmp_path: Path
) -> None:
    def stop(doing: str, done: int, total: int | None) -> None:
        if "M=4" in doing:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        perplexity(lm.model, text, [1, 2, 4], store=Store(tmp_path), report=stop)
    loops_run()
    rows = perplexity(lm.model, text, [1, 2, 4], store=Store(tmp_path), batch_tokens=100_000)
    assert loops_run() == 4
    assert [row["reused"] for row in rows] == [True, True, False]


def test_progress_ends_at_the_last_token(lm: LM, text: Text) -> None:
    said: list[tuple[str, int, int | None]] = []
    perplexity(lm.model, text, [1], report=lambda *one: said.append(one), batch_tokens=20)
    assert [done for _, done, _ in said] == sorted(done for _, done, _ in said)
    assert said[-1] == ("test.txt M=1", text.tokens, text.tokens)


def test_other_dtypes_are_other_pieces(lm: LM, text: Text, loops_run: Callable[[], int], tmp_path: Path) -> None:
    (full,) = perplexity(lm.model, text, [2], weights="w", store=Store(tmp_path))
    lm.model.to(torch.bfloat16)
    loops_run()
    (half,) = perplexity(lm.model, text, [2], weights="w", store=Store(tmp_path))
    assert loops_run() > 0
    assert half["dtype"] == "bfloat16"
    assert half["nats"] == pytest.approx(full["nats"], rel=0.05)


def test_no_number_is_none(lm: LM, text: Text) -> None:
    with torch.no_grad():
        lm.model.tokens.weight.fill_(math.nan)
    (row,) = perplexity(lm.model, text, [1])
    assert row["perplexity"] is row["bits_per_byte"] is row["nats"] is None


@pytest.mark.parametrize(
    ("trajectory", "sentence"), [(5, "above the model's 4 loops"), (0, "1 or more"), ("a", "Cannot")]
)
def test_impossible_routes(lm: LM, text: Text, trajectory: int | str, sentence: str) -> None:
    with pytest.raises(LoopformerError, match=sentence):
        perplexity(lm.model, text, [trajectory])


def test_a_foreign_tokenizer_is_noticed(lm: LM, text: Text) -> None:
    other = LoopedLM(dataclasses.replace(lm.model.config, vocab=64))
    with pytest.raises(LoopformerError, match="the model knows 64; is this the model's own tokenizer"):
        perplexity(other, text, [1])
    with pytest.raises(LoopformerError, match="--batch-tokens must be 1"):
        perplexity(lm.model, text, [1], batch_tokens=0)
