"""What a model computes between its products and attention: one function for each, and one kernel
where the tensors lie on a GPU that Triton compiles for.

Elsewhere the functions of `reference.py` run, which also say how results are rounded; each Triton
file names what it takes beyond the contract here (contiguous inputs) and when its launches overlap.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.kernels.elementwise import reference
from minisgl.kernels.launch import compiles_gated_norm

if TYPE_CHECKING:  # not every platform has Triton
    from minisgl.kernels.comm.mailbox import Mailbox
    from minisgl.kernels.linear.config import LinearWorkspace
    from minisgl.kernels.linear.cublaslt import Products

logger = logging.getLogger(__name__)

_OLDEST = (8, 0)  # compute capability that Triton supports


class PendingNorm(Protocol):
    """Adds to `rows` what several ranks have of a sum: add_rms_norm of both."""

    def __call__(self, rows: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]: ...


class Residual(NamedTuple):
    """The residual stream of a model: the sum of `rows` and `delta`, both [num_rows, size], or of
    `rows` and what is `pending`.

    What adds to it may write over `rows`, or leave the addition to the norm that comes next.
    """

    rows: Tensor
    delta: Tensor | None = None
    squares: Tensor | None = None  # of `rows`, without a delta: what launch.Norm takes
    # Where ranks have summands of what is to be added: what takes the place of add_rms_norm.
    pending: PendingNorm | None = None


def embed(token_ids: Tensor, weight: Tensor, first: int = 0) -> Tensor:
    """Row `id - first` of the weight for each id, zeros where it has none.

    token_ids: [num_rows] int64; weight: [vocab, size]. Returns a new [num_rows, size].
    """
    return _kernels_for(weight.device).embed(token_ids, weight, first)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight of each row.

    x: [num_rows, size]; weight: [size], of x's dtype. Returns a new tensor like x.
    """
    return _kernels_for(x.device).rms_norm(x, weight, eps)


def add_rms_norm(
    delta: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The norm of residual + delta, and that sum, which may have been written over `residual`.

    Both are [num_rows, size] and of one dtype.
    """
    return _kernels_for(residual.device).add_rms_norm(delta, residual, weight, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) · up. gate_up: [num_rows, 2 · size], the gates first; returns [num_rows, size]."""
    return _kernels_for(gate_up.device).silu_mul(gate_up)


class LinearKernels(NamedTuple):
    """What the linear maps of a model need besides their weights; one map at a time may run."""

    workspace: LinearWorkspace  # of the Triton kernels for few rows
    products: Products | None  # of cuBLASLt, for those that it was tuned for


def linear_kernels(weights: Sequence[Tensor]) -> LinearKernels | None:
    """For maps with these weights; None where there are none for their dtype and device."""
    first = weights[0]
    if first.dtype == torch.float32 or not runs_triton(first.device):
        return None
    from minisgl.kernels.linear.config import MAX_ROWS, LinearWorkspace
    from minisgl.kernels.linear.cublaslt import load_products

    shapes = {(weight.shape[0], weight.shape[1]) for weight in weights}
    workspace = LinearWorkspace.allocate(shapes, MAX_ROWS, first.device)
    return LinearKernels(workspace, load_products(first.dtype, first.device))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, kernels: LinearKernels | None) -> Tensor:
    """x Wᵀ + bias. x: [num_rows, k]; weight: [n, k]; bias: [n]; returns [num_rows, n]."""
    if kernels is not None:
        from minisgl.kernels.linear import config, launch

        if config.is_worth_it(x.shape[0], *weight.shape, gated=False):
            return launch.linear(x, weight, bias, workspace=kernels.workspace)
    return _product(x, weight, bias, kernels)


def linear_silu_mul(x: Tensor, weight: Tensor, kernels: LinearKernels | None) -> Tensor:
    """silu_mul(linear(x, weight)). weight: [2 · size, k]; returns [num_rows, size]."""
    if kernels is not None:
        from minisgl.kernels.linear import config, launch

        if config.is_worth_it(x.shape[0], *weight.shape, gated=True):
            return launch.linear_silu_mul(x, weight, workspace=kernels.workspace)
    return silu_mul(linear(x, weight, None, kernels))


def linear_add(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rows: Tensor,
    kernels: LinearKernels | None,
) -> Residual:
    """rows + linear(x, weight, bias)."""
    if kernels is not None:
        from minisgl.kernels.linear import config, launch

        if config.is_worth_it(x.shape[0], *weight.shape, gated=False):
            squares = launch.linear_add(x, weight, bias, rows, workspace=kernels.workspace)
            return Residual(rows, squares=squares)
    return Residual(rows, delta=_product(x, weight, bias, kernels))


def linear_send(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mailbox: Mailbox,
    kernels: LinearKernels | None,
) -> PendingNorm | None:
    """Send linear(x, weight, bias) to all ranks, if there is a kernel that does. Returns what adds
    up what all have sent; no other exchange may come between."""
    if kernels is None:
        return None
    from minisgl.kernels.comm import one_shot
    from minisgl.kernels.linear import config, launch

    if not config.is_worth_it(x.shape[0], *weight.shape, gated=False):
        return None
    launch.linear_send(x, weight, bias, mailbox, workspace=kernels.workspace)
    return partial(one_shot.received_norm, mailbox=mailbox)


