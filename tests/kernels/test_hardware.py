"""How each device computes with quantised weights and caches."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from minisgl.kernels import tuning
from minisgl.kernels.hardware import describe_formats, has_fp8_products, kernels_have_run
from minisgl.kernels.launch_options import pdl_options


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
    assert old["int4 and nvfp4 weights"] == recent["int4 and nvfp4 weights"]
    assert "activations as they are" in old["int4 and nvfp4 weights"]


def test_a_cpu_multiplies_what_is_dequantised() -> None:
    described = describe_formats(None)
    assert has_fp8_products(None)
    for name in ("fp8 weights", "int4 and nvfp4 weights"):
        assert "dequantised float32" in described[name]
    assert described["fp8 kv cache"] == "attention torch"


@pytest.fixture(params=[(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def capability(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Of the GPU that this machine seems to have."""
    found: tuple[int, int] = request.param
    sizes = SimpleNamespace(multi_processor_count=108)
    limits = SimpleNamespace(get_device_properties=lambda index: {"max_shared_mem": 99 << 10})
    driver = SimpleNamespace(active=SimpleNamespace(utils=limits))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: found)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: sizes)
    monkeypatch.setitem(sys.modules, "triton.runtime", SimpleNamespace(driver=driver))
    return found


def test_libraries_multiply_where_our_kernels_have_not_run(capability: tuple[int, int]) -> None:
    found = tuning.tuning_of.__wrapped__(torch.device("cuda", 0))
    assert (found.num_sms, found.shared_bytes) == (108, 99 << 10)
    same = replace(found, num_sms=tuning.H200.num_sms, shared_bytes=tuning.H200.shared_bytes)
    assert same == (tuning.H200 if capability == (9, 0) else tuning.UNTRIED)
    assert kernels_have_run(capability) == (capability == (9, 0))


def test_launches_overlap_only_where_that_was_tried(capability: tuple[int, int]) -> None:
    wanted = pdl_options.__wrapped__(torch.device("cuda", 0), True)
    assert wanted["pdl"] == (capability == (9, 0))
