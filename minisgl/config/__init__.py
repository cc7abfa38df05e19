"""Every option of the engine.

An `EngineConfig` is what the user wrote, checked on construction. `resolve` combines it with the
facts about the model and the device into a `ResolvedConfig`, in which nothing is automatic.
"""

from minisgl.config.engine import ATTENTION_BACKENDS, EngineConfig, refuse_engine_options
from minisgl.config.facts import (
    DTYPE_BYTES,
    DTYPES,
    AttentionSpec,
    DeviceFacts,
    ExpertFacts,
    KVSpec,
    ModelFacts,
    Quantized,
)
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
    "FP8_WHILE_LOADING",
    "HIDDEN",
    "LARGEST_AUTO_GRAPH",
    "MAX_CPU_RANKS",
    "TRTLLM_PAGE_SIZES",
    "TYPE_NAMES",
    "Activations",
    "AttentionSpec",
    "Capacity",
    "DeviceFacts",
    "EngineConfig",
    "ExpertFacts",
    "KVSpec",
    "ModelFacts",
    "QuantScheme",
    "Quantized",
    "ResolvedConfig",
    "Storage",
    "check_at_least",
    "check_types",
    "option",
    "option_names",
    "overlap_enabled",
    "refuse",
    "refuse_engine_options",
    "resolve",
]
