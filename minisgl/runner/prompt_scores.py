"""Logprobs of prompt tokens, from the rows of the chunks that compute them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from minisgl.device.lanes import HostCopy
from minisgl.kernels.sampling.reference import TokenScores, top_logprobs
from minisgl.request import TokenLogprobs
from minisgl.runner.computation import Computation
from minisgl.runner.sampled_rows import list_logprobs
from minisgl.scheduler.plan import Chunk, StepPlan

# Maximum size of the float32 logits of prompt rows that are scored together.
MAX_SCORED_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class PromptScores:
    """The scores of a step's prompt tokens, on their way to the host."""

    chunks: tuple[tuple[int, Chunk], ...]  # those with scored tokens, by their index in the plan
    copy: HostCopy  # the three tensors of TokenScores of each block, chunk by chunk

    def logprobs(self) -> dict[int, list[TokenLogprobs]]:
        """The prompt logprobs by index of the chunk. Waits for the copies."""
        tensors = iter(self.copy.wait())
        found: dict[int, list[TokenLogprobs]] = {}
        for index, chunk in self.chunks:
            rows = found[index] = []
            while len(rows) < len(chunk.scored_token_ids):
                scores = TokenScores(next(tensors), next(tensors), next(tensors))
                count = len(scores.logprob)
                targets = chunk.scored_token_ids[len(rows) : len(rows) + count]
                rows += list_logprobs(targets, scores, [chunk.prompt_logprobs] * count).values()
        return found


def score_prompts(plan: StepPlan, hidden: Tensor, computation: Computation) -> PromptScores | None:
    """Queue the scoring of the plan's prompt tokens; None if it has none.

    hidden: of all rows of the step, which has the shape of the plan. A chunk is scored in blocks of
    rows, because logits are large.
    """
    lanes = computation.lanes
    block = max(1, MAX_SCORED_BYTES // (4 * computation.vocab_size))
    scored: list[tuple[int, Chunk]] = []
    tensors: list[Tensor] = []
    first_rows = computation.tables.order.first_rows(plan)
    for (index, chunk), row in zip(enumerate(plan.chunks), first_rows, strict=True):
        if chunk.scored_token_ids:
            scored.append((index, chunk))
            (targets,) = lanes.upload([chunk.scored_token_ids])
            rows = hidden[row : row + len(targets)]
            for some, part in zip(rows.split(block), targets.split(block), strict=True):
                logits = computation.whole_logits(some)
                scores = top_logprobs(logits.float(), part, chunk.prompt_logprobs)
                tensors += (scores.logprob, scores.top_ids, scores.top_logprobs)
    return PromptScores(tuple(scored), lanes.download(tensors)) if scored else None
