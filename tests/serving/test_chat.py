"""Chats become the tokens that a model continues."""

import pytest

from loopformer import LM, LoopformerError
from loopformer.data.supervised import encode_prompt
from loopformer.serving.chat import ChatTemplate

CHAT = [{"role": "user", "content": "its time"}]
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}assistant:"


def test_without_a_template_it_is_that_of_supervised_data(lm: LM) -> None:
    tokenizer = lm.need_tokenizer()
    assert ChatTemplate(tokenizer).encode(CHAT) == encode_prompt(tokenizer, CHAT)


def test_special_tokens_of_a_template_count_as_such(lm: LM) -> None:
    tokenizer = lm.need_tokenizer()
    ids = ChatTemplate(tokenizer, TEMPLATE).encode(CHAT)
    assert ids == [*tokenizer.encode("user: its time"), tokenizer.eot, *tokenizer.encode("assistant:")]


def test_a_message_cannot_end_its_own_turn(lm: LM) -> None:
    with pytest.raises(LoopformerError, match="may not hold the token"):
        ChatTemplate(lm.need_tokenizer(), TEMPLATE).encode([{"role": "user", "content": "a<|endoftext|>b"}])


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('no systems') }}", "no systems"),
        ("{{ messages[9].content.nothing }}", "does not take"),
        ("{{ ''.__class__.__mro__ }}", "does not take"),
    ],
)
def test_a_template_that_fails_is_one_sentence(lm: LM, template: str, said: str) -> None:
    with pytest.raises(LoopformerError, match=said):
        ChatTemplate(lm.need_tokenizer(), template).encode(CHAT)


def test_a_template_that_is_none_is_said_at_once(lm: LM) -> None:
    with pytest.raises(LoopformerError, match="cannot be read"):
        ChatTemplate(lm.need_tokenizer(), "{% for %}")
