"""A model and two machines for which options are resolved."""

from __future__ import annotations

from typing import Any

from minisgl.attention.backends import BACKENDS
from minisgl.config import (
    AttentionSpec,
    DeviceFacts,
    EngineConfig,
    ModelFacts,
    ResolvedConfig,
    resolve,
)

MODEL = ModelFacts(
    dtype="bfloat16",
    max_seq_len=4096,
    max_seq_len_reason=None,
    vocab_size=1000,
    layers=(AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=64, scale=0.125),) * 2,
    intermediate_size=3072,
    num_layer_weights=100_000,
    num_head_weights=256_000,
)
DECLARED = tuple(backend.facts for backend in BACKENDS.values())
CPU = DeviceFacts(has_cuda=False, free_cpu_bytes=64 << 30, backends=DECLARED)
GPU = DeviceFacts(
    has_cuda=True,
    free_cpu_bytes=64 << 30,
    num_gpus=2,
    compute_capability=(9, 0),
    backends=DECLARED,
    missing_backends={"fa": "flash-attn is not installed"},
)


def resolved(
    model: ModelFacts = MODEL, machine: DeviceFacts = CPU, **options: Any
) -> ResolvedConfig:
    return resolve(EngineConfig(**options), model, machine, overlap=True)
