"""The options of the engine.

An `EngineConfig` has the options as the user set them, validated on construction. `resolve`
combines them with the facts about model and device into a `ResolvedConfig`, which has no automatic
values.
"""

from minisgl.config.engine import ATTENTION_BACKENDS, EngineConfig, refuse_engine_options
from minisgl.config.facts import (
    DTYPE_BYTES,
    DTYPES,
    FP8,
    UNSCALED,
    AttentionSpec,
    DeviceFacts,
    ExpertFacts,
    KVScales,
    KVSpec,
    ModelFacts,
    Quantized,
)
from minisgl.config.memory import memory_bytes
from minisgl.config.options import (
    HIDDEN,
    TYPE_NAMES,
    check_at_least,
    check_types,
    option,
    option_names,
    refuse,
)
from minisgl.config.quantization import (
    BLOCK,
    FP8_WHILE_LOADING,
    Activations,
    QuantScheme,
    Storage,
)
from minisgl.config.resolve import (
    CAPTURED_BACKENDS,
    CPU_KV_BYTES,
    CPU_KV_TOKENS,
    DEFAULT_PAGE_SIZE,
    DISABLE_OVERLAP,
    FLASHINFER_PAGE_SIZE,
    FLOAT32_BACKENDS,
    LARGEST_AUTO_GRAPH,
    MAX_CPU_RANKS,
    TRTLLM_PAGE_SIZES,
    Capacity,
    ResolvedConfig,
    overlap_enabled,
    resolve,
)
from minisgl.config.torchrun import with_torchrun

__all__ = [
    "ATTENTION_BACKENDS",
    "BLOCK",
    "CAPTURED_BACKENDS",
    "CPU_KV_BYTES",
    "CPU_KV_TOKENS",
    "DEFAULT_PAGE_SIZE",
    "DISABLE_OVERLAP",
    "DTYPES",
    "DTYPE_BYTES",
    "FLASHINFER_PAGE_SIZE",
    "FLOAT32_BACKENDS",
    "FP8",
    "FP8_WHILE_LOADING",
    "HIDDEN",
    "LARGEST_AUTO_GRAPH",
    "MAX_CPU_RANKS",
    "TRTLLM_PAGE_SIZES",
    "TYPE_NAMES",
    "UNSCALED",
    "Activations",
    "AttentionSpec",
    "Capacity",
    "DeviceFacts",
    "EngineConfig",
    "ExpertFacts",
    "KVScales",
    "KVSpec",
    "ModelFacts",
    "QuantScheme",
    "Quantized",
    "ResolvedConfig",
    "Storage",
    "check_at_least",
    "check_types",
    "memory_bytes",
    "option",
    "option_names",
    "overlap_enabled",
    "refuse",
    "refuse_engine_options",
    "resolve",
    "with_torchrun",
]
