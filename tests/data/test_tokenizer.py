"""Round trips, file formats, determinism, what is wrong with a tokenizer; loss on responses and their end only."""

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, normalizers

from loopformer.data.loader import IGNORE_INDEX, Loader, Windows
from loopformer.data.prepare import prepare
from loopformer.data.shards import TokenData
from loopformer.data.tokenizer import (
    END_TOKEN,
    LAST,
    LOSS,
    Tokenizer,
    encode_examples,
    encode_prompt,
    parse_example,
)
from loopformer.errors import FileProblem, LoopformerError

from .words import write_jsonl

TEXT = ["the cat sat on the mat\n\nthe dog sat on the log"] * 20
TRAINED = Tokenizer.train(TEXT, 300)
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Two and two?"},
    {"role": "assistant", "content": "Four."},
    {"role": "user", "content": "And three?"},
    {"role": "assistant", "content": "Seven."},
]


@given(st.text())
def test_decode_inverts_encode(text: str) -> None:
    ids = TRAINED.encode(text)
    assert TRAINED.decode(ids) == text
    assert all(0 <= number < TRAINED.vocab_size for number in ids)


def test_training_is_deterministic() -> None:
    again = Tokenizer.train(TEXT, 300)
    assert again.hash == TRAINED.hash
    assert Tokenizer.train(TEXT, 270).hash != TRAINED.hash
    assert TRAINED.vocab_size <= 300
    assert len(TRAINED.encode("the cat sat")) < len("the cat sat")


def test_save_and_load(tmp_path: Path) -> None:
    TRAINED.save(tmp_path)
    loaded = Tokenizer.load(tmp_path)
    assert loaded.hash == TRAINED.hash == Tokenizer.find(str(tmp_path / "tokenizer.json")).hash
    assert loaded.encode_batch(TEXT) == TRAINED.encode_batch(TEXT)
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]


@pytest.mark.parametrize(("vocab", "merges"), [("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt")])
def test_gpt2_files(tmp_path: Path, vocab: str, merges: str) -> None:
    TRAINED.save(tmp_path)
    model = json.loads((tmp_path / "tokenizer.json").read_text())["model"]
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / vocab).write_text(json.dumps(model["vocab"]))
    (tmp_path / merges).write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in model["merges"]))
    found = Tokenizer.find(str(tmp_path))
    assert found.encode(TEXT[0]) == TRAINED.encode(TEXT[0])
    assert found.eot == TRAINED.eot
    assert found.vocab_size == TRAINED.vocab_size


def test_end_token_comes_only_from_us() -> None:
    ids = TRAINED.encode(f"a{END_TOKEN}b")
    assert TRAINED.eot not in ids
    assert TRAINED.decode(ids) == f"a{END_TOKEN}b"
    assert TRAINED.decode([TRAINED.eot]) == ""
    assert TRAINED.decode([TRAINED.eot], special=True) == END_TOKEN
    assert TRAINED.encode_template(f"a{END_TOKEN}") == [*TRAINED.encode("a"), TRAINED.eot], (
        "but what a template wrote"
    )


def test_batch_equals_one_by_one() -> None:
    texts = ["", "the", "cat " * 50, "🙂\r\n"]
    assert TRAINED.encode_batch(texts) == [TRAINED.encode(text) for text in texts]


def test_the_model_in_the_box_has_one() -> None:
    assert Tokenizer.find("box").vocab_size == 8192


def test_wrong_tokenizers(tmp_path: Path) -> None:
    with pytest.raises(FileProblem, match=r"There is no tokenizer .*nowhere"):
        Tokenizer.find(str(tmp_path / "nowhere"))
    with pytest.raises(FileProblem, match=r"holds neither tokenizer.json nor"):
        Tokenizer.find(str(tmp_path))
    (tmp_path / "encoder.json").write_text('{"a": 0}')
    (tmp_path / "vocab.bpe").write_text("x y\n")
    with pytest.raises(FileProblem, match="do not form a byte-level BPE tokenizer"):
        Tokenizer.find(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(FileProblem, match="is not a tokenizer"):
        Tokenizer.find(str(tmp_path))
    with pytest.raises(FileProblem, match="missing or unreadable"):
        Tokenizer.load(tmp_path / "nowhere")
    with pytest.raises(LoopformerError, match="needs 257 ids or more"):
        Tokenizer.train(TEXT, 100)


SAVED = json.loads(TRAINED._text)
NORMALIZERS = {
    "none": [],
    "GPT-NeoX": [normalizers.NFC()],
    "Llama 2": [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")],
    "T5": [normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), "▁"), normalizers.Strip()],
    "XLNet": [
        normalizers.Replace("``", '"'),
        normalizers.Replace("''", '"'),
        normalizers.NFKD(),
        normalizers.StripAccents(),
        normalizers.Lowercase(),
        normalizers.Replace(Regex(" {2,}"), " "),
    ],
    "CLIP": [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()],
    "BERT": [normalizers.BertNormalizer()],
    "Nmt": [normalizers.Nmt(), normalizers.NFKC(), normalizers.ByteLevel()],
    "quotes": [normalizers.Replace(quote, '"') for quote in "“”„‟«»〝〞＂"],
}


@pytest.mark.parametrize("steps", NORMALIZERS.values(), ids=NORMALIZERS)
def test_normalizers_of_known_models_are_accepted(steps: list[normalizers.Normalizer]) -> None:
    library = tokenizers.Tokenizer.from_str(TRAINED._text)
    library.normalizer = normalizers.Sequence(steps)
    tokenizer = Tokenizer(library.to_str())
    assert tokenizer.encode("ﷺ the cat é 日") == library.encode("ﷺ the cat é 日").ids


