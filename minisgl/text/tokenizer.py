"""Converts text and messages to token ids, and token ids back to bytes."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import tokenizers
import tokenizers.decoders

from minisgl.errors import (
    CheckpointError,
    ContextLengthError,
    InvalidRequestError,
    UnsupportedModelError,
)
from minisgl.text.control_spellings import SignedTokenizer, Spellings, separable
from minisgl.text.rendering import SPELLINGS, Call, render
from minisgl.text.tiktoken_file import TIKTOKEN_FILE, is_only_form, read_tiktoken

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", TIKTOKEN_FILE)
PROCESSOR_TEMPLATE = "chat_template.json"
# The arguments of `apply_chat_template` that callers may set; other options become variables of the
# template. The remaining arguments are reserved: a request's `chat_template` would be foreign code.
OPEN_TEMPLATE_ARGUMENTS = frozenset({"tools", "documents", "continue_final_message"})
# Arguments of the library's rendering function, which template variables may not replace.
OWN_TEMPLATE_ARGUMENTS = frozenset({"conversations", "return_assistant_tokens_mask", SPELLINGS})
# Far beyond any model: what a tokenizer and a template take of time and memory grows with these.
MAX_ADDED_TOKENS = 1 << 16
MAX_TEMPLATE_CHARS = 1 << 20
# Files that list added tokens, and their fields that do; None: the file is such a field.
ADDED_TOKENS: Mapping[str, Sequence[str] | None] = {
    "tokenizer.json": ("added_tokens",),
    "tokenizer_config.json": (
        *("added_tokens_decoder", "extra_special_tokens", "additional_special_tokens"),
    ),
    "special_tokens_map.json": ("extra_special_tokens", "additional_special_tokens"),
    "added_tokens.json": None,
}
# Members of tokenizer_config.json that clients may see: none names a file or a folder.
DESCRIBED = frozenset(
    (
        *("add_bos_token", "add_eos_token", "add_prefix_space", "added_tokens_decoder"),
        *("additional_special_tokens", "bos_token", "clean_up_tokenization_spaces", "cls_token"),
        *("eos_token", "extra_special_tokens", "legacy", "mask_token", "model_max_length"),
        *("pad_token", "padding_side", "sep_token", "truncation_side", "unk_token"),
    )
)
MAX_SHORT_CHARS = 4096  # a text of this size is tokenized in under a millisecond
# Encoding takes about 350 bytes of memory per token. So the beginning of a long text is encoded
# first, to detect one with too many tokens. A text shorter than this cannot have too many in any
# real language.
MIN_BEGINNING_BYTES = 64 << 10
BYTES_PER_TOKEN = 4
BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
MARKER = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")  # <think>, [TOOL_CALLS]
IMAGE = {"type": "image"}  # a part of a message, as templates know it
MAX_TOKEN_ID = 2**32 - 1  # the tokenizers library raises OverflowError for larger ids


class Tokenizer:
    """A checkpoint's tokenizer. All methods are thread-safe.

    Decoding is implemented here: each token is a fixed sequence of bytes, and the text is the UTF-8
    decoding of their concatenation. So tokens can be decoded one by one, with the library's result
    for every sequence of valid UTF-8. Invalid bytes become U+FFFD; the library differs only in
    runs of byte-fallback tokens, where it replaces valid characters as well.
    """

    def __init__(self, tokenizer: Any, name: str = "The model") -> None:
        """Take ownership of a `transformers` tokenizer with a Rust backend.

        Raises UnsupportedModelError if its decoder does not map each token to fixed bytes.
        """
        self._tokenizer = tokenizer
        # The wrapper sets padding and truncation at each call, which is not thread-safe; without
        # them the backend is stateless.
        self._backend: tokenizers.Tokenizer = tokenizer.backend_tokenizer
        self._backend.no_padding()
        self._backend.no_truncation()
        arguments = inspect.signature(tokenizer.apply_chat_template).parameters
        closed = arguments.keys() | OWN_TEMPLATE_ARGUMENTS
        self._closed_template_arguments = closed - OPEN_TEMPLATE_ARGUMENTS
        self._name = name

        spelling = _spelling_of(self._backend.decoder, name)
        self.drops_first_space = spelling.drops_first_space  # at the beginning of a text
        added = self._backend.get_added_tokens_decoder()
        special = (token_id for token_id, token in added.items() if token.special)
        self._added = {token.content: token_id for token_id, token in added.items()}
        self._all_bytes = _TokenBytes(self._backend, spelling)
        self._visible_bytes = _TokenBytes(self._backend, spelling, hidden=special)
        control = {
            token_id: text for token_id, text in self.control_tokens().items() if separable(text)
        }
        self._spellings = Spellings.of(
            control.values(),
            always=self._backend.normalizer is not None
            and any(added[token_id].normalized for token_id in control),
        )
        self._signed_texts = frozenset(control.values())
        self._signed = SignedTokenizer(self._backend, control, self._spellings.sign)

    @staticmethod
    def found_in(folder: Path) -> bool:
        """True if the checkpoint has a tokenizer."""
        return any((folder / name).is_file() for name in TOKENIZER_FILES)

    @classmethod
    def load(cls, folder: Path, *, chat_template: str | None = None) -> Tokenizer:
        """Read the tokenizer of a checkpoint. Raises CheckpointError, UnsupportedModelError.

        chat_template: Jinja in place of the checkpoint's template.
        """
        if not cls.found_in(folder):
            raise CheckpointError(f"{folder} has no tokenizer (no tokenizer.json).")
        _check_added_tokens(folder)
        try:
            tokenizer = read_tiktoken(folder) if is_only_form(folder) else _read(folder)
        except Exception as error:  # broken files raise many types
            reason = str(error)
            if "trust_remote_code" in reason:
                reason = "it needs code of its own, and code from a checkpoint is not run."
            raise CheckpointError(f"The tokenizer in {folder} cannot be read: {reason}") from error
        if not tokenizer.is_fast:
            raise CheckpointError(f"The tokenizer in {folder} has no tokenizer.json form.")
        if chat_template is not None:
            tokenizer.chat_template = chat_template
        elif not tokenizer.chat_template:
            tokenizer.chat_template = _template_of_processor(folder)
        made = cls(tokenizer, folder.name)
        if (num_chars := len(made.chat_template_text)) > MAX_TEMPLATE_CHARS:
            raise CheckpointError(
                f"The chat template in {folder} has {num_chars:,} characters; "
                f"allowed: {MAX_TEMPLATE_CHARS:,}."
            )
        return made

    # -- to ids ------------------------------------------------------------------------------------

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        param: str = "prompt",
        max_tokens: int | None = None,
    ) -> list[int]:
        """Tokenize a text, or a rendered conversation.

        Raises InvalidRequestError for a lone surrogate. With `max_tokens`, raises
        ContextLengthError for a long text that is found to have more before all of it is encoded; a
        text with only a few more is encoded. param: the name of the field in errors.
        """
        try:
            if len(text) <= MAX_SHORT_CHARS:
                if text.startswith(self._spellings.sign):
                    return self._signed.encode(text.removeprefix(self._spellings.sign))
                return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
            if max_tokens is not None:
                self._check_beginning(text, param, max_tokens)
            return self._encode_long(text, add_special_tokens)
        except (TypeError, UnicodeEncodeError) as error:
            raise InvalidRequestError(param, "is not Unicode text (a lone surrogate).") from error

    def _encode_long(self, text: str, add_special_tokens: bool) -> list[int]:
        if text.startswith(self._spellings.sign):
            return self._signed.encode_long(text.removeprefix(self._spellings.sign))
        # Only the library's batch calls release the GIL. They wait for a thread pool, which a short
        # text, possibly on an event loop, must not do.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def _check_beginning(self, text: str, param: str, max_tokens: int) -> None:
        """Raise ContextLengthError if a beginning of the text has twice `max_tokens`.

        The text after a beginning can change only the tokens at its end: those of the last word,
        which are far from half of all, and trailing white space, which is left out.
        """
        data = text.encode()
        size = max(BYTES_PER_TOKEN * max_tokens, MIN_BEGINNING_BYTES)
        while 2 * size <= len(data):  # doubling: all of it costs at most one more encoding
            beginning = data[:size].decode(errors="ignore").rstrip()
            num_tokens = len(self._encode_long(beginning, False))
            if num_tokens > 2 * max_tokens + 1:
                fewest = num_tokens // 2
                raise ContextLengthError(
                    fewest, None, max_tokens, at_least=True, prompt_field=param
                )
            size *= 2

    def num_chars(self, text: str) -> int:
        """The number of characters of a text, or of a rendered conversation."""
        return len(text) - text.count(self._spellings.sign) * len(self._spellings.sign)

    def count_control(self, rendered: str, token: str) -> int:
        """How often the template has written a control token into a rendered conversation."""
        return rendered.count(self._spelled(rendered, token))

    def surround_control(self, rendered: str, token: str, before: str, after: str) -> str:
        """A rendered conversation with plain text around a control token of the template."""
        spelled = self._spelled(rendered, token)
        return rendered.replace(spelled, before + spelled + after)

    def _spelled(self, rendered: str, token: str) -> str:
        is_signed = rendered.startswith(self._spellings.sign) and token in self._signed_texts
        return self._spellings.sign + token if is_signed else token

    def opening(self, rendered: str) -> list[int]:
        """The ids that a processor of transformers puts in front of a rendered conversation: those
        that every text begins with, unless the template has written the first token of a text."""
        first = self._tokenizer.bos_token
        if first is not None and rendered.removeprefix(self._spellings.sign).startswith(
            self._spelled(rendered, first)
        ):
            return []
        return self.encode("")

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        **template_options: Any,
    ) -> list[int]:
        """Tokenize a conversation with the model's chat template, in this thread, without limits.

        Raises InvalidRequestError.
        """
        call = self.template_call(messages, **template_options)
        try:
            text = render(call)
        except InvalidRequestError:
            raise
        except Exception as error:  # a template may raise anything
            reason = str(error) or type(error).__name__
            raise InvalidRequestError(
                "messages", f"the model's chat template refuses them: {reason}"
            ) from error
        return self.encode(text, add_special_tokens=False, param="messages")

    def template_call(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        control_tokens_in_text: bool = False,
        content_in_parts: bool = False,
        **template_options: Any,
    ) -> Call:
        """The arguments for rendering a conversation. Raises InvalidRequestError.

        Content given as a list of text parts is concatenated, and `developer` becomes `system` for
        a template that does not know that role. Content with images stays a list; so does all
        content with `content_in_parts`. With `continue_final_message` the last message
        stays open and no generation prompt follows it; otherwise one does by default. What users,
        results and calls of tools, `tools` and `documents` spell is a control token only with
        `control_tokens_in_text`.
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
            template = template.removeprefix("\ufeff")  # a byte-order mark
        except Exception as error:  # several templates, none of them the default
            raise InvalidRequestError("messages", f"have no chat template: {error}") from error
        conversation = [
            _plain_message(message, "developer" in template, content_in_parts)
            for message in messages
        ]
        if not conversation:
            raise InvalidRequestError("messages", "must not be empty.")
        spellings = {} if control_tokens_in_text else {SPELLINGS: asdict(self._spellings)}
        return {
            **self._tokenizer.special_tokens_map,
            **template_options,
            **spellings,
            "conversations": [conversation],
            "chat_template": template,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }

    # -- from ids ----------------------------------------------------------------------------------

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Decode a whole sequence. Ids outside the vocabulary add no text."""
        table = self.byte_table(skip_special_tokens=skip_special_tokens)
        data = b"".join(table[token_id] for token_id in token_ids)
        if self.drops_first_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token, special tokens included; b"" for an unknown id."""
        return self._all_bytes[token_id]

    def token_text(self, token_id: int) -> str:
        """The text of a token for display; an incomplete character is U+FFFD."""
        return self._all_bytes[token_id].decode("utf-8", "replace")

    def byte_table(self, *, skip_special_tokens: bool) -> Mapping[int, bytes]:
        """The bytes of every token by id; with `skip_special_tokens`, b"" for special tokens."""
        return self._visible_bytes if skip_special_tokens else self._all_bytes

    def control_tokens(self) -> dict[int, str]:
        """The added tokens that are no text: special ones, and markers such as <tool_call>."""
        return {
            token_id: token.content
            for token_id, token in self._backend.get_added_tokens_decoder().items()
            if token.special or MARKER.fullmatch(token.content)
        }

    def special_around(self) -> tuple[list[int], list[int]]:
        """The tokens that are put in front of each text, and behind it."""
        bare, whole = self.encode("a", add_special_tokens=False), self.encode("a")
        for start in reversed(range(len(whole))):
            if whole[start : start + len(bare)] == bare:
                return whole[:start], whole[start + len(bare) :]
        return [], []

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

    def described(self) -> dict[str, Any]:
        """What tokenizer_config.json says of the tokenizer, without files and folders; as JSON."""
        said = {
            name: value
            for name, value in self._tokenizer.init_kwargs.items()
            if name in DESCRIBED and value is not None
        }
        said["chat_template"] = self._tokenizer.chat_template
        said["tokenizer_class"] = type(self._tokenizer).__name__
        return dict(json.loads(json.dumps(said, default=_added_token)))

    @property
    def has_chat_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    @property
    def chat_template_text(self) -> str:
        """The chat template, all of them where there are several; "" for none."""
        template = self._tokenizer.chat_template or ""
        return "\n".join(template.values()) if isinstance(template, dict) else str(template)


