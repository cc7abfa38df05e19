"""The kernels of LoRA at awkward sizes: on a GPU if there is one, or else in the interpreter."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
pytest.importorskip("triton", reason="Triton is not installed: scripts/tools/try_interpreter.sh")

from minisgl.kernels.adapters import (
    AdaptedRows,
    AdapterWeights,
    Delta,
    allocate,
    b_of,
    places_of_parts,
)
from minisgl.kernels.elementwise.reference import rms_norm
from minisgl.kernels.linear.dense_gemm import linear
from minisgl.kernels.linear.epilogue import GATED, Epilogue, FusedNorm
from minisgl.kernels.linear.tiles import LinearTiles, LinearWorkspace, workspace_size
from minisgl.kernels.lora import expand_kernel, reference, sort_kernel
from minisgl.kernels.lora.shrink_kernel import shrink, shrink_norm

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
STREAM = LinearTiles(64, 16, 32, num_stages=2)
HOW = {
    "stream": STREAM,
    "split": replace(STREAM, splits=3),
    "groups": LinearTiles(16, 16, 64, groups=4, num_stages=2),
    "burst": LinearTiles(16, 16, 256, groups=4, burst=True),
}


def padded(rank: int) -> int:
    return -(-rank // 16) * 16


def adapters_of(
    ranks: Sequence[int], k: int, widths: Sequence[int], dtype: torch.dtype = torch.float32
) -> tuple[AdapterWeights, list[Tensor]]:
    """Slots with adapters of these ranks, with NaN wherever no kernel may read; and what each adds
    to W: [n, k] in float64."""
    weights = allocate(len(ranks), padded(max(ranks)), k, tuple(widths), dtype=dtype, device=DEVICE)
    weights.a.fill_(torch.nan)
    weights.b.fill_(torch.nan)
    added = []
    for slot, rank in enumerate(ranks):
        weights.ranks[slot] = padded(rank)
        weights.a[slot, :, :rank] = torch.randn_like(weights.a[slot, :, :rank]) * k**-0.5
        weights.a[slot, :, rank : padded(rank)] = 0
        b = b_of(weights, slot, padded(rank))
        b[:, :rank] = torch.randn_like(b[:, :rank])
        b[:, rank:] = 0
        added.append(
            torch.cat(
                [
                    b[columns, :rank].double() @ weights.a[slot, part, :rank].double()
                    for part, columns in enumerate(places_of_parts(weights))
                ]
            )
        )
    return weights, added


def some_adapters(num_rows: int, num_slots: int) -> Tensor:
    """Of each row, in any order, some with none; the last slot is not used if there are others."""
    most = max(num_slots - 1, 1)
    return torch.randint(0, most + 1, (num_rows,), dtype=torch.int32, device=DEVICE)


def exact(x: Tensor, added: Sequence[Tensor], rows: AdaptedRows) -> Tensor:
    """What the adapters add to y, in float64."""
    none = torch.zeros_like(added[0])
    return torch.stack(
        [
            row.double() @ (added[adapter - 1] if adapter else none).T
            for row, adapter in zip(x, rows.adapters.tolist(), strict=True)
        ]
    )


def with_nan_where_undefined(delta: Delta) -> Delta:
    """v with NaN in all that shrink does not define, which nothing may read."""
    v = torch.full_like(delta.v, torch.nan).unflatten(2, (-1, delta.weights.max_rank))
    for row, adapter in enumerate(delta.rows.adapters.tolist()):
        rank = int(delta.weights.ranks[adapter - 1]) if adapter else 0
        v[:, row, :, :rank] = delta.v.view(v.shape)[:, row, :, :rank]
    return delta._replace(v=v.flatten(2))


@pytest.mark.parametrize("num_slots", [1, 3, 8, 33])
@pytest.mark.parametrize("num_rows", [1, 2, 17, 64, 300])
def test_rows_are_sorted_as_torch_sorts_them(num_rows: int, num_slots: int) -> None:
    for adapters in (
        some_adapters(num_rows, num_slots),
        torch.zeros(num_rows, dtype=torch.int32, device=DEVICE),
        torch.full((num_rows,), num_slots, dtype=torch.int32, device=DEVICE),
    ):
        found = sort_kernel.sort_rows(adapters, num_slots)
        expected = reference.sort_rows(adapters, num_slots)
        count, num_active = int((adapters > 0).sum()), int(expected.active[0])
        assert torch.equal(found.order[:count], expected.order[:count])
        used = expected.tiles[:, 0] > 0
        assert torch.equal(found.tiles[:, 0], expected.tiles[:, 0])
        assert torch.equal(found.tiles[used], expected.tiles[used])
        assert torch.equal(found.active[: 1 + num_active], expected.active[: 1 + num_active])


CASES = [  # ranks of the slots, rows, k, rows of W of each part
    ((16,), 1, 512, (64,)),
    ((1, 8, 16, 64), 5, 100, (70, 33, 33)),
    ((16, 1), 17, 1030, (40,)),
    ((8, 320, 16), 6, 250, (130, 7)),
    ((64, 16, 8, 16, 1, 1, 16, 16, 8, 1, 16), 33, 64, (48, 16, 16)),
    ((16, 8, 1), 300, 130, (20, 20)),
    ((1, 64), 3, 17000, (16,)),
]


@pytest.mark.parametrize(("ranks", "num_rows", "k", "widths"), CASES)
def test_shrink_and_expand_match_float64(
    ranks: tuple[int, ...], num_rows: int, k: int, widths: tuple[int, ...]
) -> None:
    weights, added = adapters_of(ranks, k, widths)
    rows = sort_kernel.sort_rows(some_adapters(num_rows, len(ranks)), len(ranks))
    x = torch.randn(num_rows, k + 8, device=DEVICE)[:, :k]
    delta = with_nan_where_undefined(shrink(x, weights, rows))
    y = torch.randn(num_rows, sum(widths), device=DEVICE)
    expected, by_torch, before = y.double() + exact(x, added, rows), y.clone(), y.clone()
    expand_kernel.expand(y, delta)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-4)
    reference.expand(by_torch, reference.shrink(x, weights, rows))
    torch.testing.assert_close(by_torch.double(), expected, rtol=1e-5, atol=1e-4)
    assert torch.equal(y[rows.adapters == 0], before[rows.adapters == 0])


@pytest.mark.parametrize(("ranks", "num_rows", "k", "widths"), CASES)
def test_shrink_norms_all_rows(
    ranks: tuple[int, ...], num_rows: int, k: int, widths: tuple[int, ...]
) -> None:
    """Also those without an adapter; and v is that of the norm, to the bit."""
    weights, _ = adapters_of(ranks, k, widths, dtype=torch.float16)
    rows = sort_kernel.sort_rows(some_adapters(num_rows, len(ranks)), len(ranks))
    x = torch.randn(num_rows, k, device=DEVICE).half()
    factor, eps = torch.rand(k, device=DEVICE).half(), 1e-3
    squares = torch.rand(num_rows, 5, device=DEVICE)
    squares *= x.double().square().sum(1, keepdim=True).float() / squares.sum(1, keepdim=True)
    normed, delta = shrink_norm(x, FusedNorm(factor, eps, squares), weights, rows)
    torch.testing.assert_close(normed, rms_norm(x, factor, eps), rtol=2e-3, atol=1e-6)
    alone = with_nan_where_undefined(shrink(normed, weights, rows))
    assert torch.equal(with_nan_where_undefined(delta).v.nan_to_num(), alone.v.nan_to_num())


@pytest.mark.parametrize("num_rows", [40, 300])
def test_a_row_has_the_bits_that_it_has_alone(num_rows: int) -> None:
    """Also where each split of k has a program, and where one program has all."""
    weights, _ = adapters_of((16, 64, 1, 320), 1030, (33, 16, 16))
    adapters = some_adapters(num_rows, 4)
    x = torch.randn(num_rows, 1030, device=DEVICE)
    before = torch.randn(num_rows, 65, device=DEVICE)
    y = before.clone()
    expand_kernel.expand(y, shrink(x, weights, sort_kernel.sort_rows(adapters, 4)))
    for row in torch.randperm(num_rows)[:4].tolist():
        one = slice(row, row + 1)
        alone = before[one].clone()
        rows = sort_kernel.sort_rows(adapters[one].clone(), 4)
        expand_kernel.expand(alone, shrink(x[one], weights, rows))
        assert torch.equal(alone, y[one])


def gemm(x: Tensor, w: Tensor, epilogue: Epilogue, how: LinearTiles) -> Tensor:
    room, counters = workspace_size(len(x), *w.shape, how, gated=epilogue.gated)
    workspace = LinearWorkspace(
        partials=torch.full((room,), torch.nan, device=DEVICE),
        semaphores=torch.zeros(counters, dtype=torch.int32, device=DEVICE),
    )
    return linear(x, w, epilogue=epilogue, workspace=workspace, tiles=how)


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
@pytest.mark.parametrize(
    ("ranks", "num_rows", "k", "widths"),
    [
        ((16,), 1, 128, (64,)),
        ((1, 8, 16, 64), 5, 100, (70, 33, 33)),
        ((16, 1, 320), 18, 130, (3, 5, 1)),
        ((64, 16, 8, 16, 1, 1, 16, 16, 8, 1, 16), 33, 64, (48, 16, 16)),
    ],
)
def test_a_gemm_adds_a_delta_to_its_sums(
    ranks: tuple[int, ...], num_rows: int, k: int, widths: tuple[int, ...], how: LinearTiles
) -> None:
    weights, added = adapters_of(ranks, k, widths)
    rows = sort_kernel.sort_rows(some_adapters(num_rows, len(ranks)), len(ranks))
    x, w = torch.randn(num_rows, k, device=DEVICE), torch.randn(sum(widths), k, device=DEVICE)
    delta = with_nan_where_undefined(shrink(x, weights, rows))
    expected = x.double() @ w.double().T + exact(x, added, rows)
    y = gemm(x, w, Epilogue(delta=delta), how)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-4)
    stream = torch.randn_like(y)
    expected += stream
    gemm(x, w, Epilogue(residual=stream, delta=delta), how)
    torch.testing.assert_close(stream.double(), expected, rtol=1e-5, atol=1e-4)
    for row, adapter in enumerate(rows.adapters.tolist()):
        one = slice(row, row + 1)
        if row % 5:
            continue
        mine = torch.tensor([adapter], dtype=torch.int32, device=DEVICE)
        alone = sort_kernel.sort_rows(mine, len(ranks))
        own = delta._replace(v=delta.v[:, one].contiguous(), rows=alone)
        # To the bit on a GPU. The interpreter multiplies by numpy, whose order of additions depends
        # on a row's place in its tile on some processors.
        close = 0.0 if DEVICE.type == "cuda" else 1e-5
        found = gemm(x[one], w, Epilogue(delta=own), how)
        torch.testing.assert_close(found, y[one], rtol=close, atol=close)


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
@pytest.mark.parametrize("widths", [(70, 70), (33, 33), (140,)], ids=str)
def test_a_delta_is_added_before_an_activation(widths: tuple[int, ...], how: LinearTiles) -> None:
    """With an A of each half, or one of both."""
    weights, added = adapters_of((16, 8, 64), 100, widths)
    rows = sort_kernel.sort_rows(some_adapters(7, 3), 3)
    x, w = torch.randn(7, 100, device=DEVICE), torch.randn(sum(widths), 100, device=DEVICE) * 0.1
    delta = with_nan_where_undefined(shrink(x, weights, rows))
    gate, up = (x.double() @ w.double().T + exact(x, added, rows)).chunk(2, dim=1)
    out = gemm(x, w, GATED._replace(delta=delta), how)
    torch.testing.assert_close(out.double(), F.silu(gate) * up, rtol=1e-4, atol=1e-4)
