"""Writes the config.json of a public model, for benchmarks with random weights and no download.

Those fields of the published file that transformers does not have as defaults, without the ids of
tokens: random weights would end answers by chance. Of models that also see images, the text part;
of a name that ends with -vision, the tower, too.

python scripts/tools/dummy_config.py Qwen3-0.6B /tmp/qwen3-0.6b
minisgl bench --model /tmp/qwen3-0.6b --load-format dummy

With --quantization it is that of a quantised checkpoint, as the tools that make such write it:

| fp8-block | Qwen and DeepSeek: a scale for each 128 x 128 weights |
| fp8-channel | compressed-tensors, FP8_DYNAMIC: a scale for each row |
| fp8-tensor | AutoFP8: a scale for each matrix, and one for its inputs |
| int8 | compressed-tensors, W8A8: a scale for each row |
| int4 | compressed-tensors, W4A16: symmetric, in groups of 128 |
| awq | AutoAWQ: with zero points, in groups of 128 |
| gptq | GPTQModel: symmetric, in groups of 128 |
| nvfp4 | compressed-tensors, NVFP4A16 |
| none | not quantised, where it is published quantised |

A name that ends with -eagle3 is that of a drafter of the model: --speculative FOLDER.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "num_key_value_heads": 8,
    "rope_theta": 1_000_000,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}
LLAMA3: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "max_position_embeddings": 131072,
    "num_experts_per_tok": 4,
    "num_key_value_heads": 8,
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}
QWEN3_5: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "dtype": "bfloat16",
    "full_attention_interval": 4,
    "max_position_embeddings": 262144,
    "mtp_num_hidden_layers": 1,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10_000_000,
        "rope_type": "default",
    },
    "vocab_size": 248320,
}
GEMMA4: dict[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "attention_k_eq_v": True,
    "dtype": "bfloat16",
    "final_logit_softcapping": 30.0,
    "hidden_size_per_layer_input": 0,
    "max_position_embeddings": 262144,
    "rope_parameters": {
        "full_attention": {
            "partial_rotary_factor": 0.25,
            "rope_theta": 1_000_000.0,
            "rope_type": "proportional",
        },
        "sliding_attention": {"rope_theta": 10_000.0, "rope_type": "default"},
    },
    "sliding_window": 1024,
    "tie_word_embeddings": True,
    "vocab_size": 262144,
}
DEEPSEEK: dict[str, Any] = {
    "attention_bias": False,
    "dtype": "bfloat16",
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "kv_lora_rank": 512,
    "moe_layer_freq": 1,
    "qk_rope_head_dim": 64,
    "tie_word_embeddings": False,
}
DEEPSEEK_ROPE = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}


def sizes(hidden: int, intermediate: int, layers: int, heads: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }


MODELS = {
    "Qwen3-0.6B": QWEN3 | sizes(1024, 3072, 28, 16) | {"tie_word_embeddings": True},
    "Qwen3-8B": QWEN3 | sizes(4096, 12288, 36, 32),
    "Qwen3-14B": QWEN3 | sizes(5120, 17408, 40, 40),
    "Qwen3-32B": QWEN3 | sizes(5120, 25600, 64, 64),
    "Qwen3-30B-A3B": QWEN3
    | sizes(2048, 6144, 48, 32)
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    },
    "Llama-3.1-8B": LLAMA3 | sizes(4096, 14336, 32, 32),
    "Mistral-7B": sizes(4096, 14336, 32, 32)
    | {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "max_position_embeddings": 32768,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
        "torch_dtype": "bfloat16",
        "vocab_size": 32000,
    },
    "Qwen3.8-27B": QWEN3_5
    | sizes(5120, 17408, 64, 24)
    | {"linear_num_value_heads": 48, "num_key_value_heads": 4},
    "Qwen3.5-35B-A3B": QWEN3_5
    | sizes(2048, 512, 40, 16)
    | {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "linear_num_value_heads": 32,
        "moe_intermediate_size": 512,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 2,
        "shared_expert_intermediate_size": 512,
    },
    "Qwen3.5-tiny": QWEN3_5  # of no publisher: for a CPU
    | sizes(128, 256, 4, 2)
    | {
        "head_dim": 64,
        "linear_key_head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_value_head_dim": 32,
        "num_key_value_heads": 1,
        "vocab_size": 1024,
    },
    "gpt-oss-20b": GPT_OSS | sizes(2880, 2880, 24, 64) | {"num_local_experts": 32},
    "gpt-oss-120b": GPT_OSS | sizes(2880, 2880, 36, 64) | {"num_local_experts": 128},
    "gemma-4-31B": GEMMA4
    | sizes(5376, 21504, 60, 32)
    | {"num_global_key_value_heads": 4, "num_key_value_heads": 16},
    "gemma-4-26B-A4B": GEMMA4
    | sizes(2816, 2112, 30, 16)
    | {
        "enable_moe_block": True,
        "moe_intermediate_size": 704,
        "num_experts": 128,
        "num_global_key_value_heads": 2,
        "num_key_value_heads": 8,
        "top_k_experts": 8,
    },
    "GLM-4.7-Flash": DEEPSEEK
    | sizes(2048, 10240, 47, 20)
    | {
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "model_type": "glm4_moe_lite",
        "max_position_embeddings": 202752,
        "moe_intermediate_size": 1536,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 4,
        "num_key_value_heads": 20,
        "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 1.0,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000,
        "routed_scaling_factor": 1.8,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "v_head_dim": 256,
        "vocab_size": 154880,
    },
    "DeepSeek-V2-Lite": DEEPSEEK
    | sizes(2048, 10944, 27, 16)
    | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "max_position_embeddings": 163840,
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "num_experts_per_tok": 6,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_scaling": DEEPSEEK_ROPE | {"mscale": 0.707, "mscale_all_dim": 0.707},
        "rope_theta": 10000,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "topk_group": 1,
        "topk_method": "greedy",
        "v_head_dim": 128,
        "vocab_size": 102400,
    },
    "DeepSeek-V3": sizes(7168, 18432, 61, 128)
    | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "dtype": "bfloat16",
        "max_position_embeddings": 163840,
        "rope_scaling": DEEPSEEK_ROPE | {"mscale": 1.0, "mscale_all_dim": 1.0},
        "rope_theta": 10000,
        "vocab_size": 129280,
    },
    "Gemma-2-9B": sizes(3584, 14336, 42, 16)
    | {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "num_key_value_heads": 8,
        "torch_dtype": "bfloat16",
        "vocab_size": 256000,
    },
    "Gemma-3-12B": sizes(3840, 15360, 48, 16)
    | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "dtype": "bfloat16",
        "num_key_value_heads": 8,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
        "vocab_size": 262208,
    },
    "Olmo-3-7B": sizes(4096, 11008, 32, 32)
    | {
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "dtype": "bfloat16",
        "max_position_embeddings": 65536,
        "rms_norm_eps": 1e-6,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "attention_factor": 1.2079441541679836,
            "original_max_position_embeddings": 8192,
        },
        "vocab_size": 100278,
    },
    "MiMo-V2-Flash": sizes(4096, 16384, 48, 64)
    | {
        "architectures": ["MiMoV2FlashForCausalLM"],
        "model_type": "mimo_v2_flash",
        "dtype": "bfloat16",
        "vocab_size": 152576,
    },
}


def eagle3_head(model: str) -> dict[str, Any]:
    """An EAGLE-3 head of 32,000 tokens for one of MODELS."""
    target = {name: value for name, value in MODELS[model].items() if name != "rope_scaling"}
    return target | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "draft_vocab_size": 32000,
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
    }


def with_tower(model: str, architecture: str, model_type: str, tower: dict[str, Any]) -> Any:
    """A model of the Qwen kind that sees. Its tokens for images are the last that
    dummy_tokenizer.py writes."""
    text = {name: value for name, value in MODELS[model].items() if name != "architectures"}
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id")
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "text_config": text,
        "tie_word_embeddings": False,
        "vision_config": {"model_type": model_type} | tower,
        **{name: text["vocab_size"] - 3 + place for place, name in enumerate(names)},
    }


QWEN3_5_TOWER: dict[str, Any] = {
    "deepstack_visual_indexes": [],
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "num_position_embeddings": 2304,
    "out_hidden_size": 5120,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
MODELS["Qwen3.8-27B-vision"] = with_tower(
    "Qwen3.8-27B", "Qwen3_5ForConditionalGeneration", "qwen3_5", QWEN3_5_TOWER
)
# Of drafters, which are no models: for --speculative FOLDER with --load-format dummy.
DRAFTERS = {f"{name}-eagle3": eagle3_head(name) for name in ("Llama-3.1-8B", "Qwen3-14B")}


def compressed_tensors(format: str, weights: dict[str, Any], inputs: Any) -> dict[str, Any]:
    """What llm-compressor writes: `weights` and `inputs` say how these are quantised."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group | {"output_activations": None}},
        "ignore": ["lm_head", "re:.*mlp.gate$"],  # the latter: routers
        "kv_cache_scheme": None,
    }


