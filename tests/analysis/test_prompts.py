import json
from pathlib import Path

import pytest
import torch

from loopformer import LM, LoopformerError
from loopformer.analysis.dynamics import read_prompts
from loopformer.data.prepare import prepare
from loopformer.data.shards import TokenData


def _jsonl(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def test_each_document_gives_its_beginning(lm: LM, tmp_path: Path) -> None:
    texts = [f"every pass {i} is told its time and its step" for i in range(5)]
    texts.insert(1, "no")  # too short
    prompts = read_prompts(_jsonl(tmp_path / "a.jsonl", texts), lm.need_tokenizer(), 4, 6)
    expected = [lm.need_tokenizer().encode(texts[i])[:6] for i in (0, 2, 3, 4)]
    assert prompts.ids.tolist() == expected
    assert prompts.documents == 4
    again = read_prompts(str(tmp_path / "a.jsonl"), lm.need_tokenizer(), 4, 6)
    assert again.hash == prompts.hash
    assert read_prompts(str(tmp_path / "a.jsonl"), lm.need_tokenizer(), 3, 6).hash != prompts.hash


def test_few_documents_give_several_windows_each(lm: LM, tmp_path: Path) -> None:
    texts = ["its time and its step " * 3, "every pass is told " * 20]
    one, other = (lm.need_tokenizer().encode(text) for text in texts)
    prompts = read_prompts(_jsonl(tmp_path / "a.jsonl", texts), lm.need_tokenizer(), 5, 8)
    assert prompts.documents == 2
    assert 16 <= len(one) < 24  # two windows, so the other document gives three
    expected = [one[:8], other[:8], one[8:16], other[8:16], other[16:24]]
    assert prompts.ids.tolist() == expected


def test_short_documents_are_read_past(lm: LM, tmp_path: Path) -> None:
    """The first look does not reach the only document that is long enough."""
    texts = ["its step"] * 2000 + ["every pass is told its time and its step"]
    prompts = read_prompts(_jsonl(tmp_path / "a.jsonl", texts), lm.need_tokenizer(), 1, 8)
    assert prompts.ids.tolist() == [lm.need_tokenizer().encode(texts[-1])[:8]]


def test_a_prepared_folder_gives_its_held_out_part(lm: LM, tmp_path: Path) -> None:
    lm.need_tokenizer().save(tmp_path)
    source = _jsonl(tmp_path / "a.jsonl", [f"pass {i} is told its time and step {i * i}" for i in range(400)])
    prepare([source], tmp_path / "data", tokenizer=str(tmp_path / "tokenizer.json"), val_fraction=0.2, workers=1)
    prompts = read_prompts(str(tmp_path / "data"), lm.need_tokenizer(), 3, 6)
    data = TokenData.open(tmp_path / "data", "val")
    held = data.sources[0].ids.read(0, data.tokens).tolist()
    assert prompts.ids[0].tolist() == held[:6]
    assert data.eot not in prompts.ids
    assert prompts.part == "validation split"


def test_what_cannot_be_is_one_sentence(lm: LM, tmp_path: Path) -> None:
    text, tokenizer = _jsonl(tmp_path / "a.jsonl", ["every pass is told its time"]), lm.need_tokenizer()
    tokens = len(tokenizer.encode("every pass is told its time"))
    with pytest.raises(LoopformerError, match=f"no document of {tokens + 1} tokens"):
        read_prompts(text, tokenizer, 1, tokens + 1)
    with pytest.raises(LoopformerError, match=r"has 1 windows .* where 2 prompts were asked for"):
        read_prompts(text, tokenizer, 2, tokens)
    with pytest.raises(LoopformerError, match="prompts must be 1 or more"):
        read_prompts(text, tokenizer, 0, 4)
    with pytest.raises(LoopformerError, match="4 tokens or more"):
        read_prompts(text, tokenizer, 1, 3)
    assert read_prompts(text, tokenizer, 1, tokens).ids.dtype == torch.int64
