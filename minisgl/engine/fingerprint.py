"""What tells engines of one machine that they compute the same numbers."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

from minisgl.config import ResolvedConfig
from minisgl.models.config_reader import CONFIG_FILE


def fingerprint(folder: Path, config: ResolvedConfig, quantization: str | None) -> bytes:
    """A digest of the model, its files and all options that the bytes of its KV pages depend on.

    Files count with their sizes and times, which change whenever they are written.
    """
    files = sorted(file for file in folder.iterdir() if file.suffix in (".json", ".safetensors"))
    stated = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    options = (
        *(config.dtype, config.kv_dtype, config.load_format, config.device, quantization),
        *(config.page_size, config.tp, config.max_seq_len),
    )
    digest = blake2b((folder / CONFIG_FILE).read_bytes(), digest_size=32)
    digest.update(repr((stated, options)).encode())
    return digest.digest()
