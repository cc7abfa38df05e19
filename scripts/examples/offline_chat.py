"""Holds a conversation of several turns: `python scripts/examples/offline_chat.py`."""

from __future__ import annotations

from minisgl import LLM, SamplingParams


def main() -> None:
    messages: list[dict[str, str]] = []
    with LLM(page_size=1) as llm:
        for question in ("I am Ada and I live in Turin.", "What is 17 + 25?", "Where do I live?"):
            messages.append({"role": "user", "content": question})
            output = llm.chat(messages, SamplingParams(temperature=0, max_tokens=64))
            messages.append({"role": "assistant", "content": output.text})
            print(f"> {question}\n{output.text}")
            # Each turn repeats those before it, which the prefix cache already holds.
            print(f"  {output.num_cached_tokens} of {len(output.prompt_token_ids)} tokens cached")


if __name__ == "__main__":
    main()
