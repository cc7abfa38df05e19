"""Drafts from a slot's own tokens: what followed the last time that it ended like this.

In Triton (ngram_kernel.py) this is one launch, with a program for each slot that was sampled.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.kernels.dispatch import runs_triton
from minisgl.kernels.slots.slot_state import SlotState

# How many of the last tokens a place must share to be a match, and up to how many are compared.
LEAST_MATCH = 2
MOST_MATCH = 8


def draft_ngrams(
    history: Tensor,
    state: SlotState,
    slots: Tensor,
    output_index: Tensor,
    token_ids: Tensor,
    num_decode_rows: int,
    run: int,
) -> None:
    """Add the tokens of a settled step to the history, and write the drafts of its slots.

    history: [num_slots + 1, n] int32, the tokens of each slot by position. slots, output_index,
    token_ids: [num_samples] int64, of the sampled rows: runs of `run` rows, `num_decode_rows` in
    all, then single rows; what they sampled. Tokens that were rejected do no harm, because nothing
    reads the history behind a slot's last token.

    The drafts continue the place that shares the most tokens with the end of the history, from
    LEAST_MATCH up to MOST_MATCH, and of several such places the last. Where the history ends, they
    go on with the first drafts, as a repetition does. -1 if there is no such place.
    """
    if runs_triton(slots.device):
        from minisgl.kernels.slots import ngram_kernel

        rows = slots, output_index, token_ids, num_decode_rows, run
        ngram_kernel.draft_ngrams(history, state, *rows, LEAST_MATCH, MOST_MATCH)
        return
    positions = (output_index + state.prompt_lengths[slots]).clamp(max=history.shape[1] - 1)
    history[slots, positions] = token_ids.int()
    ends = torch.cat((slots[:num_decode_rows:run], slots[num_decode_rows:]))
    last = state.lengths[ends].long()
    places = torch.arange(int(last.max()) + 1, device=slots.device)
    tokens = history[ends, : len(places)]
    matches = places < last[:, None]
    shared = torch.zeros_like(tokens)
    for back in range(min(MOST_MATCH, len(places))):
        suffix = tokens.gather(1, (last - back).clamp(min=0)[:, None])
        matches[:, back:] &= tokens[:, : len(places) - back] == suffix
        matches[:, :back] = False
        shared += matches
    scores = (shared * len(places) + places).masked_fill(shared < LEAST_MATCH, -1)
    score, place = scores.max(dim=1)
    offsets = torch.arange(state.drafts.shape[1], device=slots.device)
    sources = place[:, None] + 1 + offsets % (last - place)[:, None].clamp(min=1)
    drafts = tokens.gather(1, sources.clamp(max=len(places) - 1))
    state.drafts[ends] = drafts.masked_fill((score < 0)[:, None], -1)
