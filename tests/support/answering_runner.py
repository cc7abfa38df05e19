"""A runner whose answers are texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from support.engine_loop import EOS, ScriptedRunner
from support.engine_loop import loaded as demo

from minisgl.engine.startup import Loaded
from minisgl.text.tokenizer import Tokenizer


class AnsweringRunner(ScriptedRunner):
    """Answers each prompt with the next of `answers`, token by token, then EOS."""

    def __init__(self, answers: Sequence[str], tokenizer: Tokenizer) -> None:
        super().__init__(1)
        self._tokenizer = tokenizer
        self._answers = [[*tokenizer.encode(answer), EOS] for answer in answers]
        self.prompts: list[str] = []

    def _report(self, slot: Any, token_id: int, *into: Any) -> None:
        prompt = slot.join.prompt_token_ids
        place = slot.length - len(prompt)
        if place == 0:
            text = b"".join(map(self._tokenizer.token_bytes, prompt))
            self.prompts.append(text.decode())
        answer = self._answers[len(self.prompts) - 1]
        slot.last_token = answer[min(place, len(answer) - 1)]
        super()._report(slot, slot.last_token, *into)

    def loaded(self) -> Loaded[Any]:
        loaded = demo(self, overlap=True, tokenizer=True, num_pages=1000)
        self.vocab_size = loaded.model.vocab_size
        return replace(loaded, tokenizer=self._tokenizer)
