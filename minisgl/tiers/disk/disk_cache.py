"""Opens a disk cache."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

from minisgl.config import LayerSpec, ResolvedConfig, StateSpec
from minisgl.errors import ConfigError
from minisgl.paths import path_of
from minisgl.tiers.disk.page_files import PageFiles


def check_folder(config: ResolvedConfig) -> None:
    """Make the folder if there is none. Raises ConfigError for one that is unfit, or not this
    user's alone."""
    folder = _folder(config)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError as error:
        reason = (
            f"the folder cannot be used: {error.strerror}; allowed: a folder that is there or "
            "can be made"
        )
        raise ConfigError("--disk-cache", config.disk_cache, reason) from error
    if found.st_uid != os.geteuid():
        reason = "it belongs to another user, who could plant pages there"
        raise ConfigError("--disk-cache", config.disk_cache, reason)
    if stat.S_IMODE(found.st_mode) & 0o077:
        reason = (
            "it holds what prompts leave in the KV cache, and other users may enter it; "
            "allowed: a folder for this alone, such as a new one, or one closed by chmod 700"
        )
        raise ConfigError("--disk-cache", config.disk_cache, reason)
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        reason = "no files can be made in it; allowed: a folder that this user may write"
        raise ConfigError("--disk-cache", config.disk_cache, reason)


def open_store(
    config: ResolvedConfig,
    layers: Sequence[LayerSpec],
    fingerprint: bytes,
    rank: int,
    page_bytes: int,
) -> PageFiles:
    """The files of one rank, among those of all stages, in a folder that was checked. layers: that
    it has. page_bytes: of a page in host memory."""
    of_rank = blake2b(fingerprint + rank.to_bytes(4, "little"), digest_size=32)
    if config.windows is not None:
        of_rank.update(config.windows.window.to_bytes(4, "little"))  # which layers it has
    states = [spec.tensors for spec in layers if isinstance(spec, StateSpec)]
    of_rank.update(repr(states).encode() if states else b"")  # with what drafts need of them
    return PageFiles(_folder(config), of_rank.digest(), page_bytes, config.disk_cache_bytes)


def _folder(config: ResolvedConfig) -> Path:
    return path_of("--disk-cache", config.disk_cache)
