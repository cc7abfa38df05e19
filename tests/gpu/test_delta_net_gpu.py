"""A gated delta net on a GPU, at the sizes of Qwen3.8-27B, in bfloat16, and in a captured graph."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from support.delta_net_cases import (
    NUM_SLOTS,
    RUN_SLOTS,
    UNREAD,
    Heads,
    Inputs,
    relative_error,
    runs_of,
    segments_of,
)

from minisgl.kernels.gated_delta import reference
from minisgl.kernels.gated_delta.delta_net import (
    causal_conv,
    causal_conv_runs,
    gated_delta_prefill,
    gated_delta_runs,
    gated_rms_norm,
)
from minisgl.kernels.gated_delta.reference import DeltaRows
from minisgl.kernels.segments import Runs

pytestmark = pytest.mark.gpu

HEADS = Heads(k=16, v=48, key_dim=128, value_dim=128)


def test_prefill_equals_its_reference_alone_and_captured() -> None:
    segments = segments_of("cuda")
    num_rows = int(segments.row_starts[-1])
    inputs = Inputs.draw(num_rows + UNREAD, HEADS, torch.bfloat16, "cuda")
    rows, before = inputs.rows, inputs.state.clone()
    wanted = reference.gated_delta_prefill(rows, expected := before.clone(), segments)
    found = [gated_delta_prefill(rows, inputs.state, segments)]
    states = [inputs.state.clone()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gated_delta_prefill(rows, inputs.state, segments)
    inputs.state.copy_(before)
    graph.replay()
    for out, state in zip([*found, captured], [*states, inputs.state], strict=True):
        assert relative_error(out[:num_rows], wanted[:num_rows]) < 5e-3
        for slot in range(NUM_SLOTS):
            assert relative_error(state[slot], expected[slot]) < 3e-5


def test_decode_equals_its_reference() -> None:
    slots = torch.tensor([5, 0, NUM_SLOTS, 8, NUM_SLOTS], device="cuda")
    inputs = Inputs.draw(len(slots), HEADS, torch.bfloat16, "cuda")
    runs, expected = Runs(slots), inputs.state.clone()
    wanted = reference.gated_delta_runs(None, inputs.rows, expected, runs)
    out = gated_delta_runs(None, inputs.rows, inputs.state, runs)
    real = slots < NUM_SLOTS
    assert relative_error(out[real], wanted[real]) < 5e-3
    assert relative_error(inputs.state[:-1], expected[:-1]) < 2e-6


def test_the_convolution_and_the_norm_equal_their_references() -> None:
    segments = segments_of("cuda")
    num_rows, width = int(segments.row_starts[-1]), 4
    torch.manual_seed(0)

    def half(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda").bfloat16()

    x, weight = half(num_rows, HEADS.channels), half(HEADS.channels, width)
    state = half(NUM_SLOTS + 1, HEADS.channels, width - 1)
    expected = state.clone()
    for slots in (segments.slots[:1], segments.slots[4:6]):
        rows = x[: len(slots)]
        _, wanted = reference.causal_conv_runs(rows, weight, expected, None, Runs(slots))
        _, found = causal_conv_runs(rows, weight, state, None, Runs(slots))
        assert relative_error(found, wanted) < 5e-3
        assert torch.equal(state, expected)
    wanted = reference.causal_conv(x, weight, expected, segments)
    assert relative_error(causal_conv(x, weight, state, segments), wanted) < 5e-3
    assert torch.equal(state, expected)
    heads, gate = half(num_rows, HEADS.v, 128), half(num_rows, HEADS.v, 128)
    wanted = reference.gated_rms_norm(heads, gate, weight := half(128), 1e-6)
    assert relative_error(gated_rms_norm(heads, gate, weight, 1e-6), wanted) < 5e-3


@pytest.mark.parametrize("size", [1, 4])
def test_runs_equal_their_references(size: int) -> None:
    most, runs = 4, runs_of(size, (0, 2, 4, 1), "cuda")
    num_rows, width = len(RUN_SLOTS) * size, 4
    newer = Inputs.draw(num_rows, HEADS, torch.bfloat16, "cuda")
    older = Inputs.draw(len(RUN_SLOTS) * most, HEADS, torch.bfloat16, "cuda")
    of_layer = {"a_log": newer.gates.a_log, "dt_bias": newer.gates.dt_bias}
    rows = (
        DeltaRows(older.q, older.k, older.v, older.gates._replace(**of_layer)),
        newer.rows,
    )
    state, expected = newer.state, newer.state.clone()
    wanted = reference.gated_delta_runs(*rows, expected, runs)
    out = gated_delta_runs(*rows, state, runs)
    real = (runs.slots < NUM_SLOTS).repeat_interleave(size)
    assert relative_error(out[real], wanted[real]) < 5e-3
    assert relative_error(state[:-1], expected[:-1]) < 2e-6

    def half(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda").bfloat16()

    x, weight = half(num_rows, HEADS.channels), half(HEADS.channels, width)
    past, kept = half(NUM_SLOTS + 1, HEADS.channels, 3), half(NUM_SLOTS + 1, most, HEADS.channels)
    expected_past, expected_kept = past.clone(), kept.clone()
    _, wanted = reference.causal_conv_runs(x, weight, expected_past, expected_kept, runs)
    _, found = causal_conv_runs(x, weight, past, kept, runs)
    assert relative_error(found[real], wanted[real]) < 5e-3
    assert torch.equal(past[:-1], expected_past[:-1])
    assert torch.equal(kept[:-1], expected_kept[:-1])
