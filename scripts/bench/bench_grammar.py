"""Time of grammars on the host: `python scripts/bench/bench_grammar.py`, without a GPU.

Twenty schemas like those that clients send, over a vocabulary of the size of Qwen's. `compile` is
the time of the process that tries a grammar, of compiling it and of its first mask. The masks are
those along a random answer, each from a grammar that has not seen the text before.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "tools"))

from dummy_tokenizer import make_tokenizer
from transformers import PreTrainedTokenizerFast

from minisgl.grammar.compiler import Grammars
from minisgl.grammar.matching import GrammarMatcher
from minisgl.grammar.tool_grammars import Tool, tool_calls
from minisgl.matcher import WORD_BITS, mask_words
from minisgl.request import StructuredOutput
from minisgl.text.parsing.formats import HERMES
from minisgl.text.tokenizer import Tokenizer

TEXT = {"type": "string"}
MAX_TOKENS = 200  # of an answer


def closed(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    """An object with exactly these properties."""
    required = [*properties]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
        **more,
    }


def array(items: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, **more}


PERSON = closed({"name": TEXT, "age": {"type": "integer"}, "email": TEXT})
COUNT = {"type": "integer", "minimum": 1}
ITEM = closed({"sku": TEXT, "count": COUNT, "price": {"type": "number"}})
NODE = closed({"value": TEXT, "children": array({"$ref": "#/$defs/node"})})
ELEMENT = closed({"tag": {"enum": ["div", "button"]}, "inside": array({"$ref": "#"})})
CONTAINER = closed({"name": TEXT, "image": TEXT, "ports": array({"type": "integer"})})
TOOLS = [
    Tool(name=f"tool_{number}", parameters=closed({"path": TEXT, f"option_{number}": TEXT}))
    for number in range(15)
]
SCHEMAS: dict[str, dict[str, Any]] = {
    "flat person": PERSON,
    "class": closed({"class": {"enum": ["spam", "ham", "unsure"]}}),
    "weather tool": closed({"city": TEXT, "unit": {"enum": ["celsius", "fahrenheit"]}}),
    "reasoning steps": closed({"steps": array(closed({"say": TEXT, "do": TEXT})), "answer": TEXT}),
    "nested order": closed({"buyer": PERSON, "items": array(ITEM), "note": TEXT}),
    "recursive tree": {**NODE, "$defs": {"node": NODE}},
    "recursive page": ELEMENT,
    "optional fields": {"type": "object", "properties": {f"field_{n}": TEXT for n in range(8)}},
    "union": {
        "anyOf": [
            closed({"kind": {"const": kind}, "size": {"type": "number"}})
            for kind in ("circle", "square", "line")
        ]
    },
    "array bounds": array(TEXT, minItems=2, maxItems=10),
    "string lengths": closed({"title": {**TEXT, "maxLength": 80}, "body": TEXT}),
    "formats": closed({name: {**TEXT, "format": name} for name in ("date", "uuid", "email")}),
    "patterns": closed({"phone": {**TEXT, "pattern": "^\\+[0-9]{6,14}$"}, "zip": TEXT}),
    "map": {"type": "object", "additionalProperties": {"type": "number"}},
    "pattern names": {
        "type": "object",
        "patternProperties": {"^x-": TEXT},
        "additionalProperties": False,
    },
    "enum of 500": closed({"code": {"enum": [f"code-{n * 7919 % 10007}" for n in range(500)]}}),
    "deployment": closed({"replicas": {"type": "integer"}, "containers": array(CONTAINER)}),
    "any object": {"type": "object"},
    "all of": {"allOf": [{"type": "object", "properties": {"a": TEXT}}, {"required": ["a"]}]},
}
CASES = {name: StructuredOutput(json_schema=schema) for name, schema in SCHEMAS.items()}


def answer(matcher: GrammarMatcher, size: int, eos: int, seed: int) -> list[float]:
    """Seconds of each mask along a random answer."""
    rng, words, seconds = random.Random(seed), np.zeros(mask_words(size), np.uint32), []
    while len(seconds) < MAX_TOKENS and not matcher.finished:
        began = time.perf_counter()
        matcher.fill(words)
        seconds.append(time.perf_counter() - began)
        word = int(rng.choice(np.flatnonzero(words)))
        bits = [bit for bit in range(WORD_BITS) if int(words[word]) >> bit & 1]
        token_id = word * WORD_BITS + rng.choice(bits)
        if token_id == eos:
            break
        matcher.accept([token_id])
    return seconds


def row(name: str, seconds: Sequence[float], unit_s: float) -> str:
    ordered = sorted(second / unit_s for second in seconds)
    at_90 = ordered[int(0.9 * (len(ordered) - 1))]
    return f"{name:<24}{statistics.median(ordered):>10.2f}{at_90:>10.2f}{ordered[-1]:>10.2f}"


async def measure(vocab_size: int) -> None:
    tokenizer = Tokenizer(
        PreTrainedTokenizerFast(tokenizer_object=make_tokenizer(vocab_size), eos_token="<|im_end|>")
    )
    eos = tokenizer.eos_token_id
    assert eos is not None
    grammars = Grammars(tokenizer, vocab_size, [eos])
    tools = tool_calls(TOOLS, HERMES.spelling, {}, required=True)
    cases = {**CASES, "15 tools": tools}
    try:
        began = time.perf_counter()
        await grammars.compile(StructuredOutput(choice=["first"]))
        print(f"{vocab_size} tokens; the first grammar after {time.perf_counter() - began:.2f} s")
        compiling, masking = [], []
        print(f"{'':<24}{'compile ms':>10}{'mask p50':>10}{'max µs':>10}")
        for number, (name, structured) in enumerate(cases.items()):
            began = time.perf_counter()
            compiled = await grammars.compile(structured)
            compiling.append(time.perf_counter() - began)
            matcher = compiled.matcher()
            assert isinstance(matcher, GrammarMatcher)
            masks = answer(matcher, vocab_size, eos, number)
            masking += masks
            middle, most = 1e6 * statistics.median(masks), 1e6 * max(masks)
            print(f"{name:<24}{1e3 * compiling[-1]:>10.2f}{middle:>10.1f}{most:>10.1f}")
        print(f"{'':<24}{'p50':>10}{'p90':>10}{'max':>10}")
        print(row("compile, ms", compiling, 1e-3))
        print(row("mask, µs", masking, 1e-6))
    finally:
        grammars.close()
        grammars.join()


def main() -> None:
    parser = argparse.ArgumentParser(description="Times of compiling and of masks.")
    parser.add_argument("--vocab-size", type=int, default=151_936)
    asyncio.run(measure(parser.parse_args().vocab_size))


if __name__ == "__main__":
    main()
