"""Qwen2 and Qwen2.5 (arXiv 2407.10671): Llama with biases of q, k and v."""

from __future__ import annotations

from minisgl.models.config import NativeConfig
from minisgl.models.config_reader import Fields
from minisgl.models.decoder_reader import DECODER_FIELDS, read_decoder, switched_windows_of_some

ARCHITECTURE = "Qwen2ForCausalLM"


def read_config(fields: Fields) -> NativeConfig:
    """The biases of q, k and v are always there; o has none."""
    fields.refuse_others(DECODER_FIELDS)
    windows = switched_windows_of_some(fields, 4096)
    return read_decoder(fields, ARCHITECTURE, qkv_bias=True, o_bias=False, windows=windows)
