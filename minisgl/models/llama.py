"""Llama 2 and 3 (Touvron et al., arXiv 2307.09288; arXiv 2407.21783), and models built alike."""

from __future__ import annotations

from minisgl.models.config import NativeConfig
from minisgl.models.config_reader import Fields, field_names
from minisgl.models.decoder_reader import DECODER_FIELDS, read_decoder

ARCHITECTURE = "LlamaForCausalLM"


def read_config(fields: Fields) -> NativeConfig:
    """attention_bias switches the biases of q, k, v and o on, mlp_bias those of the MLP.

    A sliding window has no effect, as in transformers.
    """
    fields.refuse_others(DECODER_FIELDS | field_names("attention_bias mlp_bias"))
    return read_decoder(
        fields,
        ARCHITECTURE,
        qkv_bias=fields.flag("attention_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
    )
