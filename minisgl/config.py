"""Every option of the engine, once.

An `EngineConfig` is what the user wrote, checked on construction. `resolve` combines it with the
facts about the model and the device into a `ResolvedConfig`, in which nothing is automatic any
more. What is known only after loading the model is the runner's result, a `Capacity`.
"""

from __future__ import annotations

import math
import os
from dataclasses import Field, dataclass, field, fields
from types import NoneType
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

from minisgl.errors import ConfigError, one_of

ATTENTION_BACKENDS = ("fa", "fi", "trtllm", "triton", "torch")
DTYPES = ("bfloat16", "float16", "float32")
TYPE_NAMES: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "a text",
    tuple: "a tuple of texts",
    NoneType: "None",
}
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}

DISABLE_OVERLAP = "MINISGL_DISABLE_OVERLAP_SCHEDULING"

# On CPU the KV cache is modest unless --num-pages says otherwise.
CPU_KV_TOKENS = 65_536
CPU_KV_BYTES = 2 << 30


def option(default: Any, help: str, *, names: tuple[str, ...] = (), group: str = "Engine") -> Any:
    """A dataclass field that the command line offers as an option.

    The option is spelled after the field (`page_size` → `--page-size`) unless `names` says
    otherwise; the first name is the one that messages use.
    """
    return field(default=default, metadata={"help": help, "names": names, "group": group})


