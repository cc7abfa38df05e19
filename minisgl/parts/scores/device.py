"""The runner's half: logprobs of prompt tokens, from the rows of the chunks that compute them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields

from torch import Tensor

from minisgl.device.lanes import HostCopy, Lanes
from minisgl.kernels.sampling.listed import list_logprobs
from minisgl.kernels.sampling.reference import TokenScores, top_logprobs
from minisgl.parts.device_part import StepPart
from minisgl.parts.scores.host import ScorePlan
from minisgl.request import TokenLogprobs

# Maximum size of the float32 logits of prompt rows that are scored together.
MAX_SCORED_BYTES = 256 << 20


def rows_scored(vocab_size: int) -> int:
    """The number of prompt rows that are scored together."""
    return max(1, MAX_SCORED_BYTES // (4 * vocab_size))


class ScoreStep(StepPart):
    def __init__(
        self,
        lanes: Lanes,
        whole_logits: Callable[[Tensor], Tensor],
        num_rows: int,
        plan: ScorePlan,
    ) -> None:
        """whole_logits: of rows of hidden states, over the whole vocabulary. num_rows: that are
        scored together."""
        self._lanes = lanes
        self._whole_logits = whole_logits
        self._block = num_rows
        self._chunks = plan.chunks
        # The four tensors of TokenScores of each block, chunk by chunk.
        self._copy: HostCopy | None = None

    def read_rows(self, hidden: Tensor, first_rows: Sequence[int]) -> None:
        """Score the chunks in blocks of rows, because logits are large."""
        tensors: list[Tensor] = []
        for chunk in self._chunks:
            (targets,) = self._lanes.upload([[max(0, each) for each in chunk.token_ids]])
            first = first_rows[chunk.index]
            rows = hidden[first : first + len(targets)]
            for some, part in zip(rows.split(self._block), targets.split(self._block), strict=True):
                scores = top_logprobs(self._whole_logits(some).float(), part, chunk.num_top)
                tensors += (scores.logprob, scores.rank, scores.top_ids, scores.top_logprobs)
        self._copy = self._lanes.download(tensors)

    def outcome(self) -> dict[int, list[TokenLogprobs | None]]:
        """The prompt logprobs by index of the chunk."""
        found: dict[int, list[TokenLogprobs | None]] = {}
        if self._copy is None:
            return found
        tensors = iter(self._copy.wait())
        for chunk in self._chunks:
            rows = found[chunk.index] = []
            while len(rows) < len(chunk.token_ids):
                scores = TokenScores(*(next(tensors) for _ in fields(TokenScores)))
                count = len(scores.logprob)
                targets = chunk.token_ids[len(rows) : len(rows) + count]
                wanted = [chunk.num_top if each >= 0 else None for each in targets]
                listed = list_logprobs(targets, scores, wanted)
                rows += [listed.get(row) for row in range(count)]
        return found
