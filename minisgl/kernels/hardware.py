"""How a device computes with each format of weights and of the KV cache.

A compute capability stands for the device here; None is a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping

ComputeCapability = tuple[int, int]

_OLDEST_WITH_FP8 = (8, 9)  # Ada: tensor cores multiply FP8, and Triton converts it

# The generations of GPUs, by major compute capability, that our kernels have run on: only Hopper.
# scripts/bench/gpu_checks.json says what ran there and when.
_GENERATIONS = (9,)


def kernels_have_run(capability: ComputeCapability) -> bool:
    """Whether our kernels have run on GPUs of this generation. Where they have not, and a library
    can do the same work, `auto` takes the library."""
    return capability[0] in _GENERATIONS


def has_fp8_products(capability: ComputeCapability | None) -> bool:
    """Whether the device multiplies one FP8 matrix by another, for which activations are rounded.
    Other GPUs leave these as they are. A CPU rounds them: it is the reference of those that do."""
    return capability is None or capability >= _OLDEST_WITH_FP8


def describe_formats(capability: ComputeCapability | None) -> Mapping[str, str]:
    """What computes with each format on the device, in words for people."""
    if capability is None:
        return {
            "fp8 weights": "dequantised float32, activations rounded to FP8 as on a GPU",
            "int8 weights": "dequantised float32, activations rounded to INT8 as on a GPU",
            "int4 and nvfp4 weights": "dequantised float32, activations as they are",
            "fp8 kv cache": "attention torch",
        }
    weights_alone = "dequantised in registers, activations as they are"
    in_int8 = "INT8 tensor cores, activations rounded to INT8"
    if not has_fp8_products(capability):
        return {
            "fp8 weights": weights_alone,
            "int8 weights": in_int8,
            "int4 and nvfp4 weights": weights_alone,
            "fp8 kv cache": "attention torch",
        }
    return {
        "fp8 weights": "FP8 tensor cores, activations rounded to FP8",
        "int8 weights": in_int8,
        "int4 and nvfp4 weights": weights_alone,
        "fp8 kv cache": "attention triton, torch",
    }
