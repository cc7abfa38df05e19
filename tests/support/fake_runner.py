"""A runner without a model, whose tokens betray every wrong page.

The KV of a token is a hash of itself and of the KV in front of it, read through the page table. A
sampled token is a function of that hash, so it depends on every token of its sequence and on
nothing else: one page lost, shared while being written or handed out too early changes the output.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from minisgl.request import TokenLogprobs
from minisgl.scheduler.plan import SlotJoin, StepPlan, StepResult

MASK = (1 << 61) - 1


def mix(state: int, token_id: int) -> int:
    return ((state ^ (token_id + 0x9E3779B9)) * 0x2545F4914F6CDD1D + 1) & MASK


def sample(state: int, seed: int, vocab_size: int, masked: frozenset[int] = frozenset()) -> int:
    """A token that is not among `masked`, unless all of them are."""
    if len(masked) >= vocab_size:
        masked = frozenset()
    drawn = mix(state, seed)
    while (token_id := (drawn >> 20) % vocab_size) in masked:
        drawn = mix(drawn, seed)
    return token_id


def expected_output(
    prompt: Sequence[int], *, seed: int, max_tokens: int, stop: frozenset[int], vocab_size: int
) -> list[int]:
    """The output for a prompt under every correct schedule."""
    state = 0
    for token_id in prompt:
        state = mix(state, token_id)
    output: list[int] = []
    while len(output) < max_tokens:
        token_id = sample(state, seed, vocab_size)
        output.append(token_id)
        if token_id in stop:
            break
        state = mix(state, token_id)
    return output


@dataclass
class _Slot:
    join: SlotJoin
    pages: dict[int, int] = field(default_factory=dict)
    length: int = 0
    last_token: int = -1


class FakeRunner:
    """Executes plans at launch, in order; `collect` hands the result over later.

    Where a plan allows runs, `runs` draws the length of each.
    """

    def __init__(
        self,
        *,
        page_size: int,
        vocab_size: int = 50,
        fail_at: frozenset[int] = frozenset(),
        runs: random.Random | None = None,
    ):
        self.page_size = page_size
        self.vocab_size = vocab_size
        self.fail_at = fail_at
        self.num_computed_tokens = 0
        self._runs = runs or random.Random(0)
        self._slots: dict[int, _Slot] = {}
        self._cells: dict[tuple[int, int], int] = {}

    def launch(self, plan: StepPlan) -> StepResult:
        if plan.step in self.fail_at:
            raise RuntimeError(f"step {plan.step} was told to fail")
        for join in plan.joins:
            self._slots[join.slot] = _Slot(join)
        for grant in plan.grants:
            for offset, page in enumerate(grant.pages):
                self._slots[grant.slot].pages[grant.index + offset] = page
        longest = max((self._slots[slot].length + 1 for slot in plan.decode_slots), default=0)
        tokens: list[int] = []
        run_lengths: list[int] = []
        logprobs: dict[int, TokenLogprobs] = {}
        scores: dict[int, list[TokenLogprobs]] = {}
        for slot_id in plan.decode_slots:
            run_lengths.append(self._run(self._slots[slot_id], plan.max_run, tokens, logprobs))
        if plan.max_run == 1:
            assert plan.longest_decode == longest
        else:  # how long the runs before it were is not known to whoever planned
            assert plan.longest_decode >= longest
        for index, chunk in enumerate(plan.chunks):
            slot = self._slots[chunk.slot]
            sampled = -1
            for position, token_id in enumerate(chunk.token_ids, chunk.start):
                sampled = self._compute(slot, position, token_id)
            if chunk.samples:
                self._report(slot, sampled, tokens, logprobs)
                run_lengths.append(1)
            else:
                slot.last_token = -1  # must not be fed
            if chunk.scored_token_ids:
                scores[index] = [TokenLogprobs(t, -1.0) for t in chunk.scored_token_ids]
        self.num_computed_tokens += plan.num_tokens
        if plan.max_run == 1:
            return StepResult(plan.step, tokens, logprobs, scores)
        return StepResult(plan.step, tokens, logprobs, scores, run_lengths=run_lengths)

    def collect(self, handle: StepResult) -> StepResult:
        return handle

    def may_compile(self) -> bool:
        return False

    def _run(
        self, slot: _Slot, max_run: int, tokens: list[int], logprobs: dict[int, TokenLogprobs]
    ) -> int:
        """One decode row; returns how many tokens it sampled."""
        wanted = self._runs.randint(1, max_run)
        for length in range(1, wanted + 1):
            self._report(slot, self._compute(slot, slot.length, slot.last_token), tokens, logprobs)
            if length < wanted and not self._has_room(slot, slot.length):
                wanted = length
                break
        for position in range(slot.length, slot.length + max_run - wanted):  # what was rejected
            if self._has_room(slot, position):
                self._cells[self._cell(slot, position)] = -1
        return wanted

    def _has_room(self, slot: _Slot, position: int) -> bool:
        return position // self.page_size in slot.pages

    @staticmethod
    def _report(
        slot: _Slot, token_id: int, tokens: list[int], logprobs: dict[int, TokenLogprobs]
    ) -> None:
        if slot.join.params.logprobs is not None:
            logprobs[len(tokens)] = TokenLogprobs(token_id, -1.0)
        tokens.append(token_id)

    def _compute(self, slot: _Slot, position: int, token_id: int) -> int:
        before = 0 if position == 0 else self._cells[self._cell(slot, position - 1)]
        state = mix(before, token_id)
        self._cells[self._cell(slot, position)] = state
        slot.length = position + 1
        join = slot.join
        num_outputs = position + 1 - len(join.prompt_token_ids)
        masked = join.stop_token_ids if num_outputs < join.params.min_tokens else frozenset()
        slot.last_token = sample(state, join.seed, self.vocab_size, masked)
        return slot.last_token

    def _cell(self, slot: _Slot, position: int) -> tuple[int, int]:
        page = slot.pages[position // self.page_size]
        assert page > 0, "the scratch page was handed out"
        return page, position % self.page_size
