"""The convolution of a gated delta net in Triton, with the rounding of reference.py."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernels.gated_delta.delta_parts import tile_of_segment
from minisgl.kernels.inlined import wait_for_previous
from minisgl.kernels.launch_options import pdl_options
from minisgl.kernels.segments import Segments

_WIDEST = 4
_ROWS, _CHANNELS = 16, 128  # of a tile


def causal_conv(
    x: Tensor,
    weight: Tensor,
    state: Tensor,
    segments: Segments,
    *,
    silu: bool = True,
    pdl: bool = True,
) -> Tensor:
    """See delta_net.py. `pdl`: see launch_options.py."""
    num_rows, channels = x.shape
    width = check_convolution(x, weight, state)
    num_segments = len(segments.slots)
    out = x.new_empty(x.shape)
    if num_segments == 0:
        return out
    _convolve_chains[(num_rows // _ROWS + num_segments, triton.cdiv(channels, _CHANNELS))](
        out,
        x,
        weight,
        state,
        *segments,
        num_segments,
        x.stride(0),
        channels=channels,
        width=width,
        silu=silu,
        segments_block=triton.next_power_of_2(num_segments),
        rows=_ROWS,
        block=_CHANNELS,
        num_warps=4,
        **pdl_options(x.device, pdl),
    )
    return out


def check_convolution(x: Tensor, weight: Tensor, state: Tensor) -> int:
    """Returns the width."""
    channels, width = weight.shape
    assert 2 <= width <= _WIDEST and state.shape[1:] == (channels, width - 1)
    assert x.stride(1) == 1 and weight.is_contiguous() and state.is_contiguous()
    assert x.dtype == weight.dtype == state.dtype
    return width


@triton.jit(do_not_specialize=["num_segments"])
def _convolve_chains(
    out,
    x,
    weight,
    state,
    sources,
    slots,
    row_starts,
    num_segments,
    x_stride,
    channels: tl.constexpr,
    width: tl.constexpr,
    silu: tl.constexpr,
    segments_block: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
    pdl: tl.constexpr,
):
    """A tile of the rows of a chain, which is a segment and those that continue it. Its first
    tile is the only one that reads its state, and writes those that its segments leave."""
    index = tl.arange(0, segments_block)
    there = index < num_segments
    starts = tl.load(row_starts + index, mask=there, other=0)
    source = tl.load(sources + index, mask=there, other=0)
    is_head = there & ((index == 0) | (source != tl.load(slots + index - 1, there & (index > 0))))
    head, first, tile = tile_of_segment(starts, is_head, num_segments, index, rows)
    next_head = tl.min(tl.where(is_head & (index > head), index, num_segments), 0)
    end = tl.load(row_starts + next_head)

    channel = tl.program_id(1) * block + tl.arange(0, block)
    inside = channel < channels
    row = first + tile * rows + tl.arange(0, rows)
    past = state + (tl.load(sources + head) * channels + channel) * (width - 1)
    result = tl.zeros([rows, block], tl.float32)
    wait_for_previous(pdl)  # for x

    for tap in tl.static_range(width):
        factor = tl.load(weight + channel * width + tap, mask=inside, other=0.0).to(tl.float32)
        from_row = row - (width - 1 - tap)
        place = x + from_row.to(tl.int64)[:, None] * x_stride + channel[None, :]
        taken = ((from_row >= first) & (row < end))[:, None] & inside[None, :]
        value = tl.load(place, mask=taken, other=0.0)
        older = ((from_row < first) & (row < end))[:, None] & inside[None, :]
        before = past[None, :] + (from_row - first + width - 1)[:, None]
        value += tl.load(before, mask=older, other=0.0)
        result += factor[None, :] * value.to(tl.float32)
    if silu:
        result = result.to(out.dtype.element_ty).to(tl.float32)
        result = result / (1.0 + tl.exp(-result))
    place = out + row.to(tl.int64)[:, None] * channels + channel[None, :]
    tl.store(place, result, mask=(row < end)[:, None] & inside[None, :])

    if tile == 0:
        kept = ()
        for tap in tl.static_range(width - 1):
            kept += (tl.load(past + tap, mask=inside, other=0.0),)
        tl.debug_barrier()  # the source may be one of the slots
        for segment in range(head, next_head):
            last = tl.load(row_starts + segment + 1)
            left = state + (tl.load(slots + segment) * channels + channel) * (width - 1)
            for tap in tl.static_range(width - 1):
                from_last = last - (width - 1) + tap
                new = inside & (from_last >= first)
                left_x = tl.load(x + from_last.to(tl.int64) * x_stride + channel, new, other=0.0)
                for past_tap in tl.static_range(width - 1):
                    is_older = from_last - first + width - 1 == past_tap
                    left_x = tl.where(is_older, kept[past_tap], left_x)
                tl.store(left + tap, left_x, mask=inside)


@triton.jit
def convolved(seen, value, factors, width: tl.constexpr, silu: tl.constexpr, dtype: tl.constexpr):
    """The result for the row `value` behind those in `seen`. dtype: that before the activation."""
    result = tl.zeros(value.shape, tl.float32)
    for tap in tl.static_range(width - 1):
        result += factors[tap].to(tl.float32) * seen[tap].to(tl.float32)
    result += factors[width - 1].to(tl.float32) * value.to(tl.float32)
    if silu:
        result = result.to(dtype).to(tl.float32)
        result = result / (1.0 + tl.exp(-result))
    return result
