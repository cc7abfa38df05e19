"""The chat's model on an engine in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from minisgl.config import EngineConfig
from minisgl.engine import AsyncEngine
from minisgl.errors import ContextLengthError, UnsupportedModelError
from minisgl.events import has_broken_call
from minisgl.printable import counted
from minisgl.request import SamplingParams
from minisgl.runner.facts import device_name
from minisgl.text.history import fitted_history, needs_facts
from minisgl.text.parsing.selection import has_messages
from minisgl.text.thinking import OPEN
from minisgl.text.tokenizer import Tokenizer

from .engine_rules import (
    call_pieces,
    check_rules,
    plan_reply,
    structured,
    thinking,
)
from .model import TEXT, AnswerRules, ContextFullError, Message, ReplyDelta, check_can_chat
from .prompt_reuse import keep_seen

NUM_OPENING_TOKENS = 16  # at the end of a prompt: more than `<think>` and line breaks take


async def start_chat_engine(
    config: EngineConfig, progress: Callable[[str, float], None]
) -> AsyncEngine:
    """Starts an engine that has a tokenizer. Raises MinisglError."""
    engine = await AsyncEngine.start(config, progress)
    if engine.tokenizer is None:
        await engine.close()
        raise UnsupportedModelError(f"{engine.model_name} has no tokenizer to chat with.")
    try:
        check_can_chat(engine.model_name, engine.vectors.task)
    except UnsupportedModelError:
        await engine.close()
        raise
    return engine


class EngineModel:
    """An engine as a `ChatModel`.

    Reuses the tokens of the last answer in the next prompt, so that the prefix cache finds them.
    """

    def __init__(self, engine: AsyncEngine, tokenizer: Tokenizer) -> None:
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
        devices = f"{config.num_ranks} x " if config.num_ranks > 1 else ""
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
        await check_rules(self._engine, rules)

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
        if any(needs_facts(each["role"], each.get("tool_calls")) for each in messages):
            messages = fitted_history(messages, await self._engine.template_facts())
        offer = {"tools": rules.tools} if rules.tools else {}
        prompt = await self.prompt(messages, **offer)
        params = self._engine.defaults.sampling(**sampling)
        ruled: dict[str, Any] = {}
        # The text of messages has headers, which only a parser removes.
        if rules != TEXT or has_messages(self._tokenizer.chat_template_text):
            plan = await plan_reply(self._engine, prompt, rules)
            ruled = {"parser": plan.parser(), "extras": plan.extras()}
        if rules.schema is not None:
            params = replace(params, structured=structured(rules.schema))
        if params.max_tokens is not None and params.max_tokens > self.max_seq_len - len(prompt):
            params = replace(params, max_tokens=None)  # the room that there is
        try:
            stream = self._engine.submit(prompt, params, **ruled)
        except ContextLengthError as error:
            raise ContextFullError(
                f"The conversation with this question has {counted(len(prompt), 'token')}; the "
                f"context of {self.max_seq_len:,} has no room for an answer."
            ) from error
        # Some templates open the thinking themselves, and the model only closes it.
        opening = f"{OPEN}\n" if not ruled and self._opens_thinking(prompt) else ""
        token_ids: list[int] = []
        is_broken = False  # whether a call cannot be read
        try:
            async for delta in stream:
                token_ids += delta.token_ids
                is_broken = is_broken or has_broken_call(delta.events)
                reason = delta.finish_reason
                if reason is not None and is_broken:
                    reason = reason.with_broken_call()
                yield ReplyDelta(
                    text=opening + delta.text,
                    thinking=thinking(delta.events),
                    calls=call_pieces(delta.events),
                    num_tokens=len(token_ids),
                    num_prompt_tokens=len(prompt),
                    num_cached_tokens=delta.num_cached_tokens,
                    num_drafted_tokens=delta.num_drafted_tokens,
                    num_accepted_tokens=delta.num_accepted_tokens,
                    finish_reason=reason,
                )
                opening = ""
        finally:
            stream.abort()
            if token_ids:  # without a token, the last answer may be kept, and its tokens too
                self._seen = prompt + token_ids

    async def prompt(self, messages: Sequence[Message], **template_options: Any) -> list[int]:
        """The prompt as token ids. Raises MinisglError if the template rejects the messages."""
        templated = await self._engine.encode_chat(messages, True, **template_options)
        # A long conversation takes a while; in a thread, Ctrl-C still works.
        return await asyncio.to_thread(
            keep_seen, self._seen, templated, self._tokenizer.token_bytes
        )

    def _opens_thinking(self, prompt: Sequence[int]) -> bool:
        end = b"".join(map(self._tokenizer.token_bytes, prompt[-NUM_OPENING_TOKENS:]))
        return end.rstrip().endswith(OPEN.encode())
