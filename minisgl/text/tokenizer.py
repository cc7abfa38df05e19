"""Text and messages to token ids, and token ids back to the bytes that they stand for."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import tokenizers
import tokenizers.decoders

from minisgl.errors import (
    CheckpointError,
    ContextLengthError,
    InvalidRequestError,
    UnsupportedModelError,
)
from minisgl.text.rendering import Call, render
from minisgl.text.vocabulary import longest_token

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
# What a caller may set of `apply_chat_template`'s own arguments; every other option goes to the
# template by name. The rest stay ours: `chat_template` from a request would run a stranger's code.
OPEN_TEMPLATE_ARGUMENTS = frozenset({"tools", "documents", "continue_final_message"})
# What the library's function that renders is called with, whatever a template may want.
OWN_TEMPLATE_ARGUMENTS = frozenset({"conversations", "return_assistant_tokens_mask"})
MAX_SHORT_CHARS = 4096  # of a text that is tokenized in under a millisecond
# A text takes some 350 bytes of memory for each token while it is encoded. So of a long one the
# beginning is encoded alone first, to see whether it has too many tokens already. It has not, in
# any real language, where the text is shorter than this.
MIN_BEGINNING_BYTES = 64 << 10
BYTES_PER_TOKEN = 4
BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
MAX_TOKEN_ID = 2**32 - 1  # the tokenizers library raises OverflowError beyond


class Tokenizer:
    """A checkpoint's tokenizer. Every method may be called from several threads at once.

    Decoding is done here and not by the library: each token is a fixed sequence of bytes, and a
    text is the UTF-8 reading of their concatenation. So decoding can go token by token, and equals
    the library's for every sequence of valid UTF-8. What is invalid becomes U+FFFD; only in a run
    of byte-fallback tokens does the library differ, replacing valid characters as well.
    """

    def __init__(self, tokenizer: Any, name: str = "The model") -> None:
        """Takes over a `transformers` tokenizer with a Rust backend.

        Raises UnsupportedModelError where its decoder is not a matter of bytes.
        """
        self._tokenizer = tokenizer
        # The wrapper sets padding and truncation at each call, which threads must not do at once;
        # the backend without either is free of state.
        self._backend: tokenizers.Tokenizer = tokenizer.backend_tokenizer
        self._backend.no_padding()
        self._backend.no_truncation()
        arguments = inspect.signature(tokenizer.apply_chat_template).parameters
        closed = arguments.keys() | OWN_TEMPLATE_ARGUMENTS
        self._closed_template_arguments = closed - OPEN_TEMPLATE_ARGUMENTS
        self._name = name

        spelling = _spelling_of(self._backend.decoder, name)
        self.drops_first_space = spelling.drops_first_space  # where a text begins
        added = self._backend.get_added_tokens_decoder()
        special = (token_id for token_id, token in added.items() if token.special)
        self._added = {token.content: token_id for token_id, token in added.items()}
        self._all_bytes = _TokenBytes(self._backend, spelling)
        self._visible_bytes = _TokenBytes(self._backend, spelling, hidden=special)
        self._longest_token = longest_token(self._backend)

    @staticmethod
    def found_in(folder: Path) -> bool:
        """Whether a checkpoint comes with a tokenizer."""
        return any((folder / name).is_file() for name in TOKENIZER_FILES)

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read the tokenizer of a checkpoint. Raises CheckpointError, UnsupportedModelError."""
        if not cls.found_in(folder):
            raise CheckpointError(f"{folder} has no tokenizer (no tokenizer.json).")
        from transformers import AutoTokenizer  # a second, and it imports torch

        try:
            tokenizer = AutoTokenizer.from_pretrained(
                folder,
                local_files_only=True,
                trust_remote_code=False,  # or it would ask on the terminal
            )
        except Exception as error:  # whatever the library makes of broken files
            reason = str(error)
            if "trust_remote_code" in reason:
                reason = "it needs code of its own, and code from a checkpoint is not run."
            raise CheckpointError(f"The tokenizer in {folder} cannot be read: {reason}") from error
        if not tokenizer.is_fast:
            raise CheckpointError(f"The tokenizer in {folder} has no tokenizer.json form.")
        return cls(tokenizer, folder.name)

    # -- to ids ------------------------------------------------------------------------------------

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        param: str = "prompt",
        max_tokens: int | None = None,
    ) -> list[int]:
        """Token ids of a text. Raises InvalidRequestError for a lone surrogate.

        With `max_tokens`, ContextLengthError for a long text that is seen to have more before it
        is encoded as a whole; one that has a few more is encoded. `param` is what errors name.
        """
        try:
            if len(text) <= MAX_SHORT_CHARS:
                return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
            if max_tokens is not None:
                self._check_beginning(text, param, max_tokens)
            return self._encode_long(text, add_special_tokens)
        except (TypeError, UnicodeEncodeError) as error:
            raise InvalidRequestError(param, "is not Unicode text (a lone surrogate).") from error

    def _encode_long(self, text: str, add_special_tokens: bool) -> list[int]:
        # Only the library's calls for batches let other threads run. They wait for a pool of
        # threads, which a short text, perhaps on an event loop, must not do.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def _check_beginning(self, text: str, param: str, max_tokens: int) -> None:
        """Raises ContextLengthError where the beginning of a text has twice `max_tokens`.

        What follows a beginning changes the tokens at its end: of the last word, in general, and
        of white space that a special token takes in. The one is far from half of them, and the
        other is left out.
        """
        data = text.encode()
        size = max(BYTES_PER_TOKEN * max_tokens, MIN_BEGINNING_BYTES)
        while 2 * size <= len(data):  # so that all of it together costs one encoding more
            beginning = data[:size].decode(errors="ignore").rstrip()
            num_tokens = len(self._encode_long(beginning, False))
            if num_tokens > 2 * max_tokens + 1:
                fewest = num_tokens // 2
                raise ContextLengthError(
                    fewest, None, max_tokens, at_least=True, prompt_field=param
                )
            size *= 2

    def fewest_tokens(self, num_chars: int) -> int:
        """A lower bound on the tokens of any text of `num_chars` characters; 0 if there is none."""
        return -(-num_chars // self._longest_token) if self._longest_token else 0

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        **template_options: Any,
    ) -> list[int]:
        """Token ids of a conversation under the model's chat template, for which this waits as
        long as it takes. Raises InvalidRequestError."""
        call = self.template_call(messages, **template_options)
        try:
            text = render(call)
        except InvalidRequestError:
            raise
        except Exception as error:  # a template is the model author's code and raises what it likes
            raise InvalidRequestError(
                "messages", f"the model's chat template refuses them: {error}"
            ) from error
        return self.encode(text, add_special_tokens=False, param="messages")

    def template_call(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        **template_options: Any,
    ) -> Call:
        """The arguments for rendering a conversation. Raises InvalidRequestError.

        A content that is a list of text parts is joined as it stands, and `developer` becomes
        `system` for a template that does not know the role. With `continue_final_message` the last
        message stays open and no generation prompt follows; otherwise one does by default.
        """
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        elif add_generation_prompt and continue_final_message:
            raise InvalidRequestError(
                "continue_final_message", "is not allowed with add_generation_prompt: true."
            )
        if not self.has_chat_template:
            raise InvalidRequestError(
                "messages", f"{self._name} has no chat template; /v1/completions takes plain text."
            )
        for option in template_options:
            if option in self._closed_template_arguments:
                raise InvalidRequestError("chat_template_kwargs", f"{option} cannot be set.")
        try:
            template: str = self._tokenizer.get_chat_template(tools=template_options.get("tools"))
        except Exception as error:  # several, and none of them is the default
            raise InvalidRequestError("messages", f"have no chat template: {error}") from error
        conversation = [_plain_message(message, "developer" in template) for message in messages]
        if not conversation:
            raise InvalidRequestError("messages", "must not be empty.")
        return {
            **self._tokenizer.special_tokens_map,
            **template_options,
            "conversations": [conversation],
            "chat_template": template,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }

    # -- from ids ----------------------------------------------------------------------------------

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence. Ids outside the vocabulary have no text."""
        table = self.byte_table(skip_special_tokens=skip_special_tokens)
        data = b"".join(table[token_id] for token_id in token_ids)
        if self.drops_first_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Exactly what a token adds to a text, special tokens included; b"" for an unknown id."""
        return self._all_bytes[token_id]

    def token_text(self, token_id: int) -> str:
        """`token_bytes` for people: a part of a character is U+FFFD."""
        return self._all_bytes[token_id].decode("utf-8", "replace")

    def byte_table(self, *, skip_special_tokens: bool) -> Mapping[int, bytes]:
        """The bytes of every token by id; with `skip_special_tokens` those of special ones b""."""
        return self._visible_bytes if skip_special_tokens else self._all_bytes

    # -- facts -------------------------------------------------------------------------------------

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included. The model's own vocabulary may be padded."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def bos_token_id(self) -> int | None:
        token_id: int | None = self._tokenizer.bos_token_id
        return token_id

    @property
    def eos_token_id(self) -> int | None:
        token_id: int | None = self._tokenizer.eos_token_id
        return token_id

    def added_token_id(self, text: str) -> int | None:
        """The id of the token that was added to the vocabulary for exactly this text."""
        return self._added.get(text)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    @property
    def chat_template_text(self) -> str:
        """The chat template, all of them where there are several; "" for none."""
        template = self._tokenizer.chat_template or ""
        return "\n".join(template.values()) if isinstance(template, dict) else str(template)