def _read(folder: Path) -> Any:
    from transformers import CONFIG_MAPPING, AutoTokenizer, PreTrainedTokenizerFast  # imports torch

    path = folder / "config.json"
    kind = json.loads(path.read_bytes()).get("model_type") if path.is_file() else None
    if kind not in CONFIG_MAPPING and (folder / "tokenizer.json").is_file():
        # transformers has no class for it, and may be unable to read its config.json.
        return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    return AutoTokenizer.from_pretrained(
        folder,
        local_files_only=True,
        trust_remote_code=False,  # the default prompts on the terminal
    )


def _template_of_processor(folder: Path) -> str | None:
    """The chat template of a checkpoint with images that has it in a file of its processor."""
    file = folder / PROCESSOR_TEMPLATE
    if not file.is_file():
        return None
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, str])["chat_template"]
    except (ValueError, KeyError) as error:
        reason = f"{file} cannot be read: it has no chat_template, a text."
        raise CheckpointError(reason) from error


def _added_token(token: tokenizers.AddedToken) -> dict[str, Any]:
    """An added token as tokenizer_config.json has it."""
    names = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
    return {name: getattr(token, name) for name in names}


def _length(value: msgspec.Raw | None) -> int:
    """The number of entries of a list or an object in JSON; 0 for something else."""
    decoded = None if value is None else msgspec.json.decode(value)
    return len(decoded) if isinstance(decoded, list | dict) else 0


