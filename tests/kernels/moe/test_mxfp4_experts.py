"""The kernels for experts in MXFP4 and NVFP4 at awkward sizes: on a GPU if there is one, or else in
the interpreter."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from inspect import getsource
from itertools import product
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
pytest.importorskip("triton", reason="Triton is not installed: scripts/tools/try_interpreter.sh")

from support.mxfp4_expert_cases import check, random_experts, random_nvfp4_experts

from minisgl.kernels.linear.e2m1 import E2M1, pack_e2m1, tiled
from minisgl.kernels.linear.nvfp4 import pack_scales
from minisgl.kernels.linear.weight_only import unpacking_e2m1
from minisgl.kernels.moe.fused_experts import fused_experts
from minisgl.kernels.moe.mxfp4_experts import HALVED_MEMBERS
from minisgl.kernels.moe.reference import ByRouter, Chosen, Routing
from minisgl.kernels.tuning import ExpertTiles, ManyTiles

pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(
    ("num_rows", "num_experts", "top_k", "hidden_size", "size", "dtype", "plain", "make"),
    [
        (1, 4, 4, 64, 128, torch.float32, False, random_experts),
        (3, 4, 2, 192, 64, torch.float16, False, random_experts),
        (20, 3, 2, 64, 192, torch.float32, True, random_experts),
        (1, 4, 4, 64, 128, torch.float32, True, random_nvfp4_experts),
        (3, 4, 2, 192, 64, torch.float16, False, random_nvfp4_experts),
    ],
)
def test_fused_experts_match_the_reference(
    num_rows: int,
    num_experts: int,
    top_k: int,
    hidden_size: int,
    size: int,
    dtype: torch.dtype,
    plain: bool,
    make: Callable[..., Any],
) -> None:
    check(
        num_rows,
        num_experts,
        top_k,
        hidden_size,
        size,
        dtype=dtype,
        device=DEVICE,
        pdl=False,
        plain=plain,
        make=make,
    )


def test_pairs_that_fill_half_of_a_tile() -> None:
    """And one more, also after a whole tile."""
    half = HALVED_MEMBERS // 2
    counts = torch.tensor([half, half + 1, 3 * half, 3 * half + 1])
    num_experts, num_rows = len(counts), int(counts.sum())
    experts = random_experts(num_experts, 64, 64, dtype=torch.float32, device=DEVICE)
    chosen = torch.arange(num_experts, dtype=torch.int32).repeat_interleave(counts)
    weights = torch.ones(num_rows, 1, device=DEVICE)
    choice = Chosen(chosen[torch.randperm(num_rows)][:, None].to(DEVICE), weights)
    x = torch.randn(num_rows, 64, device=DEVICE)
    tiles = ExpertTiles(64, 2 * half, 64, num_warps=4, num_stages=1)
    out, _ = fused_experts(x, choice, experts, tiles=ManyTiles(tiles, tiles), pdl=False)
    torch.testing.assert_close(out, experts.reference(x, choice), rtol=1e-4, atol=1e-4)


def test_a_nan_row_harms_no_other_row() -> None:
    experts = random_experts(4, 64, 64, dtype=torch.float32, device=DEVICE)
    routing = Routing(2, normalize=True)
    x, logits = torch.randn(3, 64, device=DEVICE), torch.randn(3, 4, device=DEVICE)
    clean, _ = fused_experts(x, ByRouter(logits, routing), experts, pdl=False)
    x[1, 40], logits[2] = torch.nan, torch.nan
    out, _ = fused_experts(x, ByRouter(logits, routing), experts, pdl=False)
    assert torch.equal(out[0], clean[0]) and bool(out[1:].isnan().all())


def test_no_rows() -> None:
    experts = random_experts(4, 64, 64, dtype=torch.float32, device=DEVICE)
    x, logits = torch.randn(0, 64, device=DEVICE), torch.randn(0, 4, device=DEVICE)
    out, _ = fused_experts(x, ByRouter(logits, Routing(2, normalize=True)), experts, pdl=False)
    assert out.shape == (0, 64)


@pytest.mark.parametrize(("group", "left_out"), [(32, 64), (16, 104)])
def test_the_instructions_for_a_gpu_make_every_number(group: int, left_out: int) -> None:
    """Those of two words at a time, which the interpreter cannot run, carried out one by one."""
    [numbers] = ptx_of(unpacking_e2m1.e2m1_planes)
    factors = ptx_of(unpacking_e2m1._factors)[group == 16]
    codes = (torch.arange(16 * 64).reshape(16, 64) * 5 // 3 % 16).to(torch.uint8)
    assert {code for row in codes.tolist() for code in row} == set(range(16))
    if group == 32:
        scale = 2.0 ** torch.arange(-68, 66)[torch.arange(32) * 4].view(16, 2)
        packed = scale.bfloat16().view(torch.int32)[:, 0]
    else:
        bits = (torch.arange(64) * 2).to(torch.uint8).view(16, 4)  # zero, and some subnormal
        scale = bits.view(torch.float8_e4m3fn).double()
        packed = pack_scales(scale)[0]
    wanted = codes.double().apply_(lambda code: (*E2M1, *(-one for one in E2M1))[int(code)])
    wanted *= scale.double().repeat_interleave(group, dim=1)
    threads = tiled(pack_e2m1(codes)).view(torch.int32).view(32, 4).tolist()
    for thread, pairs in enumerate(threads):
        for pair, word in enumerate(pairs):
            row = thread // 4 + 8 * (pair // 2)
            first, last = run_ptx(factors, {"$2": int(packed[row])})[:2]
            found = run_ptx(numbers, {"$4": word, "$5": first, "$7": last})
            for quarter, half in product(range(4), range(2)):
                column = 16 * quarter + thread % 4 * 4 + pair % 2 * 2 + half
                number = halves(found[quarter])[half] * 2.0**left_out
                assert number == float(wanted[row, column]), (row, column)


def ptx_of(function: Any) -> list[str]:
    return re.findall(r'"""\{(.*?)\}"""', getsource(function.fn), re.DOTALL)


def halves(word: int) -> list[float]:
    """The bfloat16 numbers in a register."""
    both = torch.tensor([word & 0xFFFF, word >> 16 & 0xFFFF], dtype=torch.int32)
    return both.to(torch.int16).view(torch.bfloat16).double().tolist()


def run_ptx(text: str, given: dict[str, int]) -> list[int]:
    """The first four registers, or as many as are written."""
    registers = {name: value & 0xFFFFFFFF for name, value in given.items()}
    for line in filter(None, map(str.strip, text.split(";"))):
        name, _, rest = line.partition(" ")
        if name == ".reg":
            continue
        if pair := re.fullmatch(r"\{(\w+), (\w+)\}, (\S+)", rest):
            registers[pair[1]] = registers[pair[3]] & 0xFFFF
            registers[pair[2]] = registers[pair[3]] >> 16
            continue
        if pair := re.fullmatch(r"(\w+), \{(\w+), (\w+)\}", rest):
            registers[pair[1]] = registers[pair[2]] | registers[pair[3]] << 16
            continue
        target, *operands = (operand.strip() for operand in rest.split(","))
        a, *more = [registers[one] if one in registers else int(one, 0) for one in operands]
        match name:
            case "mov.b32":
                value = a
            case "and.b32":
                value = a & more[0]
            case "shl.b32":
                value = a << more[0]
            case "lop3.b32":
                assert more[2] == 0xEA  # (a & b) | c
                value = a & more[0] | more[1]
            case "shf.r.wrap.b32":
                value = (more[0] << 32 | a) >> more[1]
            case "prmt.b32":
                bytes_ = (more[0] << 32 | a).to_bytes(8, "little")
                chosen = bytes(bytes_[more[1] >> 4 * place & 7] for place in range(4))
                value = int.from_bytes(chosen, "little")
            case "fma.rn.bf16x2":
                assert more[1] == 0x80008000
                products = [x * y for x, y in zip(halves(a), halves(more[0]), strict=True)]
                rounded = torch.tensor(products, dtype=torch.float64).to(torch.bfloat16)
                assert rounded.double().tolist() == products  # all of them are exact
                low, high = (int(one) & 0xFFFF for one in rounded.view(torch.int16))
                value = low | high << 16
            case _:
                raise AssertionError(line)
        registers[target] = value & 0xFFFFFFFF
    return [registers[f"${place}"] for place in range(4) if f"${place}" in registers]
