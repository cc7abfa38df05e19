"""The text part of models that have towers beside it, for images or for sound."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from minisgl.errors import UnsupportedModelError
from minisgl.models.adopted.architectures import ADOPTED

# Renames weights of the text part to those of a model of text alone: regular expressions, of which
# one at most fits.
RENAMED = {
    r"^(?:language_model|text_model)\.": "",
    r"^model\.(?:language_model|text_model)\.": "model.",
}
_TEXT = ("language_model.", "text_model.", "model.language_model.", "model.text_model.")
# Of a text part to which transformers gives no architecture by its model_type.
_ARCHITECTURES = {"emu3_text_model": "Emu3ForCausalLM"}
# A text part that counts positions in three directions is another model where these are equal.
_AS_TEXT = {"glm4v_text": "glm4", "glm4v_moe_text": "glm4_moe"}
_DIRECTIONS = "mrope_section"
HEAD = {"lm_head.weight", "language_model.lm_head.weight"}


def is_of_text(name: str) -> bool:
    """Whether the weight of this name in a checkpoint is part of the text part."""
    return name.startswith(_TEXT) or name in HEAD


def text_part(config: Any) -> tuple[Any, str]:
    """The text part of a transformers config, and its architecture. Raises
    UnsupportedModelError."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    text = _in_one_direction(config.get_text_config())
    known = {**MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, **_ARCHITECTURES}
    architecture = known.get(text.model_type)
    if architecture not in ADOPTED:
        raise UnsupportedModelError(
            f"The text part of this model, {architecture or text.model_type}, is not supported; "
            "`minisgl models` lists what is."
        )
    text.tie_word_embeddings = config.tie_word_embeddings
    text.architectures = [architecture]
    return text, str(architecture)


def _in_one_direction(text: Any) -> Any:
    """The config of a text part, as of the model that it is for text."""
    from transformers import CONFIG_MAPPING

    kind = _AS_TEXT.get(text.model_type)
    if kind is None:
        return text
    values = {name: value for name, value in text.to_dict().items() if name != "model_type"}
    rope = values["rope_parameters"]
    values["rope_parameters"] = {
        "partial_rotary_factor": 1.0,
        **{name: rope[name] for name in rope if name != _DIRECTIONS},
    }
    values.setdefault("head_dim", text.hidden_size // text.num_attention_heads)
    values.setdefault("attention_bias", True)
    values.setdefault("num_nextn_predict_layers", 0)
    return CONFIG_MAPPING[kind].from_dict(values)


def left_out(config: Any) -> Iterable[str]:
    """The names of the towers."""
    return sorted(
        name.removesuffix("_config") for name in config.sub_configs if name != "text_config"
    )
