"""The kernels for quantised weights and plain x: on a GPU if there is one, or else in the
interpreter."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
pytest.importorskip("triton", reason="Triton is not installed: scripts/tools/try_interpreter.sh")

from support.weight_only_cases import (
    GivenWords,
    nvfp4_weights,
    packed_int4,
    random_e4m3,
    random_int4,
    random_nvfp4,
)

from minisgl.kernels.elementwise import reference
from minisgl.kernels.linear.epilogue import GATED, Epilogue, FusedNorm
from minisgl.kernels.linear.tiles import LinearTiles, LinearWorkspace, workspace_size
from minisgl.kernels.linear.weight_only import weight_only_product
from minisgl.kernels.linear.weight_only.weight_only_gemm import dequantize, linear
from minisgl.kernels.linear.weight_only.weight_only_tiles import allocate_workspace, choose_tiles
from minisgl.kernels.linear.weight_only.weights import WeightWords, int4_words, values
from minisgl.kernels.tuning import H200

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.float16
Make = Callable[..., tuple[WeightWords, Tensor]]
# How the weights are made, and a k that leaves an odd number of groups or tiles somewhere.
KINDS: dict[str, tuple[Make, int]] = {
    "int4, 128": (partial(random_int4, group=128, symmetric=True, device=DEVICE), 512),
    "int4, 128, odd": (partial(random_int4, group=128, symmetric=True, device=DEVICE), 384),
    "int4, 128, zeros": (partial(random_int4, group=128, symmetric=False, device=DEVICE), 384),
    "int4, 64": (partial(random_int4, group=64, symmetric=True, device=DEVICE), 384),
    "int4, 64, odd": (partial(random_int4, group=64, symmetric=True, device=DEVICE), 192),
    "int4, 64, zeros": (partial(random_int4, group=64, symmetric=False, device=DEVICE), 192),
    "int4, 32": (partial(random_int4, group=32, symmetric=True, device=DEVICE), 192),
    "int4, 32, zeros": (partial(random_int4, group=32, symmetric=False, device=DEVICE), 192),
    "int4, 256, zeros": (partial(random_int4, group=256, symmetric=False, device=DEVICE), 512),
    "e4m3, rows": (partial(random_e4m3, block=None, device=DEVICE), 384),
    "e4m3, rows, 32": (partial(random_e4m3, block=None, device=DEVICE), 160),
    "e4m3, blocks": (partial(random_e4m3, block=(128, 128), device=DEVICE), 512),
    "e4m3, small blocks": (partial(random_e4m3, block=(16, 32), device=DEVICE), 224),
    "nvfp4": (partial(random_nvfp4, device=DEVICE), 384),
    "nvfp4, odd": (partial(random_nvfp4, device=DEVICE), 192),
}
EPS = 1e-3


def tiles(weight: WeightWords, splits: int = 1) -> LinearTiles:
    block_k = weight.span * 2 if weight.k % (weight.span * 2) == 0 else weight.span
    return LinearTiles(16, 16, block_k, splits=splits, num_stages=2)


def workspace(m: int, n: int, k: int, how: LinearTiles, *, gated: bool = False) -> LinearWorkspace:
    """Just as large as it must be, and with nothing in it that would do."""
    room, counters = workspace_size(m, n, k, how, gated=gated)
    return LinearWorkspace(
        partials=torch.full((room,), torch.nan, device=DEVICE),
        semaphores=torch.zeros(counters, dtype=torch.int32, device=DEVICE),
    )


def assert_rounded(out: Tensor, exact: Tensor) -> None:
    """One rounding away from the exact result, but for the error of the float32 sums."""
    error = (out.double() - exact).abs()
    allowed = exact.abs() * torch.finfo(out.dtype).eps * 0.51 + exact.abs().mean() * 1e-4
    assert bool((error <= allowed).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_values(kind: str, dtype: torch.dtype) -> None:
    make, k = KINDS[kind]
    weight, exact = make(37, k, dtype=dtype)
    assert torch.equal(values(weight, dtype).double(), exact)
    assert (weight.n, weight.k) == (37, k)


@pytest.mark.parametrize(
    ("scale", "centred"),
    [(1e-20, True), (1000.0, True), (-1000.0, True), (2048.0, False), (-2048.0, False)],
)
def test_symmetric_values_of_any_magnitude(scale: float, centred: bool) -> None:
    q = torch.arange(0, 16, device=DEVICE).repeat(3, 8)
    scales = torch.full((1, 3), scale, device=DEVICE).bfloat16()
    weight = int4_words(packed_int4(q), scales, None, torch.bfloat16)
    expected = ((q - 8).double() * scales.double().T).bfloat16()
    assert weight.centred is centred
    assert torch.equal(values(weight, torch.bfloat16), expected)


@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_dequantize(kind: str, dtype: torch.dtype) -> None:
    """To the bit, and nothing beyond."""
    make, k = KINDS[kind]
    weight, exact = make(19, k, dtype=dtype)
    room = torch.full((19 * k + 5,), torch.nan, dtype=dtype, device=DEVICE)
    assert torch.equal(dequantize(weight, room).double(), exact)
    assert room[19 * k :].isnan().all()


@pytest.mark.parametrize(("kind", "splits"), [*((kind, 3) for kind in KINDS), ("int4, 128", 1)])
def test_linear(kind: str, splits: int) -> None:
    make, k = KINDS[kind]
    m, n = 17, 20
    weight, exact = make(n, k, dtype=HALF)
    x = torch.randn(m, k + 8, device=DEVICE).to(HALF)[:, 8:]
    bias = torch.randn(n, device=DEVICE).to(HALF)
    how = tiles(weight, splits)
    room = workspace(m, n, k, how)
    for _ in range(2):  # the second finds what the first left behind
        out = linear(x, weight, bias, workspace=room, tiles=how)
        assert_rounded(out, x.double() @ exact.T + bias.double())
    assert not room.semaphores.any()


@pytest.mark.parametrize("kind", KINDS)
def test_each_weight_meets_its_column(kind: str) -> None:
    """Seen through rows of x with a single one: the columns of W, to the bit."""
    make, k = KINDS[kind]
    weight, exact = make(16, k, dtype=HALF)
    how = replace(tiles(weight), block_m=256)
    identity = torch.eye(k, device=DEVICE, dtype=HALF)
    out = linear(identity, weight, workspace=workspace(k, 16, k, how), tiles=how)
    assert torch.equal(out.T.double(), exact)


@pytest.mark.parametrize(
    ("normed", "splits", "gelu"), [(False, 2, False), (True, 1, False), (False, 2, True)]
)
@pytest.mark.parametrize(
    "kind", ["int4, 128", "int4, 32, zeros", "e4m3, rows", "e4m3, blocks", "nvfp4"]
)
def test_linear_gated_mul(kind: str, normed: bool, splits: int, gelu: bool) -> None:
    make, k = KINDS[kind]
    m, size = 5, 20
    weight, exact = make(2 * size, k, dtype=HALF)
    x = torch.randn(m, k, device=DEVICE).to(HALF)
    squares = torch.stack([part.float().square().sum(1) for part in x.split(50, dim=1)], dim=1)
    norm = FusedNorm(torch.randn(k, device=DEVICE).to(HALF), EPS, squares) if normed else None
    how = tiles(weight, splits)
    room = workspace(m, 2 * size, k, how, gated=True)
    gated = GATED._replace(gelu=gelu)
    out = linear(x, weight, epilogue=gated, norm=norm, workspace=room, tiles=how)
    if norm is not None:
        x = reference.rms_norm(x, norm.weight, EPS)
    expected = reference.gated_mul((x.double() @ exact.T).to(HALF), gelu)
    torch.testing.assert_close(out, expected, rtol=4e-3, atol=1e-3)


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("kind", ["int4, 128", "int4, 64, zeros", "e4m3, rows", "nvfp4"])
def test_linear_add(kind: str, splits: int) -> None:
    make, k = KINDS[kind]
    for m, n in ((17, 20),):
        weight, exact = make(n, k, dtype=HALF)
        x, residual = torch.randn(m, k, device=DEVICE).to(HALF), torch.randn(m, n).to(HALF)
        residual, how = residual.to(DEVICE), tiles(weight, splits)
        expected = residual.double() + (x.double() @ exact.T).to(HALF).double()
        room = workspace(m, n, k, how)
        squares = linear(x, weight, epilogue=Epilogue(residual=residual), workspace=room, tiles=how)
        torch.testing.assert_close(residual.double(), expected, rtol=2e-3, atol=2e-3)
        wide = residual.float().square().sum(1)
        torch.testing.assert_close(squares.sum(1), wide, rtol=1e-4, atol=1e-4)


def test_no_rows() -> None:
    weight, _ = random_int4(32, 128, 128, HALF, symmetric=True, device=DEVICE)
    x = torch.empty(0, 128, device=DEVICE, dtype=HALF)
    assert linear(x, weight).shape == (0, 32)
    assert linear(x, weight, epilogue=GATED).shape == (0, 16)
    assert (
        len(
            linear(
                x, weight, epilogue=Epilogue(residual=torch.empty(0, 32, device=DEVICE, dtype=HALF))
            )
        )
        == 0
    )


def test_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows and many take other kernels, with the same W."""
    monkeypatch.setattr(weight_only_product, "runs_triton", lambda device: True)
    monkeypatch.setattr(
        weight_only_product, "tuning_of", lambda device: replace(H200, weight_only_rows=32)
    )
    words, exact = random_int4(64, 256, 128, HALF, symmetric=False, device=DEVICE)
    product = GivenWords(words, HALF)
    weight_only_product.share_kernels([product], HALF, DEVICE)
    assert product.kernels is not None
    x = torch.randn(33, 256, device=DEVICE).to(HALF)
    for m in (0, 1, 32, 33):
        if m:
            assert_rounded(product(x[:m]), x[:m].double() @ exact.T)
        assert product(x[:m]).shape == (m, 64)
    added = product.add_to(x[:5], torch.zeros(5, 64, device=DEVICE, dtype=HALF))
    assert_rounded(added.rows, x[:5].double() @ exact.T)
    assert added.squares is not None and len(added.squares) == 5


