"""Completes many prompts at once: `python scripts/examples/offline_batch.py`."""

from __future__ import annotations

from minisgl import LLM, SamplingParams

QUESTIONS = ["What is 17 + 25?", "What is the capital of France?", "Spell the word: planet."]


def main() -> None:
    with LLM() as llm:  # or LLM("Qwen/Qwen3-0.6B", dtype="bfloat16")
        tokenizer = llm.engine.tokenizer
        assert tokenizer is not None
        # A prompt is a text or a list of token ids; these are ids under the chat template.
        prompts = [tokenizer.chat([{"role": "user", "content": text}]) for text in QUESTIONS]
        greedy = SamplingParams(temperature=0, max_tokens=64)
        for question, output in zip(QUESTIONS, llm.generate(prompts, greedy), strict=True):
            print(f"{question} {output.text} ({output.finish_reason})")

        # One set of parameters a prompt is possible, too. The same seed gives the same answer.
        sampled = [SamplingParams(temperature=0.8, seed=seed, max_tokens=64) for seed in (1, 1, 2)]
        answers = [output.text for output in llm.generate([prompts[0]] * 3, sampled)]
        assert answers[0] == answers[1]
        print(answers)


if __name__ == "__main__":
    main()
