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
from minisgl.kernels.linear.weight_only import unpacking_e2m1
from minisgl.kernels.moe.fused_experts import fused_experts
from minisgl.kernels.moe.reference import ByRouter, Routing

pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("make", [random_experts, random_nvfp4_experts])
@pytest.mark.parametrize(
    ("num_rows", "num_experts", "top_k", "hidden_size", "size", "dtype", "plain"),
    [
        (1, 4, 4, 64, 128, torch.float32, False),
        (3, 4, 2, 192, 64, torch.float16, False),
        (20, 3, 2, 64, 192, torch.float32, True),
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


def test_the_instructions_for_a_gpu_make_every_number() -> None:
    """Those of two words at a time, which the interpreter cannot run, carried out one by one."""
    source = getsource(unpacking_e2m1.e2m1_planes.fn)
    [text] = re.findall(r'"""\{(.*?)\}"""', source, re.DOTALL)
    codes = (torch.arange(16 * 64).reshape(16, 64) * 5 // 3 % 16).to(torch.uint8)
    threads = tiled(pack_e2m1(codes)).view(torch.int32).view(32, 4).tolist()
    for thread, pairs in enumerate(threads):
        for pair, word in enumerate(pairs):
            row = thread // 4 + 8 * (pair // 2)
            found = run_ptx(text, word & 0xFFFFFFFF)
            for quarter, half in product(range(4), range(2)):
                code = int(codes[row, 16 * quarter + thread % 4 * 4 + pair % 2 * 2 + half])
                bits = torch.tensor(found[quarter] >> 16 * half & 0xFFFF, dtype=torch.int32)
                number = bits.to(torch.int16).view(torch.bfloat16).double() * 2.0**126
                wanted = E2M1[code & 7] * (-1 if code & 8 else 1)
                assert float(number) == wanted, (code, quarter)
    assert {code for row in codes.tolist() for code in row} == set(range(16))


def run_ptx(text: str, word: int) -> list[int]:
    """The first four registers, after all but the products, of which the factors are checked."""
    registers = {"$4": word}
    factors: list[str] = []
    for line in filter(None, map(str.strip, text.split(";"))):
        name, _, rest = line.partition(" ")
        if name in (".reg", "mov.b32"):
            continue
        target, *operands = (operand.strip() for operand in rest.split(","))
        if name == "fma.rn.bf16x2":
            assert operands[0] == target and operands[2] == "nought"
            factors.append(operands[1])
            continue
        values = [registers[one] if one in registers else int(one, 0) for one in operands]
        if name == "lop3.b32":
            assert values[3] == 0xEA  # (a & b) | c
            registers[target] = values[0] & values[1] | values[2]
        else:
            a, b, *places = values
            turned = (b << 32 | a) >> (places[0] if places else 0)
            registers[target] = {"shf.r.wrap.b32": turned & 0xFFFFFFFF, "and.b32": a & b}[name]
    assert factors == ["$5", "$7", "$9", "$11"]
    return [registers[f"${plane}"] for plane in range(4)]
