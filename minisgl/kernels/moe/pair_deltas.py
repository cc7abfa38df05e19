"""What adapters (LoRA) add to the sums of an expert's GEMM: B v for each pair, with v = A x of
shrink_pairs.py.

The pairs of a request are neighbours in the list of an expert, so that a tile rarely has those of
many adapters. It takes these in turn, with zeros in the places of other pairs than theirs: the bits
of a pair do not depend on its neighbours' adapters.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def next_adapter(adapters, before):
    """The lowest of some adapters above `before`; a very large number if there is none."""
    return tl.min(tl.where(adapters > before, adapters, 1 << 30), 0)


@triton.jit
def with_deltas(
    delta, expert, pair, inside, output, total, up_total, num_outputs: tl.constexpr, gated
):
    """total and up_total [outputs, pairs] with B v of an expert's rows `output` of gates, or of the
    map down, and of ups. delta: of `shrink_pairs`."""
    v, b, ranks, adapters, top_k, slot_stride, num_experts, max_rank = delta
    halves: tl.constexpr = 2 if gated else 1
    adapter = tl.load(adapters + pair // top_k, mask=inside, other=0)
    lane, real = tl.arange(0, 16), (output < num_outputs)[:, None]
    # Offsets of 32 bits take fewer registers, beside the sums, than pointers.
    b_at = output[:, None] * max_rank + lane[None, :]
    v_at = pair[None, :] * (halves * max_rank) + lane[:, None]
    gates = expert.to(tl.int64) * num_outputs * max_rank
    ups = (expert.to(tl.int64) + num_experts) * num_outputs * max_rank
    now = next_adapter(adapter, 0)
    while now < 1 << 30:
        of_slot, mine = b + (now - 1).to(tl.int64) * slot_stride, (adapter == now)[None, :]
        for first in tl.range(0, tl.load(ranks + now - 1), 16, num_stages=1):
            w = tl.load(of_slot + gates + first + b_at, mask=real, other=0.0)
            rows = tl.load(v + first + v_at, mask=mine, other=0.0).to(w.dtype)
            total = tl.dot(w, rows, total, input_precision="ieee")
            if gated:
                w = tl.load(of_slot + ups + first + b_at, mask=real, other=0.0)
                rows = tl.load(v + max_rank + first + v_at, mask=mine, other=0.0).to(w.dtype)
                up_total = tl.dot(w, rows, up_total, input_precision="ieee")
        now = next_adapter(adapter, now)
    return total, up_total