def option_names(spec: Field[Any]) -> tuple[str, ...]:
    return tuple(spec.metadata["names"]) or ("--" + spec.name.replace("_", "-"),)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The options as the user gave them. Raises ConfigError on a value that can never be right."""

    model: str = option(
        "",
        "Local folder or Hugging Face id; the bundled demo model if not given.",
        names=("--model", "--model-path"),
        group="Model",
    )
    dtype: str = option("auto", "auto, bfloat16, float16 or float32.", group="Model")
    device: str = option("auto", "auto, cuda or cpu.", group="Model")
    load_format: str = option(
        "auto", "auto (safetensors) or dummy (random weights).", group="Model"
    )
    max_seq_len_override: int | None = option(
        None, "Longest sequence in tokens; the model's own if not given.", group="Model"
    )
    tp: int = option(
        1,
        "Tensor-parallel ranks, on one host.",
        names=("--tp", "--tensor-parallel-size", "--tp-size"),
        group="Parallelism",
    )
    disable_pynccl: bool = option(
        False, "Use torch.distributed's own collectives for everything.", group="Parallelism"
    )
    memory_ratio: float = option(
        0.9,
        "Fraction of the GPU memory free at start for weights, activations and KV cache together.",
        group="Memory",
    )
    num_pages: int | None = option(
        None, "Size of the KV cache in pages; from memory if not given.", group="Memory"
    )
    page_size: int | None = option(
        None, "Tokens per page; chosen by backend if not given.", group="Memory"
    )
    cache_type: str = option(
        "radix", "Prefix cache: radix or naive.", names=("--cache-type", "--cache"), group="Memory"
    )
    max_running_requests: int = option(256, "Running requests at most.", group="Scheduling")
    max_queued_requests: int = option(
        2048, "Waiting requests before new ones are refused.", group="Scheduling"
    )
    max_prefill_length: int = option(
        8192,
        "Prompt tokens in one step; longer prompts are prefilled in chunks.",
        group="Scheduling",
    )
    schedule_policy: str = option(
        "fcfs", "fcfs (in order) or lpm (longest cached prefix first).", group="Scheduling"
    )
    schedule_conservativeness: float = option(
        1.0,
        "Scales the reserve for tokens not yet generated; under 1 admits more and may retract.",
        group="Scheduling",
    )
    attn: str = option(
        "auto",
        "auto, a backend for both phases, or a pair PREFILL,DECODE.",
        names=("--attn", "--attention-backend"),
        group="Kernels",
    )
    cuda_graph_max_bs: int | None = option(
        None,
        "Largest batch whose decoding runs as a CUDA graph; 0 turns graphs off.",
        group="Kernels",
    )

    def __post_init__(self) -> None:
        check_types(self)
        self._check_choice("dtype", ("auto", *DTYPES))
        self._check_choice("device", ("auto", "cuda", "cpu"))
        self._check_choice("load_format", ("auto", "dummy"))
        self._check_choice("cache_type", ("radix", "naive"))
        self._check_choice("schedule_policy", ("fcfs", "lpm"))
        check_at_least(self, "tp", 1)
        check_at_least(self, "num_pages", 2)
        check_at_least(self, "page_size", 1)
        check_at_least(self, "max_seq_len_override", 1)
        check_at_least(self, "max_running_requests", 1)
        check_at_least(self, "max_queued_requests", 1)
        check_at_least(self, "max_prefill_length", 1)
        check_at_least(self, "cuda_graph_max_bs", 0)
        if not 0 < self.memory_ratio <= 1:
            refuse(self, "memory_ratio", "allowed: above 0 and at most 1")
        if not 0 < self.schedule_conservativeness < math.inf:
            refuse(self, "schedule_conservativeness", "allowed: a number above 0")
        backends = self.attn.split(",")
        if self.attn != "auto" and (
            len(backends) > 2 or any(name not in ATTENTION_BACKENDS for name in backends)
        ):
            choices = one_of(("auto", *ATTENTION_BACKENDS))
            refuse(self, "attn", f"{choices}, or a pair PREFILL,DECODE")

    def _check_choice(self, name: str, choices: tuple[str, ...]) -> None:
        if getattr(self, name) not in choices:
            refuse(self, name, one_of(choices))


def refuse(config: Any, name: str, allowed: str) -> NoReturn:
    """Raise ConfigError for field `name`, made with `option`, of the dataclass `config`."""
    spec = next(spec for spec in fields(config) if spec.name == name)
    raise ConfigError(option_names(spec)[0], getattr(config, name), allowed)


def check_types(config: Any) -> None:
    """Refuse a field whose value is not of the type that it is declared with."""
    for name, hint in get_type_hints(type(config)).items():
        kinds = {get_origin(kind) or kind for kind in get_args(hint) or (hint,)}
        if get_origin(hint) is tuple:
            kinds = {tuple}
        value = getattr(config, name)
        if float in kinds:
            kinds.add(int)
        # A bool is an int to Python, and to nobody else.
        if type(value) not in kinds:
            names = " or ".join(sorted(TYPE_NAMES[kind] for kind in kinds))
            refuse(config, name, f"allowed: {names}")


def check_at_least(config: Any, name: str, low: int) -> None:
    """Refuse a field that is given and below `low`."""
    value = getattr(config, name)
    if value is not None and value < low:
        refuse(config, name, f"allowed: {low} or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the options depend on, of the model."""

    dtype: str  # of the checkpoint: bfloat16, float16 or float32
    max_seq_len: int
    max_seq_len_reason: str | None  # why a longer --max-seq-len-override is refused; None: allowed
    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_layer_weights: int  # in the matrices of all layers
    num_head_weights: int  # in the matrix that makes logits

    def kv_bytes_per_token(self, dtype: str) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * DTYPE_BYTES[dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """What the options depend on, of the machine."""

    has_cuda: bool
    free_cpu_bytes: int
    attention_backends: tuple[str, ...]  # those that run here, best first
    missing_backends: dict[str, str]  # why the others do not


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """The options with nothing left to choose."""

    model: str
    device: str
    dtype: str
    load_format: str
    max_seq_len: int  # before the capacity of the KV cache is known
    tp: int
    disable_pynccl: bool
    memory_ratio: float
    num_pages: int  # 0: as many as memory_ratio leaves room for
    page_size: int
    cache_type: str
    max_running_requests: int
    max_queued_requests: int
    max_prefill_length: int
    schedule_policy: str
    schedule_conservativeness: float
    attn_prefill: str
    attn_decode: str
    cuda_graph_max_bs: int
    overlap: bool
    notes: tuple[str, ...]  # what was decided and why, for the log


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the runner found room for, once the weights were loaded."""

    num_pages: int  # page 0 is scratch, so one less is usable
    page_size: int
    num_slots: int
    max_seq_len: int

    @staticmethod
    def of(config: ResolvedConfig, num_pages: int) -> Capacity:
        return Capacity(
            num_pages=num_pages,
            page_size=config.page_size,
            num_slots=config.max_running_requests,
            max_seq_len=min(config.max_seq_len, (num_pages - 1) * config.page_size),
        )


def overlap_enabled() -> bool:
    """What the environment says of look-ahead. Raises ConfigError."""
    value = os.environ.get(DISABLE_OVERLAP, "")
    if value not in ("", "0", "1"):
        raise ConfigError(DISABLE_OVERLAP, value, one_of((0, 1)))
    return value != "1"


def resolve(
    config: EngineConfig, model: ModelFacts, device: DeviceFacts, *, overlap: bool
) -> ResolvedConfig:
    """Settle every automatic option. Pure; raises ConfigError where model or device object."""
    notes: list[str] = []
    target = config.device
    if target == "auto":
        target = "cuda" if device.has_cuda else "cpu"
    elif target == "cuda" and not device.has_cuda:
        raise ConfigError(
            "--device", "cuda", "PyTorch finds no usable GPU here; allowed: auto or cpu"
        )

    if config.tp != 1:
        raise ConfigError("--tp", config.tp, "this version runs one rank; allowed: 1")
    if config.cuda_graph_max_bs:
        raise ConfigError(
            "--cuda-graph-max-bs", config.cuda_graph_max_bs, "this version runs eagerly; allowed: 0"
        )

    dtype = _resolve_dtype(config, model, target, notes)
    prefill, decode = _resolve_attention(config, device, notes)
    page_size = config.page_size or 16
    return ResolvedConfig(
        model=config.model,
        device=target,
        dtype=dtype,
        load_format="safetensors" if config.load_format == "auto" else config.load_format,
        max_seq_len=_resolve_max_seq_len(config, model, notes),
        tp=config.tp,
        disable_pynccl=config.disable_pynccl,
        memory_ratio=config.memory_ratio,
        num_pages=_resolve_num_pages(config, model, device, target, dtype, page_size),
        page_size=page_size,
        cache_type=config.cache_type,
        max_running_requests=config.max_running_requests,
        max_queued_requests=config.max_queued_requests,
        max_prefill_length=config.max_prefill_length,
        schedule_policy=config.schedule_policy,
        schedule_conservativeness=config.schedule_conservativeness,
        attn_prefill=prefill,
        attn_decode=decode,
        cuda_graph_max_bs=0,
        overlap=overlap,
        notes=tuple(notes),
    )


def _resolve_dtype(config: EngineConfig, model: ModelFacts, target: str, notes: list[str]) -> str:
    if config.dtype != "auto":
        return config.dtype
    if target == "cpu":
        return "float32"
    if model.dtype == "float32":
        notes.append("a float32 checkpoint runs in float16; --dtype bfloat16 has the wider range")
    return "bfloat16" if model.dtype == "bfloat16" else "float16"


def _resolve_attention(
    config: EngineConfig, device: DeviceFacts, notes: list[str]
) -> tuple[str, str]:
    if config.attn == "auto":
        best = device.attention_backends[0]
        notes.append(f"attention backend {best}, the best that runs here")
        return best, best
    backends = config.attn.split(",")
    for name in backends:
        if name not in device.attention_backends:
            why = device.missing_backends.get(name, "not usable here")
            raise ConfigError(
                "--attn", config.attn, f"{why}; {one_of(('auto', *device.attention_backends))}"
            )
    return backends[0], backends[-1]


def _resolve_max_seq_len(config: EngineConfig, model: ModelFacts, notes: list[str]) -> int:
    wanted = config.max_seq_len_override
    if wanted is None:
        return model.max_seq_len
    if wanted > model.max_seq_len:
        if model.max_seq_len_reason:
            reason = f"{model.max_seq_len_reason}; allowed: at most {model.max_seq_len}"
            refuse(config, "max_seq_len_override", reason)
        notes.append(f"the model was made for {model.max_seq_len} tokens, not for {wanted}")
    return wanted


def _resolve_num_pages(
    config: EngineConfig,
    model: ModelFacts,
    device: DeviceFacts,
    target: str,
    dtype: str,
    page_size: int,
) -> int:
    if config.num_pages is not None or target == "cuda":
        return config.num_pages or 0
    room = min(CPU_KV_BYTES, device.free_cpu_bytes // 4) // model.kv_bytes_per_token(dtype)
    return max(2, 1 + min(CPU_KV_TOKENS, room) // page_size)
