"""Which kernels the package has, and which of them may spill. Needs no Triton."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "minisgl"

# The most bytes that a thread of a kernel stores and loads because its registers do not suffice, by
# the kernel's name below minisgl.kernels, and the target. Those of sm_90 were measured with them,
# but for weight_only_kernel, which spills in tiles of 256 rows.
SPILLS: Mapping[str, Mapping[str, int]] = {
    "attention.paged_decode._rows_kernel": {"sm_100": 12},
    "attention.paged_prefill._split_kernel": {"sm_80": 1048, "sm_90": 836, "sm_100": 1616},
    "attention.paged_prefill._whole_kernel": {"sm_80": 1048, "sm_90": 544, "sm_100": 1616},
    "comm.one_shot._all_reduce_row": {"sm_100": 72},
    "comm.two_shot._all_reduce_rows": {"sm_80": 16, "sm_90": 20, "sm_100": 12},
    "gated_delta.delta_prefill._prepare": {"sm_80": 112},
    "linear.burst_kernel.burst_kernel": {"sm_80": 808},
    "linear.stream_kernel.stream_kernel": {"sm_100": 40},
    "linear.weight_only.weight_only_kernel.weight_only_kernel": {
        "sm_80": 376,
        "sm_90": 80,
        "sm_100": 176,
    },
    "lora.expand_kernel._expand": {"sm_100": 16},
    "lora.shrink_kernel._shrink": {"sm_80": 8, "sm_100": 8},
    "moe.few_rows._few_outer": {"sm_80": 40, "sm_90": 8, "sm_100": 32},
    "moe.fp8_experts._expert_product": {"sm_90": 336, "sm_100": 2792},
    "moe.int4_experts._expert_product": {"sm_80": 176},
    "moe.many_rows._expert_product": {"sm_80": 416, "sm_100": 84},
    "moe.mxfp4_experts._expert_product": {"sm_80": 244, "sm_90": 16, "sm_100": 8},
    "sampling.draw.draw_kernel": {"sm_80": 32, "sm_90": 48, "sm_100": 108},
    "sampling.filters.settle_kernel": {"sm_80": 1212, "sm_90": 1272, "sm_100": 1628},
    "sampling.scores.record_kernel": {"sm_90": 24, "sm_100": 20},
}


def spilled_bytes(log: str) -> int:
    """What ptxas (-v) logs of its one kernel. Raises ValueError without such a log."""
    if len(re.findall(r"Used \d+ registers", log)) != 1:
        raise ValueError(f"ptxas has not told of one kernel: {log!r}")
    return sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", log)))


def kernels_of(package: Path = PACKAGE) -> set[str]:
    """The kernels of the package, as `module.function`: what Triton compiles, and no other function
    that it compiles calls."""
    compiled = {
        f"{_module(path, package)}.{node.name}": node
        for path in package.rglob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
        if any("triton.jit" in ast.unparse(each) for each in node.decorator_list)
    }
    called = set()
    for name, function in compiled.items():
        for node in ast.walk(function):
            if isinstance(node, ast.Name):  # of the module's own, or else imported
                own = f"{name.rpartition('.')[0]}.{node.id}"
                called.add(own if own in compiled else node.id)
    return {name for name, function in compiled.items() if not {name, function.name} & called}


def _module(path: Path, package: Path) -> str:
    return ".".join(path.relative_to(package.parent).with_suffix("").parts)
