"""Drafters of tests, which know what will be sampled, and how a run of the engine used them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from torch import Tensor

from minisgl.config import LayerSpec
from minisgl.device.lanes import Lanes
from minisgl.drafting.drafter import DraftStep, Draw
from minisgl.engine.startup import Loaded
from minisgl.scheduler.plan import StepPlan, StepResult

Kind = Literal["right", "wrong", "random", "fading"]


@dataclass
class KnowingDrafter:
    """Drafts from streams of tokens that requests are known to get.

    right: what will be sampled. wrong: never that. random: of any length. fading: right at first,
    and then perhaps wrong.
    """

    kind: Kind
    streams: Sequence[Sequence[int]]
    vocab_size: int
    taps: ClassVar[tuple[int, ...]] = ()
    rng: random.Random = field(default_factory=lambda: random.Random(3))
    following: dict[int, Sequence[int]] = field(default_factory=dict)

    def __call__(self, num_slots: int, max_seq_len: int, lanes: Lanes) -> KnowingDrafter:
        """In place of a class of drafters."""
        return self

    def layer_specs(self, kv_dtype: str) -> Sequence[LayerSpec]:
        return ()

    def join(self, slots: Sequence[int], token_ids: Sequence[Sequence[int]]) -> None:
        for slot, known in zip(slots, token_ids, strict=True):
            streams = (each for each in self.streams if list(each[: len(known)]) == list(known))
            self.following[slot] = next(streams, ())

    def draft(self, step: DraftStep, token_ids: Tensor, draw: Draw) -> None:
        state = step.state
        for slot in step.ending_slots().tolist():
            if slot != state.scratch_slot:
                length = int(state.lengths[slot]) + 1
                num_drafts = state.drafts.shape[1]
                drafts = self._drafts(self.following[slot][length : length + num_drafts])
                padded = [*drafts, *[-1] * num_drafts][:num_drafts]
                state.drafts[slot] = state.drafts.new_tensor(padded)

    def _drafts(self, following: Sequence[int]) -> list[int]:
        match self.kind:
            case "right":
                return list(following)
            case "wrong":
                return [(token + 1) % self.vocab_size for token in following]
            case "random":
                return [self.rng.randrange(-1, self.vocab_size) for _ in range(8)]
            case "fading":
                return [token if self.rng.random() < 0.7 else 0 for token in following]


def watch(loaded: Loaded[Any]) -> tuple[list[StepPlan], list[StepResult]]:
    """The plans and results of an engine, in lists that grow."""
    plans: list[StepPlan] = []
    results: list[StepResult] = []
    launch, collect = loaded.runner.launch, loaded.runner.collect

    def launch_and_note(plan: StepPlan, *masks: Any) -> Any:
        plans.append(plan)
        return launch(plan, *masks)

    def collect_and_note(handle: Any) -> StepResult:
        results.append(collect(handle))
        return results[-1]

    loaded.runner.launch, loaded.runner.collect = launch_and_note, collect_and_note
    return plans, results


def num_drafted(results: Sequence[StepResult]) -> int:
    return sum(sum(result.num_drafted or ()) for result in results)


def num_accepted(results: Sequence[StepResult]) -> int:
    return sum(length - 1 for result in results for length in result.run_lengths or ())
