"""Every option of the engine, once.

An `EngineConfig` is what the user wrote, checked on construction. `resolve` combines it with the
facts about the model and the device into a `ResolvedConfig`, in which nothing is automatic any
more. What is known only after loading the model is the runner's result, a `Capacity`.
"""

from __future__ import annotations

import math
import os
from dataclasses import Field, dataclass, field, fields, replace
from types import NoneType
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

from minisgl.errors import ConfigError, one_of
from minisgl.shards import can_divide, kv_head_shard

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

# Backends whose decoding reads all that changes from step to step on the device.
CAPTURED_BACKENDS = ("fa", "trtllm", "triton")
FLOAT32_BACKENDS = ("triton", "torch")
LARGEST_AUTO_GRAPH = 512
DEFAULT_PAGE_SIZE = 16
# FlashInfer's kernels and TensorRT-LLM's are at their best there.
FLASHINFER_PAGE_SIZE = 64
TRTLLM_PAGE_SIZES = (16, 32, 64)

DISABLE_OVERLAP = "MINISGL_DISABLE_OVERLAP_SCHEDULING"

MAX_CPU_RANKS = 8
# On CPU the KV cache is modest unless --num-pages says otherwise.
CPU_KV_TOKENS = 65_536
CPU_KV_BYTES = 2 << 30

HIDDEN = "(not shown)"  # in place of a secret


