"""Logprobs of tokens as the host lists them."""

from __future__ import annotations

from collections.abc import Sequence

from minisgl.kernels.sampling.reference import TokenScores
from minisgl.request import TokenLogprobs


def list_logprobs(
    token_ids: Sequence[int], scores: TokenScores, num_logprobs: Sequence[int | None]
) -> dict[int, TokenLogprobs]:
    """The logprobs of each row that requested any, by row; of sampled tokens or of a prompt.

    token_ids: one per row. scores: of these tokens, on the host. num_logprobs: the number of top
    tokens that each row requested, None for no logprobs at all.
    """
    asked = [(row, num) for row, num in enumerate(num_logprobs) if num is not None]
    rows = [row for row, _ in asked]
    logprob, rank = scores.logprob[rows].tolist(), scores.rank[rows].tolist()
    top_ids, top = scores.top_ids[rows].tolist(), scores.top_logprobs[rows].tolist()
    return {
        row: TokenLogprobs(
            token_ids[row],
            logprob[place],
            rank[place],
            tuple(zip(top_ids[place][:num], top[place][:num], strict=True)),
        )
        for place, (row, num) in enumerate(asked)
    }
