"""Whether quantised weights are kept in the dtype of the model, too: see --dense-copies."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from minisgl.config import LayerSpec, ResolvedConfig, page_bytes
from minisgl.distributed.pipeline import Pipeline
from minisgl.errors import DeviceMemoryError
from minisgl.models.decoder import Decoder
from minisgl.runner.memory import GIB, state_bytes

logger = logging.getLogger(__name__)


def prepare_model(
    config: ResolvedConfig,
    model: Decoder,
    layers: Sequence[LayerSpec],
    pipeline: Pipeline,
    room: int,
) -> int:
    """Prepare the kernels of a model with its weights; returns the bytes of the dense copies.

    All ranks must call this together: they keep copies or none does, since products with and
    without them send their sums to other ranks in different ways. room: bytes that the weights
    leave of what the engine may use; may be negative. Raises DeviceMemoryError.
    """
    num_bytes, share = model.dense_copy_bytes, config.dense_copies_share
    room -= config.num_pages * page_bytes(layers, config.page_size) + state_bytes(config, layers)
    keeps = bool(pipeline.host_min(int(num_bytes <= share * max(room, 1))))
    try:
        model.prepare(dense_copies=keeps)
    except torch.OutOfMemoryError as error:
        if not keeps:
            raise
        raise DeviceMemoryError(
            f"The dense copies of the quantised weights take {num_bytes / GIB:.1f} GiB, which do "
            "not fit beside these; --dense-copies never does without them."
        ) from error
    if not num_bytes:
        return 0
    if keeps:
        logger.info(
            "Weights: dense copies, for steps of many tokens, take another %.2f GiB; "
            "--dense-copies never leaves that to the KV cache",
            num_bytes / GIB,
        )
    elif share:
        logger.info(
            "Weights: no dense copies, which would take %.2f GiB; --dense-copies always keeps "
            "them, and makes steps of many tokens faster",
            num_bytes / GIB,
        )
    return num_bytes if keeps else 0
