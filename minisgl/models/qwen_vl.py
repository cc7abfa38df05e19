"""The text parts of Qwen2-VL, Qwen2.5-VL and Qwen3-VL (arXiv 2409.12191, 2502.13923, 2511.21631):
the decoders of Qwen2, Qwen3 and Qwen3-MoE."""

from __future__ import annotations

from dataclasses import replace

from minisgl.models.config import NativeConfig
from minisgl.models.config_reader import Fields, field_names
from minisgl.models.llama import read_qwen2, read_qwen3, read_qwen3_moe
from minisgl.models.text_part import text_part


def _read_mixture(fields: Fields, architecture: str) -> NativeConfig:
    """Unlike in Qwen3-MoE, the weights of a token's experts always add up to 1."""
    if fields.values.get("norm_topk_prob") is None:
        fields = Fields({**fields.values, "norm_topk_prob": True}, fields.where)
    fields.require("norm_topk_prob", (True,))
    return read_qwen3_moe(fields, architecture)


READERS = {
    "Qwen2VLForConditionalGeneration": read_qwen2,
    "Qwen2_5_VLForConditionalGeneration": read_qwen2,
    "Qwen3VLForConditionalGeneration": read_qwen3,
    "Qwen3VLMoeForConditionalGeneration": _read_mixture,
}
_TOWER = "visual."
# Of the whole, where a config of transformers 4 has those of the text part beside them.
_OF_WHOLE = field_names(
    """architectures model_type vision_config image_token_id video_token_id vision_start_token_id
    vision_end_token_id vision_token_id"""
)


def read_config(whole: Fields, architecture: str) -> NativeConfig:
    """Raises as `read_decoder` does."""
    whole = with_text_config(whole)
    fields, notes = text_part(whole)
    if (tied := whole.values.get("tie_word_embeddings")) is not None:  # which decides
        fields = Fields({**fields.values, "tie_word_embeddings": tied}, fields.where)
    read = READERS[architecture](fields, architecture)
    return replace(read, notes=(*read.notes, *notes))


def with_text_config(whole: Fields) -> Fields:
    """The config with the text part by itself."""
    if "text_config" in whole.values:
        return Fields(
            {name: value for name, value in whole.values.items() if name != "vision_token_id"},
            whole.where,
        )
    own = {name: whole.values[name] for name in _OF_WHOLE & whole.values.keys()}
    text = {name: value for name, value in whole.values.items() if name not in _OF_WHOLE}
    own.pop("vision_token_id", None)
    return Fields({**own, "text_config": text}, whole.where)


def name_of(stored_name: str) -> str | None:
    """What a tensor of a checkpoint is called in the model; None for those of the tower."""
    name = stored_name.removeprefix("model.").removeprefix("language_model.")
    return None if name.startswith(_TOWER) else name
