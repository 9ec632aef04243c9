"""The wordings of a world: templates and words become sentences, as tokens.

    book = Phrasebook(templates, words, slots, connectives=["Then"])
    sentences = book.tell(rng, [("swap", {"one": "left", "two": "right", "a": "Mia", "b": "Ben"})])  # ids
    book.tokenizer.decode(sentences[0])                                    # "Then Mia swaps left and right."

A template is a sentence with slots: `{a} gives {b} {thing.an} {thing}.` A slot stands for a word of its kind.
With a form after the dot it stands for a word that goes with it: `{a.they}`, `{a.them}` and `{a.their}` are
pronouns, `{thing.an}` is the article of a thing. Templates are split into ids once, so telling is fast.

A sentence that begins with its actor, slot `a`, may get a connective, unless it belongs to the opening of a story.
It may also get a pronoun if the sentence before was about the same person alone, so a pronoun is never ambiguous.
Questions get neither.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence, Set
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
PERSON_FORMS, THING_FORMS = ("they", "them", "their"), ("an", "An")
PRONOUN_RATE, CONNECTIVE_RATE = 0.5, 0.2  # of the sentences that may have one

WORD = r"'s|\w+|[^\w\s]"
_PIECE = re.compile(rf"\{{[\w.]*\}}|{WORD}")


class Gap(NamedTuple):
    """A gap in a template: its slot, the form of the word that fills it, and the id of each word in this form."""

    name: str
    form: str
    ids: Mapping[str, int]


@dataclass(frozen=True)
class Template:
    """A sentence with gaps, as ids and slots."""

    text: str
    pieces: tuple[int | Gap, ...]
    begins_with_actor: bool
    is_about_actor: bool  # alone, so that a pronoun in the next sentence can only be the actor


class Phrasebook:
    """The sentences of a world.

    `slots` gives the kinds of words of each slot, `sections` the slots that the templates of each section must have
    and, after a bar, may have. `openings` and `questions` name the sections that begin and that end a story.
    """

    def __init__(
        self,
        templates: Mapping[str, Sequence[str]],
        words: Words,
        people: Mapping[str, str],
        slots: Mapping[str, str],
        sections: Mapping[str, str],
        openings: Set[str],
        questions: Set[str],
        connectives: Sequence[str] = (),
    ) -> None:
        self._words, self._people, self._slots = words, people, slots
        self._openings, self._questions = openings, questions
        texts = [*connectives, *(text for section in templates.values() for text in section)]
        literal = {piece for text in texts for piece in _PIECE.findall(text) if piece[0] != "{"}
        used = {"they", *(piece[1:-1].partition(".")[2] for text in texts for piece in _PIECE.findall(text))}
        forms = {word for pronouns in PRONOUNS.values() for form, word in pronouns.items() if form in used}
        forms |= {pronouns["they"].capitalize() for pronouns in PRONOUNS.values()}
        forms |= {article for form in used.intersection(THING_FORMS) for article in (form, form[0])}
        every = sorted(literal | forms | {word for kind in words.values() for word in kind})
        self.vocab: dict[str, int] = {word: number for number, word in enumerate((*every, END_TOKEN))}
        self.templates = {
            section: tuple(self._compile(text, section, sections[section]) for text in lines)
            for section, lines in templates.items()
        }
        self.stops = {self.vocab[mark] for mark in ".!?" if mark in self.vocab}
        plain = all(text.strip() and "{" not in text for text in connectives)
        require(plain, "A connective must be words without slots, such as Then.")
        self.connectives = [tuple(self.vocab[word] for word in _PIECE.findall(text)) for text in connectives]
        self._pronouns = {person: self.vocab[PRONOUNS[gender]["they"]] for person, gender in people.items()}
        self._capitals = {
            person: self.vocab[PRONOUNS[gender]["they"].capitalize()] for person, gender in people.items()
        }
        self.words_by_id = {number: word for word, number in self.vocab.items()}
        self.subjects: dict[int, set[str]] = {}  # whom each pronoun at the beginning of a sentence may stand for
        for person, pronoun in (*self._pronouns.items(), *self._capitals.items()):
            self.subjects.setdefault(pronoun, set()).add(person)

    def _compile(self, text: str, section: str, expected: str) -> Template:
        pieces = [self._piece(piece, text) for piece in _PIECE.findall(text)]
        where = f"The template {text!r} of {section}"
        slots = {piece.name for piece in pieces if isinstance(piece, Gap)}
        begins = text.startswith("{a} ")
        template = Template(text, tuple(pieces), begins, begins and "b" not in slots)
        needed, _, optional = expected.partition("|")
        missing = [name for name in needed.split() if name not in slots]
        require(not missing, f"{where} lacks {{{'}, {'.join(missing)}}}; add what is missing.")
        unfilled = sorted(slots - {*needed.split(), *optional.split()})
        require(not unfilled, f"{where} has {{{'}, {'.join(unfilled)}}}, which nothing fills there; leave it out.")
        starts_well = text.lstrip("“")[:1].isupper() or text.startswith(("{a}", "{b}", "{thing.An}"))
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
        kinds = self._slots[name].split()
        words = [word for kind in kinds for word in self._words[kind]]
        if not form:
            return Gap(name, form, {word: self.vocab[word] for word in words})
        known = PERSON_FORMS if kinds == [PERSON] else THING_FORMS
        if form not in known:
            hint = nearest(form, list(known))
            raise LoopformerError(f"The template {text!r} has an unknown form {piece}; {hint}")
        return Gap(name, form, {word: self.vocab[self._form(word, form)] for word in words})

    def _form(self, word: str, form: str) -> str:
        if form in THING_FORMS:
            return form if word[0] in "aeiou" else form[0]
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
            if template.begins_with_actor and section not in self._questions:
                is_joined = self.connectives and section not in self._openings and draw() < CONNECTIVE_RATE
                if actor == alone and draw() < PRONOUN_RATE:
                    ids[0] = (self._pronouns if is_joined else self._capitals)[actor]
                if is_joined:
                    ids[:0] = self.connectives[int(draw() * len(self.connectives))]
            alone = actor if template.is_about_actor else ""
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
