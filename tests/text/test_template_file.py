"""Chat templates from files: what is read, and what is refused."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from minisgl import LLM
from minisgl.errors import ConfigError
from minisgl.models.hub import DEMO_FOLDER
from minisgl.text.rendering import render
from minisgl.text.template_file import QUESTION, check_template, read_template
from minisgl.text.tokenizer import Tokenizer

BARE = "{% for message in messages %}{{ message.content }};{% endfor %}"


def refusal(file: Path) -> str:
    """Why a chat template is refused."""
    with pytest.raises(ConfigError) as refused:
        text = read_template(str(file))
        check_template(Tokenizer.load(DEMO_FOLDER, chat_template=text), str(file))
    said = str(refused.value)
    assert said.startswith(f"--chat-template {file}: ") and "\n" not in said
    return said


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b" \n", "it is empty"),
        (b"\xff\xfe", "it cannot be read: 'utf-8' codec"),
        (b"{% for message in messages %}\n{{ message.content }}", r"in line 2: .*'endfor'"),
        (b"{{ messages[0].content.nothing.at_all }}", "UndefinedError"),
        (b"{{ raise_exception('not for you') }}", "not for you"),
        (b"Hello, {{ user }}", "what a user says is not in"),
    ],
)
def test_a_broken_template_is_refused_in_words(tmp_path: Path, text: bytes, reason: str) -> None:
    file = tmp_path / "chat.jinja"
    file.write_bytes(text)
    assert re.search(reason, refusal(file))


@pytest.mark.parametrize("place", ["option", "chat_template.jinja"])
def test_a_template_is_read_past_a_byte_order_mark(tmp_path: Path, place: str) -> None:
    """The mark would be the first character of every prompt."""
    folder = tmp_path / "model"
    shutil.copytree(DEMO_FOLDER, folder)
    file = tmp_path / "other.jinja" if place == "option" else folder / place
    file.write_text("\ufeff" + BARE, "utf-8")
    text = read_template(str(file)) if place == "option" else None
    tokenizer = Tokenizer.load(folder, chat_template=text)
    assert render(tokenizer.template_call(QUESTION)) == "Hello!;"


def test_a_missing_template_is_refused(tmp_path: Path) -> None:
    assert "there is no such file" in refusal(tmp_path / "missing.jinja")
    assert "there is no such file" in refusal(tmp_path)


def test_a_template_from_a_file_replaces_the_checkpoints_own(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text(BARE)
    question = {"role": "user", "content": "Hello!"}
    with LLM(chat_template=str(file), device="cpu") as llm:
        assert llm.engine.tokenizer is not None
        assert llm.engine.tokenizer.chat_template_text == BARE
        [plain] = llm.generate(["Hello!;"], temperature=0, max_tokens=8)
        told = llm.chat([question], temperature=0, max_tokens=8)
    assert told.token_ids == plain.token_ids
    assert told.prompt_token_ids == plain.prompt_token_ids
