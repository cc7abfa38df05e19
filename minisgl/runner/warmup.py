"""Plans the largest steps that the options allow, run once before the KV cache is allocated."""

from __future__ import annotations

from collections.abc import Sequence

from minisgl.config import ResolvedConfig
from minisgl.parts.scores.host import ScoredChunk, ScorePlan
from minisgl.request import SamplingParams
from minisgl.scheduler.plan import Chunk, PageGrant, SlotJoin, StepPlan

# On a CPU, where memory is not measured, this suffices to check that the logits are finite.
SELF_TEST_LENGTH = 4


def pages_for_largest_step(config: ResolvedConfig) -> int:
    """Number of pages that `longest_step` and `widest_step` use, the scratch page included."""
    return 1 + -(-_longest_chunk(config) // config.page_size)


def longest_step(
    config: ResolvedConfig, vocab_size: int, *, scored: bool = True, rank: int = 0
) -> StepPlan:
    """A step of one chunk that uses the whole prefill budget. scored: with all prompt logprobs.
    rank: that has it, of those that divide requests."""
    slot = rank * (config.max_running_requests // config.num_attending)
    tokens = [index % vocab_size for index in range(_longest_chunk(config))]
    scores = ScorePlan((ScoredChunk(0, tokens[1:], num_top=0),))
    pages = tuple(range(1, pages_for_largest_step(config)))
    grants = _grants(config, (slot,), pages)
    return StepPlan(
        1,
        (),
        chunks=(Chunk(slot, 0, tokens, samples=True),),
        joins=(_join(slot),),
        grants=grants,
        parts=(scores,) if scored else (),
    )


def widest_step(config: ResolvedConfig) -> StepPlan:
    """A step that samples as many rows as steps do, with the filters that take most memory.

    All rows write to the same page, which does no harm here.
    """
    slots = range(config.max_running_requests)
    rows = range(max(len(slots), config.max_run_rows))  # those of runs have their slot in common
    return StepPlan(
        2,
        (),
        chunks=tuple(Chunk(row % len(slots), 0, (0,), samples=True) for row in rows),
        joins=tuple(_join(slot) for slot in slots),
        grants=_grants(config, slots, (1,)),
    )


def _grants(
    config: ResolvedConfig, slots: Sequence[int], pages: Sequence[int]
) -> tuple[PageGrant, ...]:
    """The same pages for each slot, in each page table."""
    kinds = (False,) if config.windows is None else (False, True)
    return tuple(PageGrant(slot, 0, pages, windowed) for slot in slots for windowed in kinds)


def _longest_chunk(config: ResolvedConfig) -> int:
    limit = config.max_prefill_length if config.device == "cuda" else SELF_TEST_LENGTH
    return min(limit, config.max_seq_len)


def _join(slot: int) -> SlotJoin:
    return SlotJoin(
        slot=slot,
        params=SamplingParams(top_k=50, top_p=0.9, repetition_penalty=1.1),
        seed=slot,
        stop_token_ids=frozenset(),
        prompt_token_ids=(0,),
        output_token_ids=(),
    )
