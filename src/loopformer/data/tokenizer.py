"""Text ↔ token ids: a thin wrapper over the `tokenizers` library, and chats as tokens with loss on the responses.

    Tokenizer.find("gpt2")                      # GPT-2's BPE from the Hub
    Tokenizer.find("folder")                    # tokenizer.json, or GPT-2's encoder.json and vocab.bpe
    Tokenizer.train(texts, vocab_size=4096)     # byte-level BPE, the same for the same text
    tokenizer.encode("Hello world"); tokenizer.decode([15496, 995])

A tokenizer is stored as a single file, tokenizer.json. Text never encodes to a special token: `<|endoftext|>` in a
document stays text. Only the output of a chat template may contain special tokens (`encode_template`).

A supervised example is a prompt and a response, or a chat:

    {"prompt": "2 + 2?", "response": "4"}
    {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}

Both become the same text, turn by turn. Here ⏎ is a line break and END is the tokenizer's end token:

    System: content⏎⏎
    User: content⏎⏎
    Assistant: contentEND

The loss is on the content of each assistant turn and on the END after it. For inference, `encode_prompt` gives
the ids up to and including "Assistant:".
"""

from __future__ import annotations

import base64
import copy
import hashlib
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from string import printable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from loopformer.config.model import BOX, bundled_model_dir
from loopformer.data.splits import clean, cut
from loopformer.errors import FileProblem, LoopformerError, RunFailed, require
from loopformer.files import write_atomic

if TYPE_CHECKING:
    import tokenizers

