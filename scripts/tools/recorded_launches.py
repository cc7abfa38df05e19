"""Records which Triton kernels the engine launches on a GPU, with their types, constants and
options, on a machine without one: those of the models that are served, and of layers that none of
these has, attention (ATTENDED) and gated delta nets (DELTA_NETS).

The engine itself runs on a pretended GPU: it loads models with its own options, captures its steps
and runs the largest. A launch ends where Triton would compile its kernel. So no list of arguments
stands twice: what is recorded is what ships.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from dummy_config import config_of
from pretended_gpu import GPU, Device, pretended, pretended_ranks
from torch import Tensor
from triton.runtime.jit import JITFunction

from minisgl.attention.base import DecodeBatch, PrefillBatch
from minisgl.attention.state import PagedKV
from minisgl.attention.triton_attention import TritonAttention, prefill_tiles
from minisgl.config import AttentionSpec, EngineConfig, ResolvedConfig, resolve
from minisgl.kernels.cache_pages.page_copies import gather_pages, scatter_pages
from minisgl.kernels.cache_pages.planes import Planes
from minisgl.kernels.elementwise.reference import NormRope
from minisgl.kernels.gated_delta.causal_conv import causal_conv
from minisgl.kernels.gated_delta.delta_prefill import gated_delta_prefill
from minisgl.kernels.gated_delta.gated_norm import gated_rms_norm
from minisgl.kernels.gated_delta.reference import DeltaRows, Gates
from minisgl.kernels.gated_delta.run_kernels import causal_conv_runs, gated_delta_runs
from minisgl.kernels.hardware import has_fp8_products
from minisgl.kernels.segments import Runs, Segments
from minisgl.kernels.tuning import H200, UNTRIED, DeviceTuning
from minisgl.models.config import ModelConfig
from minisgl.models.registry import read_model_config
from minisgl.runner.facts import device_facts
from minisgl.runner.load import load_runner
from minisgl.runner.memory import allocate_states
from minisgl.runner.warmup import longest_step

NUM_LAYERS = 2  # the others are like the second
# Rows of steps without a graph, beside the longest: tables of tiles have entries between them.
CHUNKS = (700, 1500, 3000)


@dataclass(frozen=True, slots=True)
class Served:
    """A model of dummy_config.py, and the options that it is served with."""

    model: str
    quantization: str | None = None
    tp: int = 1
    ep: bool = False
    kv_cache_dtype: str = "auto"
    dense_copies: str = "auto"
    speculative: str | None = None
    multiplies_fp8: bool = False  # it has no kernels for devices that cannot

    def runs_on(self, device: Device) -> bool:
        return has_fp8_products(device.capability) or not self.multiplies_fp8


SERVED = (
    Served("Qwen3-0.6B"),
    Served("Qwen3-14B"),
    Served("Llama-3.1-8B"),
    Served("Qwen3-30B-A3B"),
    Served("Qwen3-0.6B", speculative="ngram"),  # a run's group of heads is padded
    Served("Llama-3.1-8B", speculative="ngram"),
    Served("Qwen3-14B", kv_cache_dtype="fp8", speculative="ngram", multiplies_fp8=True),
    Served("Qwen3-30B-A3B", speculative="ngram"),
    Served("Qwen3-14B", tp=2),
    Served("Qwen3-14B", tp=4),
    Served("Qwen3-14B", kv_cache_dtype="fp8", multiplies_fp8=True),
    Served("Qwen3-14B", "fp8-block", dense_copies="never"),
    Served("Qwen3-14B", "fp8-channel"),
    Served("Qwen3-14B", "fp8-tensor"),
    Served("Qwen3-14B", "int4", dense_copies="always"),
    Served("Qwen3-14B", "int4", dense_copies="never"),
    Served("Qwen3-14B", "awq", dense_copies="never"),
    Served("Qwen3-30B-A3B", "fp8-block", multiplies_fp8=True),
    Served("Qwen3-30B-A3B", "fp8-channel", multiplies_fp8=True),
    Served("Qwen3-30B-A3B", "fp8-tensor", multiplies_fp8=True),
    Served("Qwen3-30B-A3B", "int4"),
    Served("Qwen3-30B-A3B", tp=2, ep=True),
    Served("Qwen3-30B-A3B", "fp8-block", tp=2, ep=True, multiplies_fp8=True),
    Served("gpt-oss-20b"),
    Served("gpt-oss-20b", "none"),
    Served("gpt-oss-20b", tp=2),
    Served("gpt-oss-20b", tp=2, ep=True),
    Served("gpt-oss-120b"),
    Served("gemma-4-31B"),
    Served("gemma-4-26B-A4B"),
    Served("GLM-4.7-Flash"),
    Served("GLM-4.7-Flash", kv_cache_dtype="fp8", multiplies_fp8=True),
    Served("DeepSeek-V2-Lite"),
)


def _attention(num_heads: int, num_kv_heads: int, head_dim: int, **features: Any) -> AttentionSpec:
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        **features,
    )


# With the width of values and the dtype of the KV cache.
ATTENDED = (
    (_attention(32, 8, 128, window=4096), 128, torch.bfloat16),  # Mistral-7B
    (_attention(64, 8, 64, window=128, sinks=True), 64, torch.bfloat16),  # gpt-oss
    (_attention(64, 8, 64, window=128, sinks=True), 64, torch.float8_e4m3fn),
    (_attention(16, 8, 256, window=4096, softcap=50.0), 256, torch.bfloat16),  # Gemma 2
    (_attention(16, 8, 256, window=1024), 256, torch.bfloat16),  # Gemma 3
    (_attention(16, 8, 256, window=1024), 256, torch.float8_e4m3fn),
    (_attention(32, 4, 512), 512, torch.bfloat16),  # Gemma 4
    (_attention(64, 8, 192, window=128, sinks=True), 128, torch.bfloat16),  # MiMo-V2-Flash
    (_attention(128, 1, 576, value_dim=512, v_in_k=True), 512, torch.bfloat16),  # DeepSeek-V3
)

RUN = 4  # rows of a request in a step that verifies drafts
# The heads of keys and of values of gated delta nets. All have 128 dimensions.
DELTA_NETS = (
    (16, 48),  # Qwen3.8-27B
    (16, 32),  # Qwen3.5-35B-A3B, Qwen3-Next-80B-A3B
)


@dataclass(frozen=True, slots=True)
class Launch:
    """What Triton compiles for a launch."""

    name: str  # of the kernel, with its module
    signature: dict[str, Any]  # types by the names of parameters
    constants: dict[tuple[int, ...], Any]  # by the places of parameters, and within tuples
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]

    @property
    def kernel(self) -> Any:
        """The JITFunction."""
        module, _, function = self.name.rpartition(".")
        return getattr(import_module(module), function)

    @property
    def variant(self) -> str:
        """The types that it points to, the constants and the options that were chosen, and a digest
        of all that Triton compiles it for."""
        types = list(_flat(list(self.signature.values())))
        kinds = dict.fromkeys(kind[1:] for kind in types if kind.startswith("*"))
        constants = {
            parameter.name: self.constants[(place,)]
            for place, parameter in enumerate(self.kernel.params)
            if parameter.is_constexpr
        }
        chosen = {name: self.options[name] for name in ("num_warps", "num_stages", "maxnreg")}
        shown = (_shown(name, value) for name, value in (constants | chosen).items())
        return " ".join([",".join(kinds), *filter(None, shown), f"#{self._digest}"])

    @property
    def _digest(self) -> str:
        # A library's path is that of the installation.
        options = {name: value for name, value in self.options.items() if name != "extern_libs"}
        parts = (self.signature, self.constants, self.attributes, sorted(options.items()))
        return sha256(repr(parts).encode()).hexdigest()[:6]


def _flat(types: Any) -> Iterator[str]:
    for kind in types:
        if isinstance(kind, str):
            yield kind
        else:
            yield from _flat(kind)


def _shown(name: str, value: Any) -> str:
    """Short: a flag is shown if it is set, and nothing of what is absent."""
    if value is None or value is False:
        return ""
    return name if value is True else f"{name}={value}"


def record(device: Device) -> list[Launch]:
    """All different launches on `device`. Only for a process that has asked for no device before,
    and will ask for no other."""
    found: dict[tuple[str, str], Launch] = {}

    def note(
        kernel: Any,
        key: Any,
        signature: Any,
        index: int,
        constants: Any,
        options: Any,
        attributes: Any,
        warmup: bool,
    ) -> Any:
        name = f"{kernel.module}.{kernel.__name__}"
        launch = Launch(name, signature, constants, attributes, options.__dict__)
        found.setdefault((launch.name, launch.variant), launch)
        compiled = kernel.device_caches[index][0]
        return compiled.setdefault(key, _NOTHING)

    with pretended(device), mock.patch.object(JITFunction, "_do_compile", note):
        for served in SERVED:
            if served.runs_on(device):
                _serve(served)
        # As on a real device: the pretended ones take the kernels of all as measured.
        tuning = H200 if device.capability[0] == 9 else UNTRIED
        for spec, v_head_dim, kv_dtype in ATTENDED:
            if kv_dtype != torch.float8_e4m3fn or has_fp8_products(device.capability):
                _attend(spec, v_head_dim, kv_dtype, tuning)
        for k_heads, v_heads in DELTA_NETS:
            _keep_states(k_heads, v_heads, tuning)
    return list(found.values())


# In place of a compiled kernel: its launch does nothing.
_NOTHING = SimpleNamespace(
    launch_metadata=lambda *_: None, run=lambda *_: None, function=None, packed_metadata=None
)


def _serve(served: Served) -> None:
    """Start an engine's runner as a server does, and run eager steps."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        content = config_of(served.model, served.quantization)
        few = json.dumps(content | {"num_hidden_layers": NUM_LAYERS})
        (folder / "config.json").write_text(few)
        model = read_model_config(folder)
        config = _resolved(served, model)
        ranks = pretended_ranks(served.tp, model.hidden_size, getattr(torch, config.dtype))
        runner = load_runner(config, model, folder, ranks=ranks)
    for length in CHUNKS:
        shorter = replace(config, max_prefill_length=length)
        plan = longest_step(shorter, runner.vocab_size, scored=False)
        runner.collect(runner.launch(plan))
    runner.close()
    _move_pages(config, model, content["num_hidden_layers"])


