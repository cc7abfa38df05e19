"""An engine that answers with given texts, in a real vocabulary and under a real chat template.

Answers go through the detokenizer, the parser and the matcher as in the real engine. One that its
matcher refuses ends with an error.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
from support.fake_engine import FakeEngine, names_of
from support.toy_tokenizers import with_tokens

from minisgl.errors import GrammarError, InvalidRequestError
from minisgl.events import Event, joined
from minisgl.grammar.compiler import Compiled, Grammars
from minisgl.matcher import WORD_BITS, mask_words
from minisgl.parts.masks.host import Constraint
from minisgl.request import (
    EVERYONE,
    Extra,
    FinishReason,
    OutputDelta,
    SamplingParams,
    StructuredOutput,
    Tenant,
    TokenLogprobs,
)
from minisgl.text.detokenizer import Detokenizer
from minisgl.text.parsing.answer import AnswerParser
from minisgl.text.parsing.parsing_detokenizer import ParsingDetokenizer
from minisgl.text.rendering import encode_call, render
from minisgl.text.template_facts import TemplateFacts, probe
from minisgl.text.tokenizer import Tokenizer

IM = ("<|im_start|>", "<|im_end|>")
TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
# As Qwen3 has it.
QWEN_TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Write <tool_call>{"name": …, "arguments": …}</tool_call>.<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.role == "tool" %}<tool_response>{{ message.content }}</tool_response>
{%- else %}
{%- if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n' if not loop.first else '' }}{{ '<tool_call>\\n{"name": "' + call.function.name }}
{{- '", "arguments": ' }}{{ call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}
{%- endfor %}
{%- endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""
# Without reasoning, as in Qwen2.5.
PLAIN_TEMPLATE = QWEN_TEMPLATE.replace("<think>\n", "").replace("\n</think>\n\n", "")
# The template opens the block, as those of QwQ and R1 do.
OPEN_TEMPLATE = QWEN_TEMPLATE.replace("assistant\n{% if en", "assistant\n<think>\n{% if en")
# Takes neither tools nor calls.
DEAF_TEMPLATE = """\
{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}<|im_start|>assistant
"""


def qwen(template: str = QWEN_TEMPLATE, *special: str) -> Tokenizer:
    return with_tokens(*TAGS, special=(*IM, *special), chat_template=template)


class ScriptedStream:
    """One answer, a delta for each run of tokens."""

    def __init__(
        self,
        engine: ScriptedEngine,
        answer: str,
        prompt: Sequence[int],
        params: SamplingParams,
        parser: AnswerParser | None,
        extras: Sequence[Extra],
    ) -> None:
        self.prompt = prompt
        self.params = params
        self.parser = parser
        constraints = [extra.matcher for extra in extras if isinstance(extra, Constraint)]
        self.matcher = constraints[0] if constraints else None
        self.adapters = names_of(extras)
        self.aborted = False
        self.request = SimpleNamespace(admitted_s=None, first_token_s=None)
        self._engine = engine
        self._answer = answer
        make: Any = Detokenizer
        settings: dict[str, Any] = {
            "stop": params.stop,
            "include_stop": params.include_stop,
            "skip_special_tokens": params.skip_special_tokens,
            "min_tokens": params.min_tokens,
            "prompt_token_ids": prompt,
        }
        if parser is not None:
            make, settings["parser"] = ParsingDetokenizer, parser
        self._detokenizer = make(engine.tokenizer, **settings)

    def abort(self) -> None:
        self.aborted = True

    async def __aiter__(self) -> AsyncIterator[OutputDelta]:
        engine, params = self._engine, self.params
        eos = engine.eos_token_id
        ids = [*engine.tokenizer.encode(self._answer, add_special_tokens=False), eos]
        limit = params.max_tokens if params.max_tokens is not None else len(ids)
        ids, cut = ids[:limit], limit < len(ids)
        end = 0
        while end < len(ids):
            await engine.pause(self, end)
            if self.aborted:
                return
            run = engine.chance.randint(1, engine.run) if engine.chance else engine.run
            start, end = end, min(end + run, len(ids))
            taken, texts = ids[start:end], []
            last = end == len(ids)
            for token_id in taken:
                self._accept(token_id)
                if token_id != eos:
                    texts.append(self._detokenizer.push(token_id))
            stopped = self._detokenizer.stopped
            finish = None
            if last or stopped is not None:
                natural = stopped is not None or not cut
                texts.append(self._detokenizer.flush(natural=natural))
                stopped = self._detokenizer.stopped
                natural = stopped is not None or not cut
                finish = FinishReason.STOP if natural else FinishReason.LENGTH
            yield self._delta(taken, "".join(texts), end, finish, stopped)
            if finish is not None:
                return

    def _accept(self, token_id: int) -> None:
        if self.matcher is None:
            return
        words = np.zeros(mask_words(self._engine.vocab_size), np.uint32)
        self.matcher.fill(words)
        if not words[token_id // WORD_BITS] >> token_id % WORD_BITS & 1:
            raise GrammarError("the script has a token that the mask forbids")
        self.matcher.accept([token_id])
        assert self.matcher.error is None

    def _delta(
        self,
        ids: Sequence[int],
        text: str,
        count: int,
        finish: FinishReason | None,
        stopped: str | None,
    ) -> OutputDelta:
        events: list[Event] = []
        num_reasoning = 0
        if isinstance(self._detokenizer, ParsingDetokenizer):
            events = joined(self._detokenizer.take_events())
            num_reasoning = self._detokenizer.num_reasoning_tokens
        stop_reason: str | int | None = stopped
        if finish is FinishReason.STOP and stopped is None:
            stop_reason = ids[-1]
        scored = [] if self.params.logprobs is None else [TokenLogprobs(id, -0.5, 1) for id in ids]
        return OutputDelta(
            [*ids],
            text,
            count,
            0,
            logprobs=scored,
            finish_reason=finish,
            stop_reason=stop_reason,
            events=events,
            num_reasoning_tokens=num_reasoning,
        )


class ScriptedEngine(FakeEngine):
    """Answers with `answers` in turn; the last one stays.

    A delta has `run` tokens, or by `chance` up to that many.
    """

    def __init__(self, tokenizer: Tokenizer, **options: Any) -> None:
        super().__init__(max_seq_len=100_000, **options)
        self.tokenizer: Any = tokenizer
        self.vocab_size = tokenizer.vocab_size
        assert tokenizer.eos_token_id is not None
        self.eos_token_id = tokenizer.eos_token_id
        self.answers = [""]
        self.run = 1
        self.chance: random.Random | None = None
        self.texts: list[str] = []  # of the conversations
        self.streams: list[ScriptedStream] = []
        self._facts: TemplateFacts | None = None
        self._grammars = Grammars(tokenizer, self.vocab_size, [self.eos_token_id])

    async def encode(
        self, text: str, /, *, add_special_tokens: bool = True, any_length: bool = False
    ) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return ids

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        any_length: bool = False,
        /,
        **template_options: Any,
    ) -> list[int]:
        self.template_options = template_options
        text = await asyncio.to_thread(self._render, messages, template_options)
        ids = await self.encode(text, add_special_tokens=False)
        self.texts.append(self.tokenizer.decode(ids, skip_special_tokens=False))
        return ids

    def _render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
        call = encode_call(self.tokenizer.template_call(messages, **options))
        try:
            return render(msgspec.json.decode(call))
        except Exception as error:  # a template may raise anything
            raise InvalidRequestError("messages", f"the chat template refuses: {error}") from error

    async def template_facts(self) -> TemplateFacts:
        if self._facts is None:
            self._facts = await asyncio.to_thread(probe, self._render)
        return self._facts

    async def compile(self, structured: StructuredOutput | None, client: str = "") -> Compiled:
        if structured is None:
            return await self._grammars.unconstrained()
        return await self._grammars.compile(structured, client)

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        cache_salt: str | None = None,
        tenant: Tenant = EVERYONE,
        parser: AnswerParser | None = None,
        extras: Sequence[Extra] = (),
    ) -> Any:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        stream = ScriptedStream(self, answer, prompt_token_ids, params, parser, extras)
        self.streams.append(stream)
        return stream

    async def pause(self, stream: ScriptedStream, num_tokens: int) -> None:
        """Called before each delta of an answer, with the number of its tokens so far."""
        await asyncio.sleep(0)

    async def close(self) -> None:
        self._grammars.close()
        await asyncio.to_thread(self._grammars.join)
        await super().close()
