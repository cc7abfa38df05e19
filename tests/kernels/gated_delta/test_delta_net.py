"""The operations of a gated delta net in torch against a recurrence in float64 and against
transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.delta_net_cases import (
    NUM_SLOTS,
    RUN_SLOTS,
    UNREAD,
    Heads,
    Inputs,
    recurrence,
    relative_error,
    runs_of,
    segments_of,
)
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_next import modeling_qwen3_next

from minisgl.kernels.gated_delta.delta_net import (
    causal_conv,
    causal_conv_runs,
    gated_delta_prefill,
    gated_delta_runs,
    gated_rms_norm,
    swap_rows,
)
from minisgl.kernels.gated_delta.reference import DeltaRows
from minisgl.kernels.segments import Runs

BOUNDS = {torch.float32: 1e-6, torch.bfloat16: 3e-3}


@pytest.mark.parametrize("dtype", BOUNDS)
def test_prefill_is_the_recurrence_of_each_segment(dtype: torch.dtype) -> None:
    segments = segments_of()
    inputs = Inputs.draw(int(segments.row_starts[-1]) + UNREAD, Heads(), dtype)
    wanted, state = recurrence(inputs, segments)
    out = gated_delta_prefill(inputs.rows, inputs.state, segments)
    assert out.dtype == dtype
    assert relative_error(out[:-UNREAD], wanted[:-UNREAD]) < BOUNDS[dtype]
    assert relative_error(inputs.state, state) < BOUNDS[torch.float32]


def test_decode_is_prefill_of_a_row_of_each_slot() -> None:
    slots = torch.tensor([5, 0, NUM_SLOTS, 8, NUM_SLOTS])
    inputs = Inputs.draw(len(slots), Heads(), torch.float32)
    state = inputs.state.clone()
    segments = segments_of(segments=[(slot, slot, 1) for slot in slots.tolist()])
    wanted = gated_delta_prefill(inputs.rows, state, segments)
    found = gated_delta_runs(None, inputs.rows, inputs.state, Runs(slots))
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
    segments = segments_of(segments=[(3, 7, num_rows)])
    found = gated_delta_prefill(inputs.rows, inputs.state, segments)
    torch.testing.assert_close(found, wanted[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(inputs.state[7], state[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("silu", [False, True])
def test_a_convolution_goes_on_where_its_state_is_from(width: int, silu: bool) -> None:
    """What is left in slots, and in snapshots, is what the rows of a whole prompt would have."""
    segments, channels = segments_of(), 5
    num_rows = int(segments.row_starts[-1])
    x = torch.randn(num_rows + UNREAD, channels)
    weight = torch.randn(channels, width)
    before = torch.randn(NUM_SLOTS + 1, channels, width - 1)
    state, expected = before.clone(), before.clone()
    out = causal_conv(x, weight, state, segments, silu=silu)
    starts = segments.row_starts.tolist()
    for index, (source, slot) in enumerate(zip(segments.sources, segments.slots, strict=True)):
        rows = x[starts[index] : starts[index + 1]].T[None]
        past = expected[source, None].clone()
        if rows.shape[2]:
            wanted = modeling_qwen3_5.causal_conv1d_update(
                rows, past, weight, None, "silu" if silu else None
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
    wanted = causal_conv(x, weight, other, segments, silu=silu)
    _, found = causal_conv_runs(x, weight, state, None, Runs(slots), silu=silu)
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


# Of each step: the rows of a run, and how many of them count in the slots that are not scratch.
STEPS = (
    (3, (1, 1, 3, 2)),
    (3, (3, 1, 1, 2)),
    (1, (1, 1, 1, 1)),
    (4, (2, 4, 4, 1)),
    (2, (1, 2, 2, 1)),
)
MOST = 4


@pytest.mark.parametrize("silu", [False, True])
def test_only_rows_that_count_advance_a_convolution(silu: bool) -> None:
    channels = 5
    weight, state = torch.randn(channels, 4), torch.randn(NUM_SLOTS + 1, channels, 3)
    alone = state.clone()
    kept, num_kept = torch.randn(NUM_SLOTS + 1, MOST, channels), (0, 0, 0, 0)
    for size, counts in STEPS:
        runs = runs_of(size, num_kept)
        rows = torch.randn(len(RUN_SLOTS) * size, channels)
        _, newer = causal_conv_runs(rows, weight, state, kept, runs, silu=silu)
        for place, slot in enumerate(RUN_SLOTS):
            if slot == NUM_SLOTS:
                continue
            for index in range(size):
                ahead = alone if index < counts[place] else alone.clone()
                row, own = place * size + index, torch.tensor([slot])
                if index < counts[place]:
                    _, wanted = causal_conv_runs(
                        rows[row, None], weight, ahead, None, Runs(own), silu=silu
                    )
                    torch.testing.assert_close(newer[row, None], wanted)
        num_kept = counts if size > 1 else (0, 0, 0, 0)
    last = torch.randn(len(RUN_SLOTS), channels)
    causal_conv_runs(last, weight, state, kept, runs_of(1, num_kept), silu=silu)
    real = torch.tensor([slot for slot in RUN_SLOTS if slot < NUM_SLOTS])
    causal_conv_runs(last[[0, 2, 3]], weight, alone, None, Runs(real), silu=silu)
    torch.testing.assert_close(state[:-1], alone[:-1])


def test_only_rows_that_count_advance_a_delta_net() -> None:
    heads = Heads()
    first = Inputs.draw(MOST * len(RUN_SLOTS), heads, torch.float32)
    state, alone = first.state.clone(), first.state.clone()
    older = first.rows
    num_kept: tuple[int, ...] = (0, 0, 0, 0)
    for step, (size, counts) in enumerate(STEPS):
        drawn = Inputs.draw(size * len(RUN_SLOTS) + step, heads, torch.float32)
        rows = slice(0, size * len(RUN_SLOTS))
        gates = first.gates._replace(a=drawn.gates.a[rows], b=drawn.gates.b[rows])
        newer = DeltaRows(drawn.q[rows], drawn.k[rows], drawn.v[rows], gates)
        out = gated_delta_runs(older, newer, state, runs_of(size, num_kept))
        for place, slot in enumerate(RUN_SLOTS):
            for index in range(counts[place] if slot < NUM_SLOTS else 0):
                row = slice(place * size + index, place * size + index + 1)
                of_row = gates._replace(a=gates.a[row], b=gates.b[row])
                alone_row = DeltaRows(*(part[row] for part in newer[:3]), of_row)
                wanted = gated_delta_runs(None, alone_row, alone, Runs(torch.tensor([slot])))
                torch.testing.assert_close(out[row], wanted)
        older, num_kept = padded(newer, size), counts if size > 1 else (0, 0, 0, 0)
    gated_delta_runs(older, older, state, runs_of(MOST, num_kept))
    torch.testing.assert_close(state[:-1], alone[:-1])


def padded(rows: DeltaRows, size: int) -> DeltaRows:
    """Runs of MOST rows, of which the others are noise."""

    def pad(part: Tensor) -> Tensor:
        wide = torch.randn(len(RUN_SLOTS), MOST, *part.shape[1:])
        wide[:, :size] = part.unflatten(0, (-1, size))
        return wide.flatten(0, 1)

    gates = rows.gates._replace(a=pad(rows.gates.a), b=pad(rows.gates.b))
    return DeltaRows(pad(rows.q), pad(rows.k), pad(rows.v), gates)


def test_rows_are_kept_until_the_next_run_of_their_slot() -> None:
    kept = torch.randn(NUM_SLOTS + 1, MOST, 3)
    before, runs = kept.clone(), runs_of(2, (0, 0, 0, 0))
    x = torch.randn(len(RUN_SLOTS) * 2, 3)
    assert torch.equal(swap_rows(x, kept, runs), before[runs.slots].flatten(0, 1))
    assert torch.equal(kept[[5, 0, 8], :2].flatten(0, 1), x[[0, 1, 4, 5, 6, 7]])
    assert torch.equal(kept[:, 2:], before[:, 2:]) and torch.equal(kept[1:5], before[1:5])
    after = kept.clone()
    assert torch.equal(
        swap_rows(x[:4], kept, runs_of(1, (2, 1, 1, 2))), after[runs.slots].flatten(0, 1)
    )
    assert torch.equal(kept, after)
