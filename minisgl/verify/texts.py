"""Tokens and chat template beside those of transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from minisgl.errors import MinisglError
from minisgl.text.rendering import EndlessTemplateError, Renderer, encode_call
from minisgl.text.tokenizer import Tokenizer
from minisgl.verify.prompts import CONVERSATIONS, TEXTS, TOOL


def differing_texts(tokenizer: Tokenizer, folder: Path) -> list[str]:
    """The texts whose tokens, or what these spell, are not those of transformers."""
    theirs = _theirs(folder)
    wrong = []
    for text in TEXTS:
        ids = tokenizer.encode(text)
        wanted = theirs(text).input_ids
        shown = theirs.decode(wanted, clean_up_tokenization_spaces=False, skip_special_tokens=True)
        if ids != wanted or tokenizer.decode(ids) != shown:
            wrong.append(repr(text[:40]))
    return wrong


def differing_conversations(
    tokenizer: Tokenizer, folder: Path, chat_template: str | None
) -> dict[str, str]:
    """How each conversation is rendered, by its name: "" as apply_chat_template renders it, else
    what differs. A conversation that both refuse is left out. chat_template: in place of the
    checkpoint's own."""
    theirs = _theirs(folder)
    if chat_template is not None:
        theirs.chat_template = chat_template
    cases: dict[str, tuple[Sequence[Mapping[str, Any]], dict[str, Any]]] = {
        name: (messages, {}) for name, messages in CONVERSATIONS.items()
    }
    if "tools" in tokenizer.chat_template_text:
        cases["a tool"] = (CONVERSATIONS["a question"], {"tools": [TOOL]})
    found = {}
    with Renderer() as renderer:
        for name, case in cases.items():
            try:
                found[name] = _difference(tokenizer, renderer, theirs, *case)
            except EndlessTemplateError as error:  # in transformers nothing would end it
                return {name: f"minisgl refuses it: {error}"}
    return {name: said for name, said in found.items() if said is not None}


def _difference(
    tokenizer: Tokenizer,
    renderer: Renderer,
    theirs: Any,
    messages: Sequence[Mapping[str, Any]],
    options: Any,
) -> str | None:
    """Raises EndlessTemplateError."""
    refusal = None
    try:
        plain = tokenizer.template_call(messages, control_tokens_in_text=True, **options)
        text = renderer.render(encode_call(plain))
        signed = renderer.render(encode_call(tokenizer.template_call(messages, **options)))
        ids = tokenizer.encode(signed, add_special_tokens=False)
    except EndlessTemplateError:
        raise
    except MinisglError as error:
        refusal = str(error)
    try:
        wanted = theirs.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **options
        )
        wanted_ids = theirs(wanted, add_special_tokens=False).input_ids
    except Exception as error:  # a template may raise anything
        return None if refusal is not None else f"transformers refuses it: {error}"
    if refusal is not None:
        return f"minisgl refuses it: {refusal}"
    if text != wanted:
        at = next(
            (
                place
                for place, pair in enumerate(zip(text, wanted, strict=False))
                if len({*pair}) > 1
            ),
            min(len(text), len(wanted)),
        )
        return (
            f"the texts differ from character {at} on: {text[at:][:40]!r}, not {wanted[at:][:40]!r}"
        )
    return "" if ids == wanted_ids else "the texts are equal and the tokens are not"


def _theirs(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
