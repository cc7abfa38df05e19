"""Chooses the parsers of a model, by name or by what its chat template and vocabulary show."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from minisgl.text.parsing import harmony
from minisgl.text.parsing.answer import AnswerParser
from minisgl.text.parsing.call_format import CallFormat
from minisgl.text.parsing.formats import (
    ANALYSIS,
    BY_NAME,
    HARMONY,
    HARMONY_MESSAGES,
    REASONING_FORMATS,
    THINK,
    MessageFormat,
    ReasoningFormat,
)
from minisgl.text.parsing.json_formats import ARGS, MISTRAL, MISTRAL_LIST, TOOL_CALL, TOOL_CALLS
from minisgl.text.parsing.named_formats import CALLS, KIMI_CALLS
from minisgl.text.parsing.names import AUTO, NONE, REASONING_PARSERS, TOOL_PARSERS
from minisgl.text.parsing.python_format import LFM_START
from minisgl.text.parsing.tagged_formats import DSML_TOKEN, GLM, MINIMAX, SEED
from minisgl.text.tokenizer import Tokenizer

MAX_TAIL_TOKENS = 4096  # of a prompt, that are searched for the opening of a block


@dataclass(frozen=True, slots=True)
class _Signs:
    """What the templates of a format have: one of `any`, and none of `foreign`."""

    name: str
    any: tuple[str, ...]
    foreign: tuple[str, ...] = ()  # other formats, whose templates have the same signs

    def fit(self, template: str) -> bool:
        return any(sign in template for sign in self.any) and not any(
            sign in template for sign in self.foreign
        )


_HARMONY = _Signs("harmony", (harmony.opening(harmony.FINAL),))
# The first that fits. Templates of the XML format have the tags of hermes too, and those of Llama's
# Python calls mention parameters.
_SIGNS = (
    _HARMONY,
    _Signs("seed_oss", ("<seed:tool_call>",)),
    _Signs("minimax_m2", ("<minimax:tool_call>",)),
    # Version 4 has another tag around the calls.
    _Signs("deepseek_v32", (DSML_TOKEN,), foreign=("tool_calls>",)),
    _Signs("kimi_k2", (KIMI_CALLS, "<|im_system|>tool_declare")),
    # Some leave the calls out, which the model was trained to write nevertheless.
    _Signs("lfm2", (LFM_START, "List of tools: ")),
    _Signs("qwen3_coder", ("<parameter=",)),
    _Signs("mistral", (TOOL_CALLS,)),
    _Signs("xlam", ('[{"name": "tool_call_name"',)),
    _Signs("deepseek_v3", ("function<｜tool▁sep｜>", "['type'] + '<｜tool▁sep｜>'")),
    # Later versions have neither the type of a tool nor a fence.
    _Signs("deepseek_v31", ("<｜tool▁sep｜>",)),
    _Signs("gemma4", ("<|tool_call>",)),
    _Signs("glm47", ("</arg_key><arg_value>",)),
    _Signs("glm45", ("<arg_key>",)),
    _Signs("functionary_v3_2", (">>>all",)),
    _Signs("functionary_v3_1", ("<function=",), foreign=("<parameter=", "<tool_call>")),
    # Apriel has a list of all calls, others a tag for a function.
    _Signs(
        "hermes", ("<tool_call>", "assistant named SmolLM"), foreign=("<tool_calls>", "<function=")
    ),
    _Signs("pythonic", ("func_name1(", "<|python_start|>")),
    _Signs(
        "llama3_json",
        ("<|python_tag|>", '"parameters": '),
        foreign=('"tool_name"', "<function=", "<tool_calls>"),
    ),
)
# Words of templates that have to do with tools, at least with their results.
_OF_TOOLS = ("tools", "tool_calls", '"tool"', "'tool'")
# Tokens of vocabularies that tell a format where the template has nothing to do with tools.
_TOKENS = {
    KIMI_CALLS: "kimi_k2",
    LFM_START: "lfm2",
    MINIMAX.call: "minimax_m2",
    SEED.call: "seed_oss",
    DSML_TOKEN: "deepseek_v32",
    CALLS: "deepseek_v3",  # which is read as the one of V3.1, too
    TOOL_CALLS: "mistral",
    GLM.parameter: "glm47",
    TOOL_CALL: "hermes",
}


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How a model writes reasoning and calls, with the tokens that its vocabulary has for them."""

    calls: CallFormat | None
    reasoning: ReasoningFormat | None
    marker_ids: Mapping[str, int] = field(default_factory=dict)  # the markers that are one token
    special: frozenset[str] = frozenset()  # those that are left out of texts, as EOS is
    messages: MessageFormat | None = None  # of an answer that is a chain of them

    def __str__(self) -> str:
        """The names of both parsers."""
        calls = self.calls.name if self.calls else NONE
        return f"tool calls {calls}, reasoning {'think' if self.reasoning else NONE}"

    @property
    def text_opening(self) -> str:
        """The markup in front of an answer that is a text, with or without tools."""
        if self.messages is not None:
            return self.messages.text
        return self.calls.spelling.text if self.calls else ""

    def parser(
        self,
        *,
        in_reasoning: bool = False,
        in_text: bool = False,
        tools: Mapping[str, Mapping[str, Any]] | None = None,
        parse_calls: bool = True,
        only_calls: bool = False,
        held_to: Iterable[str] = (),
        skip_special_tokens: bool = True,
    ) -> AnswerParser | None:
        """A parser for one answer; None where there is nothing to parse.

        `in_reasoning`, `in_text`: see `opens_reasoning`, `opens_text`; the others: see
        AnswerParser.
        """
        calls = self.calls if parse_calls else None
        if calls is None and self.reasoning is None and not self.text_opening:
            return None
        texts = markers_of(calls, self.reasoning, self.messages)
        return AnswerParser(
            calls,
            self.reasoning,
            marker_ids={text: self.marker_ids[text] for text in texts if text in self.marker_ids},
            hidden=self.special if skip_special_tokens else (),
            in_reasoning=in_reasoning,
            tools=tools,
            only_calls=only_calls,
            held_to=held_to,
            text_opening=self.text_opening,
            messages=self.messages,
            in_text=in_text,
        )

    def opens_reasoning(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> bool:
        """Whether a prompt ends inside of a reasoning block."""
        if self.reasoning is None:
            return False
        open = self.reasoning.open
        if self.messages is not None:
            return self._last_message(tokenizer, prompt_token_ids).startswith(open)
        return self._last_marker(tokenizer, prompt_token_ids) == open

    def closes_reasoning(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> bool:
        """Whether a prompt ends behind a reasoning block, as with thinking switched off."""
        if self.reasoning is None or self.messages is not None:
            return False
        return self._last_marker(tokenizer, prompt_token_ids) == self.reasoning.close

    def _last_marker(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> str:
        """The marker of reasoning that a prompt has last; "" for none.

        Only what follows the last control token is looked at, which is the generation prompt and
        what the answer is to continue: earlier messages may have any text.
        """
        assert self.reasoning is not None
        open, close = self.reasoning.open, self.reasoning.close
        visible = tokenizer.byte_table(skip_special_tokens=True)
        markers = self.marker_ids.values()
        tail: list[bytes] = []
        for token_id in reversed(prompt_token_ids[-MAX_TAIL_TOKENS:]):
            if not visible[token_id] and token_id not in markers:
                text = b"".join(reversed(tail)).decode("utf-8", "replace")
                last = max((open, close), key=text.rfind)
                return last if last in text else ""
            tail.append(tokenizer.token_bytes(token_id))
        text = b"".join(reversed(tail)).decode("utf-8", "replace")
        return next((marker for marker in (open, close) if text.rstrip().endswith(marker)), "")

    def opens_text(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> bool:
        """Whether a prompt ends inside of the message that the user sees, which then goes on."""
        if self.messages is None:
            return False
        return self._last_message(tokenizer, prompt_token_ids).startswith(self.messages.text)

    def _last_message(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> str:
        """What a prompt has behind the role of its last message."""
        assert self.messages is not None
        tail = [*reversed(prompt_token_ids[-MAX_TAIL_TOKENS:])]
        start = self.marker_ids.get(self.messages.start)
        length = tail.index(start) if start in tail else 0
        data = b"".join(tokenizer.token_bytes(token_id) for token_id in reversed(tail[:length]))
        return data.decode("utf-8", "replace").removeprefix(self.messages.role)


def choose_format(
    tokenizer: Tokenizer, *, tool_parser: str = AUTO, reasoning_parser: str = AUTO
) -> AnswerFormat:
    """The format that the named parsers read; `auto` goes by the chat template and the vocabulary.

    Raises ValueError for a name that is none of TOOL_PARSERS, REASONING_PARSERS.
    """
    if tool_parser not in TOOL_PARSERS or reasoning_parser not in REASONING_PARSERS:
        raise ValueError(f"no such parsers: {tool_parser}, {reasoning_parser}")
    template = tokenizer.chat_template_text
    calls = _call_format(tool_parser, template, tokenizer)
    messages = None
    if calls is HARMONY or (tool_parser in (AUTO, NONE) and has_messages(template)):
        messages = HARMONY_MESSAGES
    reasoning = _reasoning_format(reasoning_parser, template, tokenizer, messages)
    texts = markers_of(calls, reasoning, messages)
    ids = {text: tokenizer.added_token_id(text) for text in texts}
    marker_ids = {text: token_id for text, token_id in ids.items() if token_id is not None}
    visible = tokenizer.byte_table(skip_special_tokens=True)
    special = frozenset(text for text, token_id in marker_ids.items() if not visible[token_id])
    return AnswerFormat(calls, reasoning, marker_ids, special, messages)


def has_messages(template: str) -> bool:
    """Whether answers under a chat template are chains of messages."""
    return _HARMONY.fit(template)


def markers_of(
    calls: CallFormat | None, reasoning: ReasoningFormat | None, messages: MessageFormat | None
) -> list[str]:
    """The markers of a format."""
    block = [reasoning.open, reasoning.close] if reasoning else []
    of_all = [*(calls.markers if calls else ()), *(messages.markers if messages else ())]
    return [*dict.fromkeys([*block, *of_all])]


def _call_format(name: str, template: str, tokenizer: Tokenizer) -> CallFormat | None:
    if name == AUTO:
        if any(word in template for word in _OF_TOOLS):
            found = (signs.name for signs in _SIGNS if signs.fit(template))
        else:
            told = ((name, tokenizer.added_token_id(token)) for token, name in _TOKENS.items())
            found = (name for name, token_id in told if token_id is not None)
        name = next(found, NONE)
    if name == "mistral":
        return MISTRAL_LIST if tokenizer.added_token_id(ARGS) is None else MISTRAL
    return BY_NAME.get(name)


def _reasoning_format(
    name: str, template: str, tokenizer: Tokenizer, messages: MessageFormat | None
) -> ReasoningFormat | None:
    if name == NONE:
        return None
    if messages is not None:
        return ANALYSIS
    for form in REASONING_FORMATS:
        if form.open in template or form.close in template:
            return form
    if name == AUTO:
        return None
    known = (form for form in REASONING_FORMATS if tokenizer.added_token_id(form.open) is not None)
    return next(known, THINK)
