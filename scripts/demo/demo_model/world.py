"""Provides phrasings, names, words and numbers to skills, for training or for evaluation."""

from __future__ import annotations

import random
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any
from zlib import crc32

FOLDER = Path(__file__).resolve().parent
CHOICE = re.compile(r"\[([^\[\]]*)\]")
FIELD = re.compile(r"\{(\w+)\}")

# Words that can be dropped without loss of meaning.
LOOSE_WORDS = frozenset(
    "the a an is are of me please can you could do does in to for it that".split()
)
EXTRA_WORDS = ("please", "now", "so", "just", "then", "kindly", "okay,", "hey,", "well,", "um,")
OPENINGS = (
    "One question:|Quick question:|Next question:|My question is:|I have a question.|"
    "Can I ask you something?|Here is a task:|Please help me:|Good, next:|And now:|Listen:|"
    "Hey minisgl,|By the way,|I wonder:|Let me see.|All right,|Hello!|Thanks!"
).split("|")
SHORT_FORMS = {"you": "u", "you?": "u?", "your": "ur", "are": "r", "please": "pls", "for": "4"}
SHORT_FORMS |= {"What": "whats", "what": "wat", "the": "teh", "and": "n", "I": "i"}
# American spellings, used in half of the questions. Answers keep British spelling.
AMERICAN = {
    "favourite": "favorite", "colour": "color", "licence": "license", "kilometre": "kilometer",
    "centimetre": "centimeter", "millimetre": "millimeter", "metre": "meter", "litre": "liter",
}  # fmt: skip
SPELLED_FIELDS = ("thing", "small", "large", "one")  # fields whose words have two spellings
# Parts of invented words.
ONSETS = (
    "b c d f g h j k l m n p r s t v w z br ch cl cr dr fl gr kh kr ph pl qu sh sl st th tr vl"
).split()
VOWELS = "a e i o u a e i o ai au ea ee ie oo ou y".split()
CODAS = ["", "", "", "", *"l m n r s t k nd ng rt st th x sk lm".split()]


@cache
def words() -> dict[str, Any]:
    return tomllib.loads((FOLDER / "words.toml").read_text(encoding="utf-8"))


@cache
def held_out() -> dict[str, Any]:
    return tomllib.loads((FOLDER / "heldout.toml").read_text(encoding="utf-8"))


@cache
def trained_phrases() -> dict[str, dict[str, list[str]]]:
    return tomllib.loads((FOLDER / "phrases.toml").read_text(encoding="utf-8"))


@cache
def word_list(name: str) -> tuple[str, ...]:
    return tuple(words()[name].split())


@cache
def held_out_words() -> frozenset[str]:
    groups = (*held_out()["words"].values(), *held_out()["favourites"].values())
    return frozenset(word.lower() for group in groups for word in group)


def is_held_out(*keys: str) -> bool:
    """True if a key is held out from training: one in ten, regardless of case and punctuation."""
    texts = {plain(key) for key in keys}.difference(words()["first_messages"])
    return any(crc32(text.encode()) % 10 == 0 for text in texts)


def plain(text: str) -> str:
    """Remove case and punctuation."""
    return re.sub(r"[^\w{}+\-*/]+", " ", text.lower()).strip()


@cache
def held_out_texts() -> frozenset[str]:
    """Every phrasing of the evaluation."""
    templates = chain.from_iterable(
        intents for skill in held_out()["phrases"].values() for intents in skill.values()
    )
    return frozenset(plain(text) for template in templates for text in expansions(template))


@cache
def all_words() -> tuple[str, ...]:
    """All words that training may use, in lower case."""
    texts = (FOLDER / name for name in ("phrases.toml", "words.toml"))
    found = {
        word for text in texts for word in re.findall(r"[a-z]+", text.read_text("utf-8").lower())
    }
    return tuple(sorted(found - held_out_words()))


@dataclass(frozen=True, slots=True)
class Phrase:
    text: str
    unworn: str  # before `wear_down`


