"""The options of the engine.

An `EngineConfig` has the options as the user set them, validated on construction. `resolve`
combines them with the facts about model and device into a `ResolvedConfig`, which has no automatic
values.
"""

from minisgl.config.engine import ATTENTION_BACKENDS, EngineConfig, refuse_engine_options
from minisgl.config.facts import (
    ATTENTION_EXTRAS,
    DTYPE_BYTES,
    DTYPES,
    FP8,
    LATENTS,
    MAX_SEQ_LEN,
    OTHER_VALUES,
    SOFT_CAPS,
    UNSCALED,
    WINDOWS,
    AttentionSpec,
    BackendFacts,
    DeviceFacts,
    ExpertFacts,
    KVScales,
    KVSpec,
    LayerSpec,
    ModelFacts,
    Quantized,
    SharedKV,
    StateSpec,
    best_first,
    page_bytes,
    slot_bytes,
)
from minisgl.config.keywords import (
    INSTEAD,
    EngineOptions,
    KeywordError,
    Text,
    config_of,
    in_keywords,
)
from minisgl.config.machine import memory_bytes, usable_cores
from minisgl.config.options import (
    HIDDEN,
    TYPE_NAMES,
    check_at_least,
    check_parameter,
    check_types,
    option,
    option_names,
    refuse,
)
from minisgl.config.quantization import Activations
from minisgl.config.resolve import (
    SNAPSHOT_SHARE,
    Capacity,
    ResolvedConfig,
    overlap_enabled,
    resolve,
    with_layout,
)
from minisgl.config.torchrun import with_torchrun
from minisgl.config.windows import WindowSizes, divide
