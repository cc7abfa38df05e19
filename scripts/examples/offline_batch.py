"""Completes many prompts at once: `python scripts/examples/offline_batch.py`."""

from __future__ import annotations

from minisgl import LLM, SamplingParams

QUESTIONS = ["What is 17 + 25?", "What is the capital of France?", "Spell the word: planet."]


def main() -> None:
    with LLM() as llm:  # or LLM("Qwen/Qwen3-0.6B", dtype="bfloat16")
        conversations = [[{"role": "user", "content": text}] for text in QUESTIONS]
        outputs = llm.chat(conversations, temperature=0, max_tokens=64)
        for question, output in zip(QUESTIONS, outputs, strict=True):
            print(f"{question} {output.text} ({output.finish_reason})")

        # `generate` completes texts or token ids, each with parameters of its own if they differ.
        # The same seed gives the same answer.
        prompt = outputs[0].prompt_token_ids
        sampled = [SamplingParams(temperature=0.8, seed=seed, max_tokens=64) for seed in (1, 1, 2)]
        answers = [output.text for output in llm.generate([prompt] * 3, sampled)]
        assert answers[0] == answers[1]
        print(answers)

        for piece in llm.stream(conversations[1], temperature=0):
            print(piece.text, end="", flush=True)
        print()


if __name__ == "__main__":
    main()
