"""Writes the config.json of a public model, for benchmarks with random weights and no download.

python scripts/tools/dummy_config.py Qwen3-0.6B /tmp/qwen3-0.6b
minisgl bench --model /tmp/qwen3-0.6b --load-format dummy
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}
LLAMA3 = QWEN3 | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "vocab_size": 128256,
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
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "Llama-3.1-8B": LLAMA3 | sizes(4096, 14336, 32, 32),
}


def main() -> None:
    if len(sys.argv) != 3 or sys.argv[1] not in MODELS:
        sys.exit(f"usage: dummy_config.py MODEL FOLDER, with MODEL one of {', '.join(MODELS)}")
    folder = Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODELS[sys.argv[1]], indent=2) + "\n")


if __name__ == "__main__":
    main()