def _plain_message(message: Mapping[str, Any], keep_developer: bool) -> dict[str, Any]:
    """A message with the role and the kind of content that every chat template understands."""
    if not isinstance(message, Mapping) or "role" not in message:
        raise InvalidRequestError("messages", 'must be objects with a "role" and a "content".')
    plain = {name: value for name, value in message.items() if value is not None}
    if plain.get("role") == "developer" and not keep_developer:
        plain["role"] = "system"
    if isinstance(plain.get("content"), list | tuple):
        plain["content"] = "".join(_part_text(part) for part in plain["content"])
    return plain


def _part_text(part: object) -> str:
    match part:
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": str(kind)}:
            raise InvalidRequestError("messages", f"content of type {kind} is not supported.")
        case _:
            raise InvalidRequestError("messages", 'a content part must be {"type": "text", ...}.')


class _TokenBytes(dict[int, bytes]):
    """Token id to bytes, filled as ids occur. Threads may race to an id: they find the same."""

    def __init__(
        self, backend: tokenizers.Tokenizer, spelling: _Spelling, hidden: Iterable[int] = ()
    ) -> None:
        super().__init__(dict.fromkeys(hidden, b""))
        self._backend = backend
        self._spelling = spelling

    def __missing__(self, token_id: int) -> bytes:
        known = 0 <= token_id <= MAX_TOKEN_ID
        token = self._backend.id_to_token(token_id) if known else None
        if token is None:
            return b""  # not stored: there is no end of ids that are no token
        return self.setdefault(token_id, self._spelling.to_bytes(token))


