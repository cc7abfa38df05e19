"""Chat templates from files: what is read, and what is refused."""

from __future__ import annotations

import re
import shutil
from functools import partial
from pathlib import Path

import pytest
from support.endless_template_server import ENDLESS

from minisgl import LLM
from minisgl.errors import ConfigError
from minisgl.models.hub import DEMO_FOLDER
from minisgl.text import template_file
from minisgl.text.rendering import Renderer, render
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
        (b"\xff\xfe", "it is not in UTF-8; save it in UTF-8$"),
        ("{# 問い #}".encode("shift-jis"), "it is not in UTF-8; save it in UTF-8$"),
        (b"{% for message in messages %}\n{{ message.content }}", r"in line 2: .*'endfor'"),
        (b"{{ messages[0].content.nothing.at_all }}", "'str object' has no attribute 'nothing'"),
        (b"{{ raise_exception('not for you') }}", "not for you"),
        (b"Hello, {{ user }}", "what a user says is not in"),
    ],
)
def test_a_broken_template_is_refused_in_words(tmp_path: Path, text: bytes, reason: str) -> None:
    file = tmp_path / "chat.jinja"
    file.write_bytes(text)
    assert re.search(reason, refusal(file))


@pytest.mark.parametrize(
    ("text", "reason"),
    [(ENDLESS, "did not end within 0.5 s"), ("{{ 'x' * 10 ** 10 }}", "takes more than 1024 MiB")],
)
def test_a_template_is_tried_within_limits(
    tmp_path: Path, text: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = 0.5 if text == ENDLESS else 3600
    monkeypatch.setattr(template_file, "Renderer", partial(Renderer, seconds))
    file = tmp_path / "chat.jinja"
    file.write_text(text)
    assert reason in refusal(file)


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
