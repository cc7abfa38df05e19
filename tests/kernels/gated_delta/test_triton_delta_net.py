"""The kernels of a gated delta net against their references: on a GPU if there is one, or else in
the interpreter."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
pytest.importorskip("triton", reason="Triton is not installed: scripts/tools/try_interpreter.sh")

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

from minisgl.kernels.gated_delta import reference
from minisgl.kernels.gated_delta.causal_conv import causal_conv
from minisgl.kernels.gated_delta.delta_prefill import gated_delta_prefill
from minisgl.kernels.gated_delta.gated_norm import gated_rms_norm
from minisgl.kernels.gated_delta.reference import DeltaRows
from minisgl.kernels.gated_delta.run_kernels import causal_conv_runs, gated_delta_runs
from minisgl.kernels.segments import Runs, Segments
from minisgl.kernels.tuning import DeltaDecodeTiles, DeltaPrefillTiles

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Of results, and of states.
BOUNDS = {torch.float32: (2e-6, 2e-6), torch.bfloat16: (5e-3, 3e-5), torch.float16: (1e-3, 1e-6)}
CHANNELS = 200  # not a multiple of a block


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("block_v", [16, 64])
def test_prefill_is_the_recurrence_of_each_segment(dtype: torch.dtype, block_v: int) -> None:
    segments = segments_of(DEVICE)
    num_rows = int(segments.row_starts[-1])
    inputs = Inputs.draw(num_rows + UNREAD, Heads(value_dim=32), dtype, DEVICE)
    wanted, state = recurrence(inputs, segments)
    tiles = DeltaPrefillTiles(4, block_v, num_warps=4, num_stages=2)
    out = gated_delta_prefill(inputs.rows, inputs.state, segments, tiles=tiles)
    of_results, of_states = BOUNDS[dtype]
    assert out.dtype == dtype
    assert relative_error(out[:num_rows], wanted[:num_rows]) < of_results
    for slot in range(NUM_SLOTS + 1):
        assert relative_error(inputs.state[slot], state[slot]) < of_states


@pytest.mark.parametrize("dtype", BOUNDS)
def test_decode_is_the_recurrence_of_a_row_of_each_slot(dtype: torch.dtype) -> None:
    slots = torch.tensor([5, 0, NUM_SLOTS, 8, NUM_SLOTS], device=DEVICE)
    inputs = Inputs.draw(len(slots), Heads(), dtype, DEVICE)
    segments = segments_of(DEVICE, [(slot, slot, 1) for slot in slots.tolist()])
    wanted, state = recurrence(inputs, segments)
    tiles = DeltaDecodeTiles(block_v=8, num_warps=1)
    out = gated_delta_runs(None, inputs.rows, inputs.state, Runs(slots), tiles=tiles)
    real = (slots < NUM_SLOTS).cpu()
    assert out.dtype == dtype
    assert relative_error(out.cpu()[real], wanted[real]) < BOUNDS[dtype][0]
    assert relative_error(inputs.state[:-1], state[:-1]) < BOUNDS[torch.float32][1]


def test_equal_keys_of_full_strength_overwrite_one_another() -> None:
    """The worst case of the triangular system: its matrix is full of ones."""
    segments = segments_of(DEVICE, [(0, 0, 64)])
    inputs = Inputs.draw(64, Heads(k=1, v=1), torch.bfloat16, DEVICE)
    inputs.k.copy_(inputs.k[:1].clone().expand_as(inputs.k))
    inputs.gates.b.fill_(30.0)
    inputs.gates.a_log.fill_(-20.0)
    wanted, state = recurrence(inputs, segments)
    out = gated_delta_prefill(inputs.rows, inputs.state, segments)
    assert relative_error(out, wanted) < 5e-3
    assert relative_error(inputs.state[0], state[0]) < 3e-5


def inputs_of_convolution(
    num_rows: int, width: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(width)
    x = torch.randn(num_rows, CHANNELS + 8).to(DEVICE, dtype)[:, :CHANNELS]
    weight = torch.randn(CHANNELS, width).to(DEVICE, dtype)
    state = torch.randn(NUM_SLOTS + 1, CHANNELS, width - 1).to(DEVICE, dtype)
    return x, weight, state


CONVOLUTIONS = [(4, torch.float32), (4, torch.bfloat16), (2, torch.float32)]
CLOSE = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2}}


@pytest.mark.parametrize(("width", "dtype"), CONVOLUTIONS)
def test_a_convolution_leaves_and_takes_up_states(width: int, dtype: torch.dtype) -> None:
    segments = segments_of(DEVICE)
    num_rows = int(segments.row_starts[-1])
    x, weight, state = inputs_of_convolution(num_rows + UNREAD, width, dtype)
    expected = state.clone()
    silu = width != 2
    wanted = reference.causal_conv(x, weight, expected, segments, silu=silu)
    found = causal_conv(x, weight, state, segments, silu=silu)
    torch.testing.assert_close(found[:num_rows], wanted[:num_rows], **CLOSE[dtype])
    assert torch.equal(state, expected)


@pytest.mark.parametrize(("width", "dtype"), CONVOLUTIONS)
def test_a_decoded_row_is_convolved_with_the_state_of_its_slot(
    width: int, dtype: torch.dtype
) -> None:
    slots = torch.tensor([5, NUM_SLOTS, 0, 8, NUM_SLOTS], device=DEVICE)
    x, weight, state = inputs_of_convolution(len(slots), width, dtype)
    expected = state.clone()
    silu = width != 2
    runs = Runs(slots)
    _, wanted = reference.causal_conv_runs(x, weight, expected, None, runs, silu=silu)
    _, found = causal_conv_runs(x, weight, state, None, runs, silu=silu)
    real = slots < NUM_SLOTS
    torch.testing.assert_close(found[real], wanted[real], **CLOSE[dtype])
    assert torch.equal(state[:-1], expected[:-1])


def test_nothing_is_done_for_no_rows() -> None:
    none = segments_of(DEVICE, [(0, 0, 0)])
    none = Segments(none.sources[:0], none.slots[:0], none.row_starts[:1])
    inputs = Inputs.draw(0, Heads(), torch.float32, DEVICE)
    x, weight, state = inputs_of_convolution(0, 4, torch.float32)
    runs = Runs(none.slots)
    assert gated_delta_prefill(inputs.rows, inputs.state, none).shape == inputs.v.shape
    assert gated_delta_runs(None, inputs.rows, inputs.state, runs).shape == inputs.v.shape
    assert causal_conv(x, weight, state, none).shape == x.shape
    assert causal_conv_runs(x, weight, state, None, runs)[1].shape == x.shape


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("size", [128, 24])
def test_the_gated_norm_takes_a_gate_among_other_columns(size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(size)
    num_rows, heads = 5, 3
    x = torch.randn(num_rows, heads, size).to(DEVICE, dtype)
    gate = torch.randn(num_rows, heads * size + 7).to(DEVICE, dtype)[:, :-7]
    gate = gate.unflatten(1, (heads, size))
    weight = torch.randn(size).to(DEVICE, dtype)
    wanted = reference.gated_rms_norm(x, gate, weight, 1e-6)
    torch.testing.assert_close(gated_rms_norm(x, gate, weight, 1e-6), wanted, **CLOSE[dtype])


RUNS = [(1, (0, 0, 3, 4)), (3, (0, 1, 4, 2)), (4, (4, 0, 0, 1))]
MOST = 4


@pytest.mark.parametrize(("size", "num_kept"), RUNS)
@pytest.mark.parametrize(("width", "dtype"), CONVOLUTIONS)
def test_runs_are_convolved_as_in_the_reference(
    size: int, num_kept: tuple[int, ...], width: int, dtype: torch.dtype
) -> None:
    runs = runs_of(size, num_kept, DEVICE)
    x, weight, state = inputs_of_convolution(len(RUN_SLOTS) * size, width, dtype)
    kept = torch.randn(NUM_SLOTS + 1, MOST, CHANNELS).to(DEVICE, dtype)
    expected, rows, silu = state.clone(), kept.clone(), width != 2
    wanted = reference.causal_conv_runs(x, weight, expected, rows, runs, silu=silu)
    found = causal_conv_runs(x, weight, state, kept, runs, silu=silu)
    counts = torch.arange(MOST, device=DEVICE) < runs.num_kept[:, None]
    older = (part[0].view(-1, MOST, CHANNELS)[counts] for part in (found, wanted))
    torch.testing.assert_close(*older, **CLOSE[dtype])
    torch.testing.assert_close(found[1], wanted[1], **CLOSE[dtype])
    assert torch.equal(state[:-1], expected[:-1]) and torch.equal(kept[:-1], rows[:-1])


@pytest.mark.parametrize(("size", "num_kept"), RUNS)
@pytest.mark.parametrize("dtype", BOUNDS)
def test_runs_follow_the_rule_as_in_the_reference(
    size: int, num_kept: tuple[int, ...], dtype: torch.dtype
) -> None:
    runs, drawn = runs_of(size, num_kept, DEVICE), []
    for rows in (MOST * len(RUN_SLOTS), size * len(RUN_SLOTS)):
        inputs = Inputs.draw(rows + 1, Heads(), dtype, DEVICE)
        gates = inputs.gates._replace(a=inputs.gates.a[:rows], b=inputs.gates.b[:rows])
        drawn.append(DeltaRows(inputs.q[:rows], inputs.k[:rows], inputs.v[:rows], gates))
    older, newer = drawn
    of_layer = {"a_log": newer.gates.a_log, "dt_bias": newer.gates.dt_bias}
    older = older._replace(gates=older.gates._replace(**of_layer))
    state, expected = inputs.state, inputs.state.clone()
    wanted = reference.gated_delta_runs(older, newer, expected, runs)
    tiles = DeltaDecodeTiles(block_v=8, num_warps=1)
    out = gated_delta_runs(older, newer, state, runs, tiles=tiles)
    assert out.dtype == dtype
    real = (runs.slots < NUM_SLOTS).repeat_interleave(size)
    assert relative_error(out[real], wanted[real]) < BOUNDS[dtype][0]
    assert relative_error(state[:-1], expected[:-1]) < BOUNDS[torch.float32][1]
