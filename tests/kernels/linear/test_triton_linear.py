"""The linear kernels at awkward sizes: on a GPU if there is one, or else in the interpreter.

float32 leaves no doubt about which products were added; the sizes of models, half precision to its
last place and CUDA graphs are in tests/gpu.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
pytest.importorskip("triton", reason="Triton is not installed: scripts/tools/try_interpreter.sh")

from minisgl.kernels.elementwise import reference
from minisgl.kernels.linear import dense_gemm, dense_tiles
from minisgl.kernels.linear.dense_gemm import linear
from minisgl.kernels.linear.dense_tiles import MAX_ROWS, allocate_workspace, choose_tiles, smaller
from minisgl.kernels.linear.epilogue import GATED, Epilogue, FusedNorm
from minisgl.kernels.linear.tiles import LinearTiles, LinearWorkspace, workspace_size
from minisgl.kernels.tuning import H200, UNTRIED

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# float32 takes twice the room: tiles here are small ones.
STREAM = LinearTiles(64, 16, 32, num_stages=2)
HOW = {
    "stream": STREAM,
    "groups": replace(STREAM, block_n=16, block_k=64, groups=4),
    "split": replace(STREAM, splits=3),
    "split by many": replace(STREAM, block_n=16, block_k=16, splits=6),
    "burst": LinearTiles(16, 16, 256, groups=4, burst=True),
    "burst of three": LinearTiles(16, 8, 128, groups=4, burst=True),
    "small": LinearTiles(4, 2, 128, burst=True, small=True),
}
EPS = 1e-3


def workspace(m: int, n: int, k: int, how: LinearTiles, *, gated: bool = False) -> LinearWorkspace:
    """Just as large as it must be, and with nothing in it that would do."""
    room, counters = workspace_size(m, n, k, how, gated=gated)
    return LinearWorkspace(
        partials=torch.full((room,), torch.nan, device=DEVICE),
        semaphores=torch.zeros(counters, dtype=torch.int32, device=DEVICE),
    )


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 64, 256), (3, 70, 100), (17, 33, 250), (40, 1, 17)])
def test_linear_matches_torch(m: int, n: int, k: int, biased: bool, how: LinearTiles) -> None:
    x, weight = torch.randn(m, k, device=DEVICE), torch.randn(n, k, device=DEVICE)
    bias = torch.randn(n, device=DEVICE) if biased else None
    room = workspace(m, n, k, how)
    for _ in range(2):  # the second finds what the first left behind
        out = linear(x, weight, bias, workspace=room, tiles=how)
        torch.testing.assert_close(out, F.linear(x, weight, bias), rtol=1e-5, atol=1e-4)
    assert not room.semaphores.any()


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
@pytest.mark.parametrize(("m", "size", "k"), [(1, 64, 256), (3, 70, 100), (17, 33, 250)])
@pytest.mark.parametrize("gelu", [False, True])
def test_linear_gated_mul_matches_the_reference(
    m: int, size: int, k: int, gelu: bool, how: LinearTiles
) -> None:
    x, weight = torch.randn(m, k, device=DEVICE), torch.randn(2 * size, k, device=DEVICE)
    weight /= k**0.5
    room = workspace(m, 2 * size, k, how, gated=True)
    for _ in range(2):
        gated = GATED._replace(gelu=gelu)
        out = linear(x, weight, epilogue=gated, workspace=room, tiles=how)
        expected = reference.gated_mul(F.linear(x, weight), gelu)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    assert not room.semaphores.any()


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 64, 256), (3, 70, 100), (17, 33, 250), (40, 1, 17)])
def test_linear_add_matches_the_reference_and_returns_squares(
    m: int, n: int, k: int, biased: bool, how: LinearTiles
) -> None:
    x, weight = torch.randn(m, k, device=DEVICE), torch.randn(n, k, device=DEVICE)
    bias = torch.randn(n, device=DEVICE) if biased else None
    residual = torch.randn(m, n, device=DEVICE)
    expected, room = residual.clone(), workspace(m, n, k, how)
    for _ in range(2):
        squares = linear(
            x, weight, bias, epilogue=Epilogue(residual=residual), workspace=room, tiles=how
        )
        expected = expected + F.linear(x, weight, bias)
        torch.testing.assert_close(residual, expected, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(squares.sum(1), expected.square().sum(1), rtol=1e-4, atol=1e-4)


def test_linear_add_rounds_like_linear_then_add() -> None:
    """The product is rounded before it is added: to 4096, 4100 or 4104 and their like."""
    x, weight = torch.full((1, 16), 16, device=DEVICE).half(), torch.zeros(48, 16, device=DEVICE)
    weight[:, 0] = 256 + torch.arange(48, device=DEVICE) / 16
    residual = torch.full((1, 48), -4096.0, device=DEVICE).half()
    expected = residual + (x.double() @ weight.double().T).half()
    linear(x, weight.half(), epilogue=Epilogue(residual=residual), tiles=HOW["burst"])
    assert torch.equal(residual, expected)


def squares_of(x: torch.Tensor, num_parts: int) -> torch.Tensor:
    parts = x.square().tensor_split(num_parts, dim=1)
    return torch.stack([part.sum(1) for part in parts], dim=1)


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
@pytest.mark.parametrize(
    ("m", "n", "k", "num_parts"),
    [
        *[(1, 64, 256, 16), (3, 70, 100, 5), (17, 34, 250, 40), (40, 2, 17, 1)],
        *[(1, 64, 256, None), (3, 70, 100, None), (17, 34, 250, None), (40, 2, 17, None)],
    ],
)
def test_linear_of_a_norm_matches_the_reference(
    m: int, n: int, k: int, num_parts: int | None, how: LinearTiles
) -> None:
    """Rows of very different sizes, of which one is 0, and parts of wider ones."""
    wide = torch.randn(m, k + 8, device=DEVICE) * torch.arange(m, device=DEVICE)[:, None] * 0.1
    x = wide[:, :k]
    weight, bias = torch.randn(n, k, device=DEVICE) / k**0.5, torch.randn(n, device=DEVICE)
    squares = None if num_parts is None else squares_of(x, num_parts)
    norm = FusedNorm(torch.randn(k, device=DEVICE), EPS, squares)
    normed = reference.rms_norm(x, norm.weight, EPS)
    out = linear(x, weight, bias, norm=norm, workspace=workspace(m, n, k, how), tiles=how)
    torch.testing.assert_close(out, F.linear(normed, weight, bias), rtol=1e-5, atol=1e-4)
    room = workspace(m, n, k, how, gated=True)
    out = linear(x, weight, epilogue=GATED, norm=norm, workspace=room, tiles=how)
    expected = reference.gated_mul(F.linear(normed, weight))
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("how", [how for how in HOW.values() if how.burst and not how.small])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 64, 256), (3, 70, 100), (17, 34, 250)])
def test_the_stored_norm_is_the_one_that_was_multiplied(
    m: int, n: int, k: int, how: LinearTiles
) -> None:
    x, weight = torch.randn(m, k, device=DEVICE), torch.randn(n, k, device=DEVICE) / k**0.5
    norm = FusedNorm(torch.randn(k, device=DEVICE), EPS, squares_of(x, 7))
    room = torch.full((m + 1, k), torch.nan, device=DEVICE)
    out = linear(x, weight, norm=norm, normed=room[:m], tiles=how)
    expected = reference.rms_norm(x, norm.weight, EPS)
    torch.testing.assert_close(room[:m], expected, rtol=1e-5, atol=1e-5)
    assert room[m:].isnan().all()
    assert torch.equal(out, linear(x, weight, norm=norm, tiles=how))


@pytest.mark.parametrize("num_parts", [7, None])
@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_the_fused_norm_rounds_like_the_reference(how: LinearTiles, num_parts: int | None) -> None:
    """Seen through the identity: what is multiplied is the norm as by itself, to the bit."""
    m, k = 5, 250
    x, weight = torch.randn(m, k, device=DEVICE).half(), torch.randn(k, device=DEVICE).half()
    squares = None if num_parts is None else squares_of(x.float(), num_parts)
    norm = FusedNorm(weight, EPS, squares)
    identity = torch.eye(k, device=DEVICE).half()
    out = linear(x, identity, norm=norm, workspace=workspace(m, k, k, how), tiles=how)
    expected = reference.rms_norm(x, weight, EPS)
    assert (out == expected).float().mean() > 0.99  # one scale may be a unit off
    torch.testing.assert_close(out, expected, rtol=2e-3, atol=0)


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_linear_gated_mul_rounds_like_linear_then_gated_mul(how: LinearTiles) -> None:
    """Small integers, so that the products are exact, and the rounding behind them can be seen."""
    x = torch.randint(-2, 3, (5, 200), device=DEVICE).half() / 4
    weight = torch.randint(-2, 3, (2 * 40, 200), device=DEVICE).half() / 4
    room = workspace(5, 80, 200, how, gated=True)
    out = linear(x, weight, epilogue=GATED, workspace=room, tiles=how)
    expected = reference.gated_mul((x.double() @ weight.double().T).half())
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=0)


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_strided_rows_match_torch(how: LinearTiles) -> None:
    x, weight = torch.randn(5, 300, device=DEVICE)[:, 40:160], torch.randn(48, 120, device=DEVICE)
    out = linear(x, weight, workspace=workspace(5, 48, 120, how), tiles=how)
    torch.testing.assert_close(out, F.linear(x, weight), rtol=1e-5, atol=1e-4)


def test_empty_batches_give_empty_results() -> None:
    x, weight = torch.randn(0, 64, device=DEVICE), torch.randn(32, 64, device=DEVICE)
    assert linear(x, weight).shape == (0, 32)
    assert linear(x, weight, epilogue=GATED).shape == (0, 16)
    assert (
        len(linear(x, weight, epilogue=Epilogue(residual=torch.randn(0, 32, device=DEVICE)))) == 0
    )


SHAPES = [(4096, 1024), (1024, 2048), (151936, 1024), (7168, 5120), (5120, 17408), (130, 100)]


# Of compute capability 8.6, 8.0 and 9.0.
SHARED_BYTES = [99 << 10, 163 << 10, H200.shared_bytes]


@pytest.mark.parametrize("shared_bytes", SHARED_BYTES)
@pytest.mark.parametrize(("n", "k"), [*SHAPES, (1024, 3072), (1, 2048)])  # 1: a gate of experts
def test_the_allocated_workspace_is_large_enough_for_any_call(
    n: int, k: int, shared_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuning = replace(H200, shared_bytes=shared_bytes)
    monkeypatch.setattr(dense_tiles, "tuning_of", lambda device: tuning)
    room = allocate_workspace([(n, k)], 256, torch.device("meta"))
    for m in range(1, 257):
        for gated in (False, True) if n > 1 else (False,):
            how = choose_tiles(m, n, k, tuning, gated=gated)
            partials, semaphores = workspace_size(m, n, k, how, gated=gated)
            assert partials <= room.partials.numel() and semaphores <= room.semaphores.numel()
            how = choose_tiles(m, n, k, tuning, gated=gated, may_split=False)
            assert workspace_size(m, n, k, how, gated=gated) == (0, 0)


# n, k and whether gated, of Qwen3-0.6B, 8B, 14B and 32B, Llama-3.1-8B and Qwen3-30B-A3B
OF_MODELS = [
    (4096, 1024, False), (1024, 2048, False), (6144, 1024, True), (1024, 3072, False),
    (6144, 4096, False), (4096, 4096, False), (24576, 4096, True), (4096, 12288, False),
    (7168, 5120, False), (5120, 5120, False), (34816, 5120, True), (5120, 17408, False),
    (10240, 5120, False), (5120, 8192, False), (51200, 5120, True), (5120, 25600, False),
    (28672, 4096, True), (4096, 14336, False), (128256, 4096, False), (151936, 1024, False),
    (5120, 2048, False), (2048, 4096, False), (128, 2048, False),
]  # fmt: skip


def shared_bytes_of(how: LinearTiles, k: int, *, gated: bool) -> int:
    """What a program takes at most: a stream its tiles in flight, a burst all of W and one tile of
    x. What Triton 3.6 compiles for sm_80, sm_89, sm_90 and sm_120 takes no more, and for sm_100 up
    to 32 bytes more, for barriers."""
    rows_of_w = how.block_n * (2 if gated else 1)
    if how.burst:
        return (rows_of_w * -(-k // how.block_k) + how.block_m) * how.block_k * 2
    return (rows_of_w + how.block_m) * how.block_k * 2 * how.num_stages


@pytest.mark.parametrize("shared_bytes", SHARED_BYTES)
@pytest.mark.parametrize(("n", "k", "gated"), OF_MODELS)
def test_linear_tiles_fit_into_shared_memory(
    n: int, k: int, gated: bool, shared_bytes: int
) -> None:
    for m in range(1, MAX_ROWS + 1):
        for may_split in (False, True):
            tuning = replace(H200, shared_bytes=shared_bytes)
            how = choose_tiles(m, n, k, tuning, gated=gated, may_split=may_split)
            assert shared_bytes_of(how, k, gated=gated) <= shared_bytes
            assert how.num_stages >= 2  # one at work, one under way


def test_linear_tiles_on_an_h200_are_the_measured_ones() -> None:
    burst = LinearTiles(16, 16, 1024, groups=8, num_warps=8, burst=True)
    measured = {
        (8, 4096, 1024, False): replace(burst, block_m=8),
        (16, 1024, 3072, False): burst,
        (16, 6144, 4096, False): LinearTiles(64, 16, 64, splits=4, num_stages=6, prefetch=256),
        (32, 4096, 4096, False): LinearTiles(64, 32, 128, splits=2, num_stages=6, prefetch=256),
        (64, 1024, 3072, False): LinearTiles(64, 64, 128, splits=6, num_stages=6, prefetch=256),
        (128, 1024, 3072, False): LinearTiles(64, 64, 128, splits=4),
        (16, 6144, 1024, True): burst,
        (32, 6144, 1024, True): LinearTiles(64, 32, 128, splits=2, prefetch=256),
        (64, 34816, 5120, True): LinearTiles(64, 64, 128),
    }
    for (m, n, k, gated), how in measured.items():
        assert choose_tiles(m, n, k, H200, gated=gated) == how


@pytest.mark.parametrize(("m", "rows"), [(1, 1), (2, 2), (3, None)])
def test_one_or_two_rows_of_a_small_map_have_small_programs(m: int, rows: int | None) -> None:
    """A large map streams, as with more rows."""
    burst, stream = (choose_tiles(m, 1024, k, H200) for k in (1024, 65536))
    tiles = smaller(burst, m, H200)
    assert (tiles.block_m if tiles.small else None) == rows
    assert smaller(stream, m, H200) == stream and not stream.burst


@pytest.mark.parametrize("small_rows", [0, 2])
def test_a_norm_is_stored_whatever_the_number_of_rows(
    small_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dense_gemm, "tuning_of", lambda _: replace(H200, small_rows=small_rows))
    x, weight, norm_weight = (
        torch.randn(*size, device=DEVICE) for size in ((1, 64), (8, 64), (64,))
    )
    norm, left = FusedNorm(norm_weight, EPS, None), torch.empty_like(x)
    linear(x, weight, norm=norm, normed=left)
    torch.testing.assert_close(left, reference.rms_norm(x, norm_weight, EPS))


@pytest.mark.parametrize("m", [1, 16, 32])
def test_cublas_multiplies_where_our_kernels_have_not_run(m: int) -> None:
    assert dense_tiles.should_use(H200, m, 1024, 4096, gated=False)
    assert not dense_tiles.should_use(UNTRIED, m, 1024, 4096, gated=False)
    assert not dense_tiles.should_fuse_norm(UNTRIED, m, 1024, 1024, gated=False)
