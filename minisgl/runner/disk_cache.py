"""Opens a disk cache: its folder, and the fingerprint of all that its pages depend on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

from minisgl import __version__
from minisgl.config import KVSpec, ResolvedConfig
from minisgl.errors import ConfigError
from minisgl.models.config import ModelConfig
from minisgl.models.fingerprint import weights_fingerprint
from minisgl.runner.page_files import PageFiles, open_folder


def model_fingerprint(config: ResolvedConfig, model_config: ModelConfig, folder: Path) -> bytes:
    """32 bytes that differ between models, and between forms in which their KV is kept.

    The same on all ranks. Raises CheckpointError.
    """
    weights = b"random"  # which are drawn from a fixed seed
    if config.load_format != "dummy":
        weights = weights_fingerprint(folder)
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
    )
    return blake2b(repr(parts).encode(), digest_size=32).digest()


def open_store(
    config: ResolvedConfig, layers: Sequence[KVSpec], fingerprint: bytes, rank: int
) -> PageFiles:
    """The files of one rank, among those of all stages. Raises ConfigError for an unfit folder."""
    folder = Path(config.disk_cache).expanduser()
    try:
        open_folder(folder)
    except OSError as error:
        reason = f"the folder cannot be used: {error.strerror}"
        raise ConfigError("--disk-cache", config.disk_cache, reason) from error
    except ValueError as error:
        raise ConfigError("--disk-cache", config.disk_cache, str(error)) from error
    of_rank = blake2b(fingerprint + rank.to_bytes(4, "little"), digest_size=32).digest()
    page_bytes = sum(spec.bytes_per_token for spec in layers) * config.page_size
    return PageFiles(folder, of_rank, page_bytes, config.disk_cache_bytes)
