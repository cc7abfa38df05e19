"""Reads tiktoken.model, the only form in which Kimi's tokenizer is published: in each line a token
in base64, and its id."""

from __future__ import annotations

import base64
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import AddedToken, Tokenizer

from minisgl.errors import CheckpointError

TIKTOKEN_FILE = "tiktoken.model"
_KIMI = "TikTokenTokenizer"  # what tokenizer_config.json calls it
_NUM_ADDED = 256  # tokens behind those of the file; most are reserved
_MAX_BYTES = 1024  # of a token: the time to find its merges grows with the square
# How Kimi's code cuts a text before it merges bytes: into runs of Han characters, words, numbers of
# up to three digits, punctuation and white space.
_FIRST, _SUFFIX = r"[^\r\n\p{L}\p{N}]?", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        f"{_FIRST}{_UPPER}*{_LOWER}+{_SUFFIX}",
        f"{_FIRST}{_UPPER}+{_LOWER}*{_SUFFIX}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


def is_only_form(folder: Path) -> bool:
    """Whether a checkpoint has its tokenizer in this form alone."""
    return (folder / TIKTOKEN_FILE).is_file() and not (folder / "tokenizer.json").is_file()


def read_tiktoken(folder: Path) -> Any:
    """The `transformers` tokenizer of such a checkpoint. Raises CheckpointError, and other errors
    where files are broken."""
    from transformers import PreTrainedTokenizerFast
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    config = get_tokenizer_config(str(folder), local_files_only=True)
    if config.get("tokenizer_class") != _KIMI:
        raise CheckpointError(
            f"{TIKTOKEN_FILE} says nothing of how the tokenizer cuts a text, which is known for "
            f"the class {_KIMI} alone; add the tokenizer.json of another copy of the model"
        )
    tokenizer = _convert(folder / TIKTOKEN_FILE, config.get("added_tokens_decoder") or {})
    # As a checkpoint with a tokenizer.json, so that its other files are read as those of any.
    with TemporaryDirectory() as made:
        for path in (*folder.glob("*token*.json"), *folder.glob("*.jinja")):
            (Path(made) / path.name).symlink_to(path.absolute())
        tokenizer.save(str(Path(made) / "tokenizer.json"))
        return PreTrainedTokenizerFast.from_pretrained(made, local_files_only=True)


def _convert(path: Path, named: dict[str, Any]) -> Tokenizer:
    """named: the added tokens that have a name, by their ids."""
    from transformers.convert_slow_tokenizer import TikTokenConverter

    class Converter(TikTokenConverter):
        """One that needs no package tiktoken."""

        @staticmethod
        def load_tiktoken_bpe(tiktoken_url: str) -> dict[bytes, int]:
            return _ids_by_token(Path(tiktoken_url))

    converter: Any = Converter
    tokenizer: Tokenizer = converter(str(path), pattern=_PATTERN).converted()
    first = tokenizer.get_vocab_size()
    for token_id in range(first, first + _NUM_ADDED):
        values = named.get(str(token_id), {})
        text = values.get("content", f"<|reserved_token_{token_id}|>")
        special = values.get("special", True)
        tokenizer.add_tokens([AddedToken(text, normalized=False, special=special)])
        if tokenizer.token_to_id(text) != token_id:
            raise CheckpointError(f"tokenizer_config.json: the token {text!r} has another id, too")
    return tokenizer


def _ids_by_token(path: Path) -> dict[bytes, int]:
    lines = (line.split() for line in path.read_bytes().splitlines() if line)
    found = {base64.b64decode(token, validate=True): int(token_id) for token, token_id in lines}
    is_whole = bool(found) and {*found.values()} == {*range(len(found))}
    if not is_whole or max(map(len, found)) > _MAX_BYTES:
        raise CheckpointError(
            f"{path}: tokens must have up to {_MAX_BYTES} bytes, and the ids from 0 on"
        )
    return found