TOKENIZER_FILE = "tokenizer.json"
END_TOKEN = "<|endoftext|>"
_END_NAMES = (END_TOKEN, "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "<|im_end|>", "[SEP]")
_MAX_GROWTH = 100  # how many times as long a text may become; Unicode normalization alone reaches 18
_MAX_POSSIBLE_GROWTH = 1000  # by the lengths of what replacements write; few texts come near it
_MAX_PROBE_CHARS = 1000  # of the texts that growth is measured on
_MAX_VOCAB = 1 << 24  # as of a model
_NO_MODEL = {"type": "BPE", "vocab": {}, "merges": []}
_END_OF_TEXTS = b"\n"  # tells the training process that all texts were sent; JSON is never an empty line
_PIECE_CHARS = (1 << 12, 1 << 16)  # fewest and most of a training text; the trainer buffers hundreds of texts
_MAX_TRAINING_CHARS = 256 << 20
_MAX_WORDS_MEMORY = 320 << 20  # bytes that training may use for the distinct words of the text
_MEMORY_PER_WORD, _MEMORY_PER_BYTE = 500, 110  # measured, for each distinct word and for each byte in it
_WORD = re.compile(r"[^\W\d_]+|\d+|\s+|[^\w\s]+|_+")  # roughly the words of byte-level BPE
_GPT2_FILES = (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt"))  # OpenAI's names, and the Hub's

LOSS = 1  # flag of a token that has loss
LAST = 2  # flag of the last token of an example; end tokens cannot mark it, as each response of a chat ends in one
ROLES = {"system": "System:", "user": "User:", "assistant": "Assistant:"}


class Tokenizer:
    """A tokenizer with the exact text of its tokenizer.json; `hash` is the SHA-256 of that file."""

    def __init__(self, text: str, name: str = TOKENIZER_FILE) -> None:
        self._text = text
        try:
            grows = _grows_too_long(json.loads(text))
            if not grows:  # parsing already normalizes added tokens
                self._tokenizer = self._parse()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the library raises plain Exception, and a panic is a BaseException
            raise FileProblem(f"{name} is not a tokenizer that the tokenizers library can read.") from error
        if grows:
            raise FileProblem(
                f"{name} could make a text more than {_MAX_GROWTH} times as long; use another tokenizer."
            )
        self._tokenizer.encode_special_tokens = True  # despite its name: encode them as ordinary text
        ends = [end_id for end in _END_NAMES if (end_id := self._tokenizer.token_to_id(end)) is not None]
        if not ends:
            raise FileProblem(f"{name} has no end token; add {END_TOKEN} to it.")
        self.eot = ends[0]
        self._decoded: dict[int, str] = {}  # a cache: id → text

    @cached_property
    def vocab_size(self) -> int:
        """Ids are 0 … vocab_size - 1."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def hash(self) -> str:
        return hashlib.sha256(self._text.encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, computed in parallel."""
        with _explain_encode_errors(self._tokenizer):
            encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encoded]

    def fewest_tokens(self, text: str) -> int:
        """A lower bound on the number of tokens of a text, without encoding it; 0 where nothing is certain."""
        return 0 if self._max_token_chars is None else -(-len(text) // self._max_token_chars)

    @cached_property
    def _max_token_chars(self) -> int | None:
        """The most characters that one token can stand for, or None if it is not certain.

        It is certain for byte-level BPE that knows every byte, if nothing drops or merges characters on the way.
        """
        from tokenizers.pre_tokenizers import ByteLevel

        saved = json.loads(self._tokenizer.to_str())  # as the library has read it
        model, added, splitter = saved["model"], saved.get("added_tokens", ()), saved.get("pre_tokenizer") or {}
        splitters = splitter.get("pretokenizers") or [splitter]
        kinds = {each.get("type") for each in splitters}
        keeps_all = (
            model.get("type") == "BPE"
            and not saved.get("normalizer")
            and "ByteLevel" in kinds <= {"ByteLevel", "Digits", "Punctuation", "Split"}
            and not any(each.get("behavior") == "Removed" for each in splitters)
            and set(ByteLevel.alphabet()) <= model["vocab"].keys()  # BPE drops unknown characters
            and not (model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"))
            and not any(token["lstrip"] or token["rstrip"] for token in added)  # they take spaces beside them
            and bool(self.encode("a"))  # a post-processor can leave out the text
        )
        return max(map(len, (*model["vocab"], *(token["content"] for token in added)))) if keeps_all else None

    def encode_template(self, text: str) -> list[int]:
        """The ids of the output of a chat template, where special tokens are encoded as such."""
        with _explain_encode_errors(self._tokenizer):
            return self._template_tokenizer.encode(text, add_special_tokens=False).ids

    @cached_property
    def _template_tokenizer(self) -> tokenizers.Tokenizer:
        return self._parse()

    def _parse(self) -> tokenizers.Tokenizer:
        import tokenizers

        tokenizer = tokenizers.Tokenizer.from_str(self._text)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    @cached_property
    def special_tokens(self) -> list[str]:
        """The texts of the special tokens."""
        return [added["content"] for added in json.loads(self._text).get("added_tokens", ()) if added["special"]]

    def with_end_token(self, token: str) -> Tokenizer:
        """The same tokenizer with another end token."""
        end_id = self._tokenizer.get_vocab(with_added_tokens=True).get(token)
        if end_id is None:
            raise LoopformerError(f"The tokenizer has no token {token!r} that could end a text.")
        other = copy.copy(self)
        other.eot = end_id
        return other

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """The text of the ids; special tokens such as the end token are left out unless `special` is set."""
        if special or len(ids) != 1:
            return self._tokenizer.decode(list(ids), skip_special_tokens=not special)
        token_id = int(ids[0])  # streaming decodes a single id for every token
        if token_id not in self._decoded:
            self._decoded[token_id] = self._tokenizer.decode([token_id])
        return self._decoded[token_id]

    def byte_count(self, ids: Iterable[int]) -> int:
        """UTF-8 bytes of the text of the ids. Byte-level tokenizers count partial characters, too."""
        if self._byte_lengths is None:
            return len(self.decode(list(ids)).encode())
        return sum(self._byte_lengths[token_id] for token_id in ids)

    @cached_property
    def _byte_lengths(self) -> list[int] | None:
        """Bytes of each id of a byte-level tokenizer; None for other kinds."""
        saved = json.loads(self._text)
        decoder = saved.get("decoder")
        if not isinstance(decoder, dict):
            return None
        if "ByteLevel" not in [part["type"] for part in (decoder, *decoder.get("decoders", ())) if part]:
            return None
        lengths = [0] * self.vocab_size
        for token, token_id in self._tokenizer.get_vocab(with_added_tokens=False).items():
            lengths[token_id] = len(token)
        for added in saved.get("added_tokens", ()):
            lengths[added["id"]] = 0 if added["special"] else len(added["content"].encode())
        return lengths

    def save(self, folder: Path | str) -> None:
        write_atomic(Path(folder) / TOKENIZER_FILE, self._text.encode())

    @classmethod
    def load(cls, folder: Path | str) -> Tokenizer:
        """The tokenizer that `save` left in a folder."""
        return cls.from_file(Path(folder) / TOKENIZER_FILE)

    @classmethod
    def from_file(cls, path: Path | str) -> Tokenizer:
        return cls(_read(Path(path)), str(path))

    @classmethod
    def find(cls, source: str) -> Tokenizer:
        """`gpt2` (from the Hub), `box`, a tokenizer.json, or a folder with one or with GPT-2's two files."""
        path = Path(source)
        if path.is_file():
            return cls.from_file(path)
        if path.is_dir():
            if (path / TOKENIZER_FILE).is_file():
                return cls.load(path)
            for vocab, merges in _GPT2_FILES:
                if (path / vocab).is_file() and (path / merges).is_file():
                    return cls(_from_gpt2_files(path / vocab, path / merges), str(path / vocab))
            raise FileProblem(f"{source} holds neither tokenizer.json nor encoder.json and vocab.bpe.")
        if source == "gpt2":
            return cls(_download("openai-community/gpt2"), "openai-community/gpt2")
        if source == BOX:
            return cls.load(bundled_model_dir())
        raise FileProblem(
            f"There is no tokenizer {source}; give gpt2, box, a tokenizer.json or a folder that has one."
        )

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> Tokenizer:
        """Byte-level BPE, the end token included in `vocab_size`; the same text gives the same tokenizer."""
        check_vocab_size(vocab_size)
        pieces = (piece for text in texts for piece in cut(text, *_PIECE_CHARS))
        return cls(_train(pieces, vocab_size), "the trained tokenizer")

    @classmethod
    def train_in_subprocess(cls, texts: Iterable[str], vocab_size: int) -> Tokenizer:
        """Train on `training_pieces` in another process, because Ctrl-C cannot stop the library in this one."""
        check_vocab_size(vocab_size)
        code = "from loopformer.data.tokenizer import _train_from_stdin; _train_from_stdin()"
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(vocab_size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,  # Ctrl-C reaches only this process, which then kills the other
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with suppress(BrokenPipeError):  # it has died, which its exit code shows below
                for text in texts:
                    process.stdin.write(json.dumps(text).encode() + b"\n")
                process.stdin.write(_END_OF_TEXTS)
                process.stdin.close()
            trained = process.stdout.read().decode()
            if process.wait():
                raise RunFailed("The tokenizer could not be trained; there may be too little memory.")
            return cls(trained, "the trained tokenizer")
        finally:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with suppress(OSError):
                    pipe.close()


def training_pieces(documents: Iterable[Sequence[str]], shares: int = 1) -> Iterator[str]:
    """Pieces of the documents' texts for training, up to 1/`shares` of the limits.

    The limits bound the characters and the memory that the trainer needs for distinct words.
    """
    words: set[str] = set()
    characters, memory = _MAX_TRAINING_CHARS // shares, _MAX_WORDS_MEMORY // shares
    for texts in documents:
        for text in texts:
            characters -= len(text)
            for piece in cut(text, *_PIECE_CHARS):
                new = {word for word in _WORD.findall(piece) if word not in words}
                memory -= sum(_MEMORY_PER_WORD + _MEMORY_PER_BYTE * len(word.encode()) for word in new)
                if memory < 0:
                    return
                words |= new
                yield piece
        if characters <= 0:
            return


def check_vocab_size(vocab_size: int) -> None:
    fits = 257 <= vocab_size <= _MAX_VOCAB
    require(fits, f"A byte-level tokenizer has 257 ids or more, up to {_MAX_VOCAB:,}; got {vocab_size}.")


def _train(texts: Iterable[str], vocab_size: int) -> str:
    from tokenizers import models, pre_tokenizers, trainers

    tokenizer = _byte_level(models.BPE())
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_TOKEN], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.to_str()


def _train_from_stdin() -> None:
    """Train on texts from stdin, one JSON string per line, and write the tokenizer to stdout.

    If stdin ends without `_END_OF_TEXTS`, the parent died, and nothing is written.
    """

    def texts() -> Iterator[str]:
        for line in sys.stdin.buffer:
            if line == _END_OF_TEXTS:
                return
            yield json.loads(line)
        raise SystemExit(1)

    sys.stdout.buffer.write(_train(texts(), int(sys.argv[1])).encode())


def _download(repository: str) -> str:
    import tokenizers

    try:
        return tokenizers.Tokenizer.from_pretrained(repository).to_str()
    except Exception as error:  # whatever the network or the Hub throws
        raise LoopformerError(
            f"The tokenizer {repository} cannot be downloaded; connect, give --tokenizer a local folder, "
            "or use --train-tokenizer 4096."
        ) from error


def _from_gpt2_files(vocab: Path, merges: Path) -> str:
    """The byte-level BPE of OpenAI's `encoder.json` and `vocab.bpe`."""
    from tokenizers.models import BPE

    ids, pairs = _read(vocab), _read(merges)
    try:
        lines = [line.split(" ") for line in pairs.split("\n") if line and not line.startswith("#version")]
        model = BPE(json.loads(ids), [(first, second) for first, second in lines])
    except Exception as error:  # bad JSON, a line that is no pair, or the library's plain Exception
        raise FileProblem(f"{vocab} and {merges.name} do not form a byte-level BPE tokenizer.") from error
    return _byte_level(model).to_str()


def _byte_level(model: tokenizers.models.BPE) -> tokenizers.Tokenizer:
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers

    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_TOKEN, special=True, normalized=False)])
    return tokenizer


