"""The formats of quantised weights, each with a module of its own."""

from __future__ import annotations

from minisgl.models.formats.fp8 import FP8_WHILE_LOADING, Fp8
from minisgl.models.formats.int4 import Awq, CompressedInt4, Gptq
from minisgl.models.formats.int8 import Int8
from minisgl.models.formats.mxfp4 import Mxfp4
from minisgl.models.formats.mxfp8 import Mxfp8
from minisgl.models.formats.nvfp4 import CompressedNvfp4, ModelOptNvfp4
from minisgl.models.formats.quantized_format import OneFormat, QuantizedFormat

FORMATS: tuple[type[OneFormat], ...] = (
    *(Fp8, Mxfp8, CompressedInt4, Awq, Gptq, Mxfp4),
    *(Int8, CompressedNvfp4, ModelOptNvfp4),
)

__all__ = ["FORMATS", "FP8_WHILE_LOADING", "QuantizedFormat"]
