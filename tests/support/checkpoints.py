"""Small random checkpoints with teeth, and what transformers computes from them in float32.

transformers' own initialisation gives nearly uniform attention and a greedy run of one repeated
token, under which a wrong rope, page or head map passes. Here the projections are scaled so that
attention is peaked and greedy tokens vary; tests/integration/test_mutations.py proves that mistakes
show.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

disable_progress_bar()

MODEL_TYPES = {
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "Glm4MoeLiteForCausalLM": "glm4_moe_lite",
    "GptOssForCausalLM": "gpt_oss",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Phi3ForCausalLM": "phi3",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3_5ForCausalLM": "qwen3_5_text",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
MAX_POSITION = 512


@dataclass(frozen=True)
class Spec:
    """A checkpoint to make. The same spec always makes the same weights."""

    name: str
    architecture: str
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    hidden_size: int = 128
    num_layers: int = 2
    vocab_size: int = 499
    tied: bool = False
    rope: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)  # other fields of config.json
    sharded: bool = False
    transformers4: bool = False  # spell config.json as transformers 4 did
    dtype: torch.dtype = torch.float32
    seed: int = 0

    def __str__(self) -> str:
        return self.name


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}

SPECS = [
    Spec("llama", "LlamaForCausalLM"),
    Spec("llama3", "LlamaForCausalLM", num_kv_heads=1, tied=True, rope=LLAMA3_ROPE),
    Spec(
        "llama-biased",
        "LlamaForCausalLM",
        num_kv_heads=4,
        head_dim=96,
        extra={"attention_bias": True, "mlp_bias": True},
        transformers4=True,
    ),
    Spec("llama-yarn", "LlamaForCausalLM", rope=YARN_ROPE, transformers4=True, sharded=True),
    Spec("llama-linear", "LlamaForCausalLM", rope={"rope_type": "linear", "factor": 4.0}),
    Spec("llama-dynamic", "LlamaForCausalLM", rope={"rope_type": "dynamic", "factor": 2.0}),
    Spec("mistral", "MistralForCausalLM", head_dim=128, extra={"sliding_window": 20}, sharded=True),
    Spec(
        "qwen2",
        "Qwen2ForCausalLM",
        num_heads=14,
        num_kv_heads=2,
        hidden_size=112,
        tied=True,
        transformers4=True,
    ),
    Spec("qwen3", "Qwen3ForCausalLM", head_dim=128, tied=True, num_layers=3, sharded=True),
    Spec(
        "qwen3-biased",
        "Qwen3ForCausalLM",
        num_kv_heads=1,
        extra={"attention_bias": True},
        rope={**YARN_ROPE, "rope_theta": 1_000_000.0},
    ),
]


EXPERT_SPECS = [
    Spec(
        "moe",
        "Qwen3MoeForCausalLM",
        extra={
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 96,
            "norm_topk_prob": True,
        },
    ),
    Spec(
        "moe-60",
        "Qwen3MoeForCausalLM",
        num_layers=4,
        tied=True,
        sharded=True,
        extra={
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 32,
            "norm_topk_prob": False,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
        },
    ),
]

# Not of every test: experts that no number of ranks has in equal parts.
MOE_5 = Spec(
    "moe-5",
    "Qwen3MoeForCausalLM",
    extra={
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 92,
        "norm_topk_prob": True,
    },
)

# Windows end within every prompt, gates and ups exceed the limit, and the last chunk of an expert's
# inner dimension is half padding.
GPT_OSS = Spec(
    "gpt-oss",
    "GptOssForCausalLM",
    num_layers=3,
    rope={**YARN_ROPE, "original_max_position_embeddings": 64, "truncate": False},
    extra={
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 96,
        "sliding_window": 20,
        "swiglu_limit": 1.5,
    },
)

# Attention over latents: with and without latents of queries, groups and scaled scores. Widths
# within a head differ, and so do the widths of latents. Heads divide by 4.
_LATENT: dict[str, Any] = {
    "kv_lora_rank": 48,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 40,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
_MSCALE_ROPE = {**YARN_ROPE, "mscale": 0.707, "mscale_all_dim": 1.4}
LATENT_SPECS = [
    Spec(
        "deepseek-v2",
        "DeepseekV2ForCausalLM",
        num_kv_heads=4,
        head_dim=16,
        num_layers=3,
        rope=_MSCALE_ROPE,
        transformers4=True,
        extra={**_LATENT, "q_lora_rank": None, "n_shared_experts": 2, "topk_method": "greedy"},
    ),
    Spec(
        "deepseek-v2-groups",
        "DeepseekV2ForCausalLM",
        num_kv_heads=4,
        head_dim=16,
        num_layers=3,
        extra={
            **_LATENT,
            "q_lora_rank": 56,
            "n_group": 4,
            "topk_group": 2,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 4.0,
        },
    ),
    Spec(
        "deepseek-v3",
        "DeepseekV3ForCausalLM",
        num_kv_heads=4,
        head_dim=16,
        num_layers=3,
        rope={**YARN_ROPE, "mscale": 1.0, "mscale_all_dim": 1.0},
        sharded=True,
        extra={
            **_LATENT,
            "q_lora_rank": 56,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
        },
    ),
    Spec(
        "glm-flash",
        "Glm4MoeLiteForCausalLM",
        num_kv_heads=4,
        head_dim=16,
        num_layers=3,
        extra={**_LATENT, "q_lora_rank": 56, "routed_scaling_factor": 1.8, "rms_norm_eps": 1e-5},
    ),
]

# Not of every test: sizes that INT4 takes; blocks of FP8 end within heads and between maps.
_V3 = next(spec for spec in LATENT_SPECS if spec.name == "deepseek-v3")
LATENT_64 = dataclasses.replace(
    _V3,
    name="latents-64",
    extra={
        **_V3.extra,
        "kv_lora_rank": 64,
        "moe_intermediate_size": 64,
        "q_lora_rank": 64,
        "v_head_dim": 32,
    },
)

# Not of every test: a Qwen2 whose heads divide by 4.
QWEN2_12_HEADS = Spec("qwen2-12-heads", "Qwen2ForCausalLM", num_heads=12, hidden_size=96, tied=True)


def spec_named(name: str) -> Spec:
    return next(
        spec
        for spec in (*SPECS, *EXPERT_SPECS, *LATENT_SPECS, MOE_5, GPT_OSS, QWEN2_12_HEADS)
        if spec.name == name
    )


def make_checkpoint(spec: Spec, folder: Path) -> Path:
    """Write config.json and safetensors of `spec` into `folder`; returns the folder."""
    config = AutoConfig.for_model(
        MODEL_TYPES[spec.architecture],
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=MAX_POSITION,
        tie_word_embeddings=spec.tied,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, **spec.rope},
        bos_token_id=None,
        eos_token_id=None,
        **{"intermediate_size": 2 * spec.hidden_size, **spec.extra},
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _sharpen(model, torch.Generator().manual_seed(spec.seed))
    model.to(spec.dtype)
    model.save_pretrained(folder, max_shard_size="300KB" if spec.sharded else "1GB")
    if spec.transformers4:
        _spell_as_transformers4(folder / "config.json")
    return folder


def _sharpen(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Random weights under which every part of the model matters to the result."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            fan_in = weight.shape[-1]
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                weight.copy_(1.7 + 0.4 * noise)
            elif "norm" in name:
                weight.copy_(1 + 0.3 * noise)
            elif name.endswith("bias"):
                weight.copy_(0.5 * noise)
            elif "embed_tokens" in name:
                weight.copy_(noise)
            elif any(part in name for part in ("q_proj", "k_proj", "q_b_proj", "kv_a_proj")):
                weight.copy_(2.5 * noise / fan_in**0.5)
            elif "o_proj" in name:
                weight.copy_(8 * noise / fan_in**0.5)
            elif name.endswith("sinks"):
                weight.copy_(2 * noise)
            elif "down_proj" in name or name.endswith(("mlp.gate.weight", "router.weight")):
                weight.copy_(3 * noise / fan_in**0.5)
            else:
                weight.copy_(noise / fan_in**0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):  # of probabilities
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))


def _spell_as_transformers4(path: Path) -> None:
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    config["torch_dtype"] = config.pop("dtype")
    config.pop("layer_types", None)
    if config["head_dim"] * config["num_attention_heads"] == config["hidden_size"]:
        del config["head_dim"]
    path.write_text(json.dumps(config))


def load_reference(folder: Path, architecture: Any = AutoModelForCausalLM) -> PreTrainedModel:
    """The checkpoint in transformers: float32, CPU, its plainest attention."""
    model: PreTrainedModel = architecture.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    for module in model.modules():
        if hasattr(module, "limit"):  # of gpt-oss; transformers 5.17 takes 7.0, whatever it is
            module.limit = getattr(model.config, "swiglu_limit", module.limit)
    return model


@torch.inference_mode()
def reference_logits(reference: PreTrainedModel, token_ids: Sequence[int]) -> Tensor:
    """Logits after each token: [len(token_ids), vocab_size]."""
    logits: Tensor = reference(torch.tensor([list(token_ids)]), use_cache=False).logits
    return logits[0]


@dataclass(frozen=True)
class GreedyRun:
    token_ids: list[int]
    logits: Tensor  # [len(token_ids), vocab_size]: those that each token was chosen from

    @property
    def margins(self) -> Tensor:
        """By how much each token won: [len(token_ids)]."""
        best = self.logits.topk(2).values
        return best[:, 0] - best[:, 1]


def _cache_argument(reference: PreTrainedModel) -> str:
    """The name of the KV cache as an argument, which transformers 5.24 has changed, class by
    class."""
    names = inspect.signature(reference.forward).parameters
    return "cache" if "cache" in names else "past_key_values"


@torch.inference_mode()
def greedy_reference(
    reference: PreTrainedModel, prompt: Sequence[int], num_tokens: int
) -> GreedyRun:
    """The likeliest next token, `num_tokens` times; EOS does not end it."""
    output = reference(torch.tensor([list(prompt)]), use_cache=True)
    logits: list[Tensor] = []
    token_ids: list[int] = []
    for _ in range(num_tokens):
        logits.append(output.logits[0, -1])
        token_ids.append(int(logits[-1].argmax()))
        kept = {_cache_argument(reference): output.past_key_values}
        output = reference(torch.tensor([token_ids[-1:]]), use_cache=True, **kept)
    return GreedyRun(token_ids, torch.stack(logits))


def random_prompt(spec: Spec, length: int, seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(spec.vocab_size, (length,), generator=generator).tolist()


@dataclass(frozen=True)
class Case:
    """A checkpoint on disk, and a prompt with its 64 greedy tokens as the reference sees them."""

    spec: Spec
    folder: Path
    prompt: list[int]
    greedy: GreedyRun
    logits: Tensor  # [len(token_ids), vocab_size], teacher-forced

    @property
    def token_ids(self) -> list[int]:
        return self.prompt + self.greedy.token_ids


def make_case(spec: Spec, folder: Path) -> Case:
    reference = load_reference(make_checkpoint(spec, folder))
    prompt = random_prompt(spec, 61)
    greedy = greedy_reference(reference, prompt, 64)
    assert len(set(greedy.token_ids)) >= 20, "a checkpoint without teeth"
    logits = reference_logits(reference, prompt + greedy.token_ids)
    return Case(spec, folder, prompt, greedy, logits)


def relative_error(logits: Tensor, reference: Tensor) -> float:
    """The largest difference, as a share of the largest logit."""
    return float((logits - reference).abs().max() / reference.abs().max())


# float32 through a different order of additions; mistakes cost over a thousand times as much.
TOLERANCE = 1e-4
