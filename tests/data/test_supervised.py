"""Loss falls on responses and their end token only, through prepare and the loader too."""

from pathlib import Path

import pytest

from loopformer.data.loader import NO_LOSS, Loader, validation_windows
from loopformer.data.prepare import prepare
from loopformer.data.shards import TokenData
from loopformer.data.supervised import LAST, LOSS, encode_examples, encode_prompt, parse_example
from loopformer.data.tokenizer import Tokenizer
from loopformer.errors import LoopformerError

from .words import write_jsonl

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Two and two?"},
    {"role": "assistant", "content": "Four."},
    {"role": "user", "content": "And three?"},
    {"role": "assistant", "content": "Seven."},
]


def test_template_and_mask(tokenizer: Tokenizer) -> None:
    ((ids, flags),) = encode_examples(tokenizer, [parse_example({"messages": CHAT}, "chat")])
    end = "<|endoftext|>"
    assert tokenizer.decode(ids.tolist(), special=True) == (
        f"System: Be brief.\n\nUser: Two and two?\n\nAssistant: Four.{end}"
        f"User: And three?\n\nAssistant: Seven.{end}"
    )
    learned = [number for number, flag in zip(ids.tolist(), flags.tolist(), strict=True) if flag & LOSS]
    assert tokenizer.decode(learned, special=True) == f" Four.{end} Seven.{end}"
    assert [bool(flag & LAST) for flag in flags] == [False] * (len(ids) - 1) + [True]


def test_prompt_and_response_are_a_chat_of_two_turns() -> None:
    pair = {"prompt": "Two and two?", "response": "Four."}
    assert parse_example(pair, "pair") == parse_example({"messages": CHAT[1:3]}, "chat")


def test_prompt_is_what_training_saw(tokenizer: Tokenizer) -> None:
    ((ids, _),) = encode_examples(tokenizer, [parse_example({"messages": CHAT}, "chat")])
    prompt = encode_prompt(tokenizer, CHAT[:-1])
    assert ids[: len(prompt)].tolist() == prompt
    assert tokenizer.decode(ids[len(prompt) :].tolist()) == " Seven."


def test_through_prepare_and_loader(tmp_path: Path, prepared: Path) -> None:
    records: list[dict[str, object]] = [{"prompt": f"What is {n}?", "response": f"It is {n}."} for n in range(150)]
    records += [{"messages": CHAT}] * 10
    path = write_jsonl(tmp_path / "chat.jsonl", records)
    options = {"tokenizer": str(prepared), "supervised": True, "val_fraction": 0.1, "shard_tokens": 500}
    index = prepare([str(path)], tmp_path / "out", **options)  # type: ignore[arg-type]
    counts = index["sources"][0]["splits"]
    assert counts["train"]["documents"] + counts["val"]["documents"] == 160
    assert len(counts["train"]["masks"]) == len(counts["train"]["shards"]) > 1
    data = TokenData.open(tmp_path / "out")
    data.verify()
    windows = validation_windows(data, 40, documents=True)
    batch = windows.batch(0, len(windows))
    learned = batch.targets[batch.targets != NO_LOSS].tolist()
    parts = data.tokenizer.decode(learned, special=True).split("<|endoftext|>")
    assert len(parts) > 100
    assert all(part.startswith((" It is ", " Four.", " Seven.")) for part in parts[1:-1])
    assert batch.documents is not None
    # A chat of two answers is one document, though it has two end tokens.
    assert int(batch.documents[:, -1].sum()) < int((batch.inputs == data.eot).sum())
    assert len(Loader(data, 40, 4).batch(0)) == 4


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        ({}, "has neither prompt and response nor messages"),
        ({"prompt": "x"}, "has neither prompt and response nor messages"),
        ({"prompt": "x", "response": 3}, "has a turn of role 'assistant'; each needs"),
        ({"messages": "hello"}, "must have messages such as"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "has a turn of role 'robot'"),
        ({"messages": [{"role": "user", "content": "x"}]}, "has no assistant turn"),
        ({"messages": []}, "has no assistant turn"),
    ],
)
def test_wrong_records(record: dict[str, object], sentence: str) -> None:
    with pytest.raises(LoopformerError, match=f"chat.jsonl record 3 {sentence}"):
        parse_example(record, "chat.jsonl record 3")
