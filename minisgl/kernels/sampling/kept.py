"""What temperature and filters leave of a row, for the logprobs of what was drawn, in Triton.

settle_kernel (filters.py) decides about one token; here the least kept one is looked for. top_p
bisects the keys: some 50 sums over the segments that reach a key, of which all but the first few
are short.
"""

from __future__ import annotations

import triton
import triton.language as tl

from minisgl.kernels.sampling.device_order import (
    LOWEST,
    key_above,
    least_key,
    least_of_value,
    order_key,
    value_of,
)
from minisgl.kernels.sampling.filters import (
    LIST_SEGMENTS,
    cut_of_segments,
    deviation,
    key_of_last,
    least_kept,
    load_filters,
    load_listed,
    target_of,
    weigh,
    write_list,
)


@triton.jit
def weigh_kept(source, records, slot, maxima, segment_list, gathered, num_segments):
    """(temperature, key, largest logit, logarithm of the sum of exp(logit - largest)): of the
    tokens that the draw could take, which have that key or a larger one. Logits and keys are those
    after temperature; a greedy row has neither temperature nor filters.

    maxima: of each segment of the logits before temperature.
    """
    temperature, top_p, min_p, num_sigma, top_k, by_top_k, by_top_p, filtered = load_filters(
        records, slot, source[4], True
    )
    temperature = tl.where(temperature > 0, temperature, 1.0)
    peak = tl.max(maxima)
    largest = tl.div_rn(peak, temperature)
    segments = tl.arange(0, maxima.shape[0])
    keys = order_key(tl.div_rn(maxima, temperature), segments)
    keys = tl.where(segments < num_segments, keys, LOWEST)
    low = tl.cast(LOWEST, tl.int64) + 1
    if filtered:
        low = tl.maximum(low, least_kept(largest, min_p))
        if num_sigma > 0:
            least = tl.div_rn(peak - num_sigma * deviation(source, True), temperature)
            low = tl.maximum(low, least_key(least))
        if by_top_k:
            least = cut_of_segments(keys, largest, top_k, num_segments)
            listed = write_list(segment_list, segments, (keys >= least) & (keys > LOWEST))
            least = tl.where(top_k <= num_segments, least_of_value(least), LOWEST + 1)
            high = key_above(largest)
            last = key_of_last(
                source, segment_list, listed, gathered, temperature, least, high, top_k, True
            )
            low = tl.maximum(low, last)
        if by_top_p:
            listed = _list_reaching(low, keys, segments, segment_list)
            total = weigh(source, segment_list, listed, temperature, largest, low, True)
            target = target_of(total, top_p)
            # The tokens from `least` on weigh enough, those from `high` on too little.
            least = tl.maximum(low, least_key(largest - 30.0))  # those before it weigh nothing
            high = key_above(largest)
            while high - least > 1:
                middle = (least + high) >> 1
                listed = _list_reaching(middle, keys, segments, segment_list)
                weight = weigh(source, segment_list, listed, temperature, largest, middle, True)
                enough = weight.to(tl.float64) >= target
                least = tl.where(enough, middle, least)
                high = tl.where(enough, high, middle)
            low = tl.maximum(low, least)
    listed = _list_reaching(low, keys, segments, segment_list)
    total = tl.cast(0.0, tl.float32)
    for tile in range(tl.cdiv(listed, LIST_SEGMENTS)):
        found = load_listed(source, segment_list, listed, tile, temperature, True)[2]
        gaps = tl.where(found >= low, value_of(found) - largest, -float("inf"))
        total += tl.sum(tl.exp(gaps))
    tl.debug_barrier()
    return temperature, low, largest, tl.log(total)


@triton.jit
def _list_reaching(low, keys, segments, segment_list):
    """Lists the segments that may have tokens with keys from `low` on; returns their number."""
    tl.debug_barrier()  # the list before it is read
    return write_list(segment_list, segments, (keys >= least_of_value(low)) & (keys > LOWEST))
