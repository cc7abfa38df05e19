"""The fingerprint of all that the bytes of KV pages depend on, but the tokens."""

from __future__ import annotations

from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

from minisgl import __version__
from minisgl.config import ResolvedConfig
from minisgl.drafting.networks.loading import find_network
from minisgl.models.config import ModelConfig
from minisgl.models.fingerprint import weights_fingerprint


def model_fingerprint(config: ResolvedConfig, model_config: ModelConfig, folder: Path) -> bytes:
    """32 bytes that differ between models, and between forms in which their KV is kept.

    The same on all ranks. Reads all weights, once per machine. Raises CheckpointError.
    """
    weights = drafter = b"random"  # which are drawn from a fixed seed
    drafting = find_network(
        config.speculative, model_config, folder, load_format=config.load_format
    )
    if config.load_format != "dummy":
        weights = weights_fingerprint(folder)
        if drafting is not None:
            drafter = weights_fingerprint(drafting.folder)
    parts = (
        __version__,  # computes and lays out KV in its own way
        weights,
        # Rope, quantisation and the scales of an FP8 cache are in it; its notes are only words.
        replace(model_config, notes=(), max_seq_len_reason=None),
        config.device,
        config.dtype,
        config.kv_dtype,
        config.page_size,
        config.tp,
        config.pp,
        config.ep,
    )
    # The KV of a drafter is part of the pages.
    of_drafter = () if drafting is None else (drafter, drafting.of)
    return blake2b(repr((*parts, *of_drafter)).encode(), digest_size=32).digest()
