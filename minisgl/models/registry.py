"""The supported model families by the name of their architecture in config.json."""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from minisgl.errors import (
    CheckpointError,
    MinisglError,
    ModelNotFoundError,
    UnsupportedModelError,
    in_one_line,
)
from minisgl.models import deepseek, gemma4, gpt_oss, lfm2, llama, qwen3_5, qwen_vl
from minisgl.models.adopted.architectures import ADOPTED, REFUSED, RENAMED, TOWERS
from minisgl.models.config import ModelConfig, NativeConfig
from minisgl.models.config_reader import CONFIG_FILE, NUMBERS_OF_LAYERS, Fields, read_json
from minisgl.models.quantization import read_quantization, with_option
from minisgl.models.transformer import CausalLM
from minisgl.models.transformers_fields import causal_decoders


def _without_prefix(stored_name: str) -> str:
    return stored_name.removeprefix("model.")


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture: the reader of its config.json, and its module."""

    read_config: Callable[[Fields, str], NativeConfig]  # given the name of the architecture
    model: type[CausalLM] = CausalLM
    # The name of a checkpoint's tensor in the model; None for what the model leaves aside.
    name_of: Callable[[str], str | None] = _without_prefix
    else_adopted: bool = False  # models that the reader refuses run with transformers' code


FAMILIES = {
    **dict.fromkeys(
        (deepseek.V2, deepseek.V3, deepseek.GLM, *deepseek.KIMI),
        Family(deepseek.read_config, deepseek.LatentForCausalLM, deepseek.name_of),
    ),
    **dict.fromkeys(
        (gemma4.TEXT, gemma4.WITH_TOWERS),
        Family(gemma4.read_config, gemma4.GemmaForCausalLM, gemma4.name_of, else_adopted=True),
    ),
    "GptOssForCausalLM": Family(gpt_oss.read_config),
    "Lfm2ForCausalLM": Family(lfm2.read_config, lfm2.Lfm2ForCausalLM, lfm2.name_of),
    "Lfm2MoeForCausalLM": Family(lfm2.read_moe_config, lfm2.Lfm2ForCausalLM, lfm2.name_of),
    lfm2.WITH_TOWER: Family(lfm2.read_vl_config, lfm2.Lfm2ForCausalLM, lfm2.name_of),
    "LlamaForCausalLM": Family(llama.read_llama),
    "MistralForCausalLM": Family(llama.read_mistral),
    "Qwen2ForCausalLM": Family(llama.read_qwen2),
    "Qwen3ForCausalLM": Family(llama.read_qwen3),
    "Qwen3MoeForCausalLM": Family(llama.read_qwen3_moe),
    **dict.fromkeys(qwen_vl.READERS, Family(qwen_vl.read_config, name_of=qwen_vl.name_of)),
    **dict.fromkeys(
        (qwen3_5.NEXT, *qwen3_5.TEXT, *qwen3_5.WITH_TOWER),
        Family(qwen3_5.read_config, qwen3_5.HybridForCausalLM, qwen3_5.name_of),
    ),
}

_BARE, _WITH_HEAD = "Model", "ForCausalLM"  # ends of names of architectures


def read_model_config(
    folder: Path,
    *,
    quantization: str | None = None,
    model_impl: str = "auto",
    needs_head: bool = True,
) -> ModelConfig:
    """Read `folder`/config.json. quantization and model_impl: the options. needs_head: refuse a
    decoder that was saved without its head.

    Raises ModelNotFoundError without the file, CheckpointError where it is broken or contradicts
    itself, UnsupportedModelError where it asks for what minisgl does not compute, ConfigError where
    `quantization` does not fit to the checkpoint.
    """
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise ModelNotFoundError(f"{folder} holds no model: it has no {CONFIG_FILE}.")
    fields = Fields(read_json(path), CONFIG_FILE)
    names = fields.values.get("architectures")
    name = str(names[0]) if isinstance(names, list) and len(names) == 1 else reprlib.repr(names)
    name = RENAMED.get(name, name)
    if name.endswith(_BARE) and _is_known(with_head := name.removesuffix(_BARE) + _WITH_HEAD):
        if needs_head:
            raise UnsupportedModelError(
                f"{name} is a decoder without a head, which cannot generate; allowed: --task embed."
            )
        # The embedding stands in for the head, which nothing asks for.
        fields, name = (
            Fields({**fields.values, "tie_word_embeddings": True}, CONFIG_FILE),
            with_head,
        )
    has_own_code = name in FAMILIES
    is_known = not has_own_code and (name in ADOPTED or name in TOWERS)
    config: ModelConfig
    if model_impl == "adopted" or (model_impl == "auto" and is_known):
        config = _adopted(fields, name)
    elif has_own_code:
        try:
            config = FAMILIES[name].read_config(fields, name)
        except UnsupportedModelError as error:
            if model_impl != "auto" or not FAMILIES[name].else_adopted:
                raise
            config = _adopted(fields, name, because=str(error))
    else:
        raise UnsupportedModelError(_why_unsupported(name, model_impl))
    scheme = with_option(read_quantization(fields, folder), quantization)
    if scheme is not None and scheme.only_experts and not _stacks_experts(config):
        raise UnsupportedModelError(
            f"{scheme} are supported in minisgl's own code of gpt-oss alone; leave --model-impl "
            f"{model_impl} out, or use a checkpoint in bfloat16."
        )
    return replace(config, quantization=scheme)


def _adopted(fields: Fields, name: str, because: str | None = None) -> ModelConfig:
    # Imports the modeling code of transformers, which takes seconds.
    from minisgl.models.adopted.reader import read_adopted

    _check_num_layers(fields)
    try:
        config = read_adopted(fields, name)
    except MinisglError:
        raise
    except Exception as error:  # of whatever code
        raise CheckpointError(
            f"{CONFIG_FILE} makes no {name} in transformers: {in_one_line(error)}"
        ) from error
    if because is None:
        return config
    return replace(config, notes=(*config.notes, f"model: transformers' code, since {because}"))


def _check_num_layers(fields: Fields) -> None:
    """Raise CheckpointError for a number of layers for which transformers would make endless lists,
    or none."""
    parts = [fields.values, fields.values.get("text_config")]
    for part in (Fields(part, CONFIG_FILE) for part in parts if isinstance(part, dict)):
        for name in NUMBERS_OF_LAYERS & part.values.keys():
            part.count(name)


def _stacks_experts(config: ModelConfig) -> bool:
    """Whether a checkpoint has one tensor of all experts, in minisgl's own code."""
    experts = config.experts if isinstance(config, NativeConfig) else None
    return experts is not None and experts.clamped is not None


def _is_known(name: str) -> bool:
    return name in FAMILIES or name in ADOPTED


def _why_unsupported(name: str, model_impl: str) -> str:
    if name in ADOPTED or name in TOWERS:
        return (
            f"Architecture {name} is not among those that minisgl has code of its own for; leave "
            f"--model-impl {model_impl} out to run transformers' code."
        )
    if name in REFUSED:
        return f"Architecture {name} is not supported: {REFUSED[name]}."
    refusal = f"Architecture {name} is not supported; `minisgl models` lists those that are."
    if name not in causal_decoders():
        return refusal
    return (
        f"{refusal} --model-impl adopted tries transformers' code for it, and runs it if a proof "
        "at the start finds the same numbers."
    )
