"""Times the search for n-grams at the end of a step: `python scripts/bench/bench_ngrams.py`, on a
GPU.

Each slot has a history of random tokens of a small vocabulary, so that places share a few of the
last tokens. The time is that of the launch in a CUDA graph.
"""

from __future__ import annotations

import argparse

import torch
from graph_timer import graph_s

from minisgl.kernels.slots.ngrams import draft_ngrams
from minisgl.kernels.slots.slot_state import SlotState

VOCABULARY = 1000
PROMPT_TOKENS = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--context", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--draft-tokens", type=int, default=3)
    options = parser.parse_args()
    print(f"{'slots':>6} {'context':>8} {'µs':>8}")
    for num_slots in options.slots:
        for context in options.context:
            seconds = time_s(num_slots, context, options.draft_tokens)
            print(f"{num_slots:6} {context:8} {1e6 * seconds:8.1f}", flush=True)


def time_s(num_slots: int, context: int, num_drafts: int) -> float:
    """Seconds of a step in which all slots have runs."""
    gpu, run = torch.device("cuda"), 1 + num_drafts
    history = torch.randint(VOCABULARY, (num_slots + 1, context + run), device=gpu)
    numbers = torch.zeros((num_slots + 1, 3), dtype=torch.int32, device=gpu)
    state = SlotState(
        page_table=numbers[:, :1],
        lengths=torch.full_like(numbers[:, 0], context),
        last_tokens=numbers[:, 1],
        drafts=torch.zeros((num_slots + 1, num_drafts), dtype=torch.int32, device=gpu),
        takes_drafts=numbers[:, 2] + 1,
        prompt_lengths=torch.full((num_slots + 1,), PROMPT_TOKENS, device=gpu),
        page_size=16,
    )
    slots = torch.arange(num_slots, device=gpu).repeat_interleave(run)
    index = torch.arange(run, device=gpu).repeat(num_slots) + context - num_drafts - PROMPT_TOKENS
    tokens = torch.randint(VOCABULARY, slots.shape, device=gpu)
    history = history.int()
    call = [lambda: draft_ngrams(history, state, slots, index, tokens, len(slots), run)]
    return graph_s(call * 10)


if __name__ == "__main__":
    main()
