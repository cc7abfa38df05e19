"""The chat's model on an engine in this process."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol

from minisgl.config import EngineConfig
from minisgl.engine import AsyncEngine
from minisgl.errors import ContextLengthError, UnsupportedModelError
from minisgl.events import CallArguments, CallStart, Event, ReasoningText
from minisgl.grammar.reasoning import ReasoningGate
from minisgl.request import OutputDelta, SamplingParams, StructuredOutput
from minisgl.runner.facts import device_name
from minisgl.text.parsing.selection import AnswerFormat, choose_format
from minisgl.text.template_facts import TemplateFacts
from minisgl.text.thinking import OPEN

from .model import TEXT, AnswerRules, CallPiece, ContextFullError, Message, ReplyDelta
from .prompt_reuse import keep_seen
from .text_format import count

NUM_OPENING_TOKENS = 16  # at the end of a prompt: more than `<think>` and line breaks take


class ChatTokenizer(Protocol):
    """The part of `minisgl.text.tokenizer.Tokenizer` that a chat needs."""

    def chat(self, messages: Sequence[Message], /, **template_options: Any) -> list[int]: ...

    def token_bytes(self, token_id: int, /) -> bytes: ...


async def start_chat_engine(
    config: EngineConfig, progress: Callable[[str, float], None]
) -> AsyncEngine:
    """Starts an engine that has a tokenizer. Raises MinisglError."""
    engine = await AsyncEngine.start(config, progress)
    if engine.tokenizer is None:
        await engine.close()
        raise UnsupportedModelError(f"{engine.model_name} has no tokenizer to chat with.")
    return engine


class EngineModel:
    """An engine as a `ChatModel`.

    Reuses the tokens of the last answer in the next prompt, so that the prefix cache finds them.
    """

    def __init__(self, engine: AsyncEngine, tokenizer: ChatTokenizer) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._seen: list[int] = []  # the last prompt and its answer, token for token

    @property
    def name(self) -> str:
        return self._engine.model_name

    @property
    def facts(self) -> Sequence[str]:
        config, capacity = self._engine.config, self._engine.capacity
        backends = dict.fromkeys((config.attn_prefill, config.attn_decode))
        devices = f"{config.tp} x " if config.tp > 1 else ""
        return (
            self.name,
            f"{config.dtype} on {devices}{device_name(config.device)}",
            f"attention {','.join(backends)}",
            f"context {capacity.max_seq_len:,} tokens",
        )

    @property
    def max_seq_len(self) -> int:
        return self._engine.capacity.max_seq_len

    @property
    def sampling_defaults(self) -> SamplingParams:
        return self._engine.defaults.sampling()

    def check(self, sampling: Mapping[str, Any]) -> None:
        self._engine.check(self._engine.defaults.sampling(**sampling))

    async def check_rules(self, rules: AnswerRules) -> None:
        if rules.schema is not None:
            await self._engine.compile(_structured(rules.schema))
        if rules.tools:
            facts = await self._engine.template_facts()
            if self._answer_format().calls is None or not facts.offers_tools:
                raise UnsupportedModelError(
                    f"{self.name} cannot be offered tools: its chat template has no place for "
                    "them, or none of the known formats of calls."
                )

    def status(self) -> Sequence[tuple[str, str]]:
        stats = self._engine.stats()
        num_used = stats.num_pages - stats.num_free_pages
        found, asked = stats.counters.num_cached_tokens, stats.counters.num_prompt_tokens
        return (
            ("KV cache", f"{num_used:,} of {stats.num_pages:,} pages used"),
            ("prefix hits", f"{found / max(1, asked):.0%} of prompt tokens since the start"),
        )

    async def reply(
        self, messages: Sequence[Message], sampling: Mapping[str, Any], rules: AnswerRules = TEXT
    ) -> AsyncGenerator[ReplyDelta, None]:
        # A long conversation takes a while; in a thread, Ctrl-C still works.
        prompt = await asyncio.to_thread(
            self.prompt,
            await self._fitted(messages),
            **({"tools": rules.tools} if rules.tools else {}),
        )
        params = self._engine.defaults.sampling(**sampling)
        ruled = {} if rules == TEXT else await self._ruled(prompt, rules)
        if rules.schema is not None:
            params = replace(params, structured=_structured(rules.schema))
        if params.max_tokens is not None and params.max_tokens > self.max_seq_len - len(prompt):
            params = replace(params, max_tokens=None)  # the room that there is
        try:
            stream = self._engine.submit(prompt, params, **ruled)
        except ContextLengthError as error:
            raise ContextFullError(
                f"The conversation with this question has {count(len(prompt), 'token')}; the "
                f"context of {self.max_seq_len:,} has no room for an answer."
            ) from error
        # Some templates open the thinking themselves, and the model only closes it.
        opening = f"{OPEN}\n" if not ruled and self._opens_thinking(prompt) else ""
        token_ids: list[int] = []
        try:
            async for delta in stream:
                token_ids += delta.token_ids
                yield ReplyDelta(
                    text=opening + delta.text,
                    thinking=_thinking(delta),
                    calls=_pieces(delta.events),
                    num_tokens=len(token_ids),
                    num_prompt_tokens=len(prompt),
                    num_cached_tokens=delta.num_cached_tokens,
                    finish_reason=delta.finish_reason,
                )
                opening = ""
        finally:
            stream.abort()
            if token_ids:  # without a token, the last answer may be kept, and its tokens too
                self._seen = prompt + token_ids

    def prompt(self, messages: Sequence[Message], **template_options: Any) -> list[int]:
        """The prompt as token ids. Raises MinisglError if the template rejects the messages."""
        templated = self._tokenizer.chat(messages, **template_options)
        return keep_seen(self._seen, templated, self._tokenizer.token_bytes)

    def _opens_thinking(self, prompt: Sequence[int]) -> bool:
        end = b"".join(map(self._tokenizer.token_bytes, prompt[-NUM_OPENING_TOKENS:]))
        return end.rstrip().endswith(OPEN.encode())

    def _answer_format(self) -> AnswerFormat:
        assert self._engine.tokenizer is not None
        return choose_format(self._engine.tokenizer)

    async def _ruled(self, prompt: Sequence[int], rules: AnswerRules) -> dict[str, Any]:
        """The parser and the matcher of an answer under rules. Raises MinisglError."""
        form, tokenizer = self._answer_format(), self._engine.tokenizer
        assert tokenizer is not None
        opened = form.opens_reasoning(tokenizer, prompt)
        tools = {
            tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in rules.tools
        }
        ruled: dict[str, Any] = {
            "parser": form.parser(in_reasoning=opened, tools=tools, parse_calls=bool(tools))
        }
        if rules.schema is not None:
            gate = None
            if form.reasoning is not None:
                close, ids = form.reasoning.close, form.marker_ids
                closing = (
                    [ids[close]]
                    if close in ids
                    else tokenizer.encode(close, add_special_tokens=False)
                )
                gate = ReasoningGate(
                    close, tuple(closing), opening_id=ids.get(form.reasoning.open), is_open=opened
                )
            compiled = await self._engine.compile(_structured(rules.schema))
            ruled["matcher"] = compiled.matcher(gate)
        return ruled

    async def _fitted(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The messages with their calls as the chat template takes them."""
        if not any("tool_calls" in message for message in messages):
            return messages
        facts = await self._engine.template_facts()
        return [_fitted(message, facts) for message in messages]


