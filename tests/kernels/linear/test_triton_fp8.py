"""The FP8 kernel at awkward sizes: on a GPU if there is one, or else in the interpreter."""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
pytest.importorskip("triton", reason="Triton is not installed: scripts/tools/try_interpreter.sh")

from support.fp8_cases import assert_product, weights
from support.mailboxes import make_mailboxes

from minisgl.config import Activations
from minisgl.kernels.comm.one_shot import received_norm
from minisgl.kernels.elementwise import reference
from minisgl.kernels.elementwise.quantize import quantize
from minisgl.kernels.fp8_rows import room
from minisgl.kernels.linear.fp8 import fp8_tiles
from minisgl.kernels.linear.fp8.fp8_gemm import linear
from minisgl.kernels.linear.fp8.fp8_product import TensorCoreProduct, share_kernels
from minisgl.kernels.linear.fp8.fp8_tiles import allocate_workspace, choose_tiles
from minisgl.kernels.linear.tiles import LinearTiles, LinearWorkspace, split_k, workspace_size
from minisgl.kernels.residual import Residual
from minisgl.kernels.tuning import H200, UNTRIED

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HOW = LinearTiles(64, 16, 128, num_stages=2)
BLOCKS = [None, (128, 128), (64, 32), (16, 16), (1, 32)]
SHAPES = [(1, 64, 256), (3, 130, 100), (17, 70, 200), (65, 33, 70)]


def workspace(m: int, n: int, k: int, how: LinearTiles) -> LinearWorkspace:
    """Just as large as it must be, and with nothing in it that would do."""
    size, counters = workspace_size(m, n, k, how)
    return LinearWorkspace(
        partials=torch.full((size,), torch.nan, device=DEVICE),
        semaphores=torch.zeros(counters, dtype=torch.int32, device=DEVICE),
    )


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_linear(m: int, n: int, k: int, block: tuple[int, int] | None, splits: int) -> None:
    """What lies behind the rows of x is NaN."""
    w, bias = weights(n, k, block, DEVICE), torch.randn(n, device=DEVICE).half()
    x = quantize(torch.randn(m, k, device=DEVICE).half(), w.group)
    x.data.as_strided((room(m) - m, k), (k, 1), m * k).view(torch.uint8).fill_(0x7F)
    how = replace(HOW, block_k=w.group or 64, splits=splits)
    place = workspace(m, n, k, how)
    for _ in range(2):  # the second finds what the first left behind
        assert_product(linear(x, w, bias, workspace=place, tiles=how), x, w, bias)
    assert not place.semaphores.any()


@pytest.mark.parametrize("block", BLOCKS)
def test_the_tiles_in_use(block: tuple[int, int] | None) -> None:
    n, k = 40, 13 * (block[1] if block else 128)
    w = weights(n, k, block, DEVICE)
    place = allocate_workspace([(n, k, w.group)], DEVICE)
    for m in (1, 9, 70):
        x = quantize(torch.randn(m, k, device=DEVICE).half(), w.group)
        assert_product(linear(x, w, None, workspace=place), x, w)


@pytest.mark.parametrize("static", [False, True])
def test_blocks_of_weights_with_one_scale_a_row(static: bool) -> None:
    w, scale = weights(130, 300, (64, 32), DEVICE), torch.tensor([0.02], device=DEVICE)
    x = quantize(torch.randn(5, 300, device=DEVICE).half(), static=scale if static else None)
    assert_product(linear(x, w, None), x, w)