def library_tokenizer(normalizer: normalizers.Normalizer | None = None, **added: bool) -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer.from_str(TRAINED._text)
    if normalizer is not None:
        library.normalizer = normalizer
    if added:
        library.add_tokens([tokenizers.AddedToken("the cat sat on the mat", normalized=False, **added)])
    return library


def with_settings(**changes: object) -> Tokenizer:
    return Tokenizer(json.dumps(SAVED | changes))


def tokenizer_of_words() -> Tokenizer:
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel({"the": 0, "?": 1}, unk_token="?"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens([END_TOKEN])
    return Tokenizer(library.to_str())


def split(behavior: str) -> dict[str, object]:
    spaces = {"type": "Split", "pattern": {"Regex": r"\s+"}, "behavior": behavior, "invert": False}
    return {"type": "Sequence", "pretokenizers": [spaces, SAVED["pre_tokenizer"]]}


BOUNDED = {
    "byte-level BPE": TRAINED,
    "split first": with_settings(pre_tokenizer=split("Isolated")),
    "a long added token": Tokenizer(library_tokenizer(single_word=False).to_str()),
}
UNBOUNDED = {
    "words": tokenizer_of_words(),
    "drops accents": Tokenizer(library_tokenizer(normalizers.StripAccents()).to_str()),
    "drops spaces": with_settings(pre_tokenizer=split("Removed")),
    "an added token that strips": Tokenizer(library_tokenizer(rstrip=True).to_str()),
    "not every byte": with_settings(
        model=SAVED["model"] | {"vocab": {"a": 0, END_TOKEN: 1}, "merges": [], "unk_token": None}
    ),
    "leaves out the text": with_settings(
        post_processor={
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": END_TOKEN, "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {END_TOKEN: {"id": END_TOKEN, "ids": [0], "tokens": [END_TOKEN]}},
        }
    ),
}
TEXTS = st.text() | st.lists(
    st.sampled_from(["the cat sat on the mat", " ", "\n", "é", "e\u0301", "☕", "a", END_TOKEN, "dog"]), max_size=60
).map("".join)


@pytest.mark.parametrize("name", [*BOUNDED, *UNBOUNDED])
@given(TEXTS)
def test_no_text_has_fewer_tokens_than_the_bound(name: str, text: str) -> None:
    tokenizer = (BOUNDED | UNBOUNDED)[name]
    assert tokenizer.fewest_tokens(text) <= len(tokenizer.encode(text))


def test_the_bound_is_of_use_where_it_is_certain() -> None:
    for tokenizer in BOUNDED.values():
        assert tokenizer.fewest_tokens("") == 0
        assert tokenizer.fewest_tokens("x") == 1
        assert tokenizer.fewest_tokens("the cat" * 100_000) > 10_000
    for tokenizer in UNBOUNDED.values():
        assert tokenizer.fewest_tokens("the cat" * 100_000) == 0


def replace(pattern: str, content: str) -> dict[str, object]:
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


@pytest.mark.parametrize(
    ("component", "settings"),
    [
        ("normalizer", {"type": "Sequence", "normalizers": [replace("a", "a" * 50)] * 6}),
        ("normalizer", {"type": "Sequence", "normalizers": [replace("日", "b"), replace("b", "b" * 101)]}),
        ("normalizer", {"type": "Sequence", "normalizers": [replace("abc", "abcabc" * 50)] * 6}),
        ("normalizer", {"type": "Prepend", "prepend": "long" * 50}),
        ("pre_tokenizer", {"type": "Sequence", "pretokenizers": [SAVED["pre_tokenizer"]] * 12}),
        ("decoder", {"type": "Sequence", "decoders": [replace("a", "a" * 50)] * 6}),
    ],
)
def test_a_tokenizer_that_makes_texts_explode_is_refused(component: str, settings: dict[str, object]) -> None:
    with pytest.raises(FileProblem, match="would make some texts more than 100 times as long"):
        Tokenizer(json.dumps(SAVED | {component: settings}))


def test_tokenizer_without_end_token(tmp_path: Path) -> None:
    TRAINED.save(tmp_path)
    plain = json.loads((tmp_path / "tokenizer.json").read_text())
    plain["added_tokens"] = []
    number = plain["model"]["vocab"].pop(END_TOKEN)
    plain["model"]["vocab"]["<|something|>"] = number
    (tmp_path / "tokenizer.json").write_text(json.dumps(plain))
    with pytest.raises(FileProblem, match="has no end token"):
        Tokenizer.load(tmp_path)


@given(st.text(max_size=40))
def test_bytes_are_counted_token_by_token(text: str) -> None:
    ids = TRAINED.encode(text)
    assert TRAINED.byte_count(ids) == sum(TRAINED.byte_count([number]) for number in ids) == len(text.encode())
    assert TRAINED.byte_count([*ids, TRAINED.eot]) == len(text.encode())


def test_bytes_of_a_tokenizer_of_words() -> None:
    words = {"naïve": 0, "loop": 1, END_TOKEN: 2, "?": 3}
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens([END_TOKEN])
    tokenizer = Tokenizer(library.to_str())
    assert tokenizer.byte_count(tokenizer.encode("naïve loop")) == len("naïve loop".encode())


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
    windows = Windows(data, 40, documents=True)
    batch = windows.batch(0, len(windows))
    learned = batch.targets[batch.targets != IGNORE_INDEX].tolist()
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
        ({"messages": [{"role": {}, "content": "x"}]}, "has a turn of role {}"),
        ({"messages": [{"role": "user", "content": "x"}]}, "has no assistant turn"),
        ({"messages": []}, "has no assistant turn"),
    ],
)
def test_wrong_records(record: dict[str, object], sentence: str) -> None:
    with pytest.raises(LoopformerError, match=f"chat.jsonl record 3 {sentence}"):
        parse_example(record, "chat.jsonl record 3")
