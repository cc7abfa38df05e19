"""Reads a chat template that is given in place of the checkpoint's."""

from __future__ import annotations

from minisgl.errors import ConfigError, InvalidRequestError
from minisgl.paths import path_of
from minisgl.text.rendering import Renderer, encode_call
from minisgl.text.tokenizer import Tokenizer

OPTION = "--chat-template"
MAX_BYTES = 1 << 20
QUESTION = ({"role": "user", "content": "Hello!"},)


def read_template(file: str) -> str:
    """The Jinja template in a file. Raises ConfigError."""
    path = path_of(OPTION, file)
    if not path.is_file():
        raise ConfigError(OPTION, file, "there is no such file; allowed: a file in Jinja")
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(OPTION, file, f"allowed: a file of at most {MAX_BYTES >> 20} MiB")
        text = path.read_text("utf-8")
    except OSError as error:
        raise ConfigError(OPTION, file, f"it cannot be read: {error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(OPTION, file, "it is not in UTF-8; save it in UTF-8") from error
    if not text.strip():
        raise ConfigError(OPTION, file, "it is empty; allowed: a file in Jinja")
    return text


def check_template(tokenizer: Tokenizer, file: str) -> None:
    """Raise ConfigError if a conversation of one question cannot be rendered with the template of
    `tokenizer`, which comes from this file."""
    try:
        with Renderer() as renderer:
            rendered = renderer.render(encode_call(tokenizer.template_call(QUESTION)))
    except InvalidRequestError as error:
        raise ConfigError(OPTION, file, str(error)) from error
    if QUESTION[0]["content"] not in rendered:
        raise ConfigError(OPTION, file, "what a user says is not in what it renders")
