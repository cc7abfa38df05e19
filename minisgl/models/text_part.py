"""The text part of models that also see or hear, which is what runs of them."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from minisgl.errors import CheckpointError
from minisgl.models.config_reader import CONFIG_FILE, HARMLESS_FIELDS, Fields, field_names

LEFT_OUT = "; left out: "  # of a note on a model, in front of the names of its towers
# What the whole says for a text part that does not.
_OF_BOTH = field_names("dtype torch_dtype tie_word_embeddings")
# Of the config of a model with towers, beside text_config.
_FIELDS = HARMLESS_FIELDS | field_names(
    """architectures dtype torch_dtype tie_word_embeddings quantization_config compression_config
    text_config vision_config audio_config
    image_token_id video_token_id audio_token_id vision_start_token_id vision_end_token_id
    boi_token_id eoi_token_id boa_token_id eoa_token_id eoa_token_index
    vision_soft_tokens_per_image language_model_only
    ignore_index media_placeholder_token_id use_unified_vision_chunk video_placeholder"""
)


def _repeated(whole: Mapping[str, Any], text: Mapping[str, Any]) -> frozenset[str]:
    """The fields of the whole that the text part has with the same value, there or for its rope.
    Raises CheckpointError for one that it has with another value."""
    rope = text.get("rope_parameters") or text.get("rope_scaling")
    values = {**(rope if isinstance(rope, dict) else {}), **text}
    both = [name for name in whole.keys() & values.keys() - _FIELDS if values[name] is not None]
    for name in sorted(both):
        if whole[name] not in (None, values[name]):
            raise CheckpointError(
                f"{CONFIG_FILE}: {name} is {reprlib.repr(whole[name])}, and "
                f"{reprlib.repr(values[name])} in text_config; leave out the one that is wrong."
            )
    return frozenset(both)


def text_part(whole: Fields) -> tuple[Fields, tuple[str, ...]]:
    """The fields of the text part, and notes on what is left out. A config without text_config is
    that of the text part alone, under whichever name.

    Raises CheckpointError, UnsupportedModelError.
    """
    text = whole.values.get("text_config")
    if text is None:
        return whole, ()
    if not isinstance(text, dict):
        raise CheckpointError(f"{CONFIG_FILE}: text_config is not a JSON object.")
    whole.refuse_others(_FIELDS | _repeated(whole.values, text))
    lacking = {name: whole.values.get(name) for name in _OF_BOTH if text.get(name) is None}
    towers = [name for name in ("vision", "audio") if whole.values.get(f"{name}_config")]
    note = f"the text part of the model{LEFT_OUT}{', '.join(towers) or 'nothing'}"
    return Fields(text | lacking, f"{CONFIG_FILE}: text_config"), (note,)