def _product(
    x: Tensor, weight: Tensor, bias: Tensor | None, kernels: LinearKernels | None
) -> Tensor:
    if bias is None and kernels is not None and kernels.products is not None:
        out = kernels.products(x, weight)
        if out is not None:
            return out
    return F.linear(x, weight, bias)


def norm(residual: Residual, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of the residual stream, and the stream in one tensor."""
    rows, delta = residual.rows, residual.delta
    if residual.pending is not None:
        return residual.pending(rows, weight, eps)
    if delta is None:
        return rms_norm(rows, weight, eps), rows
    return add_rms_norm(delta, rows, weight, eps)


def norm_linear(
    residual: Residual,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    kernels: LinearKernels | None,
) -> tuple[Tensor, Tensor]:
    """linear of the norm of the residual stream, and the stream in one tensor."""
    rows, squares = residual.rows, residual.squares
    if kernels is not None and squares is not None:
        from minisgl.kernels.linear import config, launch

        if config.is_norm_worth_it(rows.shape[0], *weight.shape, gated=False):
            its_norm = launch.Norm(norm_weight, eps, squares)
            return launch.linear(
                rows, weight, bias, norm=its_norm, workspace=kernels.workspace
            ), rows
    hidden, rows = norm(residual, norm_weight, eps)
    return linear(hidden, weight, bias, kernels), rows


def norm_and_linear(
    residual: Residual,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    kernels: LinearKernels | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The norm of the residual stream, linear of that, and the stream in one tensor."""
    rows, squares = residual.rows, residual.squares
    if kernels is not None and squares is not None:
        from minisgl.kernels.linear import config, launch

        if config.can_leave_norm(rows.shape[0], *weight.shape, device=rows.device):
            its_norm = launch.Norm(norm_weight, eps, squares)
            hidden = torch.empty_like(rows)
            return hidden, launch.linear(rows, weight, norm=its_norm, normed=hidden), rows
    hidden, rows = norm(residual, norm_weight, eps)
    return hidden, linear(hidden, weight, None, kernels), rows


def norm_linear_silu_mul(
    residual: Residual,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    kernels: LinearKernels | None,
) -> tuple[Tensor, Tensor]:
    """linear_silu_mul of the norm of the residual stream, and the stream in one tensor."""
    rows, squares = residual.rows, residual.squares
    if kernels is not None and squares is not None:
        from minisgl.kernels.linear import config, launch

        worth_it = config.is_norm_worth_it(rows.shape[0], *weight.shape, gated=True)
        if worth_it and compiles_gated_norm(rows.device):
            its_norm = launch.Norm(norm_weight, eps, squares)
            return launch.linear_silu_mul(
                rows, weight, norm=its_norm, workspace=kernels.workspace
            ), rows
    hidden, rows = norm(residual, norm_weight, eps)
    return linear_silu_mul(hidden, weight, kernels), rows


def turn_and_store(
    qkv: Tensor,
    positions: Tensor,
    table: Tensor,
    kv_index: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Norm the heads of q and k if there are weights, turn them, and write k and v to the cache.

    qkv: [num_rows, (num_heads + 2 · num_kv_heads) · head_dim], q's heads first, then k's, then v's.
    positions and kv_index: [num_rows] int64, as in StepInputs; table: [max_seq_len, head_dim]
    float32, RotaryEmbedding.table. The caches: [num_pages, page_size, num_kv_heads, head_dim]; two
    rows may share an index on the scratch page only, where nobody reads. The weights: both or
    neither, [head_dim], of qkv's dtype. Returns q, a new [num_rows, num_heads, head_dim].

    On Hopper and later, positions and kv_index must have been written at least two launches before.
    """
    return _kernels_for(qkv.device).turn_and_store(
        qkv, positions, table, kv_index, k_cache, v_cache, q_weight, k_weight, eps
    )


class Kernels(NamedTuple):
    """An implementation of the functions above."""

    embed: Callable[[Tensor, Tensor, int], Tensor]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    silu_mul: Callable[[Tensor], Tensor]
    turn_and_store: Callable[..., Tensor]


REFERENCE = Kernels(
    reference.embed,
    reference.rms_norm,
    reference.add_rms_norm,
    reference.silu_mul,
    reference.turn_and_store,
)


def runs_triton(device: torch.device) -> bool:
    """Whether the functions above are Triton kernels on `device`."""
    return _kernels_for(device) is not REFERENCE


def triton_kernels() -> Kernels:
    """Imports Triton, which takes a second; ImportError where there is none."""
    from minisgl.kernels.elementwise.activation import silu_mul
    from minisgl.kernels.elementwise.embedding import embed
    from minisgl.kernels.elementwise.heads import turn_and_store
    from minisgl.kernels.elementwise.norm import add_rms_norm, rms_norm

    return Kernels(embed, rms_norm, add_rms_norm, silu_mul, turn_and_store)


@cache
def _kernels_for(device: torch.device) -> Kernels:
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < _OLDEST:
        return REFERENCE
    try:
        kernels = triton_kernels()
        _start_triton()
    except Exception as error:  # an optional package that is broken must not stop the engine
        logger.warning("The layers run without Triton, which does not run here: %s", error)
        return REFERENCE
    return kernels


def _start_triton() -> None:
    """Raises where Triton lacks what it launches kernels with: at its first start on a machine it
    builds a module, for which it needs a C compiler and the headers of Python."""
    import triton

    triton.runtime.driver.active.get_current_target()