def _grows_too_long(saved: dict[str, Any]) -> bool:
    """Whether the normalizer, pre-tokenizer or decoder can make a text far longer.

    A chain of replacements can make a text of gigabytes. So first look at the lengths of what they write. Then run
    the steps one at a time, on the shortest probes first. The probes are the strings of the settings, which include
    what the steps replace, and some characters.
    """
    import tokenizers

    # The library ignores keys that it does not know, so judge what it has read.
    components = {component: saved.get(component) for component in ("normalizer", "pre_tokenizer", "decoder")}
    saved = json.loads(tokenizers.Tokenizer.from_str(json.dumps({"model": _NO_MODEL, **components})).to_str())
    parts = {component: [*_parts(saved[component])] for component in components}
    chains = [("normalizer", "pre_tokenizer"), ("decoder",)]
    for chain in chains:
        if math.prod(_possible_growth(part) for each in chain for part in parts[each]) > _MAX_POSSIBLE_GROWTH:
            return True
    strings = {string for string in _strings([*parts.values()]) if 0 < len(string) <= _MAX_PROBE_CHARS}
    steps = [[_step(each, part) for each in chain for part in parts[each]] for chain in chains]
    for probe in sorted(strings.union(printable, "é日😀ﷺ", *strings), key=len):
        for chain_steps in steps:
            text = probe
            for step in chain_steps:
                text = step(text)
                if len(text) > _MAX_GROWTH * len(probe):
                    return True
    return False


