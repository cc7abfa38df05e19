"""Mistral 7B (Jiang et al., arXiv 2310.06825): Llama without biases, with a sliding window."""

from __future__ import annotations

from minisgl.models.config import NativeConfig
from minisgl.models.config_reader import Fields
from minisgl.models.decoder_reader import DECODER_FIELDS, read_decoder, windows_of_all

ARCHITECTURE = "MistralForCausalLM"


def read_config(fields: Fields) -> NativeConfig:
    """A config that does not mention the window has one of 4,096 tokens, as in transformers."""
    fields.refuse_others(DECODER_FIELDS)
    return read_decoder(fields, ARCHITECTURE, windows=windows_of_all(fields, 4096))
