"""An engine whose model is a clock: every step takes the same time, whatever is in it.

Scheduling, detokenization and everything after them are real: it shows what the host can sustain.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, replace

from minisgl.config import Capacity, EngineConfig, overlap_enabled, resolve
from minisgl.engine import AsyncEngine
from minisgl.engine.startup import Loaded
from minisgl.models.generation import GenerationDefaults
from minisgl.models.hub import DEMO_FOLDER
from minisgl.models.registry import read_model_config
from minisgl.runner.facts import device_facts
from minisgl.scheduler.plan import StepPlan, StepResult
from minisgl.text.tokenizer import Tokenizer

NUM_TOKENS = 8191  # drawn once; more than any step samples


@dataclass(frozen=True, slots=True)
class _PacedStep:
    result: StepResult
    due: float  # by time.monotonic


class PacedRunner:
    """Behaves like a device that takes `step_s` seconds for a step, and one step at a time."""

    def __init__(self, step_s: float, tokenizer: Tokenizer) -> None:
        self._step_s = step_s
        self._free_at = 0.0
        texts = (tokenizer.token_text(id) for id in range(tokenizer.vocab_size))
        whole = [id for id, text in enumerate(texts) if text.isascii() and text.isprintable()]
        special = {tokenizer.bos_token_id, tokenizer.eos_token_id}
        # Of whole characters, so that each token is an event.
        usable = [id for id in whole if id not in special and tokenizer.decode([id])]
        self._tokens = random.Random(0).choices(usable, k=2 * NUM_TOKENS)
        self._first = 0

    def launch(self, plan: StepPlan) -> _PacedStep:
        self._free_at = max(self._free_at, time.monotonic()) + self._step_s
        first, count = self._first, plan.num_samples
        self._first = (first + count) % NUM_TOKENS
        return _PacedStep(StepResult(plan.step, self._tokens[first : first + count]), self._free_at)

    def collect(self, handle: _PacedStep) -> StepResult:
        time.sleep(max(0.0, handle.due - time.monotonic()))
        return handle.result

    def may_compile(self) -> bool:
        return False

    def close(self) -> None:
        pass


def start_paced_engine(config: EngineConfig, step_s: float) -> AsyncEngine:
    """An engine with the dimensions and the tokenizer of the demo model, on the running loop."""
    facts = read_model_config(DEMO_FOLDER).facts()
    config = replace(config, device="cpu", num_pages=config.num_pages or 1 << 16)
    resolved = resolve(config, facts, device_facts(facts), overlap=overlap_enabled())
    tokenizer = Tokenizer.load(DEMO_FOLDER)
    return AsyncEngine(
        Loaded(
            PacedRunner(step_s, tokenizer),
            resolved,
            Capacity.of(resolved, resolved.num_pages),
            facts,
            tokenizer,
            GenerationDefaults(frozenset()),
            "paced",
        )
    )
