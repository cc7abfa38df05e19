"""The operations of a gated delta net in torch against a recurrence in float64 and against
transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.delta_net_cases import (
    NUM_SLOTS,
    UNREAD,
    Heads,
    Inputs,
    recurrence,
    relative_error,
    segments_of,
)
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_next import modeling_qwen3_next

from minisgl.kernels.gated_delta.delta_net import (
    causal_conv,
    causal_conv_decode,
    gated_delta_decode,
    gated_delta_prefill,
    gated_rms_norm,
)

BOUNDS = {torch.float32: 1e-6, torch.bfloat16: 3e-3}


@pytest.mark.parametrize("dtype", BOUNDS)
def test_prefill_is_the_recurrence_of_each_segment(dtype: torch.dtype) -> None:
    segments = segments_of()
    inputs = Inputs.draw(int(segments.row_starts[-1]) + UNREAD, Heads(), dtype)
    wanted, state = recurrence(inputs, segments)
    out = gated_delta_prefill(inputs.q, inputs.k, inputs.v, inputs.gates, inputs.state, segments)
    assert out.dtype == dtype
    assert relative_error(out[:-UNREAD], wanted[:-UNREAD]) < BOUNDS[dtype]
    assert relative_error(inputs.state, state) < BOUNDS[torch.float32]


def test_decode_is_prefill_of_a_row_of_each_slot() -> None:
    slots = torch.tensor([5, 0, NUM_SLOTS, 8, NUM_SLOTS])
    inputs = Inputs.draw(len(slots), Heads(), torch.float32)
    state = inputs.state.clone()
    segments = segments_of(segments=[(slot, slot, 1) for slot in slots.tolist()])
    wanted = gated_delta_prefill(inputs.q, inputs.k, inputs.v, inputs.gates, state, segments)
    found = gated_delta_decode(inputs.q, inputs.k, inputs.v, inputs.gates, inputs.state, slots)
    real = slots < NUM_SLOTS
    torch.testing.assert_close(found[real], wanted[real])
    torch.testing.assert_close(inputs.state[:-1], state[:-1])


@pytest.mark.parametrize("form", ["chunk", "recurrent"])
def test_the_rule_is_that_of_transformers(form: str) -> None:
    heads, num_rows = Heads(), 70
    inputs = Inputs.draw(num_rows, heads, torch.float32)
    a, b, a_log, dt_bias = inputs.gates
    rule: Callable[..., tuple[Tensor, Tensor]] = getattr(
        modeling_qwen3_5, f"torch_{form}_gated_delta_rule"
    )
    wanted, state = rule(
        inputs.q[None],
        inputs.k[None],
        inputs.v[None],
        g=-a_log.exp() * torch.nn.functional.softplus(a + dt_bias)[None],
        beta=b.sigmoid()[None],
        initial_state=inputs.state[3, None],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    found = gated_delta_prefill(
        inputs.q,
        inputs.k,
        inputs.v,
        inputs.gates,
        inputs.state,
        segments_of(segments=[(3, 7, num_rows)]),
    )
    torch.testing.assert_close(found, wanted[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(inputs.state[7], state[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("silu", [False, True])
def test_a_convolution_goes_on_where_its_state_is_from(
    width: int, biased: bool, silu: bool
) -> None:
    """What is left in slots, and in snapshots, is what the rows of a whole prompt would have."""
    segments, channels = segments_of(), 5
    num_rows = int(segments.row_starts[-1])
    x = torch.randn(num_rows + UNREAD, channels)
    weight, bias = torch.randn(channels, width), torch.randn(channels) if biased else None
    before = torch.randn(NUM_SLOTS + 1, channels, width - 1)
    state, expected = before.clone(), before.clone()
    out = causal_conv(x, weight, bias, state, segments, silu=silu)
    starts = segments.row_starts.tolist()
    for index, (source, slot) in enumerate(zip(segments.sources, segments.slots, strict=True)):
        rows = x[starts[index] : starts[index + 1]].T[None]
        past = expected[source, None].clone()
        if rows.shape[2]:
            wanted = modeling_qwen3_5.causal_conv1d_update(
                rows, past, weight, bias, "silu" if silu else None
            )
            torch.testing.assert_close(out[starts[index] : starts[index + 1]], wanted[0].T)
        expected[slot] = past
    torch.testing.assert_close(state, expected)


@pytest.mark.parametrize("silu", [False, True])
def test_a_decoded_row_is_convolved_as_one_of_a_segment(silu: bool) -> None:
    slots = torch.tensor([5, NUM_SLOTS, 0, 8, NUM_SLOTS])
    x, weight = torch.randn(len(slots), 5), torch.randn(5, 4)
    state = torch.randn(NUM_SLOTS + 1, 5, 3)
    other = state.clone()
    segments = segments_of(segments=[(slot, slot, 1) for slot in slots.tolist()])
    wanted = causal_conv(x, weight, None, other, segments, silu=silu)
    found = causal_conv_decode(x, weight, None, state, slots, silu=silu)
    real = slots < NUM_SLOTS
    torch.testing.assert_close(found[real], wanted[real])
    torch.testing.assert_close(state[:-1], other[:-1])


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(
    "norm", [modeling_qwen3_5.Qwen3_5RMSNormGated, modeling_qwen3_next.Qwen3NextRMSNormGated]
)
def test_the_gated_norm_is_that_of_transformers(norm: Any, dtype: torch.dtype) -> None:
    layer = norm(16, eps=1e-6).to(dtype)
    torch.nn.init.normal_(layer.weight)
    x, gate = torch.randn(2, 5, 3, 16).to(dtype)
    found = gated_rms_norm(x, gate, layer.weight.detach(), 1e-6)
    torch.testing.assert_close(found, layer(x, gate).detach(), rtol=1e-6, atol=1e-6)
