"""A fingerprint of a checkpoint's weights, which reads little of them."""

from __future__ import annotations

import json
import os
from hashlib import blake2b
from pathlib import Path

from minisgl.errors import CheckpointError
from minisgl.models.hub import safetensors_files

SAMPLE_BYTES = 1 << 20
NUM_SAMPLES = 4  # of each file, the first at its begin, the last at its end
TENSOR_BYTES = 4096  # of the middle of each tensor
MAX_HEADER_BYTES = 100_000_000  # as the format defines


def weights_fingerprint(folder: Path) -> bytes:
    """32 bytes that differ between checkpoints whose configs and sizes are equal.

    Hashes the header of each file, samples of 1 MB of it, and the middle of each tensor: a
    fine-tune changes some tensors at least, all over. Raises CheckpointError.
    """
    digest = blake2b(digest_size=32)
    for path in safetensors_files(folder):
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                header_bytes = min(int.from_bytes(file.read(8), "little"), MAX_HEADER_BYTES, size)
                header = file.read(header_bytes)
                digest.update(size.to_bytes(8, "little"))
                digest.update(header)
                step = max(0, size - SAMPLE_BYTES) // (NUM_SAMPLES - 1)
                for index in range(NUM_SAMPLES):
                    digest.update(os.pread(file.fileno(), SAMPLE_BYTES, index * step))
                for middle in _middles(header):
                    start = 8 + header_bytes + middle - TENSOR_BYTES // 2
                    digest.update(os.pread(file.fileno(), TENSOR_BYTES, max(0, start)))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
    return digest.digest()


def _middles(header: bytes) -> list[int]:
    """The offsets of the middles of the tensors of a file."""
    tensors = json.loads(header)
    ends = [entry["data_offsets"] for name, entry in tensors.items() if name != "__metadata__"]
    return [(begin + end) // 2 for begin, end in ends]
