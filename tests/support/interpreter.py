"""FP8 in Triton's interpreter as on a GPU. Its own arithmetic is coarse: its conversions round no
subnormal number, and take NaN for 480, and its fused products are rounded before the sum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

_DTYPES = {"fp8e4nv": torch.float8_e4m3fn, "fp16": torch.float16, "fp32": torch.float32}


def mend_fp8(setattr: Callable[[object, str, object], None]) -> None:
    """Convert e4m3 by torch, and fuse products in float64. `setattr` is that of a MonkeyPatch."""
    from triton.runtime import interpreter

    plain = interpreter._convert_float

    def convert(data: np.ndarray, source: object, target: object, rounding: object) -> np.ndarray:
        if "fp8e4nv" not in (str(source), str(target)):
            return plain(data, source, target, rounding)
        there, here = _DTYPES[str(target)], _DTYPES[str(source)]
        found = torch.from_numpy(np.ascontiguousarray(data)).view(here).to(there)
        return found.view(torch.uint8 if there.itemsize == 1 else there).numpy()

    def fma(self: object, x: Any, y: Any, z: Any) -> object:
        a, b, c = (each.data.astype(np.float64) for each in (x, y, z))
        return interpreter.TensorHandle((a * b + c).astype(z.data.dtype), z.dtype.scalar)

    setattr(interpreter, "_convert_float", convert)
    setattr(interpreter.InterpreterBuilder, "create_fma", fma)