def _check_added_tokens(folder: Path) -> None:
    """Raise CheckpointError where more tokens are added to the vocabulary than any model has."""
    for name, lists in ADDED_TOKENS.items():
        file = folder / name
        if not file.is_file():
            continue
        try:
            values = msgspec.json.decode(file.read_bytes(), type=dict[str, msgspec.Raw])
            num = sum(_length(values.get(each)) for each in lists) if lists else len(values)
        except msgspec.ValidationError:
            raise CheckpointError(f"{file} cannot be read: it is no JSON object.") from None
        except (ValueError, RecursionError):  # it is read again, and refused with the reason
            continue
        if num > MAX_ADDED_TOKENS:
            raise CheckpointError(
                f"{file} adds {num:,} tokens to the vocabulary; allowed: {MAX_ADDED_TOKENS:,}."
            )


def _plain_message(
    message: Mapping[str, Any], keep_developer: bool, in_parts: bool
) -> dict[str, Any]:
    """Convert a message to the roles and the content type that every chat template supports."""
    if not isinstance(message, Mapping) or "role" not in message:
        raise InvalidRequestError("messages", 'must be objects with a "role" and a "content".')
    plain = {name: value for name, value in message.items() if value is not None}
    if plain.get("role") == "developer" and not keep_developer:
        plain["role"] = "system"
    content = plain.get("content")
    if in_parts and isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if isinstance(content, list | tuple):
        if in_parts or any(_is_image(part) for part in content):
            plain["content"] = [IMAGE if _is_image(part) else _text_part(part) for part in content]
        else:
            plain["content"] = "".join(_part_text(part) for part in content)
    return plain


