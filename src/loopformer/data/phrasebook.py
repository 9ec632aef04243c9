"""The wordings of a world: templates and words become sentences, as tokens.

    book = Phrasebook(templates, words, slots, connectives=["Then"])
    sentences = book.tell(rng, [("swap", {"one": "left", "two": "right", "a": "Mia", "b": "Ben"})])  # ids
    book.tokenizer.decode(sentences[0])                                    # "Then Mia swaps left and right."

A template is a sentence with slots: `{a} gives {b} {thing.an} {thing}.` A slot stands for a word of its kind.
With a form after the dot it stands for a word that goes with it: `{a.they}`, `{a.them}` and `{a.their}` are
pronouns, `{thing.an}` is the article of a thing. Templates are split into ids once, so telling is fast.

A sentence that begins with its actor, slot `a`, may get a connective. It may also get a pronoun if the sentence
before was about the same person alone, so a pronoun is never ambiguous.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from loopformer.data.tokenizer import END_TOKEN, Tokenizer
from loopformer.errors import LoopformerError, nearest, require

WorldEvent = tuple[str, Mapping[str, str]]  # what happens, and the words of its slots
Words = Mapping[str, Sequence[str]]  # by kind; people are split into "she" and "he"

PRONOUNS = {
    "she": {"they": "she", "them": "her", "their": "her"},
    "he": {"they": "he", "them": "him", "their": "his"},
}
PERSON = "person"
PERSON_FORMS, THING_FORMS = ("they", "them", "their"), ("an",)
PRONOUN_RATE, CONNECTIVE_RATE = 0.5, 0.2  # of the sentences that may have one

WORD = r"'s|\w+|[^\w\s]"
_PIECE = re.compile(rf"\{{[\w.]*\}}|{WORD}")


class Gap(NamedTuple):
    """A gap in a template: whose word fills it, and the id of each word's form."""

    name: str
    ids: Mapping[str, int]


@dataclass(frozen=True)
class Template:
    """A sentence with gaps, as ids and slots."""

    text: str
    pieces: tuple[int | Gap, ...]
    begins_with_actor: bool

    @property
    def slots(self) -> set[str]:
        return {piece.name for piece in self.pieces if isinstance(piece, Gap)}


class Phrasebook:
    """The sentences of a world. `slots` gives the kind of word of each slot, `needed` the slots of each section."""

    def __init__(
        self,
        templates: Mapping[str, Sequence[str]],
        words: Words,
        people: Mapping[str, str],
        slots: Mapping[str, str],
        needed: Mapping[str, str],
        connectives: Sequence[str] = (),
    ) -> None:
        self._words, self._people, self._slots = words, people, slots
        texts = [*connectives, *(text for section in templates.values() for text in section)]
        literal = {piece for text in texts for piece in _PIECE.findall(text) if piece[0] != "{"}
        forms = {form for pronouns in PRONOUNS.values() for form in pronouns.values()}
        forms |= {form.capitalize() for form in forms} | {"a", "an"}
        every = sorted(literal | forms | {word for kind in words.values() for word in kind})
        self.vocab: dict[str, int] = {word: number for number, word in enumerate((*every, END_TOKEN))}
        self.templates = {
            section: tuple(self._compile(text, section, needed.get(section, "").split()) for text in lines)
            for section, lines in templates.items()
        }
        self.stops = {self.vocab[mark] for mark in ".!?" if mark in self.vocab}
        self._connectives = [tuple(self.vocab[word] for word in _PIECE.findall(text)) for text in connectives]
        self._pronouns = {person: self.vocab[PRONOUNS[gender]["they"]] for person, gender in people.items()}
        self._capitals = {
            person: self.vocab[PRONOUNS[gender]["they"].capitalize()] for person, gender in people.items()
        }

    def _compile(self, text: str, section: str, needed: Sequence[str]) -> Template:
        pieces = [self._piece(piece, text) for piece in _PIECE.findall(text)]
        where = f"The template {text!r} of {section}"
        template = Template(text, tuple(pieces), text.startswith("{a}"))
        missing = [name for name in needed if name not in template.slots]
        require(not missing, f"{where} lacks {{{'}, {'.join(missing)}}}; add what is missing.")
        starts_well = text.lstrip("“")[:1].isupper() or text.startswith(("{a}", "{b}"))
        require(starts_well, f"{where} begins with a small letter; begin it with a capital or a person.")
        ends_well = text.rstrip("”").endswith((".", "!", "?"))
        require(ends_well, f"{where} does not end like a sentence; end it with a full stop, ! or ?.")
        return template

    def _piece(self, piece: str, text: str) -> int | Gap:
        if piece[0] != "{":
            return self.vocab[piece]
        name, _, form = piece[1:-1].partition(".")
        if name not in self._slots:
            hint = nearest(name, list(self._slots))
            raise LoopformerError(f"The template {text!r} has an unknown slot {piece}; {hint}")
        kind = self._slots[name]
        if not form:
            return Gap(name, {word: self.vocab[word] for word in self._words[kind]})
        known = PERSON_FORMS if kind == PERSON else THING_FORMS
        if form not in known:
            hint = nearest(form, list(known))
            raise LoopformerError(f"The template {text!r} has an unknown form {piece}; {hint}")
        return Gap(name, {word: self.vocab[self._form(word, form)] for word in self._words[kind]})

    def _form(self, word: str, form: str) -> str:
        if form == "an":
            return "an" if word[0] in "aeiou" else "a"
        return PRONOUNS[self._people[word]][form]

    def tell(self, rng: random.Random, events: Sequence[WorldEvent]) -> list[list[int]]:
        """The ids of a sentence for each event, in wordings drawn at random."""
        sentences, alone = list[list[int]](), ""  # whom the sentence before was about, if it was about one person
        draw = rng.random
        for section, fillers in events:
            templates = self.templates[section]
            template = templates[int(draw() * len(templates))]
            ids = [piece if piece.__class__ is int else piece.ids[fillers[piece.name]] for piece in template.pieces]  # type: ignore[union-attr]
            actor = fillers.get("a", "")
            if template.begins_with_actor:
                is_joined = self._connectives and draw() < CONNECTIVE_RATE
                if actor == alone and draw() < PRONOUN_RATE:
                    ids[0] = (self._pronouns if is_joined else self._capitals)[actor]
                if is_joined:
                    ids[:0] = self._connectives[int(draw() * len(self._connectives))]
                alone = "" if "b" in fillers else actor
            else:
                alone = ""
            sentences.append(ids)
        return sentences

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Splits text into the words and the punctuation of this world; the last id is the end token."""
        from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
        from tokenizers import Tokenizer as Library

        library = Library(models.WordLevel(self.vocab))
        by_word = pre_tokenizers.Split(Regex(WORD), "isolated")
        library.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), by_word])
        # The decoder of WordPiece puts spaces between words and none before punctuation, except for quotes.
        spaces = [decoders.WordPiece("##", cleanup=True), decoders.Fuse()]
        library.decoder = decoders.Sequence([*spaces, decoders.Replace("“ ", "“"), decoders.Replace(" ”", "”")])
        library.add_special_tokens([AddedToken(END_TOKEN, special=True, normalized=False)])
        return Tokenizer(library.to_str(), "the tokenizer of this world")
