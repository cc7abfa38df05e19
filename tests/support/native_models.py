"""Native models in float32 on the CPU: loaded from a checkpoint, and their logits compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import torch
from support.checkpoints import Case, relative_error
from support.paged import PagedModel
from torch import nn

from minisgl.config import Activations
from minisgl.kernels.linear.quantized import Fp8Product
from minisgl.kernels.moe.quantized_experts import Fp8Experts
from minisgl.models.config import ModelConfig
from minisgl.models.loader import load_model
from minisgl.models.transformer import CausalLM

Model = TypeVar("Model", bound=CausalLM)


def load_native(
    kind: type[Model], config: ModelConfig, folder: Path, *, max_seq_len: int = 256
) -> Model:
    model = load_in_float32(config, folder, max_seq_len=max_seq_len)
    assert isinstance(model, kind)
    return model


def load_in_float32(config: ModelConfig, folder: Path, *, max_seq_len: int = 256) -> Any:
    """A model of any kind, on the CPU."""
    return load_model(
        config,
        folder,
        dtype=torch.float32,
        device=torch.device("cpu"),
        load_format="safetensors",
        max_seq_len=max_seq_len,
    )


def logits_error(
    case: Case, model: CausalLM, config: ModelConfig, *, page_size: int = 16, **cut: int
) -> float:
    """How far the logits are from those of transformers. cut: as of PagedModel.run."""
    paged = PagedModel(model, config, page_size=page_size)
    return relative_error(paged.run(case.token_ids, **cut), case.logits)


def leave_inputs(model: nn.Module) -> None:
    """Let products with FP8 weights take inputs as they are, as on a GPU without FP8 products."""
    for module in model.modules():
        product = getattr(module, "product", None)
        if isinstance(product, Fp8Product | Fp8Experts):
            product.activations = Activations.NONE
