"""How each device computes with quantised weights and caches."""

from __future__ import annotations

import pytest

from minisgl.kernels.hardware import describe_formats, has_fp8_products


@pytest.mark.parametrize(
    ("capability", "found"),
    [((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True), ((12, 0), True)],
)
def test_gpus_multiply_fp8_from_ada_on(capability: tuple[int, int], found: bool) -> None:
    assert has_fp8_products(capability) == found
    described = describe_formats(capability)
    assert ("FP8 tensor cores" in described["fp8 weights"]) == found
    assert ("activations as they are" in described["fp8 weights"]) == (not found)
    assert ("triton" in described["fp8 kv cache"]) == found


def test_int4_leaves_activations_alone_on_every_gpu() -> None:
    old, recent = (describe_formats(capability) for capability in ((8, 0), (9, 0)))
    assert old["int4 weights"] == recent["int4 weights"]
    assert "activations as they are" in old["int4 weights"]


def test_a_cpu_multiplies_what_is_dequantised() -> None:
    described = describe_formats(None)
    assert has_fp8_products(None)
    for name in ("fp8 weights", "int4 weights"):
        assert "dequantised float32" in described[name]
    assert described["fp8 kv cache"] == "attention torch"
