"""Streams answers side by side in one event loop: `python scripts/examples/async_engine.py`."""

from __future__ import annotations

import asyncio

from minisgl import AsyncEngine, SamplingParams
from minisgl.config import EngineConfig

GREEDY = SamplingParams(temperature=0, max_tokens=64)


async def answer(engine: AsyncEngine, question: str) -> str:
    prompt = await engine.encode_chat([{"role": "user", "content": question}])
    text = ""
    async for delta in engine.generate(prompt, GREEDY):
        text += delta.text  # what came since the last delta
    return f"{question} {text}"


async def first_words(engine: AsyncEngine, question: str) -> str:
    """The beginning of an answer; the rest is never computed."""
    stream = engine.submit(
        await engine.encode_chat([{"role": "user", "content": question}]), GREEDY
    )
    text = ""
    async for delta in stream:
        text += delta.text
        if len(text.split()) > 3:
            stream.abort()
            break
    return f"{question} {text} ..."


async def main() -> None:
    async with await AsyncEngine.start(EngineConfig()) as engine:
        answers = await asyncio.gather(
            answer(engine, "What is the capital of France?"),
            answer(engine, "What is 17 + 25?"),
            first_words(engine, "What is minisgl?"),
        )
        print("\n".join(answers))


if __name__ == "__main__":
    asyncio.run(main())