def option(
    default: Any,
    help: str,
    *,
    names: tuple[str, ...] = (),
    group: str = "Engine",
    secret: bool = False,
) -> Any:
    """A dataclass field that the command line offers as an option.

    The option is spelled after the field (`page_size` → `--page-size`) unless `names` says
    otherwise; the first name is the one that messages use. A secret's value is in no message.
    """
    metadata = {"help": help, "names": names, "group": group, "secret": secret}
    return field(default=default, repr=not secret, metadata=metadata)


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
    step_timeout: float = option(
        30.0,
        "Seconds that a step may take longer than ones like it before the engine fails; a third of "
        "it makes /health say so.",
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
        if not self.step_timeout > 0:
            refuse(self, "step_timeout", "allowed: a number above 0, or inf")
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
    shown = HIDDEN if spec.metadata["secret"] else getattr(config, name)
    raise ConfigError(option_names(spec)[0], shown, allowed)


def refuse_engine_options(config: EngineConfig) -> None:
    """With --url there is no engine: raises ConfigError for an option that would do nothing."""
    for spec in fields(config):
        value = getattr(config, spec.name)
        if spec.name != "model" and value != spec.default:
            shown = "(given)" if value is True else value
            reason = "is for an engine of its own, and with --url there is none"
            raise ConfigError(option_names(spec)[0], shown, reason)


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
class ExpertFacts:
    """Of the layers with experts."""

    num_layers: int
    num_experts: int  # in each
    num_chosen: int  # by a token
    num_weights: int  # in the matrices of one


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
    intermediate_size: int  # of MLPs and experts: what divides it divides all of them
    num_layer_weights: int  # in the matrices of all layers, experts left out
    num_head_weights: int  # in the matrix that makes logits
    experts: ExpertFacts | None = None

    def kv_bytes_per_token(self, dtype: str) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * DTYPE_BYTES[dtype]

    def can_divide(self, num_ranks: int) -> bool:
        return can_divide(
            num_ranks,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            intermediate_size=self.intermediate_size,
            vocab_size=self.vocab_size,
        )

    def on_rank(self, num_ranks: int) -> ModelFacts:
        """With the heads that one of so many ranks computes, which must divide the model."""
        return replace(
            self,
            num_heads=self.num_heads // num_ranks,
            num_kv_heads=kv_head_shard(self.num_kv_heads, 0, num_ranks).size,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """What the options depend on, of the machine."""

    has_cuda: bool
    free_cpu_bytes: int
    num_gpus: int = 0
    # Those that run the model on the GPU in half precision, best first.
    prefill_backends: tuple[str, ...] = ()
    decode_backends: tuple[str, ...] = ()
    missing_backends: dict[str, str] = field(default_factory=dict)  # why the others do not
    flash_page_multiple: int = 1  # pages of fa must have a multiple of so many tokens


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
    step_timeout: float
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
    max_graph_batch: int = 0  # the largest batch whose decoding is captured

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

    _check_tp(config, model, device, target)
    dtype = _resolve_dtype(config, model, target, notes)
    prefill, decode = _resolve_attention(config, device, target, dtype, notes)
    page_size = _resolve_page_size(config, device, (prefill, decode), notes)
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
        step_timeout=config.step_timeout,
        attn_prefill=prefill,
        attn_decode=decode,
        cuda_graph_max_bs=_resolve_graphs(config, device, target, decode, notes),
        overlap=overlap,
        notes=tuple(notes),
    )


def _check_tp(config: EngineConfig, model: ModelFacts, device: DeviceFacts, target: str) -> None:
    """Raises ConfigError where the model or the machine cannot be divided so."""
    at_most = max(1, device.num_gpus) if target == "cuda" else MAX_CPU_RANKS
    allowed = [size for size in range(1, at_most + 1) if model.can_divide(size)]
    if config.tp in allowed:
        return
    if model.can_divide(config.tp):
        found = f"{at_most} GPUs" if target == "cuda" else f"at most {at_most} ranks on a CPU"
        reason = f"there are {found}"
    else:
        reason = (
            f"{model.num_heads} heads, {model.num_kv_heads} KV heads, an MLP of "
            f"{model.intermediate_size} and a vocabulary of {model.vocab_size} do not divide so"
        )
    refuse(config, "tp", f"{reason}; {one_of(allowed)}")


def _resolve_dtype(config: EngineConfig, model: ModelFacts, target: str, notes: list[str]) -> str:
    if config.dtype != "auto":
        return config.dtype
    if target == "cpu":
        return "float32"
    if model.dtype == "float32":
        notes.append("a float32 checkpoint runs in float16; --dtype bfloat16 has the wider range")
    return "bfloat16" if model.dtype == "bfloat16" else "float16"


def _resolve_attention(
    config: EngineConfig, device: DeviceFacts, target: str, dtype: str, notes: list[str]
) -> tuple[str, str]:
    """The backends of prefill and decode."""
    usable: list[tuple[str, ...]] = []
    for names in (device.prefill_backends, device.decode_backends):
        if target == "cpu":
            names = ("torch",)
        elif dtype == "float32":
            names = tuple(name for name in names if name in FLOAT32_BACKENDS)
        usable.append(names)
    if config.attn == "auto":
        prefill, decode = usable[0][0], usable[1][0]
        notes.append(f"attention: {prefill} for prefill, {decode} for decode, the best here")
        return prefill, decode
    first, _, last = config.attn.partition(",")
    chosen = (first, last or first)
    for name, allowed in zip(chosen, usable, strict=True):
        if name not in allowed:
            why = device.missing_backends.get(name)
            if target == "cpu":
                why = f"{name} needs a GPU"
            elif dtype == "float32" and name not in FLOAT32_BACKENDS:
                why = f"{name} computes in bfloat16 and float16 only"
            reason = why or f"{name} is not usable here"
            raise ConfigError("--attn", config.attn, f"{reason}; {one_of(('auto', *allowed))}")
    return chosen


def _resolve_page_size(
    config: EngineConfig, device: DeviceFacts, backends: tuple[str, str], notes: list[str]
) -> int:
    wanted = config.page_size
    if "trtllm" in backends and wanted is not None and wanted not in TRTLLM_PAGE_SIZES:
        allowed = ", ".join(map(str, TRTLLM_PAGE_SIZES))
        notes.append(f"page size 64 instead of {wanted}: trtllm takes pages of {allowed} tokens")
        return FLASHINFER_PAGE_SIZE
    multiple = device.flash_page_multiple if "fa" in backends else 1
    if wanted is None:
        # Measured on an H200: triton reads pages of 16 as fast as larger ones, and small pages
        # share more of a prefix.
        by_backend = backends[1] in ("fi", "trtllm")
        return max(multiple, FLASHINFER_PAGE_SIZE if by_backend else DEFAULT_PAGE_SIZE)
    if wanted % multiple:
        refuse(config, "page_size", f"fa takes a multiple of {multiple} here")
    if "fi" in backends and wanted & (wanted - 1):
        refuse(config, "page_size", "fi takes a power of two")
    return wanted


def _resolve_graphs(
    config: EngineConfig, device: DeviceFacts, target: str, decode: str, notes: list[str]
) -> int:
    """The largest batch to capture, if there is memory for it."""
    wanted = config.cuda_graph_max_bs
    reason = None
    if target == "cpu":
        reason = "CUDA graphs need a GPU"
    elif decode not in CAPTURED_BACKENDS:
        reason = f"decoding by {decode} needs the host at each step, and runs without graphs"
    elif "triton" in device.missing_backends:
        reason = f"CUDA graphs need Triton: {device.missing_backends['triton']}"
    if reason is not None:
        if wanted:
            refuse(config, "cuda_graph_max_bs", f"{reason}; allowed: 0")
        if target == "cuda":
            notes.append(reason)
        return 0
    if wanted is None:
        wanted = LARGEST_AUTO_GRAPH
    return min(wanted, config.max_running_requests)


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
