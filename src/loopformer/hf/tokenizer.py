"""Our tokenizer in the files that `AutoTokenizer.from_pretrained` reads.

    save_tokenizer(tokenizer, folder, context=128, chat_template=None)

tokenizer.json stays as it is, byte for byte. The end token also begins and pads, and padding goes to the left, as
generation in batches needs it. Unlike ours, Transformers' tokenizers read special tokens out of text.
"""

from __future__ import annotations

import json
from pathlib import Path

from loopformer.data.tokenizer import Tokenizer
from loopformer.errors import FileProblem
from loopformer.files import read_json

CONFIG, SPECIAL, TEMPLATE = "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"


def save_tokenizer(tokenizer: Tokenizer, folder: Path, context: int, chat_template: str | None = None) -> None:
    """Write tokenizer.json and what stands beside it."""
    tokenizer.save(folder)
    end = tokenizer.decode([tokenizer.eot], special=True)
    special = {"bos_token": end, "eos_token": end, "pad_token": end}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": context,
        "padding_side": "left",
    }
    for name, content in ((CONFIG, settings), (SPECIAL, special)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    if chat_template is not None:
        (folder / TEMPLATE).write_text(chat_template, encoding="utf-8")


def find_chat_template(folders: list[Path]) -> str | None:
    """The chat template of the first folder that has one, in a file of its own or in tokenizer_config.json."""
    for folder in folders:
        if (folder / TEMPLATE).is_file():
            try:
                return (folder / TEMPLATE).read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise FileProblem(f"{folder / TEMPLATE} is not UTF-8 text; convert it or leave it out.") from error
        if (folder / CONFIG).is_file() and isinstance(
            found := read_json(folder / CONFIG).get("chat_template"), str
        ):
            return found
    return None
