"""The linear kernels at the sizes of real models, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from minisgl.kernels.elementwise import reference
from minisgl.kernels.linear.dense_gemm import linear
from minisgl.kernels.linear.dense_tiles import allocate_workspace, choose_tiles
from minisgl.kernels.linear.epilogue import GATED, PLAIN, Epilogue, FusedNorm
from minisgl.kernels.linear.tiles import LinearWorkspace
from minisgl.kernels.tuning import tuning_of

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)
SHAPES = [  # n, k
    (4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151936, 1024),
    (7168, 5120), (5120, 5120), (34816, 5120), (5120, 17408),
    (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096),
    (1000, 896), (37, 100),
]  # fmt: skip
GATED_SHAPES = [(6144, 1024), (34816, 5120), (28672, 4096), (9728, 896), (74, 100)]
ROWS = [1, 2, 5, 8, 16, 17, 32, 64, 100, 128, 256]
DTYPES = [torch.bfloat16, torch.float16]


@pytest.fixture(scope="module")
def workspace() -> LinearWorkspace:
    others = [(2048, 3072), (20480, 5120), (5120, 10240), (30720, 5120), (5120, 15360)]
    return allocate_workspace([*SHAPES, *GATED_SHAPES, *others], 256, GPU)


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device=GPU, dtype=dtype)


def exact(x: Tensor, weight: Tensor) -> Tensor:
    """Some 4096 columns of the product at a time: float64 takes room."""
    return torch.cat([x.double() @ part.double().T for part in weight.split(4096)], dim=1)


def assert_rounded(out: Tensor, expected: Tensor) -> None:
    """One rounding away from the exact result, but for the error of the float32 sums."""
    error = (out.double() - expected).abs()
    allowed = expected.abs() * torch.finfo(out.dtype).eps * 0.51 + expected.abs().mean() * 3e-4
    assert bool((error <= allowed).all())


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_linear_matches_float64(n: int, k: int, workspace: LinearWorkspace) -> None:
    for dtype in DTYPES:
        weight = random(n, k, dtype=dtype)
        every_x = random(max(ROWS), k, dtype=dtype)
        expected = exact(every_x, weight)
        for m in ROWS:
            x = every_x[:m]
            split = linear(x, weight, workspace=workspace)
            assert split.shape == (m, n)
            assert_rounded(split, expected[:m])
            assert_rounded(linear(x, weight), expected[:m])
            assert torch.equal(split, linear(x, weight, workspace=workspace, pdl=False))
    assert not workspace.semaphores.any()


def test_the_tuning_has_the_shared_memory_size_of_the_device() -> None:
    expected = {(8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227, (10, 0): 227, (12, 0): 99}
    assert tuning_of(GPU).shared_bytes == expected[torch.cuda.get_device_capability(GPU)] << 10
    assert tuning_of(torch.device("cuda")).shared_bytes == tuning_of(GPU).shared_bytes


@pytest.mark.parametrize("shared_bytes", [99 << 10, 163 << 10])
@pytest.mark.parametrize(("n", "k"), [(1024, 3072), (4096, 4096), (7168, 5120)])
def test_tiles_for_less_shared_memory_match_float64(
    n: int, k: int, shared_bytes: int, workspace: LinearWorkspace
) -> None:
    """Tiles for GPUs with less shared memory."""
    smaller = replace(tuning_of(GPU), shared_bytes=shared_bytes)
    x, weight = random(max(ROWS), k, dtype=torch.bfloat16), random(n, k, dtype=torch.bfloat16)
    expected = exact(x, weight)
    for m in ROWS:
        how = choose_tiles(m, n, k, smaller)
        assert_rounded(linear(x[:m], weight, workspace=workspace, tiles=how), expected[:m])


@pytest.mark.parametrize("m", [1, 3, 64, 256])
def test_linear_with_a_bias_matches_float64(m: int, workspace: LinearWorkspace) -> None:
    x, weight = random(m, 5120, dtype=torch.bfloat16), random(7168, 5120, dtype=torch.bfloat16)
    bias = random(7168, dtype=torch.bfloat16) * 100
    expected = exact(x, weight) + bias.double()
    assert_rounded(linear(x, weight, bias, workspace=workspace), expected)
    assert_rounded(linear(x, weight, bias), expected)


@pytest.mark.parametrize(("n", "k"), GATED_SHAPES)
def test_linear_gated_mul_matches_linear_then_gated_mul(
    n: int, k: int, workspace: LinearWorkspace
) -> None:
    """As linear and gated_mul one after the other, but where sums in another order fell on the
    other side of a border between two roundings."""
    for dtype in DTYPES:
        weight = random(n, k, dtype=dtype) / k**0.5
        every_x = random(max(ROWS), k, dtype=dtype)
        for m in ROWS:
            x = every_x[:m]
            product = linear(x, weight, workspace=workspace)
            for room in (workspace, None):
                out = linear(x, weight, epilogue=GATED, workspace=room)
                expected = reference.gated_mul(product)
                differ = (out != expected).double().mean()
                assert differ < 0.1 + 1.01 / out.numel()
                error = (out.double() - expected.double()).norm() / expected.double().norm()
                assert error < torch.finfo(dtype).eps / 2


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_linear_add_equals_linear_then_add_bitwise(
    n: int, k: int, workspace: LinearWorkspace
) -> None:
    """Bitwise equal to linear and then the sum."""
    for dtype in DTYPES:
        weight, bias = random(n, k, dtype=dtype) / k**0.5, random(n, dtype=dtype)
        for m in ROWS:
            x, residual = random(m, k, dtype=dtype), random(m, n, dtype=dtype)
            for room in (workspace, None):
                for b in (bias, None):
                    expected = residual + linear(x, weight, b, workspace=room)
                    squares = linear(
                        x, weight, b, epilogue=Epilogue(residual=residual), workspace=room
                    )
                    assert torch.equal(residual, expected)
                    exact_sums = expected.double().square().sum(1)
                    torch.testing.assert_close(
                        squares.double().sum(1), exact_sums, rtol=1e-5, atol=0
                    )
    assert not workspace.semaphores.any()


def squares_of(x: Tensor, num_parts: int) -> Tensor:
    parts = x.float().square().tensor_split(num_parts, dim=1)
    return torch.stack([part.sum(1) for part in parts], dim=1)


@pytest.mark.parametrize("num_parts", [1, 37, 64, 80, None])
@pytest.mark.parametrize(
    ("n", "k"), [*GATED_SHAPES, (4096, 1024), (2048, 3072), (7168, 5120), (5120, 768)]
)
def test_linear_of_a_norm_matches_norm_then_linear(
    n: int, k: int, num_parts: int | None, workspace: LinearWorkspace
) -> None:
    """As the norm and the product one after the other, but where the scale of a row is rounded
    differently."""
    for dtype in DTYPES:
        weight, norm_weight = random(n, k, dtype=dtype) / k**0.5, random(k, dtype=dtype)
        for m in ROWS:
            x = random(m, k, dtype=dtype) * torch.rand(m, 1, device=GPU).to(dtype)
            normed = reference.rms_norm(x, norm_weight, 1e-6)
            squares = None if num_parts is None else squares_of(x, num_parts)
            norm = FusedNorm(norm_weight, 1e-6, squares)
            for room in (workspace, None):
                for epilogue in (PLAIN, GATED):
                    out = linear(x, weight, epilogue=epilogue, norm=norm, workspace=room)
                    expected = linear(normed, weight, epilogue=epilogue, workspace=room)
                    # A scale that is off by its last bit may round all elements of a row that
                    # share a mantissa the other way, and so change a third of the row's product.
                    assert (out != expected).double().mean() < 0.1 + 0.5 / m
                    error = (out.double() - expected.double()).norm() / expected.double().norm()
                    assert error < torch.finfo(dtype).eps / 2
    assert not workspace.semaphores.any()


@pytest.mark.parametrize(("n", "k"), [(128, 2048), (60, 1024), (37, 100)])
def test_the_stored_norm_is_the_one_that_was_multiplied(n: int, k: int) -> None:
    """It is the one that was multiplied, and a product that leaves it is the same."""
    for dtype in DTYPES:
        weight, norm_weight = random(n, k, dtype=dtype) / k**0.5, random(k, dtype=dtype)
        for m in (3, 5, 8, 16):
            x = random(m, k, dtype=dtype)
            norm, left = FusedNorm(norm_weight, 1e-6, squares_of(x, 256)), torch.empty_like(x)
            out = linear(x, weight, norm=norm, normed=left)
            assert torch.equal(out, linear(x, weight, norm=norm))
            assert torch.equal(out, linear(left, weight))
            expected = reference.rms_norm(x, norm_weight, 1e-6)
            assert (left != expected).double().mean() < 0.1


@pytest.mark.parametrize("m", [1, 8, 16, 32, 64])
@pytest.mark.parametrize("size", [1024, 5120])
def test_overlapping_captured_layers_equal_separate_launches_bitwise(
    size: int, m: int, workspace: LinearWorkspace
) -> None:
    """Launches that overlap give to the bit what they give one at a time."""
    dtype, num_layers = torch.bfloat16, 6
    shapes = [(4 * size, size), (size, 2 * size), (6 * size, size), (size, 3 * size)]
    weights = [random(n, k, dtype=dtype) / k**0.5 for n, k in shapes]
    norm_weight = random(size, dtype=dtype)

    def run(x: Tensor, squares: Tensor, *, calm: bool) -> Tensor:
        def wait() -> None:
            if calm:
                torch.cuda.synchronize()

        residual = x.clone()
        wait()
        for _ in range(num_layers):
            norm = FusedNorm(norm_weight, 1e-6, squares)
            qkv = linear(residual, weights[0], norm=norm, workspace=workspace)
            wait()
            q = qkv[:, : 2 * size]
            squares = linear(
                q, weights[1], epilogue=Epilogue(residual=residual), workspace=workspace
            )
            wait()
            norm = FusedNorm(norm_weight, 1e-6, squares)
            hidden = linear(residual, weights[2], epilogue=GATED, norm=norm, workspace=workspace)
            wait()
            squares = linear(
                hidden, weights[3], epilogue=Epilogue(residual=residual), workspace=workspace
            )
            wait()
        return residual

    def compose(residual: Tensor) -> Tensor:
        for _ in range(num_layers):
            hidden = reference.rms_norm(residual, norm_weight, 1e-6)
            q = F.linear(hidden, weights[0])[:, : 2 * size]
            residual = residual + F.linear(q, weights[1])
            hidden = reference.rms_norm(residual, norm_weight, 1e-6)
            hidden = reference.gated_mul(F.linear(hidden, weights[2]))
            residual = residual + F.linear(hidden, weights[3])
        return residual

    x = random(m, size, dtype=dtype)
    squares = squares_of(x, 16)
    run(x, squares, calm=True)  # compiled before it is captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(x, squares, calm=False)
    for _ in range(20):
        x.normal_()
        squares.copy_(squares_of(x, 16))
        expected = run(x, squares, calm=True)
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, expected)
        assert torch.equal(run(x, squares, calm=False), expected)
    error = (out.double() - compose(x).double()).norm() / out.double().norm()
    assert error < 0.05


@pytest.mark.parametrize("m", [1, 8, 32, 256])
def test_captured_products_that_share_a_workspace_equal_separate_launches(
    m: int, workspace: LinearWorkspace
) -> None:
    """Launches that overlap, each reading what the last wrote and sharing the workspace."""
    dtype = torch.bfloat16
    shapes = [(4096, 1024), (1024, 4096), (6144, 1024), (1024, 3072), (7168, 1024), (1024, 7168)]
    weights = [random(n, k, dtype=dtype) / k**0.5 for n, k in shapes]

    def chain(x: Tensor, pdl: bool) -> Tensor:
        for weight in weights:
            if weight.shape == (6144, 1024):
                x = linear(x, weight, epilogue=GATED, workspace=workspace, pdl=pdl)
            else:
                x = linear(x, weight, workspace=workspace, pdl=pdl)
        return x

    x = random(m, 1024, dtype=dtype)
    chain(x, True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(chain(x, True), True)
    for _ in range(20):
        x.normal_()
        expected = chain(chain(x, False), False)
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, expected)
    rough = x.clone()
    for weight in [*weights, *weights]:
        rough = F.linear(rough, weight)
        if weight.shape == (6144, 1024):
            rough = reference.gated_mul(rough)
    error = (out.double() - rough.double()).norm() / rough.double().norm()
    assert error < 0.05


def test_split_k_products_are_bitwise_deterministic(workspace: LinearWorkspace) -> None:
    for n, k in [(1024, 2048), (5120, 5120), (5120, 17408)]:
        for m in (1, 32, 256):
            x, weight = random(m, k, dtype=torch.bfloat16), random(n, k, dtype=torch.bfloat16)
            first = linear(x, weight, workspace=workspace)
            for _ in range(10):
                assert torch.equal(linear(x, weight, workspace=workspace), first)