def _parts(settings: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """The settings of the steps of a component, in order."""
    if settings is None:
        return
    if settings["type"] != "Sequence":
        yield settings
        return
    for child in settings.get("normalizers") or settings.get("pretokenizers") or settings.get("decoders") or ():
        yield from _parts(child)


def _possible_growth(part: dict[str, Any]) -> float:
    """At most how many times as long a step makes a text by what it writes for some characters only.

    It is 1 for the steps of other kinds: these treat all characters alike, so the probes show how they grow.
    """
    if part["type"] == "Replace":
        pattern, content = part["pattern"].get("String"), part["content"]
        # A regular expression may match before every character, and leave it there.
        return max(1.0, len(content) / len(pattern)) if pattern else 1 + len(content)
    if part["type"] == "Precompiled":
        charsmap = base64.b64decode(part["precompiled_charsmap"] or "")  # the size of an index, the index, strings
        written = charsmap[4 + int.from_bytes(charsmap[:4], "little") :]
        return max(1, *(len(string.decode(errors="replace")) for string in written.split(b"\0")))
    return 1


def _step(component: str, part: dict[str, Any]) -> Callable[[str], str]:
    """A step of a component as a function from text to text."""
    import tokenizers

    step: Any = getattr(tokenizers.Tokenizer.from_str(json.dumps({"model": _NO_MODEL, component: part})), component)
    if component == "normalizer":
        normalize: Callable[[str], str] = step.normalize_str
        return normalize
    if component == "pre_tokenizer":
        return lambda text: "".join(piece for piece, _ in step.pre_tokenize_str(text))
    return lambda text: step.decode([text])


def _strings(settings: Any) -> Iterator[str]:
    """All strings in settings that were read from JSON, at any depth, without the keys."""
    if isinstance(settings, str):
        yield settings
    elif isinstance(settings, dict | list):
        for child in settings.values() if isinstance(settings, dict) else settings:
            yield from _strings(child)


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise FileProblem(f"The tokenizer file {path} is missing or unreadable.") from error


@contextmanager
def _explain_encode_errors(tokenizer: tokenizers.Tokenizer) -> Iterator[None]:
    """Turn whatever the library raises into one sentence. A panic in its Rust code is a BaseException."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        reason = " ".join(str(error).split())[:200]
        if "[UNK]" in reason:
            vocabulary = tokenizer.get_vocab(with_added_tokens=False)
            examples = sorted(vocabulary, key=vocabulary.__getitem__)[:4]
            reason = f"it knows only words such as {' '.join(examples)}"
        elif "TextEncodeInput" in reason:  # its message for a str that cannot be encoded as UTF-8
            reason = "it holds half of a surrogate pair, which is no character"
        raise LoopformerError(f"The tokenizer cannot turn a text into tokens ({reason}).") from error


class Segment(NamedTuple):
    """Part of an example. With `loss` it is a response, and an end token follows."""

    text: str
    loss: bool


Example = tuple[Segment, ...]
Encoded = tuple[npt.NDArray[Any], npt.NDArray[Any]]  # ids (uint32) and flags (uint8)


def parse_example(record: dict[str, Any], where: str) -> Example:
    """The segments of one record; `where` names it in an error."""
    if "messages" in record:
        messages = record["messages"]
    elif "prompt" in record and "response" in record:
        turns = (("user", record["prompt"]), ("assistant", record["response"]))
        messages = [{"role": role, "content": content} for role, content in turns]
    else:
        raise LoopformerError(f"{where} has neither prompt and response nor messages, as --supervised needs.")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise LoopformerError(f'{where} must have messages such as [{{"role": "user", "content": "…"}}].')
    segments: list[Segment] = []
    context = ""
    for message in messages:
        role, content = message.get("role"), message.get("content")
        if role not in tuple(ROLES) or not isinstance(content, str):
            raise LoopformerError(
                f"{where} has a turn of role {role!r}; each needs a role of {', '.join(ROLES)} and text."
            )
        if role == "assistant":
            segments += [Segment(context + ROLES[role], False), Segment(" " + clean(content), True)]
            context = ""
        else:
            context += f"{ROLES[role]} {clean(content)}\n\n"
    if not segments:
        raise LoopformerError(f"{where} has no assistant turn to learn; add one or remove the record.")
    return tuple(segments)


def encode_prompt(tokenizer: Tokenizer, messages: Sequence[dict[str, str]]) -> list[int]:
    """The ids of a chat that end in "Assistant:", so that the model answers next."""
    *prompt, _ = parse_example({"messages": [*messages, {"role": "assistant", "content": ""}]}, "The chat")
    ((ids, _),) = encode_examples(tokenizer, [tuple(prompt)])
    return [int(token_id) for token_id in ids]


def example_key(example: Example) -> str:
    """The string that is hashed to choose the split; equal examples have equal keys."""
    return json.dumps(example, ensure_ascii=False)


def example_text(example: Example) -> str:
    return "".join(segment.text for segment in example)


def encode_examples(tokenizer: Tokenizer, examples: Sequence[Example]) -> Iterator[Encoded]:
    """The ids and flags of each example; an end token follows each segment with loss."""
    encoded = iter(tokenizer.encode_batch([segment.text for example in examples for segment in example]))
    for example in examples:
        parts = [next(encoded) + [tokenizer.eot] * segment.loss for segment in example]
        losses = np.array([LOSS * segment.loss for segment in example], np.uint8)
        flags = np.repeat(losses, [len(part) for part in parts])
        flags[-1] |= LAST
        yield np.concatenate([np.array(part, np.uint32) for part in parts]), flags
