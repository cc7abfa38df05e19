"""Loads a model of transformers and puts minisgl's attention into it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from minisgl.errors import CheckpointError
from minisgl.models.adopted.attend import ATTENTION, register
from minisgl.models.adopted.config import AdoptedConfig
from minisgl.models.adopted.model import AdoptedModel
from minisgl.models.adopted.reader import model_class, transformers_config
from minisgl.models.adopted.towers import HEAD, RENAMED, is_of_text
from minisgl.models.config import ModelConfig
from minisgl.models.hub import safetensors_files

_SEED = 0


def load_adopted(
    config: ModelConfig, folder: Path, *, dtype: torch.dtype, device: torch.device, has_files: bool
) -> AdoptedModel:
    """Build the model on `device`, with the weights in `folder`, or with random ones.

    Blocks. Raises CheckpointError where a weight is missing or left over, or has another shape.
    """
    assert isinstance(config, AdoptedConfig)
    register()
    architecture = model_class(config.architecture)
    its_config = transformers_config(config.values, config.architecture)
    if has_files:
        model = _from_files(
            architecture, its_config, folder, dtype, has_towers=config.has_towers
        ).to(device)
    else:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
            torch.manual_seed(_SEED)
            model = architecture._from_config(
                its_config, dtype=dtype, attn_implementation=ATTENTION
            )
    model.eval()
    return AdoptedModel(model, config.found, config.facts())


def _from_files(
    architecture: Any, config: Any, folder: Path, dtype: torch.dtype, *, has_towers: bool
) -> Any:
    from transformers.utils import logging

    towers: set[str] = set()
    if has_towers:
        names = _stored_names(folder)
        towers = {name for name in names if not is_of_text(name)}
        if names & HEAD:
            config.tie_word_embeddings = False
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # what it would report is raised below
    try:
        model, info = architecture.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=ATTENTION,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are in the info, with their names
            key_mapping=RENAMED if has_towers else None,
        )
    except (OSError, RuntimeError, ValueError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise CheckpointError(f"{folder}: {error}") from error
    finally:
        logging.set_verbosity(verbosity)
    if unexpected := sorted(info["unexpected_keys"] - towers):
        raise CheckpointError(
            f"{folder} holds weights that the model does not take: {_few(unexpected)}."
        )
    if mismatched := sorted(info["mismatched_keys"]):
        name, stored, wanted = mismatched[0]
        raise CheckpointError(
            f"{folder}: {name} has the shape {list(stored)}; the config asks for {list(wanted)}."
        )
    if missing := sorted(info["missing_keys"]):
        raise CheckpointError(f"{folder} lacks weights: {_few(missing)}.")
    return model


def _stored_names(folder: Path) -> set[str]:
    names: set[str] = set()
    for file in safetensors_files(folder):
        try:
            with safe_open(file, "pt") as tensors:
                names.update(tensors.keys())
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error
    return names


def _few(names: list[str]) -> str:
    rest = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + rest
