"""Products that send rows to peers, and norms that receive them, one rank after the other: on a GPU
if there is one, else in the interpreter. gpu/ tests kernels that wait for each other.
"""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
pytest.importorskip("triton", reason="Triton is not installed: scripts/tools/try_interpreter.sh")

from support.mailboxes import make_mailboxes

from minisgl.kernels.comm.one_shot import received_norm
from minisgl.kernels.elementwise import reference
from minisgl.kernels.linear.dense_gemm import linear
from minisgl.kernels.linear.epilogue import Epilogue
from minisgl.kernels.linear.tiles import LinearTiles, LinearWorkspace

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HOW = {
    "stream": LinearTiles(64, 16, 32, num_stages=2),
    "split": LinearTiles(64, 16, 32, splits=3, num_stages=2),
    "burst": LinearTiles(16, 16, 256, groups=4, burst=True),
}
EPS = 1e-6
MAX_ROWS = 18


# The last of these are about to fill the lower half of a stamp, or all of it.
@pytest.mark.parametrize(
    ("num_ranks", "exchanges", "dtype"),
    [
        *((2, 0, dtype) for dtype in (torch.float32, torch.float16)),
        *((3, 0xFFFE, dtype) for dtype in (torch.float32, torch.float16)),
        *((2, 2**31 - 2, torch.float32), (8, 2**31 - 2, torch.float16)),
    ],
)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 112, 200), (17, 70, 96)])
@pytest.mark.parametrize("how", HOW)
def test_products_sent_to_peers_arrive_in_their_norms(
    how: str, num_ranks: int, dtype: torch.dtype, m: int, n: int, k: int, exchanges: int
) -> None:
    torch.manual_seed(m + n + num_ranks)
    boxes = make_mailboxes(num_ranks, MAX_ROWS, n, dtype.itemsize, DEVICE)
    for box in boxes:
        box.exchanges.fill_(exchanges)
    space = LinearWorkspace(
        partials=torch.full((MAX_ROWS * 1024,), torch.nan, device=DEVICE),
        semaphores=torch.zeros(64, dtype=torch.int32, device=DEVICE),
    )
    factor, bias = torch.rand(2, n, device=DEVICE).to(dtype)
    for _ in range(4):  # each half twice
        xs = torch.randn(num_ranks, m, k, device=DEVICE).to(dtype)
        weights = torch.randn(num_ranks, n, k, device=DEVICE).div(k**0.5).to(dtype)
        rows = torch.randn(m, n, device=DEVICE).to(dtype)
        total = torch.zeros(m, n, device=DEVICE)
        for box, x, weight in zip(boxes, xs, weights, strict=True):
            its_bias = None if box.rank else bias
            linear(
                x, weight, its_bias, epilogue=Epilogue(mailbox=box), workspace=space, tiles=HOW[how]
            )
            total += F.linear(x.float(), weight.float(), None if box.rank else bias.float())
        normed, added = reference.add_rms_norm(total.to(dtype), rows, factor, EPS)
        for box in boxes:
            found_norm, found_rows = received_norm(rows.clone(), factor, EPS, box)
            tolerance = 2e-5 if dtype == torch.float32 else 1e-2
            torch.testing.assert_close(found_rows, added, rtol=tolerance, atol=tolerance)
            torch.testing.assert_close(found_norm, normed, rtol=tolerance, atol=tolerance)