def _attend(
    spec: AttentionSpec, v_head_dim: int, kv_dtype: torch.dtype, tuning: DeviceTuning
) -> None:
    """Decode, with norm and rope where keys and values have one width, and chunks of few rows and
    of many."""
    fp8 = kv_dtype == torch.float8_e4m3fn
    tiles = prefill_tiles(spec.head_dim, 2, tuning, fp8=fp8, v_in_k=spec.v_in_k)
    backend = TritonAttention(prefill=tiles)
    page_size, num_rows, max_pages = 16, 64, 256
    cache = (num_rows, page_size, spec.num_kv_heads)
    k, v = (
        torch.empty((*cache, width), dtype=kv_dtype, device=GPU)
        for width in (spec.head_dim, v_head_dim)
    )
    kv = PagedKV.of(spec.kv(str(kv_dtype).removeprefix("torch.")), k, v)
    sinks = torch.empty(spec.num_heads, device=GPU) if spec.sinks else None
    table = torch.empty((num_rows, max_pages), dtype=torch.int32, device=GPU)
    bounds = torch.empty(num_rows + 1, dtype=torch.int32, device=GPU)
    rows = DecodeBatch(table, bounds[1:], max_pages * page_size)

    def heads(num_rows: int, num_heads: int) -> Tensor:
        return torch.empty((num_rows, num_heads, spec.head_dim), dtype=torch.bfloat16, device=GPU)

    backend.decode(heads(num_rows, spec.num_heads), kv, rows, spec, sinks)
    if v_head_dim == spec.head_dim:
        norm_rope = NormRope(torch.empty(max_pages * page_size, spec.head_dim, device=GPU))
        qkv = heads(num_rows, spec.num_heads + 2 * spec.num_kv_heads).flatten(1)
        backend.decode_qkv(qkv, kv, rows, norm_rope, spec, sinks)
    for num_rows in (64, 8192):
        chunks = PrefillBatch(table[:16], bounds[:17], bounds[17:33], num_rows, (), ())
        backend.prefill(heads(num_rows, spec.num_heads), kv, chunks, spec, sinks)