def test_nan_stays_in_its_row() -> None:
    for block in BLOCKS:
        w, x = weights(40, 256, block, DEVICE), torch.randn(3, 256, device=DEVICE).half()
        clean = linear(quantize(x, w.group), w, None)
        x[1, 200] = torch.nan
        y = linear(quantize(x, w.group), w, None)
        assert y[1].isnan().all()
        assert torch.equal(y[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize("m", [1, 18])
@pytest.mark.parametrize("block", [None, (64, 32)])
def test_what_is_sent_is_received(block: tuple[int, int] | None, m: int) -> None:
    boxes = make_mailboxes(2, 18, 70, 2, DEVICE)
    w = weights(70, 160, block, DEVICE)
    place, factor = allocate_workspace([(70, 160, w.group)], DEVICE), torch.ones(70, device=DEVICE)
    for _ in range(3):
        xs = [quantize(torch.randn(m, 160, device=DEVICE).half(), w.group) for _ in boxes]
        rows = torch.randn(m, 70, device=DEVICE).half()
        for x, box in zip(xs, boxes, strict=True):
            linear(x, w, None, mailbox=box, workspace=place)
        total = sum(linear(x, w, None, workspace=place).float() for x in xs)
        for box in boxes:
            _, found = received_norm(rows.clone(), factor.half(), 1e-6, box)
            torch.testing.assert_close(found, rows + total.half(), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("activations", [Activations.TOKEN, Activations.GROUP, Activations.STATIC])
def test_a_product_computes_the_steps_around_it(
    activations: Activations,
) -> None:
    """The same as each step by itself, but for sums in another order."""
    size, inner, block = 96, 64, (32, 32) if activations == Activations.GROUP else None
    static = activations == Activations.STATIC
    scale = torch.tensor([0.03], device=DEVICE) if static else None
    gate_up, down = (
        TensorCoreProduct(weights(n, k, block, DEVICE), activations=activations, input_scale=scale)
        for n, k in ((2 * inner, size), (size, inner))
    )
    share_kernels([gate_up, down])
    norm = SimpleNamespace(weight=torch.randn(size, device=DEVICE).half(), eps=1e-6)
    scales = (gate_up.weight.group, scale)
    for m in (0, 1, 5):
        x, delta = torch.randn(2, m, size, device=DEVICE).half()
        for residual in (Residual(x.clone()), Residual(x.clone(), delta)):
            total = x if residual.delta is None else x + delta
            normed = reference.rms_norm(total, norm.weight, norm.eps)
            expected = linear(quantize(normed, *scales), gate_up.weight, None)
            hidden, rows = gate_up.gated_mul_of_norm(residual, norm, down)
            assert torch.equal(rows, total)
            expected = quantize(reference.gated_mul(expected), *scales)
            after = down.add_to(hidden, rows)
            assert after.rows is rows and after.delta is not None
            torch.testing.assert_close(
                after.delta, linear(expected, down.weight, None), rtol=2e-2, atol=2e-2
            )


def test_no_rows() -> None:
    w = weights(32, 64, None, DEVICE)
    assert linear(quantize(torch.randn(0, 64, device=DEVICE).half()), w, None).shape == (0, 32)


OF_MODELS = [
    (7168, 5120), (5120, 5120), (34816, 5120), (5120, 17408), (10240, 5120), (5120, 8192),
    (51200, 5120), (5120, 25600), (6144, 4096), (28672, 4096), (1024, 3072), (130, 100),
]  # fmt: skip


@pytest.mark.parametrize("shared_bytes", [99 << 10, H200.shared_bytes])
@pytest.mark.parametrize("group", [None, 16, 64, 128])
@pytest.mark.parametrize(("n", "k"), OF_MODELS)
def test_tiles_fit_into_shared_memory_and_workspace(
    n: int, k: int, group: int | None, shared_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuning = replace(H200, shared_bytes=shared_bytes)
    monkeypatch.setattr(fp8_tiles, "tuning_of", lambda device: tuning)
    place = allocate_workspace([(n, k, group)], torch.device("meta"))
    for m in (1, 8, 9, 16, 17, 33, 64, 65, 128, 129, 200, 256, 300, 1000, 5000, 16384):
        how = choose_tiles(m, n, k, tuning, group=group)
        assert how.block_k == group or group is None
        tile = (how.block_n + how.block_m) * max(how.block_k, 32) + 4 * how.block_m
        assert how.num_stages >= 2 and tile * how.num_stages <= shared_bytes
        size, counters = workspace_size(m, n, k, how)
        assert size <= place.partials.numel() and counters <= place.semaphores.numel()
        alone = choose_tiles(m, n, k, tuning, group=group, may_split=False)
        assert split_k(k, alone)[0] == 1


@pytest.mark.parametrize("group", [None, 128])
def test_torch_multiplies_fp8_where_our_kernels_have_not_run(group: int | None) -> None:
    assert fp8_tiles.should_use(H200, 1, group)
    assert not fp8_tiles.should_use(UNTRIED, 1, group)