class _Spelling(Protocol):
    """The way in which tokens spell bytes; does the work of the library's `Decoder`."""

    drops_first_space: bool  # encoding puts a space before the first word, decoding removes it

    def to_bytes(self, token: str) -> bytes: ...


class _ByteLevelSpelling:
    """Every byte is one printable character (GPT-2, Llama 3, Qwen)."""

    drops_first_space = False

    def __init__(self) -> None:
        # A byte is itself where it is printable Latin-1, else one from U+0100 on, in order.
        printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
        others = [byte for byte in range(256) if byte not in printable]
        self._byte_of = {chr(byte): byte for byte in printable}
        self._byte_of.update({chr(0x100 + index): byte for index, byte in enumerate(others)})

    def to_bytes(self, token: str) -> bytes:
        try:
            return bytes([self._byte_of[char] for char in token])
        except KeyError:  # an added token, which is written as it reads
            return token.encode()


@dataclass(slots=True)
class _PlainSpelling:
    """Text as it reads but for a few replacements, U+2581 for a space above all; a byte that the
    vocabulary has no character for is <0x0A> (SentencePiece, so Llama 2 and Mistral)."""

    drops_first_space: bool = False
    has_byte_tokens: bool = False
    replacements: list[tuple[str, str]] = field(default_factory=list)

    def to_bytes(self, token: str) -> bytes:
        if self.has_byte_tokens and (byte := BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(byte[1])
        for spelled, text in self.replacements:
            token = token.replace(spelled, text)
        return token.encode()


def _spelling_of(decoder: tokenizers.decoders.Decoder | None, model_name: str) -> _Spelling:
    steps = [json.loads(decoder.__getstate__())] if decoder else []  # a decoder pickles as JSON
    if steps and steps[0]["type"] == "Sequence":
        steps = steps[0]["decoders"]
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return _ByteLevelSpelling()
    if not steps:
        raise UnsupportedModelError(f"{model_name}: the tokenizer has no decoder.")
    spelling = _PlainSpelling()
    for step in steps:
        match step:
            case {"type": "Fuse"}:
                pass
            case {"type": "ByteFallback"}:
                spelling.has_byte_tokens = True
            case {"type": "Replace", "pattern": {"String": str(spelled)}, "content": str(text)}:
                spelling.replacements.append((spelled, text))
            case {"type": "Metaspace", "replacement": str(spelled), "prepend_scheme": scheme}:
                spelling.replacements.append((spelled, " "))
                spelling.drops_first_space = scheme != "never"
            case {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
                spelling.drops_first_space = True
            case _:
                raise UnsupportedModelError(
                    f"{model_name}: the tokenizer's decoder {json.dumps(step)} is not implemented."
                )
    return spelling
