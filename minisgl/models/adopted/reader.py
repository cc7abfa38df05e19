"""Reads the config.json of an architecture whose code is transformers'."""

from __future__ import annotations

import time
from typing import Any

import torch

from minisgl.errors import CheckpointError, UnsupportedModelError, in_one_line
from minisgl.models.adopted.architectures import TOWERS
from minisgl.models.adopted.config import AdoptedConfig
from minisgl.models.adopted.discover import discover
from minisgl.models.adopted.division import divisibility
from minisgl.models.adopted.proof import prove
from minisgl.models.adopted.towers import left_out, text_part
from minisgl.models.config_reader import CONFIG_FILE, Fields, checkpoint_dtype, drafting_layers
from minisgl.models.text_part import LEFT_OUT
from minisgl.models.transformers_fields import causal_decoders, model_type_of

# Of configs from before transformers had the architecture, and so another model_type: HunYuan-A13B.
_OLD_NAMES = {"attention_head_dim": "head_dim"}
_OF_WEIGHTS = ("quantization_config", "compression_config")  # the keys that describe their format


def read_adopted(fields: Fields, architecture: str) -> AdoptedConfig:
    """The config of a model that runs with transformers' code, which is proven to compute the same
    here. Takes seconds.

    Raises CheckpointError for a config that transformers does not take, UnsupportedModelError for a
    model that cannot run here, with the reason.
    """
    import transformers

    began = time.monotonic()
    values, notes = dict(fields.values), []
    for name in _OF_WEIGHTS:  # which transformers would apply itself
        values.pop(name, None)
    config = transformers_config(values, architecture)
    if has_towers := architecture in TOWERS:
        towers = ", ".join(left_out(config))
        notes.append(f"model: the text part of {architecture}{LEFT_OUT}{towers}")
        config, architecture = text_part(config)
        values = config.to_dict()
    model = model_class(architecture)
    found = discover(model, config)
    known, way = prove(model, config, found)
    with torch.device("meta"):
        made = model._from_config(config)
    num_drafting, of_drafting = drafting_layers(Fields(values, CONFIG_FILE))
    max_seq_len, reason = _limit(config, has_table=found.has_position_table)
    return AdoptedConfig(
        architecture=architecture,
        dtype=checkpoint_dtype(fields),
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=len(found.attention),
        max_seq_len=max_seq_len,
        max_seq_len_reason=reason,
        notes=(
            *(*notes, *of_drafting),
            f"model: {architecture} of transformers {transformers.__version__} with minisgl's "
            f"kernels ({way}), shown to compute the same in {time.monotonic() - began:.1f} s",
        ),
        num_drafting_layers=num_drafting,
        values=values,
        found=found,
        known=known,
        way=way,
        divides=divisibility(made, found),
        has_towers=has_towers,
        transformers=transformers.__version__,
    )


def model_class(architecture: str) -> Any:
    """The class of transformers. Raises UnsupportedModelError if there is none."""
    import transformers

    if architecture not in causal_decoders():
        raise UnsupportedModelError(
            f"Architecture {architecture} is not supported: transformers "
            f"{transformers.__version__} has no causal decoder of this name, and minisgl runs no "
            "code that comes with a checkpoint."
        )
    return getattr(transformers, architecture)


def transformers_config(values: dict[str, Any], architecture: str) -> Any:
    """transformers' config of the values of a config.json. Raises CheckpointError."""
    from transformers import CONFIG_MAPPING

    if (kind := model_type_of({**values, "architectures": [architecture]})) is None:
        raise UnsupportedModelError(
            f"{CONFIG_FILE}: transformers does not know the model_type "
            f"{values.get('model_type')!r} of {architecture}."
        )
    if kind != values.get("model_type"):
        values = {_OLD_NAMES.get(name, name): value for name, value in values.items()}
        values["model_type"] = kind
    try:
        return CONFIG_MAPPING[kind].from_dict(_without_choice_of_code(values))
    except Exception as error:  # of whichever check of whichever class
        raise CheckpointError(
            f"{CONFIG_FILE} is not taken by transformers: {in_one_line(error)}"
        ) from error


def _without_choice_of_code(value: Any) -> Any:
    """Without fields such as attn_implementation, of any part, by which transformers would choose
    another attention or other experts, from a hub even."""
    if not isinstance(value, dict):
        return value
    return {
        name: _without_choice_of_code(part)
        for name, part in value.items()
        if "_implementation" not in str(name)
    }


def _limit(config: Any, *, has_table: bool) -> tuple[int, str | None]:
    """The longest sequence, and why the limit is hard (None: it may be exceeded)."""
    most = getattr(config, "max_position_embeddings", None)
    if not isinstance(most, int) or most < 1:
        raise CheckpointError(f"{CONFIG_FILE} does not say max_position_embeddings.")
    if has_table:
        return most, "the model has a table with this number of positions"
    rope = getattr(config, "rope_parameters", None) or {}
    for part in (rope, *(part for part in rope.values() if isinstance(part, dict))):
        if part.get("rope_type") in ("dynamic", "longrope"):
            original = part.get("original_max_position_embeddings") or most
            return original, (
                f"{part['rope_type']} rope scaling rotates the keys of longer sequences with "
                "another base than those that are cached"
            )
    return most, None