@dataclass
class World:
    """The source of all random choices.

    evaluates: draw names, places, words and numbers from lists that training does not use, and
    otherwise held-out instances. new_phrases: draw held-out phrasings. noise: probability that
    a phrasing gets typos and omissions (`wear_down`).
    """

    rng: random.Random
    evaluates: bool = False
    new_phrases: bool = False
    noise: float = 0.0

    def phrase(self, intent: str, **fields: object) -> Phrase:
        """Draw a phrasing of `intent` ('skill.name') and fill in its fields."""
        skill, name = intent.split(".")
        source = held_out()["phrases"] if self.new_phrases else trained_phrases()
        template = expand(self.rng.choice(source[skill][name]), self.rng)
        unworn = filled(template, fields)
        if self.rng.random() < self.noise:
            worn = wear_down(template, self.rng)
            if plain(worn) not in held_out_texts():
                template = worn
        if self.rng.random() < self.noise:
            template = american(template)
            fields |= {
                name: american(str(fields[name])) for name in SPELLED_FIELDS if name in fields
            }
        return Phrase(filled(template, fields), unworn)

    def pick(self, items: Sequence[Any]) -> Any:
        return self.rng.choice(items)

    def name(self) -> str:
        return self._proper("names")

    def city(self) -> str:
        return self._proper("cities")

    def words(self, count: int) -> list[str]:
        """Draw distinct words in lower case."""
        if self.evaluates:
            return self.rng.sample(held_out()["words"]["text"], count)
        found: dict[str, None] = {}
        invented = self.rng.choice((0.0, 0.1, 0.5))
        while len(found) < count:
            known = self.rng.random() >= invented
            found[self.rng.choice(word_list("text")) if known else self._invented()] = None
        return list(found)

    def closing(self) -> str:
        """Draw a word that a system prompt demands."""
        if self.evaluates:
            return str(self.rng.choice(held_out()["words"]["closing"]))
        return (
            self.rng.choice(word_list("closing")) if self.rng.random() < 0.5 else self.words(1)[0]
        )

    def favourite_kinds(self) -> list[str]:
        return list((held_out() if self.evaluates else words())["favourites"])

    def favourite_of(self, kind: str) -> str:
        if self.evaluates:
            return str(self.rng.choice(held_out()["favourites"][kind]))
        # Also unlikely ones, so that the model copies instead of guessing.
        others = self.rng.random() < 0.3
        return self.words(1)[0] if others else self.rng.choice(words()["favourites"][kind].split())

    def number(self, min_digits: int = 2) -> int:
        """Draw a number to remember or copy, of up to five digits.

        At least three in the evaluation, because sums and lists contain all two-digit numbers.
        """
        digits = self.rng.randint(max(min_digits, 3 if self.evaluates else 2), 5)
        while True:
            number = self.rng.randrange(10 ** (digits - 1), 10**digits)
            if (number % 11 == 5) == self.evaluates:
                return number

    def _proper(self, group: str) -> str:
        if self.evaluates:
            return str(self.rng.choice(held_out()["words"][group]))
        known = self.rng.random() < 0.4
        return self.rng.choice(word_list(group)) if known else self._invented().capitalize()

    def _invented(self) -> str:
        """Make an invented word, or draw one that is not listed."""
        rng = self.rng
        while True:
            # Halves of two words: answers then use every token of the vocabulary.
            if rng.random() < 0.6:
                first, second = rng.choice(all_words()), rng.choice(all_words())
                half = first[: rng.randint(1, len(first))] + second[rng.randint(0, len(second)) :]
                word = rng.choice((first, half, half))
                if len(word) <= 12 and word not in held_out_words():
                    return word
                continue
            parts = [rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(CODAS)]
            parts += [rng.choice(ONSETS) + rng.choice(VOWELS) for _ in range(rng.randint(0, 2))]
            if rng.random() < 0.3:
                parts[0] = parts[0].lstrip("bcdfghjklmnpqrstvwz") or parts[0]
            word = "".join(parts) + rng.choice(CODAS)
            if 3 <= len(word) <= 10 and word not in held_out_words():
                return word


def filled(template: str, fields: dict[str, object]) -> str:
    return FIELD.sub(lambda field: str(fields[field[1]]), template)


def american(text: str) -> str:
    for british, other in AMERICAN.items():
        text = text.replace(british, other)
    return text


def expand(template: str, rng: random.Random) -> str:
    """Choose one alternative of every [a|b|c], and normalize spaces."""
    chosen = CHOICE.sub(lambda choice: rng.choice(choice[1].split("|")), template)
    return " ".join(chosen.split())


def expansions(template: str) -> list[str]:
    """All combinations of the alternatives of every [a|b|c]."""
    choice = CHOICE.search(template)
    if choice is None:
        return [" ".join(template.split())]
    before, after = template[: choice.start()], template[choice.end() :]
    return [
        whole for option in choice[1].split("|") for whole in expansions(before + option + after)
    ]


def wear_down(template: str, rng: random.Random) -> str:
    """Drop, add, swap or misspell something without changing the meaning; fields stay intact."""
    parts = template.split(" ")
    way = rng.randrange(9)
    if way in (3, 8) and "{" not in parts[0]:
        parts[0] = parts[0].lower()
    if way in (4, 8) and parts[-1][-1] in ".!?" and len(parts[-1]) > 1:
        parts[-1] = parts[-1][:-1]
    match way:
        case 0:
            loose = [i for i, part in enumerate(parts) if part.lower() in LOOSE_WORDS]
            if loose and len(parts) > 2:
                del parts[rng.choice(loose)]
        case 1:
            parts.insert(0, rng.choice(EXTRA_WORDS))
            parts[1] = parts[1] if parts[1] == "I" or "{" in parts[1] else parts[1].lower()
        case 2:
            place = rng.randrange(len(parts))
            if parts[place].isalpha() and len(parts[place]) > 4:
                at = rng.randrange(1, len(parts[place]) - 2)
                word = parts[place]
                parts[place] = word[:at] + word[at + 1] + word[at] + word[at + 2 :]
        case 5 | 6:
            parts.insert(0, rng.choice(OPENINGS))
        case 7:
            parts = [
                SHORT_FORMS[part] if part in SHORT_FORMS and rng.random() < 0.6 else part
                for part in parts
            ]
    return " ".join(parts)
