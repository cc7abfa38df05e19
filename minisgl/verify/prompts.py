"""The prompts by which a model is verified."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from minisgl.errors import InvalidRequestError
from minisgl.text.rendering import Renderer, encode_call
from minisgl.text.tokenizer import Tokenizer

NUM_NEW_TOKENS = 32
# Prompts that are computed in chunks, and that go beyond most sliding windows.
LONG_LENGTHS = (1300, 700, 300)
_MIN_TOKENS = 2

TEXTS = (
    "The capital of France is",
    "Water boils at 100 degrees Celsius at sea level. At the top of a high mountain, the air is "
    "thinner, so water boils at a lower temperature, and food takes longer to cook. This is why",
    'def fibonacci(n: int) -> int:\n    """Return a number."""\n    if n < 2:\n        return',
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. Danach gehen sie",
    "春眠不觉晓,处处闻啼鸟。夜来风雨声,",
    '{"name": "Ada Lovelace", "born": 1815, "fields": ["mathematics", "computing"], "known',
    "1, 1, 2, 3, 5, 8, 13, 21, 34, 55,",
)
_SENTENCES = (
    "Box {n} holds {a} apples and {b} pears.",
    "A train leaves at {a}:{b} and arrives {n} minutes later.",
    "In room {n}, someone reads page {a} of a book about the year 1{b}0.",
)
CONVERSATIONS: dict[str, list[dict[str, str]]] = {
    "a question": [{"role": "user", "content": "What is the capital of France?"}],
    "a system message": [
        {"role": "system", "content": "You answer in one word."},
        {"role": "user", "content": "What is the capital of France?"},
    ],
    "several turns": [
        {"role": "user", "content": "Name a colour.\n"},
        {"role": "assistant", "content": "Blue."},
        {"role": "user", "content": "  Another one, and say why:\n- in one line\n- é, ü, 中"},
    ],
}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "The city."}},
            "required": ["city"],
        },
    },
}


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts as token ids."""

    short: Sequence[list[int]]
    long: Sequence[list[int]]

    @property
    def all(self) -> list[list[int]]:
        return [*self.short, *self.long]

    @staticmethod
    def of(tokenizer: Tokenizer, max_seq_len: int) -> Prompts:
        """The prompts for a model, each with room for the tokens that are generated."""
        room = max_seq_len - NUM_NEW_TOKENS
        short = [tokenizer.encode(text)[:room] for text in TEXTS]
        if tokenizer.has_chat_template:
            # Of a template that refuses it, or does not end.
            with contextlib.suppress(InvalidRequestError), Renderer() as renderer:
                call = encode_call(tokenizer.template_call(CONVERSATIONS["a question"]))
                text = renderer.render(call)
                ids = tokenizer.encode(text, add_special_tokens=False, max_tokens=max_seq_len)
                short.append(ids[:room])
        lines = [
            _SENTENCES[n % 3].format(n=n, a=7 * n % 60, b=10 + 13 * n % 50) for n in range(300)
        ]
        ids = tokenizer.encode("\n".join(lines))
        lengths = sorted({min(length, room) for length in LONG_LENGTHS}, reverse=True)
        long = [ids[:length] for length in lengths]
        return Prompts(
            [ids for ids in short if len(ids) >= _MIN_TOKENS],
            [ids for ids in long if len(ids) >= _MIN_TOKENS],
        )