def _is_image(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") == IMAGE["type"]


def _text_part(part: object) -> dict[str, str]:
    return {"type": "text", "text": _part_text(part)}


def _part_text(part: object) -> str:
    match part:
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": str(kind)}:
            raise InvalidRequestError("messages", f"content of type {kind} is not supported.")
        case _:
            raise InvalidRequestError("messages", 'a content part must be {"type": "text", ...}.')


class _TokenBytes(dict[int, bytes]):
    """A cache of the bytes of token ids, filled lazily. Threads may race: they compute the same."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        spelling: _ByteLevelSpelling | _PlainSpelling,
        hidden: Iterable[int] = (),
    ) -> None:
        super().__init__(dict.fromkeys(hidden, b""))
        self._backend = backend
        self._spelling = spelling

    def __missing__(self, token_id: int) -> bytes:
        known = 0 <= token_id <= MAX_TOKEN_ID
        token = self._backend.id_to_token(token_id) if known else None
        if token is None:
            return b""  # not cached: there are too many ids without a token
        return self.setdefault(token_id, self._spelling.to_bytes(token))


class _ByteLevelSpelling:
    """Every byte is one printable character (GPT-2, Llama 3, Qwen)."""

    drops_first_space = False  # encoding adds a space before the first word, decoding removes it

    def __init__(self) -> None:
        # Printable Latin-1 bytes map to themselves, the others to U+0100 onwards, in order.
        printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
        others = [byte for byte in range(256) if byte not in printable]
        self._byte_of = {chr(byte): byte for byte in printable}
        self._byte_of.update({chr(0x100 + index): byte for index, byte in enumerate(others)})

    def to_bytes(self, token: str) -> bytes:
        try:
            return bytes([self._byte_of[char] for char in token])
        except KeyError:  # an added token, whose text is not encoded
            return token.encode()


@dataclass(slots=True)
class _PlainSpelling:
    """Plain text with a few replacements, mainly U+2581 for a space; a byte of a character outside
    the vocabulary is written as <0x0A> (SentencePiece: Llama 2, Mistral)."""

    drops_first_space: bool = False
    has_byte_tokens: bool = False
    replacements: list[tuple[str, str]] = field(default_factory=list)

    def to_bytes(self, token: str) -> bytes:
        if self.has_byte_tokens and (byte := BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(byte[1])
        for spelled, text in self.replacements:
            token = token.replace(spelled, text)
        return token.encode()


_Spelling: TypeAlias = _ByteLevelSpelling | _PlainSpelling


def _steps_of(step: dict[str, Any]) -> list[dict[str, Any]]:
    """The components of a decoder, given the JSON that is its pickled state."""
    if step["type"] != "Sequence":
        return [step]
    return [each for inner in step["decoders"] for each in _steps_of(inner)]


def _spelling_of(decoder: Any, model_name: str) -> _Spelling:
    steps = [] if decoder is None else _steps_of(json.loads(decoder.__getstate__()))
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
