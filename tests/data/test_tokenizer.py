"""Round trips, the two file formats, determinism and what is wrong with a tokenizer."""

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from loopformer.data.tokenizer import END, Tokenizer
from loopformer.errors import FileProblem, LoopformerError

TEXT = ["the cat sat on the mat\n\nthe dog sat on the log"] * 20
TRAINED = Tokenizer.train(TEXT, 300)


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
    ids = TRAINED.encode(f"a{END}b")
    assert TRAINED.eot not in ids
    assert TRAINED.decode(ids) == f"a{END}b"
    assert TRAINED.decode([TRAINED.eot]) == ""
    assert TRAINED.decode([TRAINED.eot], special=True) == END
    assert TRAINED.encode_template(f"a{END}") == [*TRAINED.encode("a"), TRAINED.eot], "but what a template wrote"


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
    with pytest.raises(FileProblem, match="no byte-level BPE that fits together"):
        Tokenizer.find(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(FileProblem, match="is no tokenizer"):
        Tokenizer.find(str(tmp_path))
    with pytest.raises(FileProblem, match="missing or unreadable"):
        Tokenizer.load(tmp_path / "nowhere")
    with pytest.raises(LoopformerError, match="needs 257 ids or more"):
        Tokenizer.train(TEXT, 100)


def test_tokenizer_without_end_token(tmp_path: Path) -> None:
    TRAINED.save(tmp_path)
    plain = json.loads((tmp_path / "tokenizer.json").read_text())
    plain["added_tokens"] = []
    number = plain["model"]["vocab"].pop(END)
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
    words = {"naïve": 0, "loop": 1, END: 2, "?": 3}
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens([END])
    tokenizer = Tokenizer(library.to_str())
    assert tokenizer.byte_count(tokenizer.encode("naïve loop")) == len("naïve loop".encode())
