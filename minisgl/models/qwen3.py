"""Qwen3 (arXiv 2505.09388): Llama with an RMS norm of every head of q and k."""

from __future__ import annotations

from minisgl.models.config import NativeConfig
from minisgl.models.config_reader import Fields, field_names
from minisgl.models.decoder_reader import DECODER_FIELDS, read_decoder, switched_windows_of_some

ARCHITECTURE = "Qwen3ForCausalLM"


def read_config(fields: Fields) -> NativeConfig:
    """attention_bias switches the biases of q, k, v and o on. head_dim is 128 by default."""
    fields.refuse_others(DECODER_FIELDS | field_names("attention_bias"))
    return read_decoder(
        fields,
        ARCHITECTURE,
        head_dim=128,
        qkv_bias=fields.flag("attention_bias", False),
        qk_norm=True,
        windows=switched_windows_of_some(fields, 4096),
    )
