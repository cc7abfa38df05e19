"""Opens a disk cache."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

from minisgl.config import LayerSpec, ResolvedConfig, page_bytes
from minisgl.errors import ConfigError
from minisgl.tiers.disk.page_files import PageFiles, open_folder


def check_folder(config: ResolvedConfig) -> None:
    """Make the folder if there is none. Raises ConfigError for an unfit one."""
    try:
        open_folder(_folder(config))
    except OSError as error:
        reason = (
            f"the folder cannot be used: {error.strerror}; allowed: a folder that is there or "
            "can be made"
        )
        raise ConfigError("--disk-cache", config.disk_cache, reason) from error
    except ValueError as error:
        raise ConfigError("--disk-cache", config.disk_cache, str(error)) from error


def open_store(
    config: ResolvedConfig, layers: Sequence[LayerSpec], fingerprint: bytes, rank: int
) -> PageFiles:
    """The files of one rank, among those of all stages, in a folder that was checked."""
    of_rank = blake2b(fingerprint + rank.to_bytes(4, "little"), digest_size=32).digest()
    bytes_each = page_bytes(layers, config.page_size)
    return PageFiles(_folder(config), of_rank, bytes_each, config.disk_cache_bytes)


def _folder(config: ResolvedConfig) -> Path:
    return Path(config.disk_cache).expanduser()
