"""The chat's model on an engine in this process."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from minisgl.config import EngineConfig
from minisgl.engine import AsyncEngine
from minisgl.engine.chats import Chats
from minisgl.errors import ContextLengthError, UnsupportedModelError
from minisgl.events import CallArguments, CallStart, Event, ReasoningText, has_broken_call
from minisgl.printable import counted
from minisgl.request import SamplingParams, StructuredOutput
from minisgl.runner.facts import device_name
from minisgl.text.parsing.selection import has_messages
from minisgl.text.thinking import OPEN
from minisgl.text.tokenizer import Tokenizer

from .model import (
    TEXT,
    AnswerRules,
    CallPiece,
    ContextFullError,
    Message,
    ReplyDelta,
    check_can_chat,
)

NUM_OPENING_TOKENS = 16  # at the end of a prompt: more than `<think>` and line breaks take


async def start_chat_engine(
    config: EngineConfig, progress: Callable[[str, float], None]
) -> AsyncEngine:
    """Starts an engine that has a tokenizer. Raises MinisglError."""
    engine = await AsyncEngine.start(config, progress)
    try:
        if engine.tokenizer is None:
            raise UnsupportedModelError(f"{engine.model_name} has no tokenizer to chat with.")
        check_can_chat(engine.model_name, engine.vectors.task)
    except UnsupportedModelError:
        await engine.close()
        raise
    return engine


class EngineModel:
    """An engine as a `ChatModel`."""

    def __init__(self, engine: AsyncEngine, tokenizer: Tokenizer) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._chats = Chats(engine)
        self.adapter = next(iter(engine.adapters), "")

    @property
    def adapters(self) -> Sequence[str]:
        return [*self._engine.adapters]

    @property
    def name(self) -> str:
        return self.adapter or self._engine.model_name

    @property
    def sees(self) -> bool:
        return not self._engine.image_refusal

    @property
    def facts(self) -> Sequence[str]:
        config, capacity = self._engine.config, self._engine.capacity
        backends = dict.fromkeys((config.attn_prefill, config.attn_decode))
        devices = f"{config.num_ranks} x " if config.num_ranks > 1 else ""
        return (
            self._engine.model_name,
            *([f"adapter {self.adapter}"] if self.adapter else []),
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
            await self._engine.compile(structured(rules.schema))
        if rules.tools:
            facts = await self._engine.template_facts()
            if self._chats.form.calls is None or not facts.offers_tools:
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
        conversation = await self._chats.read(messages, rules.tools, {}, any_length=True)
        prompt = conversation.prompt.token_ids
        params = self._engine.defaults.sampling(**sampling)
        if rules.schema is not None:
            params = replace(params, structured=structured(rules.schema))
        asked: dict[str, Any] = {}
        # The text of messages has headers, which only a parser removes.
        if rules != TEXT or has_messages(self._tokenizer.chat_template_text):
            plan = await self._chats.plan(conversation, params)
            asked = {"parser": plan.parser(), "extras": plan.extras()}
        is_parsed = bool(asked)
        extras = list(conversation.prompt.extras)
        if self.adapter:
            extras.append(self._engine.adapter(self.adapter))
        if extras:
            asked["extras"] = (*asked.get("extras", ()), *extras)
        if params.max_tokens is not None and params.max_tokens > self.max_seq_len - len(prompt):
            params = replace(params, max_tokens=None)  # the room that there is
        try:
            stream = self._engine.submit(prompt, params, **asked)
        except ContextLengthError as error:
            raise ContextFullError(
                f"The conversation with this question has {counted(len(prompt), 'token')}; the "
                f"context of {self.max_seq_len:,} has no room for an answer."
            ) from error
        # Some templates open the thinking themselves, and the model only closes it.
        shown = conversation.prompt_token_ids
        opening = f"{OPEN}\n" if not is_parsed and self._opens_thinking(shown) else ""
        num_tokens = 0
        is_broken = False  # whether a call cannot be read
        try:
            async for delta in stream:
                num_tokens += len(delta.token_ids)
                is_broken = is_broken or has_broken_call(delta.events)
                reason = delta.finish_reason
                if reason is not None and is_broken:
                    reason = reason.with_broken_call()
                yield ReplyDelta(
                    text=opening + delta.text,
                    thinking=thinking(delta.events),
                    calls=call_pieces(delta.events),
                    num_tokens=num_tokens,
                    num_prompt_tokens=len(prompt),
                    num_cached_tokens=delta.num_cached_tokens,
                    num_drafted_tokens=delta.num_drafted_tokens,
                    num_accepted_tokens=delta.num_accepted_tokens,
                    finish_reason=reason,
                )
                opening = ""
        finally:
            stream.abort()

    def _opens_thinking(self, prompt: Sequence[int]) -> bool:
        end = b"".join(map(self._tokenizer.token_bytes, prompt[-NUM_OPENING_TOKENS:]))
        return end.rstrip().endswith(OPEN.encode())


def structured(schema: Mapping[str, Any]) -> StructuredOutput:
    return StructuredOutput(json_schema=schema, field="schema")


def thinking(events: Iterable[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, ReasoningText))


def call_pieces(events: Iterable[Event]) -> list[CallPiece]:
    pieces = []
    for event in events:
        match event:
            case CallStart(index, name):
                pieces.append(CallPiece(index, name=name))
            case CallArguments(index, text):
                pieces.append(CallPiece(index, arguments=text))
    return pieces
