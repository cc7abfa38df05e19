"""Random adapters of the demo model, and what PEFT computes with them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from support.adapters import ALL, Base, train_on
from support.checkpoints import greedy_reference, load_reference
from transformers import AutoModelForCausalLM, PreTrainedModel

from minisgl.models.hub import DEMO_FOLDER


def save_demo_adapter(folder: Path, seed: int) -> PreTrainedModel:
    """Write an adapter of all linear maps. Returns the adapted model."""
    base = Base(DEMO_FOLDER, AutoModelForCausalLM)
    trained = train_on(base, load_reference(DEMO_FOLDER), {"r": 4, **ALL}, folder, seed=seed)
    adapted: PreTrainedModel = trained.model.base_model.model
    return adapted


def greedy_tokens(
    model: PreTrainedModel | None, prompt: Sequence[int], num_tokens: int
) -> list[int]:
    """model: an adapted one; None: the demo model itself."""
    return greedy_reference(model or load_reference(DEMO_FOLDER), prompt, num_tokens).token_ids