def _keep_states(k_heads: int, v_heads: int, tuning: DeviceTuning) -> None:
    """A gated delta net of rows of slots, and of segments."""
    dim, num_slots, num_rows = 128, 65, 64
    channels = (2 * k_heads + v_heads) * dim

    def half(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=GPU)

    gates = Gates(*half(num_rows, 2 * v_heads).chunk(2, dim=1), half(v_heads), half(v_heads))
    state = torch.empty((num_slots, v_heads, dim, dim), device=GPU)
    past, weight = half(num_slots, channels, 3), half(channels, 4)
    slots = torch.empty(num_rows, dtype=torch.int64, device=GPU)
    segments = Segments(slots, slots, torch.empty(num_rows + 1, dtype=torch.int32, device=GPU))
    x = half(num_rows, channels + v_heads * dim)[:, :channels]
    causal_conv_runs(x, weight, past, None, Runs(slots))
    mixed = causal_conv(x, weight, past, segments)
    parts = mixed.split((k_heads * dim, k_heads * dim, v_heads * dim), dim=1)
    rows = DeltaRows(*(part.unflatten(1, (-1, dim)) for part in parts), gates)
    gated_delta_runs(None, rows, state, Runs(slots), tiles=tuning.delta_decode)
    gated_delta_prefill(rows, state, segments, tiles=tuning.delta_prefill)
    _keep_rows(x, weight, past, gates, state, (k_heads * dim, v_heads * dim), tuning)
    for rows_of_norm in (num_rows, 8192):
        gate = half(rows_of_norm, channels + v_heads * dim)[:, channels:].unflatten(
            1, (v_heads, dim)
        )
        gated_rms_norm(half(rows_of_norm, v_heads, dim), gate, half(dim), 1e-6)