def test_a_product_of_nvfp4(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose words are the weights themselves."""
    monkeypatch.setattr(weight_only_product, "runs_triton", lambda device: True)
    monkeypatch.setattr(
        weight_only_product, "tuning_of", lambda device: replace(H200, weight_only_rows=2)
    )
    weight, exact = nvfp4_weights(40, 128, device=DEVICE, is_tiled=False)
    product = weight_only_product.WeightOnlyNvfp4Product(weight)
    assert product.span == product.make_words(HALF).span == 128
    weight_only_product.share_kernels([product], HALF, DEVICE)
    product.prepare(HALF)
    x = torch.randn(3, 128, device=DEVICE).to(HALF)
    for m in (1, 3):
        assert_rounded(product(x[:m]), x[:m].double() @ exact.T)
    weight.factor.mul_(2)  # as a trainer may fill them again
    product.refresh()
    assert_rounded(product(x), x.double() @ exact.T * 2)
    dense = product.keep_dense_copy(HALF)
    assert torch.equal(dense.weight.double(), exact * 2)


# n, k of Qwen3-14B and 32B, of parts of them, and of small models
OF_MODELS = [
    (7168, 5120), (5120, 5120), (34816, 5120), (5120, 17408), (10240, 5120), (5120, 8192),
    (51200, 5120), (5120, 25600), (5120, 4352), (8704, 5120), (1152, 896), (896, 4864), (130, 192),
]  # fmt: skip
# Of compute capability 8.6, 8.0 and 9.0.
SHARED_BYTES = [99 << 10, 163 << 10, H200.shared_bytes]


@pytest.mark.parametrize("shared_bytes", SHARED_BYTES)
@pytest.mark.parametrize(("bits", "span"), [(4, 64), (4, 128), (8, 32), (8, 128)])
@pytest.mark.parametrize(("n", "k"), OF_MODELS)
def test_tiles_fit(
    n: int, k: int, bits: int, span: int, shared_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if k % span:
        return
    tuning = replace(H200, shared_bytes=shared_bytes)
    monkeypatch.setattr(
        "minisgl.kernels.linear.weight_only.weight_only_tiles.tuning_of", lambda device: tuning
    )
    room = allocate_workspace([(n, k, span, bits)], torch.device("meta"))
    for m in (1, 8, 9, 16, 17, 33, 64, 65, 127, 129, 256, 257, 1000, tuning.weight_only_rows):
        for gated in (False, True):
            for may_split in (False, True):
                how = choose_tiles(m, n, k, span, bits, tuning, gated=gated, may_split=may_split)
                assert k % how.block_k == 0 and how.block_k % span == 0
                rows_of_w = how.block_n * (2 if gated else 1)
                stage = (rows_of_w * bits // 8 + how.block_m * 2) * how.block_k
                assert stage * how.num_stages <= shared_bytes
                assert how.num_stages >= 2
            partials, semaphores = workspace_size(m, n, k, how, gated=gated)
            assert partials <= room.partials.numel() and semaphores <= room.semaphores.numel()
