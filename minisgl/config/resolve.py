"""Resolves automatic options from the user's options and the facts about model and device.

Values known only after loading the model are in the runner's `Capacity`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from minisgl.config.engine import DEFAULT_LORAS, EngineConfig
from minisgl.config.facts import (
    FP8,
    BackendFacts,
    DeviceFacts,
    KVSpec,
    LayerSpec,
    ModelFacts,
    best_first,
    page_bytes,
    slot_bytes,
)
from minisgl.config.options import refuse
from minisgl.config.parallel import Advice, Layout, advise
from minisgl.config.windows import WindowSizes
from minisgl.errors import ConfigError, UnsupportedModelError, one_of

OLDEST_WITH_FP8 = (8, 9)  # compute capability
LARGEST_AUTO_GRAPH = 512
MOST_RUN_ROWS = 512

DISABLE_OVERLAP = "MINISGL_DISABLE_OVERLAP_SCHEDULING"

GB = 10**9
MAX_HOST_SHARE = 0.8  # of the memory of a machine, that a host cache may take

# By --dense-copies.
DENSE_COPIES_SHARES = {"auto": 1 / 3, "always": math.inf, "never": 0.0}

# Decode rows of a step with --batch-invariant on a GPU, and one less than the tokens of its chunks:
# together fewer than `many_rows` of DeviceTuning, from which on norms add up in another order.
MOST_INVARIANT_ROWS = 511
INVARIANT_WITH = (
    "generating with a native model that has full attention and unquantised weights, without "
    "images, on one rank, in bfloat16 or float16 with --attn triton on a GPU or --attn torch on a "
    "CPU, without adapters, drafts, routed experts, --disk-cache and an FP8 cache, and up to "
    f"{MOST_INVARIANT_ROWS} --max-running-requests"
)

MAX_CPU_RANKS = 8
# Of the KV cache and the snapshots of states together, the snapshots: for Qwen3.8-27B one for each
# 4,700 tokens of the KV cache. A prompt leaves one or two.
SNAPSHOT_SHARE = 1 / 3
# Bounds of the KV cache on a CPU if --num-pages is not set.
CPU_KV_TOKENS = 65_536
CPU_KV_BYTES = 2 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """The options with all automatic values resolved. Those that have none are as the user set
    them."""

    model: str
    device: str
    dtype: str
    kv_dtype: str  # of the KV cache: dtype, or FP8
    load_format: str
    task: str
    max_seq_len: int  # before the capacity of the KV cache is known
    tp: int
    dp_attention: bool
    pp: int
    ep: bool
    nnodes: int
    node_rank: int
    master_addr: str
    master_port: int
    cluster_token_file: str
    disable_pynccl: bool
    memory_ratio: float
    num_pages: int  # 0: as many as fit into memory_ratio
    page_size: int
    cache_type: str
    num_snapshots: int | None  # of the states of requests; None: as many as memory allows
    windows: WindowSizes | None  # where windowed layers have pages of their own
    dense_copies_share: float  # of what weights leave of the memory, that dense copies may take
    num_host_pages: int  # in the host memory of each rank
    disk_cache: str  # folder; empty: none
    disk_cache_bytes: int  # at most, of all who use the folder
    max_running_requests: int
    max_queued_requests: int
    max_prefill_length: int
    schedule_policy: str
    schedule_conservativeness: float
    key_share: float
    step_timeout: float
    max_logprobs: int
    logprobs_mode: str
    head_dtype: str  # of the logits
    return_routed_experts: bool
    batch_invariant: bool
    speculative: str  # how tokens are drafted; empty: not at all
    num_drafts: int  # at most, of a request in a step
    draft_acceptance: float  # by a coin; negative: drafts are accepted if they are right
    adapters: tuple[tuple[str, str], ...]  # name and folder of each
    max_loras: int  # of these, at once on the device; 0: there are none
    max_lora_rank: int
    lora_experts: bool
    image_hosts: tuple[str, ...]
    image_rows: int  # of the buffer for images, where the model sees
    attn_prefill: str
    attn_decode: str
    cuda_graph_max_bs: int
    overlap: bool
    notes: tuple[str, ...]  # decisions and their reasons, for the log

    @property
    def max_run(self) -> int:
        """Maximum number of tokens that a step samples of a request."""
        return 1 + self.num_drafts

    @property
    def max_run_rows(self) -> int:
        """Maximum number of decode rows of a step that verifies drafts; none does with more, since
        its rows would cost more than their drafts save."""
        return max(self.max_run, min(self.max_run * self.max_running_requests, MOST_RUN_ROWS))

    def whole_layers(self, layers: Sequence[LayerSpec]) -> list[LayerSpec]:
        """Those of whose KV cache a page in another memory has a part. What windowed layers have
        of their own is beside it."""
        return [spec for spec in layers if self.windows is None or not self.windows.has(spec)]

    def routed_shape(self, model: ModelFacts) -> tuple[int, int] | None:
        """The layers with experts, and how many a row takes in each, if layers note which."""
        if not self.return_routed_experts or model.experts is None:
            return None
        return model.experts.num_layers, model.experts.num_chosen

    @property
    def num_ranks(self) -> int:
        """The ranks of all stages."""
        return self.tp * self.pp

    @property
    def num_attending(self) -> int:
        """The number of ranks of a stage that divide the requests among them."""
        return self.tp if self.dp_attention else 1


@dataclass(frozen=True, slots=True)
class Capacity:
    """The sizes that fit into memory beside the weights."""

    num_pages: int  # including page 0, the scratch page
    page_size: int
    num_slots: int  # of all ranks together
    max_seq_len: int
    max_graph_batch: int = 0  # largest decode batch that is captured
    num_snapshots: int = 0  # of the states of requests
    num_window_pages: int = 0  # of windowed layers, if these have their own
    num_attending: int = 1  # ranks that divide the requests: each has so many pages and snapshots
    # Pages of host memory that a snapshot, and a page of windowed layers, take on every rank.
    state_parts: int = 1
    window_parts: int = 1

    @staticmethod
    def of(
        config: ResolvedConfig, num_pages: int, num_snapshots: int = 0, num_window_pages: int = 0
    ) -> Capacity:
        """The capacity with `num_pages` pages, which limit the length of a sequence."""
        return Capacity(
            num_pages=num_pages,
            page_size=config.page_size,
            num_slots=config.max_running_requests,
            max_seq_len=min(config.max_seq_len, (num_pages - 1) * config.page_size),
            num_snapshots=num_snapshots,
            num_window_pages=num_window_pages,
            num_attending=config.num_attending,
        )

    @property
    def num_tokens(self) -> int:
        """That the KV cache holds, of all ranks."""
        return self.num_attending * (self.num_pages - 1) * self.page_size

    @property
    def max_in_transit(self) -> int:
        """Number of pages that other engines may keep: half of them, if the longest sequence fits
        beside them."""
        num_pages = self.num_pages - 1
        return min(num_pages // 2, num_pages - -(-self.max_seq_len // self.page_size))


def overlap_enabled() -> bool:
    """True unless the environment turns overlap scheduling off. Raises ConfigError."""
    value = os.environ.get(DISABLE_OVERLAP, "")
    if value not in ("", "0", "1"):
        raise ConfigError(DISABLE_OVERLAP, value, one_of((0, 1)))
    return value != "1"


def resolve(
    config: EngineConfig, model: ModelFacts, device: DeviceFacts, *, overlap: bool
) -> ResolvedConfig:
    """Resolve every automatic option. A pure function.

    Raises ConfigError if an option does not fit the model or the device, UnsupportedModelError if
    no attention backend supports the model on the device.
    """
    notes: list[str] = []
    if config.device == "auto":
        config = replace(config, device="cuda" if device.has_cuda else "cpu")
    elif config.device == "cuda" and not device.has_cuda:
        refuse(config, "device", "PyTorch finds no usable GPU here; allowed: auto or cpu")
    config = with_layout(config, model, device)
    if config.dp_attention:
        model = replace(model, divides_heads=False)
    _check_ep(config, model)
    _check_routed(config, model)
    _check_tp(config, model, device)
    _check_pp(config, model, device)
    dtype = _resolve_dtype(config, model, notes)
    kv_dtype = _resolve_kv_dtype(config, model, device, dtype, notes)
    if config.tp > 1 and (advice := _advice(config, model, device, config.tp)) is not None:
        notes += (f"layouts: {line}" for line in advice.lines)
    config = _with_invariance(config, dtype, kv_dtype, notes)
    prefill, decode = _resolve_attention(config, device, dtype, kv_dtype, notes)
    page_size = _resolve_page_size(config, (prefill, decode), notes)
    config = _with_even_slots(config, notes)
    num_pages = _resolve_num_pages(config, model, device, kv_dtype, page_size)
    num_snapshots = _resolve_snapshots(config, model, num_pages * page_size, kv_dtype)
    if num_snapshots == 0 and model.states and config.cache_type != "naive":
        if config.host_cache:
            reason = (
                "this model keeps a state for each request, and cached prefixes are of use only"
            )
            reason += " with snapshots of it, for which there is no memory"
            refuse(config, "host_cache", f"{reason}; allowed: 0, or with --state-cache above 0")
        notes.append("prefix cache off: no memory is for snapshots of the states of requests")
    max_seq_len = _resolve_max_seq_len(config, model, notes)
    specs = model.on_rank(config.tp).kv_specs(kv_dtype)
    windows = _resolve_windows(config, model, max_seq_len, num_pages, page_size, specs, notes)
    host_page = page_bytes(specs, page_size) if windows is None else windows.page_bytes(specs).full
    resolved: dict[str, Any] = {
        "dtype": dtype,
        "kv_dtype": kv_dtype,
        "load_format": "safetensors" if config.load_format == "auto" else config.load_format,
        "task": "generate" if config.task == "auto" else config.task,
        "max_seq_len": max_seq_len,
        "num_pages": num_pages,
        "page_size": page_size,
        "num_snapshots": num_snapshots,
        "windows": windows,
        "dense_copies_share": DENSE_COPIES_SHARES[config.dense_copies],
        "num_host_pages": _resolve_host_pages(config, device, host_page),
        "disk_cache": config.disk_cache or "",
        "disk_cache_bytes": int(config.disk_cache_gb * GB),
        "speculative": config.speculative or "",
        "num_drafts": _resolve_drafts(config, model),
        "head_dtype": dtype if config.head_dtype == "auto" else config.head_dtype,
        "draft_acceptance": -1.0 if config.draft_acceptance is None else config.draft_acceptance,
        "adapters": tuple(config.adapters.items()),
        "max_loras": config.max_loras or min(len(config.lora), DEFAULT_LORAS),
        "attn_prefill": prefill.name,
        "attn_decode": decode.name,
        "cuda_graph_max_bs": _resolve_graphs(config, device, decode, notes),
        "overlap": overlap,
        "notes": tuple(notes),
    }
    others = {spec.name for spec in fields(ResolvedConfig)} - resolved.keys()
    return ResolvedConfig(**resolved, **{name: getattr(config, name) for name in others})


def with_layout(config: EngineConfig, model: ModelFacts, device: DeviceFacts) -> EngineConfig:
    """The options with the layout that the arithmetic prefers, unless --parallel is given: of ranks
    of --tp, or of as many GPUs of this machine as the model can be divided over."""
    if config.parallel == "given":
        return config
    after = "heads" if config.parallel == "heads" else "given"
    most = config.tp
    uses_gpus = config.device != "cpu" and device.has_cuda
    if most == 1 and uses_gpus and config.nnodes == 1:
        most = max(1, device.num_gpus // config.pp)
    sizes = [config.tp] if config.tp > 1 else range(most, 1, -1)
    advised = (_advice(config, model, device, size) for size in sizes)
    advice = next((each for each in advised if each is not None), None)
    if advice is None:
        return replace(config, parallel=after)
    best = advice.best
    return replace(config, parallel=after, tp=best.tp, ep=best.ep, dp_attention=best.dp_attention)


def _advice(
    config: EngineConfig, model: ModelFacts, device: DeviceFacts, num_ranks: int
) -> Advice | None:
    """Of the layouts of so many ranks; None if none of them can be started."""
    if config.dp_attention:  # to compare it with ranks that divide heads
        if not model.divides_requests:
            return None
        model = replace(model, divides_heads=True)
    given = Layout(num_ranks), Layout(num_ranks, ep=True)
    by_head = [layout for layout in given if layout.can_divide(model)]
    by_request = [replace(layout, dp_attention=True) for layout in given]
    by_request = [layout for layout in by_request if layout.can_divide(model)]
    startable = by_head
    if config.dp_attention:
        startable = [*by_head, *by_request] if config.parallel == "given" else by_request
    elif by_head and _may_divide_requests(config, model, num_ranks):
        startable = [*by_head, *by_request]
    if not startable or config.pp > len(model.layers):
        return None
    if config.device == "auto":
        config = replace(config, device="cuda" if device.has_cuda else "cpu")
    memory_bytes = device.gpu_bytes
    if config.device == "cpu":
        memory_bytes = device.free_cpu_bytes // (num_ranks * config.pp)
    dtype = _resolve_dtype(config, model, [])
    return advise(
        model,
        [*by_head, *by_request],
        dtype=dtype,
        kv_dtype=_resolve_kv_dtype(config, model, device, dtype, []),
        memory_bytes=int(memory_bytes * config.memory_ratio),
        max_rows=config.max_running_requests,
        num_stages=config.pp,
        startable=startable,
    )


def _may_divide_requests(config: EngineConfig, model: ModelFacts, num_ranks: int) -> bool:
    """Whether --parallel auto may take --dp-attention: never in the place of something that was
    asked for, or that the arithmetic does not count."""
    has_windows = any(spec.window is not None for spec in model.attention)  # not counted
    decodes = config.task not in ("embed", "rerank")
    beside = config.parallel == "heads" or config.speculative is not None
    return decodes and not beside and not has_windows and config.max_running_requests >= num_ranks


def _check_routed(config: EngineConfig, model: ModelFacts) -> None:
    """Raise ConfigError where rank 0 cannot tell which experts a token takes."""
    if not config.return_routed_experts:
        return
    if model.experts is None:
        reason = "this model has no experts; allowed: models with experts"
        refuse(config, "return_routed_experts", reason)
    if config.pp > 1 or config.dp_attention or config.speculative is not None:
        reason = "allowed: without --pp, --dp-attention and --speculative"
        refuse(config, "return_routed_experts", reason)


def _with_invariance(
    config: EngineConfig, dtype: str, kv_dtype: str, notes: list[str]
) -> EngineConfig:
    """With --batch-invariant, the options that leave one way to compute a row. Raises ConfigError
    for those with which it may be computed in several."""
    if not config.batch_invariant:
        return config
    on_gpu = config.device == "cuda"
    attn = "triton" if on_gpu else "torch"
    refused = {
        f"several ranks (--tp {config.tp}, --pp {config.pp})": config.tp * config.pp > 1,
        f"--task {config.task}": config.task in ("embed", "rerank"),
        "--speculative": config.speculative is not None,
        "adapters (--lora, --max-loras)": bool(config.lora or config.max_loras),
        "--disk-cache": config.disk_cache is not None,
        "--return-routed-experts": config.return_routed_experts,
        "a KV cache in FP8": kv_dtype != dtype,
        "float32 on a GPU": on_gpu and dtype == "float32",
        f"--attn {config.attn}": config.attn not in ("auto", attn, f"{attn},{attn}"),
        f"more than {MOST_INVARIANT_ROWS} requests at once": on_gpu
        and config.max_running_requests > MOST_INVARIANT_ROWS,
    }
    if found := next((what for what, is_given in refused.items() if is_given), None):
        reason = f"with {found} bits may depend on other rows"
        refuse(config, "batch_invariant", f"{reason}; allowed: {INVARIANT_WITH}")
    price = "each row is computed by itself"
    if on_gpu:
        price = "no cuBLAS, no split k, no split keys in decoding, and chunks of at most 512 tokens"
        most = min(config.max_prefill_length, MOST_INVARIANT_ROWS + 1)
        config = replace(config, max_prefill_length=most)
    notes.append(f"batch-invariant: no bit depends on other rows, at the price of speed: {price}")
    return replace(config, attn=attn)


def _check_ep(config: EngineConfig, model: ModelFacts) -> None:
    """Raise ConfigError if there is nothing that --ep could divide."""
    if not config.ep:
        return
    experts = model.experts
    if experts is None:
        refuse(config, "ep", "this model has no experts; allowed: models with experts")
    if experts.not_by_rank is not None:
        refuse(config, "ep", f"{experts.not_by_rank}; allowed: --tp without it")
    if config.tp == 1:
        reason = "it divides the experts among the ranks of --tp, and there is one"
        refuse(config, "ep", f"{reason}; allowed: with --tp 2 or more")
    if config.tp > experts.num_experts:
        reason = f"this model has {experts.num_experts} experts, fewer than --tp {config.tp} ranks"
        refuse(config, "ep", f"{reason}; allowed: with --tp up to {experts.num_experts}")


def _with_even_slots(config: EngineConfig, notes: list[str]) -> EngineConfig:
    """With --dp-attention, the ranks run equally many requests."""
    if not config.dp_attention or not config.max_running_requests % config.tp:
        return config
    even = config.max_running_requests // config.tp * config.tp
    notes.append(
        f"{even} requests at once instead of {config.max_running_requests}: so many are "
        f"the same number on each of {config.tp} ranks"
    )
    return replace(config, max_running_requests=even)


def _num_attending(config: EngineConfig) -> int:
    return config.tp if config.dp_attention else 1


def _check_tp(config: EngineConfig, model: ModelFacts, device: DeviceFacts) -> None:
    """Raise ConfigError if the model cannot be sharded, or the machine has too few GPUs."""
    nodes = config.nnodes
    here, found = _room_here(config, device)
    allowed = [
        size
        for size in range(1, nodes * here + 1)
        if size * config.pp % nodes == 0 and model.can_divide(size, by_rank=config.ep)
    ]
    if config.tp in allowed:
        return
    if model.can_divide(config.tp, by_rank=config.ep):
        reason = f"there are {found}"
    elif model.one_rank is not None:
        reason = model.one_rank
    else:
        heads = {(spec.num_heads, spec.num_kv_heads): None for spec in model.attention}
        sizes = []
        if model.divides_heads:
            sizes += [f"{num_heads} heads, {num_kv} KV heads" for num_heads, num_kv in heads]
        if model.intermediate_size:
            sizes.append(f"MLP of {model.intermediate_size}")
        if model.experts is not None and not config.ep:
            sizes.append(f"experts of {model.experts.size}")
        reason = (
            f"cannot shard this model over {config.tp} ranks: its "
            + ", ".join(sizes)
            + f" or vocabulary of {model.vocab_size} is not divisible"
        )
    refuse(config, "tp", f"{reason}; {one_of(allowed or ['another --nnodes'])}")


def _check_pp(config: EngineConfig, model: ModelFacts, device: DeviceFacts) -> None:
    """Raise ConfigError if the stages have no layer each, or the machine has too few GPUs."""
    nodes = config.nnodes
    here, found = _room_here(config, device)
    num_layers = len(model.layers)
    room = nodes * here // config.tp
    if config.pp > 1 and model.one_stage is not None:
        refuse(config, "pp", f"{model.one_stage}; {one_of([1])}")
    if config.pp <= min(room, num_layers):
        return
    reason = f"this model has {num_layers} layers"
    if config.pp > room:
        reason = f"there are {found}" if config.device == "cuda" else found
        if config.tp > 1:
            reason += f", and each stage has {config.tp} ranks (--tp)"
    allowed = [
        size for size in range(1, min(room, num_layers) + 1) if size * config.tp % nodes == 0
    ]
    refuse(config, "pp", f"{reason}; {one_of(allowed or ['another --nnodes'])}")


def _room_here(config: EngineConfig, device: DeviceFacts) -> tuple[int, str]:
    """The largest number of ranks on this node, and the words for it."""
    nodes = config.nnodes
    most = max(1, device.num_gpus) if config.device == "cuda" else MAX_CPU_RANKS // nodes
    found = f"{most} GPUs" if config.device == "cuda" else f"at most {most} ranks on a CPU"
    return most, f"{found} on this one of {nodes} nodes" if nodes > 1 else found


def _resolve_dtype(config: EngineConfig, model: ModelFacts, notes: list[str]) -> str:
    if config.dtype != "auto":
        return config.dtype
    if config.device == "cpu":
        return "float32"
    if model.dtype == "float32":
        notes.append("a float32 checkpoint runs in float16; --dtype bfloat16 has the wider range")
    return "bfloat16" if model.dtype == "bfloat16" else "float16"


def _resolve_kv_dtype(
    config: EngineConfig, model: ModelFacts, device: DeviceFacts, dtype: str, notes: list[str]
) -> str:
    wanted = config.kv_cache_dtype
    if wanted == "model" or (wanted == "auto" and model.kv_scales is None):
        return dtype
    if reason := _why_no_fp8_kv(config, device):
        if wanted == "fp8":
            refuse(config, "kv_cache_dtype", f"{reason}; {one_of(('auto', 'model'))}")
        notes.append(f"KV cache in {dtype}, although the checkpoint brings FP8 scales: {reason}")
        return dtype
    scales = "the scales of the checkpoint" if model.kv_scales else "scales of 1"
    notes.append(f"KV cache in FP8 (e4m3) with {scales}")
    return FP8


def _why_no_fp8_kv(config: EngineConfig, device: DeviceFacts) -> str | None:
    """Why the KV cache cannot be in FP8; None if it can."""
    capability = device.compute_capability
    if config.device == "cuda" and capability is not None and capability < OLDEST_WITH_FP8:
        oldest, found = (".".join(map(str, pair)) for pair in (OLDEST_WITH_FP8, capability))
        return f"FP8 needs a GPU of compute capability {oldest} or newer, and this one has {found}"
    for backend in device.backends:
        if backend.name in _backend_pair(config.attn) and backend.fp8_rank is None:
            return f"--attn {backend.name} reads no FP8"
    return None


def _backend_pair(attn: str) -> tuple[str, str]:
    """The values of --attn for prefill and for decode."""
    first, _, last = attn.partition(",")
    return first, last or first


def _resolve_attention(
    config: EngineConfig, device: DeviceFacts, dtype: str, kv_dtype: str, notes: list[str]
) -> tuple[BackendFacts, BackendFacts]:
    """The backends for prefill and decode."""
    missing, fp8 = device.missing_backends, kv_dtype == FP8
    usable = [
        backend
        for backend in device.backends
        if backend.name not in missing
        and (backend.runs_on_cpu or config.device != "cpu")
        and (backend.float32 or dtype != "float32")
        and (backend.fp8_rank is not None or not fp8)
    ]
    if not usable:
        reasons = "; ".join(missing.values())
        raise UnsupportedModelError(f"No attention backend runs this model here: {reasons}.")
    chosen: list[BackendFacts] = []
    for phase, name in zip(("prefill", "decode"), _backend_pair(config.attn), strict=True):
        allowed = {backend.name: backend for backend in best_first(usable, phase, fp8=fp8)}
        if name != "auto" and name not in allowed:
            half_only = any(each.name == name and not each.float32 for each in device.backends)
            why = missing.get(name)
            if config.device == "cpu":
                why = f"{name} needs a GPU"
            elif dtype == "float32" and half_only:
                why = f"{name} computes in bfloat16 and float16 only"
            reason = why or f"{name} is not usable here"
            raise ConfigError("--attn", config.attn, f"{reason}; {one_of(('auto', *allowed))}")
        fitting = (
            backend
            for backend in allowed.values()
            if phase == "decode"
            or backend.most_prompt_tokens is None
            or config.max_prefill_length <= backend.most_prompt_tokens
        )
        chosen.append(next(fitting) if name == "auto" else allowed[name])
    prefill, decode = chosen
    if config.attn == "auto":
        notes.append(
            f"attention: {prefill.name} for prefill, {decode.name} for decode, the best here"
        )
    elif fp8:
        said = ((prefill, prefill.fp8_prefill_note), (decode, decode.fp8_decode_note))
        notes.extend(f"{backend.name} {note}" for backend, note in said if note)
    return prefill, decode


def _resolve_page_size(
    config: EngineConfig, backends: tuple[BackendFacts, BackendFacts], notes: list[str]
) -> int:
    wanted = config.page_size
    if wanted is None:
        return max(*(backend.page_multiple for backend in backends), backends[1].best_page_size)
    for backend in backends:
        if backend.page_sizes and wanted not in backend.page_sizes:
            name, allowed = backend.name, ", ".join(map(str, backend.page_sizes))
            best = backend.best_page_size
            notes.append(
                f"page size {best} instead of {wanted}: {name} takes pages of {allowed} tokens"
            )
            return best
    for backend in backends:
        if wanted % backend.page_multiple:
            refuse(
                config,
                "page_size",
                f"{backend.name} takes a multiple of {backend.page_multiple} here",
            )
        if backend.pages_are_powers_of_two and wanted & (wanted - 1):
            refuse(config, "page_size", f"{backend.name} takes a power of two")
    return wanted


def _resolve_graphs(
    config: EngineConfig, device: DeviceFacts, decode: BackendFacts, notes: list[str]
) -> int:
    """The largest decode batch to capture if memory permits; 0: none."""
    wanted = config.cuda_graph_max_bs
    reason = None
    if config.task in ("embed", "rerank"):
        reason = f"CUDA graphs are for decoding, and --task {config.task} decodes nothing"
    elif config.device == "cpu":
        reason = "CUDA graphs need a GPU"
    elif not decode.captures_decode:
        reason = f"decoding by {decode.name} needs the host at each step, and runs without graphs"
    elif "triton" in device.missing_backends:
        reason = f"CUDA graphs need Triton: {device.missing_backends['triton']}"
    if reason is not None:
        if wanted:
            refuse(config, "cuda_graph_max_bs", f"{reason}; allowed: 0")
        if config.device == "cuda":
            notes.append(reason)
        return 0
    if wanted is None:
        wanted = LARGEST_AUTO_GRAPH
    # In captured steps the ranks that divide the requests have equally many rows.
    ranks = _num_attending(config)
    return min(-(-wanted // ranks) * ranks, config.max_running_requests)


def _resolve_drafts(config: EngineConfig, model: ModelFacts) -> int:
    """Number of drafts of a step; 0: none."""
    if config.speculative is None:
        return 0
    if config.task in ("embed", "rerank"):
        refuse(config, "speculative", f"--task {config.task} samples no tokens; allowed: none")
    if model.draft_layers and config.pp > 1:
        refuse(config, "speculative", "with --pp allowed: ngram, or --tp instead of --pp")
    return config.draft_tokens


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
    config: EngineConfig, model: ModelFacts, device: DeviceFacts, kv_dtype: str, page_size: int
) -> int:
    if config.num_pages is not None or config.device == "cuda":
        return config.num_pages or 0
    # On all ranks together; some KV heads are on several, and with --dp-attention all are on all.
    bytes_each = model.on_rank(config.tp).kv_bytes_per_token(kv_dtype) * config.tp
    room = min(CPU_KV_BYTES, device.free_cpu_bytes // 4) // bytes_each
    return max(2, 1 + min(CPU_KV_TOKENS, room) // page_size)


def _resolve_snapshots(
    config: EngineConfig, model: ModelFacts, num_kv_tokens: int, kv_dtype: str
) -> int | None:
    """Number of snapshots of states; None if memory decides. num_kv_tokens: 0 if memory decides.

    With --dp-attention, both are of one rank."""
    if not model.states:
        if config.state_cache:
            refuse(config, "state_cache", "this model keeps no state for each request; allowed: 0")
        return 0
    num_bytes = slot_bytes(model.states)
    if config.cache_type == "naive":
        if config.state_cache:
            refuse(config, "state_cache", "it is for --cache-type radix; allowed: 0")
        return 0
    if config.state_cache is not None:
        on_all = num_bytes * _num_attending(config)
        num_snapshots = int(config.state_cache * GB) // on_all
        if config.state_cache and not num_snapshots:
            least = f"{on_all / GB:.3g}"
            refuse(config, "state_cache", f"a snapshot takes {least} GB; allowed: 0, or more")
        return num_snapshots
    if not num_kv_tokens:
        return None
    of_cache = num_kv_tokens * model.kv_bytes_per_token(kv_dtype)
    return int(of_cache * SNAPSHOT_SHARE / (1 - SNAPSHOT_SHARE)) // num_bytes


def _resolve_windows(
    config: EngineConfig,
    model: ModelFacts,
    max_seq_len: int,
    num_pages: int,
    page_size: int,
    specs: Sequence[KVSpec],
    notes: list[str],
) -> WindowSizes | None:
    """The sizes of the pages of windowed layers; None if all layers share one page table. specs: of
    the layers of a rank."""
    sizes = WindowSizes.of(
        model,
        page_size,
        max_seq_len,
        config.max_prefill_length,
        config.pp,
        1 + _resolve_drafts(config, model),
    )
    if sizes is None:
        return None
    num_slots = config.max_running_requests // _num_attending(config)
    if config.whole_pages:
        notes.append("pages behind sliding windows are kept: --whole-pages")
    elif config.host_cache and not sizes.page_bytes(specs).full:
        reason = "--host-cache needs layers without a window in this model"
        notes.append(f"pages behind sliding windows are kept: {reason}")
    elif num_pages and sizes.pages_for(num_slots) >= num_pages:
        notes.append("pages behind sliding windows are kept: the KV cache is too small to gain")
    else:
        return sizes
    return None


def _resolve_host_pages(config: EngineConfig, device: DeviceFacts, page_bytes: int) -> int:
    """Number of host pages of each rank. page_bytes: of one."""
    if not config.host_cache:
        return 0
    if config.cache_type != "radix":
        refuse(config, "host_cache", "it keeps what falls out of --cache-type radix; allowed: 0")
    num_bytes = config.host_cache * GB
    most = MAX_HOST_SHARE * device.cpu_bytes
    if device.cpu_bytes and num_bytes > most:
        reason = (
            f"pinned memory cannot be swapped out, and may be {MAX_HOST_SHARE:.0%} of the "
            f"{device.cpu_bytes / GB:.1f} GB that this machine has; allowed: at most "
            f"{most / GB:.1f}"
        )
        refuse(config, "host_cache", reason)
    num_pages = int(num_bytes / config.tp) // page_bytes
    if num_pages == 0:
        least = page_bytes * config.tp / GB
        refuse(config, "host_cache", f"a page takes {least:.3g} GB over all ranks; allowed: more")
    return num_pages
