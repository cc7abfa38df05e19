"""Keeps texts that spell control tokens apart from the control tokens of a chat template.

A user, or the result of a tool, may write `<|im_start|>`. In the rendered conversation that looks
like what the template writes, and would become the same token. So a sign goes into such a spelling
before the template is rendered. Afterwards a spelling without the sign is the template's: the sign
is written before it, and removed from the others. A tokenizer whose control tokens are spelled with
the sign then finds exactly those of the template.

The sign is a secret, so that no text can have it. It has digits only, which templates neither trim
nor escape, and which have no upper case.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import tokenizers

SIGN_DIGITS = 20
MAX_CHARS = 256  # of a control token; a longer one is read everywhere
MAX_DEPTH = 8  # of groups in a pattern: what begins like a spelling so far is marked, too
ROLES = ("user", "tool")  # whose messages are text
CALLS = "tool_calls"  # of the assistant: their arguments have no markers, and may quote others
TEXT_ARGUMENTS = ("tools", "documents")  # that come from outside as well

# The texts that begin with a character, by that character. "" stands for the end of a text.
Trie: TypeAlias = dict[str, "Trie"]


@dataclass(frozen=True, slots=True)
class Spellings:
    """What is needed to tell control tokens apart. Goes to the process that renders, as JSON."""

    sign: str
    whole: str  # a pattern: the longest control token
    begun: str  # the first character of a control token, or of its part at the end of a text
    always: bool  # other texts become control tokens, too, as the tokenizer normalizes them

    @classmethod
    def of(cls, texts: Iterable[str], *, always: bool = False) -> Spellings:
        """`texts`: the control tokens, each `separable`."""
        sign = "".join(secrets.choice("0123456789") for _ in range(SIGN_DIGITS))
        trie: Trie = {}
        for text in texts:
            _add(trie, text)
        begun = (f"{re.escape(char)}(?={_begun(rest)})" for char, rest in sorted(trie.items()))
        return cls(sign, _longest(trie), "|".join(begun), always)

    def signed(self, text: str) -> str:
        """A rendered conversation with the sign at its beginning and before control tokens only."""
        if not self.whole:
            return self.sign + text.replace(self.sign, "")

        def replace(found: re.Match[str]) -> str:
            return self.sign + found[1] if found[1] else ""

        return self.sign + re.sub(f"{self.sign}|({self.whole})", replace, text)


class Marker:
    """Puts the sign into the spellings of texts."""

    def __init__(self, spellings: Spellings) -> None:
        self.found = spellings.always
        self._pattern = re.compile(spellings.begun) if spellings.begun else None
        self._marked = rf"\g<0>{spellings.sign}"

    def mark_call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a rendering, where what users and tools have written is marked."""
        marked = {name: self._mark(call[name]) for name in TEXT_ARGUMENTS if name in call}
        conversations = [
            [self._mark_message(message) for message in messages]
            for messages in call["conversations"]
        ]
        return {**call, **marked, "conversations": conversations}

    def _mark_message(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        is_text = message.get("role") in ROLES
        return {
            name: self._mark(value) if is_text or name == CALLS else value
            for name, value in message.items()
        }

    def _mark(self, value: Any) -> Any:
        match value:
            case str() if self._pattern is not None:
                text, number = self._pattern.subn(self._marked, value)
                self.found = self.found or number > 0
                return text
            case dict():
                return {self._mark(name): self._mark(member) for name, member in value.items()}
            case list() | tuple():
                return [self._mark(member) for member in value]
        return value


def separable(text: str) -> bool:
    """Whether a sign can go into a control token. A single character stays what it is."""
    return 1 < len(text) <= MAX_CHARS


class SignedTokenizer:
    """Tokenizes texts whose control tokens are signed, with the ids of `backend`."""

    def __init__(
        self, backend: tokenizers.Tokenizer, control: Mapping[int, str], sign: str
    ) -> None:
        """control: the control tokens of `backend` that are signed, by id."""
        self._backend = made = tokenizers.Tokenizer(backend.model)  # which both share
        if backend.normalizer is not None:
            made.normalizer = backend.normalizer
        if backend.pre_tokenizer is not None:
            made.pre_tokenizer = backend.pre_tokenizer
        own = backend.get_vocab(with_added_tokens=False)
        # The library counts the ids of added tokens from the number of the others. Where these have
        # gaps, an id could be taken; it is given to a token that no text has.
        gaps = max(own.values(), default=-1) + 1 - len(own)
        made.add_tokens([f"{sign}{number}{sign}" for number in range(gaps)])
        self._ids: dict[int, Sequence[int]] = {}  # those of `backend`, where they differ
        added: list[tuple[int, tokenizers.AddedToken]] = []
        for token_id, token in sorted(backend.get_added_tokens_decoder().items()):
            text = sign + token.content if token_id in control else token.content
            renamed = {**token.__getstate__(), "content": text}
            added.append((token_id, tokenizers.AddedToken(**renamed)))
        # All in one call: each of them takes time for all tokens that were added before.
        made.add_tokens([token for _, token in added])
        for token_id, token in added:
            made_id = made.token_to_id(token.content)
            assert made_id is not None
            self._ids[made_id] = (token_id,)
        for text in set(control.values()) & own.keys():
            # A word of the vocabulary, too, as which a text is written character by character.
            parts = (part.id for char in text for part in backend.model.tokenize(char))
            self._ids[own[text]] = tuple(parts)

    def encode(self, text: str) -> list[int]:
        """The ids of a text."""
        return self._real(self._backend.encode(text, add_special_tokens=False))

    def encode_long(self, text: str) -> list[int]:
        """The ids of a text. Releases the GIL, and waits for a pool of threads."""
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=False)
        return self._real(encoding)

    def _real(self, encoding: tokenizers.Encoding) -> list[int]:
        return [real for found in encoding.ids for real in self._ids.get(found, (found,))]


def _add(trie: Trie, text: str) -> None:
    for char in text:
        trie = trie.setdefault(char, {})
    trie[""] = {}


def _longest(node: Trie) -> str:
    """A pattern of the texts in a trie, which matches the longest one."""
    branches = [re.escape(char) + _longest(rest) for char, rest in sorted(node.items()) if char]
    if not branches:
        return ""
    pattern = branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"
    return f"(?:{pattern})?" if "" in node else pattern


def _begun(node: Trie, depth: int = 0) -> str:
    """A pattern of the texts in a trie, and of their beginnings at the end of the text."""
    if "" in node or depth == MAX_DEPTH:
        return ""
    branches = [re.escape(char) + _begun(rest, depth + 1) for char, rest in sorted(node.items())]
    return f"(?:{'|'.join(branches)}|\\Z)"