def number(num_bits: int, type: str, strategy: str, *, dynamic: bool = False) -> dict[str, Any]:
    return {
        "num_bits": num_bits,
        "type": type,
        "strategy": strategy,
        "symmetric": True,
        "dynamic": dynamic,
    }


QUANTIZATIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "fp8-block": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
    "fp8-channel": compressed_tensors(
        "float-quantized",
        number(8, "float", "channel"),
        number(8, "float", "token", dynamic=True),
    ),
    "fp8-tensor": {
        "quant_method": "fp8",
        "activation_scheme": "static",
        "ignored_layers": ["lm_head"],
    },
    "int8": compressed_tensors(
        "int-quantized",
        number(8, "int", "channel"),
        number(8, "int", "token", dynamic=True),
    ),
    "int4": compressed_tensors(
        "pack-quantized", number(4, "int", "group") | {"group_size": 128, "actorder": None}, None
    ),
    "awq": {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 128,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": None,
    },
    "gptq": {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 128,
        "sym": True,
        "desc_act": False,
        "checkpoint_format": "gptq",
        "lm_head": False,
    },
    "nvfp4": compressed_tensors(
        "nvfp4-pack-quantized", number(4, "float", "tensor_group") | {"group_size": 16}, None
    ),
}


def config_of(model: str, quantization: str | None = None) -> dict[str, Any]:
    """The content of config.json. model: of MODELS, or without a quantisation of DRAFTERS;
    quantization: of QUANTIZATIONS."""
    if quantization is None:
        return (MODELS | DRAFTERS)[model]
    return MODELS[model] | {"quantization_config": QUANTIZATIONS[quantization]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [*MODELS, *DRAFTERS]
    parser.add_argument("model", choices=names, metavar="MODEL", help=", ".join(names))
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where config.json goes")
    parser.add_argument("--quantization", choices=QUANTIZATIONS, help="the format of the weights")
    given = parser.parse_args()
    if given.quantization and given.model in DRAFTERS:
        parser.error(f"--quantization: {given.model} is a drafter, and not quantised")
    given.folder.mkdir(parents=True, exist_ok=True)
    content = json.dumps(config_of(given.model, given.quantization), indent=2)
    (given.folder / "config.json").write_text(content + "\n")


if __name__ == "__main__":
    main()