def _structured(schema: Mapping[str, Any]) -> StructuredOutput:
    return StructuredOutput(json_schema=schema, field="schema")


def _thinking(delta: OutputDelta) -> str:
    return "".join(event.text for event in delta.events if isinstance(event, ReasoningText))


def _pieces(events: Iterable[Event]) -> list[CallPiece]:
    pieces = []
    for event in events:
        match event:
            case CallStart(index, name):
                pieces.append(CallPiece(index, name=name))
            case CallArguments(index, text):
                pieces.append(CallPiece(index, arguments=text))
    return pieces


def _fitted(message: Message, facts: TemplateFacts) -> Message:
    fitted = dict(message)
    if "tool_call_id" in message:
        fitted["tool_call_id"] = _fitted_id(message["tool_call_id"], facts)
    if "tool_calls" in message:
        fitted["tool_calls"] = [_fitted_call(call, facts) for call in message["tool_calls"]]
    return fitted


def _fitted_call(call: Mapping[str, Any], facts: TemplateFacts) -> dict[str, Any]:
    function = dict(call["function"])
    if not facts.wants_text_arguments:
        with suppress(ValueError, RecursionError):  # what is no JSON stays the text that it is
            function["arguments"] = json.loads(function["arguments"])
    return {**call, "id": _fitted_id(call["id"], facts), "function": function}


def _fitted_id(call_id: str, facts: TemplateFacts) -> str:
    """The id, or 9 hexadecimal digits of it where the template takes no others."""
    if not facts.wants_short_ids:
        return call_id
    return hashlib.blake2b(call_id.encode(errors="replace"), digest_size=5).hexdigest()[:9]