def _keep_rows(
    x: Tensor,
    weight: Tensor,
    past: Tensor,
    gates: Gates,
    state: Tensor,
    sizes: tuple[int, int],
    tuning: DeviceTuning,
) -> None:
    """A gated delta net of runs of RUN rows, and of one. sizes: of keys and values."""
    kept = torch.empty((len(state), RUN, x.shape[1]), dtype=x.dtype, device=GPU)

    def rows(mixed: Tensor) -> DeltaRows:
        q, k, v = mixed.split((sizes[0], *sizes), dim=1)
        parts = (part.unflatten(1, (-1, state.shape[2])) for part in (q, k, v))
        return DeltaRows(*parts, gates._replace(a=gates.a[: len(mixed)], b=gates.b[: len(mixed)]))

    for size in (RUN, 1):
        num_runs = len(x) // RUN
        slots = torch.empty(num_runs, dtype=torch.int64, device=GPU)
        runs = Runs(slots, torch.empty(num_runs, dtype=torch.int32, device=GPU), size)
        older, newer = causal_conv_runs(x[: num_runs * size], weight, past, kept, runs)
        gated_delta_runs(rows(older), rows(newer), state, runs, tiles=tuning.delta_decode)


def _resolved(served: Served, model: ModelConfig) -> ResolvedConfig:
    options = EngineConfig(
        model=served.model,
        load_format="dummy",
        attn="triton",
        tp=served.tp,
        ep=served.ep,
        kv_cache_dtype=served.kv_cache_dtype,
        dense_copies=served.dense_copies,
        speculative=served.speculative,
    )
    facts = model.facts()
    return resolve(options, facts, device_facts(facts.on_rank(served.tp)), overlap=True)


def _move_pages(config: ResolvedConfig, model: ModelConfig, num_layers: int) -> None:
    """To host memory and back, for which a runner needs streams."""
    specs = model.facts().on_rank(config.tp).kv_specs(config.kv_dtype)[:1] * num_layers
    states = allocate_states(
        specs, num_pages=64, page_size=config.page_size, num_slots=0, device=GPU
    )
    planes = Planes.of([plane for state in states for plane in state.planes])
    pages = torch.zeros(8, dtype=torch.int64, device=GPU)
    packed = torch.empty((8, planes.page_bytes), dtype=torch.uint8, device=GPU)
    gather_pages(planes, pages, packed)
    scatter_pages(planes, pages, packed)
