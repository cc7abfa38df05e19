"""Answers of toy models, parsed whole and in pieces."""

from __future__ import annotations

import codecs
import itertools
import json
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from support.toy_tokenizers import with_tokens

from minisgl.events import (
    CallArguments,
    CallEnd,
    CallStart,
    ContentText,
    Event,
    ReasoningText,
    joined,
)
from minisgl.text.parsing import harmony
from minisgl.text.parsing.parsing_detokenizer import ParsingDetokenizer
from minisgl.text.parsing.selection import AnswerFormat, choose_format
from minisgl.text.tokenizer import Tokenizer

TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
MISTRAL_TOKENS = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]")
LLAMA_TOKENS = ("<|python_tag|>", "<|eot_id|>")
QWEN = with_tokens(*TAGS, special=("<|im_start|>", "<|im_end|>"))
MISTRAL = with_tokens(special=MISTRAL_TOKENS)
OLD_MISTRAL = with_tokens(special=("[TOOL_CALLS]",))
LLAMA = with_tokens(special=LLAMA_TOKENS)
DEEPSEEK_TOKENS = [
    f"<｜tool▁{name}｜>" for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")
]
DEEPSEEK = with_tokens("<think>", "</think>", *DEEPSEEK_TOKENS)
GLM_TOKENS = [f"<{slash}arg_{name}>" for name in ("key", "value") for slash in ("", "/")]
GLM = with_tokens(*TAGS, *GLM_TOKENS, special=("<|user|>", "<|assistant|>"))
GEMMA_TOKENS = ("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>")
GEMMA = with_tokens(special=(*GEMMA_TOKENS, "<|turn>", "<turn|>"))
HARMONY = with_tokens(special=harmony.MARKERS)
PLAIN = with_tokens(special=("<|im_start|>", "<|im_end|>"))  # every marker is several tokens


@dataclass
class Parsed:
    """An answer as a client gets it."""

    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)  # name and arguments
    num_ended: int = 0

    @property
    def objects(self) -> list[tuple[str, Any]]:
        return [(name, json.loads(arguments)) for name, arguments in self.calls]


def parsed(events: Sequence[Event]) -> Parsed:
    """Collects events, and checks that calls come one after the other."""
    answer = Parsed()
    for event in events:
        match event:
            case ReasoningText(text):
                answer.reasoning += text
            case ContentText(text):
                answer.content += text
            case CallStart(index, name):
                assert index == len(answer.calls) == answer.num_ended
                answer.calls.append((name, ""))
            case CallArguments(index, text):
                assert text and index == len(answer.calls) - 1 == answer.num_ended
                name, arguments = answer.calls[index]
                answer.calls[index] = (name, arguments + text)
            case CallEnd(index):
                assert index == len(answer.calls) - 1 == answer.num_ended
                answer.num_ended += 1
    return answer


def form_of(tokenizer: Tokenizer, tool_parser: str, reasoning_parser: str = "none") -> AnswerFormat:
    return choose_format(tokenizer, tool_parser=tool_parser, reasoning_parser=reasoning_parser)


def replay(
    tokenizer: Tokenizer,
    form: AnswerFormat,
    ids: Sequence[int],
    *,
    natural: bool = True,
    in_reasoning: bool = False,
    tools: Mapping[str, Mapping[str, Any]] | None = None,
    only_calls: bool = False,
    **options: Any,
) -> list[Event]:
    """The events of an answer that goes through the detokenizer, as the engine does it."""
    parser = form.parser(in_reasoning=in_reasoning, tools=tools, only_calls=only_calls)
    assert parser is not None
    detokenizer = ParsingDetokenizer(tokenizer, parser, **options)
    text = "".join(map(detokenizer.push, ids)) + detokenizer.flush(natural=natural)
    events = joined(detokenizer.take_events())
    assert text == "".join(event.text for event in events if isinstance(event, ContentText))
    return events


def fed_in_runs(
    tokenizer: Tokenizer,
    form: AnswerFormat,
    ids: Sequence[int],
    cuts: Sequence[int],
    *,
    natural: bool = True,
    **options: Any,
) -> list[Event]:
    """The events of an answer whose tokens come in runs, as a speculating engine has them."""
    [events] = fed_in_all_runs(tokenizer, form, ids, [cuts], natural=natural, **options)
    return events


def fed_in_all_runs(
    tokenizer: Tokenizer,
    form: AnswerFormat,
    ids: Sequence[int],
    splits: Sequence[Sequence[int]],
    *,
    natural: bool = True,
    **options: Any,
) -> Iterator[list[Event]]:
    """The events of an answer for each way in which its tokens come in runs."""
    parsers = [parser for _ in splits if (parser := form.parser(**options)) is not None]
    maker = PieceMaker(tokenizer, parsers[0].marker_ids)
    pieces, rest = [maker.piece(token_id) for token_id in ids], maker.rest()
    for parser, cuts in zip(parsers, splits, strict=True):
        events: list[Event] = []
        for start, end in itertools.pairwise([0, *cuts, len(ids)]):
            events += parser.feed(pieces[start:end])
        yield joined([*events, *parser.finish(natural, rest)])


class PieceMaker:
    """Token ids with the text that each completes."""

    def __init__(self, tokenizer: Tokenizer, marker_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._marker_ids = marker_ids
        self._drops_first_space = tokenizer.drops_first_space
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def piece(self, token_id: int) -> tuple[int, str]:
        if token_id in self._marker_ids:
            return token_id, self._decode(b"", True)
        table = self._tokenizer.byte_table(skip_special_tokens=True)
        data = table[token_id]
        if self._drops_first_space and data:
            self._drops_first_space = False
            data = data.removeprefix(b" ")
        return token_id, self._decode(data)

    def rest(self) -> str:
        return self._decode(b"", True)


def splits(length: int) -> list[list[int]]:
    """Where to cut an answer: runs of 1, 2 and 3 tokens, all at once, and 4 random splits."""
    chance = random.Random(length)
    regular = [[*range(run, length, run)] for run in (1, 2, 3, max(length, 1))]
    return regular + [
        sorted(chance.sample(range(1, length), chance.randint(1, length - 1)))
        for _ in range(4)
        if length > 1
    ]


def parse(
    tokenizer: Tokenizer,
    tool_parser: str,
    answer: str,
    *,
    reasoning_parser: str = "none",
    natural: bool = True,
    in_reasoning: bool = False,
    tools: Mapping[str, Mapping[str, Any]] | None = None,
) -> Parsed:
    """Parses an answer in all splits, which must give the same events; returns what they are."""
    form = form_of(tokenizer, tool_parser, reasoning_parser)
    ids = tokenizer.encode(answer, add_special_tokens=False)
    options: dict[str, Any] = {"natural": natural, "in_reasoning": in_reasoning, "tools": tools}
    whole = replay(tokenizer, form, ids, **options)
    for events in fed_in_all_runs(tokenizer, form, ids, splits(len(ids)), **options):
        assert events == whole
    return parsed(whole)
