"""The operations of a gated delta net, which keeps a state for each request instead of keys and
values of its tokens (Yang, Kautz, Hatamizadeh, Gated Delta Networks, arXiv 2412.06464).

On a GPU that Triton compiles for each is one kernel, and prefill two; elsewhere it is a function of
reference.py, which also defines the rounding. States are indexed by slot and updated in place; one
slot is scratch, for padded rows.

On Hopper and later, slots, segments and states must have been written at least two launches before.
"""

from __future__ import annotations

from torch import Tensor

from minisgl.kernels.dispatch import runs_triton
from minisgl.kernels.gated_delta import reference
from minisgl.kernels.gated_delta.reference import DeltaRows
from minisgl.kernels.segments import Runs, Segments


def causal_conv(
    x: Tensor, weight: Tensor, state: Tensor, segments: Segments, *, silu: bool = True
) -> Tensor:
    """The convolution of each channel with the rows of its segment, up to each row; silu of it if
    `silu` is set.

    x: [num_rows, channels], channels contiguous; weight: [channels, width], the newest row's last;
    state: [num_slots, channels, width - 1], the last inputs of each slot, oldest first, contiguous.
    All have one dtype. 2 <= width <= 4. Returns a new [num_rows, channels].
    """
    if runs_triton(x.device):
        from minisgl.kernels.gated_delta import causal_conv

        return causal_conv.causal_conv(x, weight, state, segments, silu=silu)
    return reference.causal_conv(x, weight, state, segments, silu=silu)


def causal_conv_runs(
    x: Tensor, weight: Tensor, state: Tensor, kept: Tensor | None, runs: Runs, *, silu: bool = True
) -> tuple[Tensor, Tensor]:
    """The same for runs, of which x has the rows.

    kept: [num_slots, max_run, channels], the rows of the last run of each slot, contiguous; the
    first num_kept of a slot advance its state. Then those of x are kept, or, if a run is one row,
    advance it as well. None: none are kept. Returns the results of the kept rows, [num_runs ·
    max_run, channels], where those that do not count are undefined, and of the rows of x.
    """
    if runs_triton(x.device):
        from minisgl.kernels.gated_delta import run_kernels

        return run_kernels.causal_conv_runs(x, weight, state, kept, runs, silu=silu)
    return reference.causal_conv_runs(x, weight, state, kept, runs, silu=silu)


def swap_rows(x: Tensor, kept: Tensor, runs: Runs) -> Tensor:
    """Keep x [num_runs · size, width] in `kept` [num_slots, max_run, width] unless a run is one
    row, and return what was kept of these slots: [num_runs · max_run, width]."""
    return reference.swap_rows(x, kept, runs)


def gated_delta_prefill(rows: DeltaRows, state: Tensor, segments: Segments) -> Tensor:
    """The gated delta rule over the rows of each segment.

    With S the state, k and q of length 1, a row is S ← decay · S; S ← S + strength · k (v - kᵀ S);
    its result is key_dim**-0.5 · qᵀ S.

    state: [num_slots, v_heads, key_dim, value_dim] float32, contiguous. Returns a new tensor like
    rows.v.
    """
    if runs_triton(state.device):
        from minisgl.kernels.gated_delta import delta_prefill

        return delta_prefill.gated_delta_prefill(rows, state, segments)
    return reference.gated_delta_prefill(rows, state, segments)


def gated_delta_runs(
    older: DeltaRows | None, newer: DeltaRows, state: Tensor, runs: Runs
) -> Tensor:
    """The same for runs.

    older: max_run rows of each run, of which the first num_kept advance the state; None: none are
    kept. newer: the rows of the runs, which leave the state as it is, unless a run is one row. The
    state is read and written once. Returns the results of the newer rows, a new tensor like
    newer.v.
    """
    if runs_triton(state.device):
        from minisgl.kernels.gated_delta import run_kernels

        return run_kernels.gated_delta_runs(older, newer, state, runs)
    return reference.gated_delta_runs(older, newer, state, runs)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The RMS norm of the last dimension of x, times silu(gate).

    x: [..., size], contiguous; gate: as x, or [num_rows, ...] of the columns of a wider tensor;
    weight: [size], of x's dtype or float32. Returns a new tensor like x.
    """
    if runs_triton(x.device):
        from minisgl.kernels.gated_delta import gated_norm

        return gated_norm.gated_rms_norm(x, gate, weight, eps)
    return reference.gated_rms_norm(x, gate, weight, eps)
