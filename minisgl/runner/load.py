"""Makes a runner from a checkpoint: loads weights, sizes the KV cache, captures graphs."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from pathlib import Path

import torch

from minisgl.attention.backends import make_attention, make_captured_attention
from minisgl.attention.base import Attention, AttentionShape, HostPlanned
from minisgl.config import (
    Capacity,
    LayerSpec,
    ModelFacts,
    ResolvedConfig,
    StateSpec,
    divide,
    page_bytes,
)
from minisgl.device.lanes import Lanes
from minisgl.distributed.communicator import SINGLE_RANK, Communicator
from minisgl.distributed.pipeline import OneStage, Pipeline
from minisgl.drafting.drafter import Drafter
from minisgl.drafting.network_drafter import NetworkDrafter
from minisgl.drafting.networks.loading import find_network, load_network
from minisgl.drafting.networks.network import DraftNetwork
from minisgl.drafting.ngram import NgramDrafter
from minisgl.errors import CheckpointError, DeviceMemoryError, StepError
from minisgl.kvcache.copies import ALWAYS, LoadRule
from minisgl.kvcache.disk import Disk
from minisgl.models.config import ModelConfig
from minisgl.models.decoder import Decoder
from minisgl.models.loader import load_model
from minisgl.parts.device import device_parts
from minisgl.runner.assumed_acceptance import AssumedAcceptance
from minisgl.runner.computation import Computation
from minisgl.runner.dense_copies import prepare_model
from minisgl.runner.graphs import MAX_SNAPSHOTS, GraphKey, graph_keys
from minisgl.runner.memory import (
    GIB,
    MemoryUse,
    allocate_states,
    fit_caches,
    fit_slots,
    free_bytes,
    page_table_bytes,
)
from minisgl.runner.model_fingerprint import model_fingerprint
from minisgl.runner.runner import ModelRunner
from minisgl.runner.stage import Stage
from minisgl.runner.warmup import longest_step, pages_for_largest_step, widest_step
from minisgl.tiers.disk.disk_cache import open_store
from minisgl.tiers.disk.page_files import PageFiles
from minisgl.tiers.host.host_copies import staging_bytes
from minisgl.tiers.tiers import Tiers

NO_ROOM_FOR_GRAPHS = (
    "The CUDA graphs do not fit into memory beside the KV cache: lower --memory-ratio, "
    "--max-running-requests or --cuda-graph-max-bs, which at 0 needs none."
)

# Of full pages where all layers have a window, unless the longest sequence needs more.
MOST_NUMBERS = 1 << 22

# Part of torch's message when a CPU allocation fails.
CPU_OUT_OF_MEMORY = "DefaultCPUAllocator"

TICK_S = 1e-12  # of times that ranks compare as integers

# Called with the name of the phase and the fraction of it that is done, 0 to 1.
Report = Callable[[str, float], None]


def load_runner(
    config: ResolvedConfig,
    model_config: ModelConfig,
    folder: Path,
    report: Report | None = None,
    ranks: Communicator = SINGLE_RANK,
    pipeline: Pipeline | None = None,
    *,
    local_rank: int = 0,
) -> ModelRunner:
    """Load the weights, measure the memory of the largest steps and of the graphs, allocate KV
    pages in the remaining memory, and capture the graphs. All ranks must call this together.

    ranks: the communicator of this rank's stage. pipeline: of the stages, if there are several.
    local_rank: its number on this machine. Blocks for seconds or minutes. Raises CheckpointError or
    DeviceMemoryError.
    """
    report = report or (lambda phase, fraction: None)
    device = rank_device(config, local_rank)
    lanes = Lanes(device)
    lanes.enter_thread()
    free_at_start = free_bytes(device)
    pipeline = pipeline or OneStage(ranks)
    facts = model_config.facts()
    drafting = find_network(
        config.speculative, model_config, folder, load_format=config.load_format
    )
    if drafting is not None:
        facts = drafting.added_to(facts)
    layers = facts.stages(pipeline.size)[pipeline.stage]
    facts = facts.on_rank(config.tp).on_stage(layers)
    model = _load_model(config, model_config, folder, report, device, free_at_start, ranks, layers)
    network: DraftNetwork | None = None
    if drafting is not None:
        report("loading the drafter", 0.0)
        network = load_network(
            drafting,
            model,
            dtype=getattr(torch, config.dtype),
            device=device,
            load_format=config.load_format,
            max_seq_len=config.max_seq_len,
            ranks=ranks,
        )
    report("tuning GEMMs", 0.0)
    if network is not None:
        network.prepare()
    layer_specs = _layer_specs(config, model, network)
    config = _with_fitting_slots(config, layer_specs, device, free_at_start, pipeline)
    copy_bytes = prepare_model(config, model, layer_specs, pipeline, device, free_at_start)
    free_with_weights = free_bytes(device)
    held_by_weights = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    report("profiling peak memory (the first run also compiles kernels)", 0.0)
    dtype = getattr(torch, config.dtype)
    hidden_size, has_runs = model_config.hidden_size, config.max_run > 1
    stage = Stage(pipeline, hidden_size, dtype, device, has_runs=has_runs)
    build = _Builder(config, facts, model, layer_specs, network, lanes, ranks, stage)
    prefill_s = 0.0
    trial = build(pages_for_largest_step(config), num_window_pages=pages_for_largest_step(config))
    try:
        # Excluding weights and states: activations, sampling tables and slot tables.
        step_bytes = _try_largest_steps(trial, config) - held_by_weights - trial.state_bytes
        graph_bytes = 0 if config.num_pages else _try_graphs(trial, config)
        if config.num_host_pages:
            report("timing prefill", 0.0)
            prefill_s = _time_prefill(trial, config)
    except torch.OutOfMemoryError as error:
        raise DeviceMemoryError(NO_ROOM_FOR_GRAPHS) from error
    finally:
        trial.close()
    del trial
    if config.num_host_pages:
        step_bytes += staging_bytes(layer_specs, config.page_size, config.num_host_pages)
    if config.disk_cache:
        report("reading the disk cache", 0.0)
        fingerprint = model_fingerprint(config, model_config, folder)
        rank = pipeline.stage * config.tp + ranks.rank
        build.disk = open_store(config, layer_specs, fingerprint, rank), fingerprint
    num_pages, num_snapshots = config.num_pages, config.num_snapshots or 0
    if not num_pages:
        use = MemoryUse(
            free_at_start=free_at_start,
            weight_bytes=free_at_start - free_with_weights,
            # The page tables of the trial were only as wide as its small cache.
            activation_bytes=step_bytes
            + page_table_bytes(config)
            + stage.bytes_on_the_way(config.max_prefill_length),
            graph_bytes=graph_bytes,
            copy_bytes=copy_bytes,
        )
        num_pages, num_snapshots = fit_caches(config, layer_specs, use)
    # Their numbers are the same on all ranks.
    num_snapshots = pipeline.host_min(num_snapshots)
    num_pages, num_window_pages = _divided(config, layer_specs, num_pages, pipeline)
    runner = build(num_pages, num_snapshots, num_window_pages, prefill_s, report)
    keys = _graph_keys(config)
    try:
        if keys:
            runner.capture(keys, lambda done: report("capturing graphs", done / len(keys)))
    except torch.OutOfMemoryError as error:
        runner.close()
        raise DeviceMemoryError(NO_ROOM_FOR_GRAPHS) from error
    return runner


def _layer_specs(
    config: ResolvedConfig, model: Decoder, network: DraftNetwork | None
) -> list[LayerSpec]:
    """What the layers of the model keep, then those of the network that drafts."""
    of_model = (
        spec.for_runs(config.max_run) if isinstance(spec, StateSpec) else spec
        for spec in model.layer_specs(config.kv_dtype)
    )
    return [*of_model, *(network.layer_specs(config.kv_dtype) if network else ())]


def _divided(
    config: ResolvedConfig, layers: Sequence[LayerSpec], num_pages: int, pipeline: Pipeline
) -> tuple[int, int]:
    """The numbers of pages of full and of windowed layers; 0 of these if all layers have the same,
    where that is more. num_pages: as many as fit then, or the option's. All ranks must call this
    together."""
    sizes, num_slots = config.windows, config.max_running_requests
    if sizes is None:
        return pipeline.host_min(num_pages), 0
    if config.num_pages:
        return pipeline.host_min(num_pages), sizes.pages_for(num_slots)
    room = num_pages * page_bytes(layers, config.page_size)
    num_pages = pipeline.host_min(num_pages)
    full, windowed = map(pipeline.host_min, divide(sizes, layers, room, config.max_seq_len))
    if full == sys.maxsize:  # no layer needs them: they are only numbers
        longest = -(-config.max_seq_len // config.page_size)
        wanted = max(num_slots, windowed // sizes.span) * longest
        full = 1 + min(wanted, max(longest, MOST_NUMBERS))
    return (full, windowed) if full > num_pages else (num_pages, 0)


def _with_fitting_slots(
    config: ResolvedConfig,
    layers: Sequence[LayerSpec],
    device: torch.device,
    free_at_start: int,
    pipeline: Pipeline,
) -> ResolvedConfig:
    """The options, with as many requests at once as their states allow on all ranks."""
    if device.type != "cuda":
        return config
    room = int(free_at_start * config.memory_ratio) - (free_at_start - free_bytes(device))
    num_slots = pipeline.host_min(fit_slots(config, layers, room)) * config.num_attending
    return replace(
        config,
        max_running_requests=num_slots,
        cuda_graph_max_bs=min(config.cuda_graph_max_bs, num_slots),
    )


def _graph_keys(config: ResolvedConfig) -> list[GraphKey]:
    """The steps to capture. Stages agree on them, also those without states."""
    keys = graph_keys(
        config.cuda_graph_max_bs,
        config.max_prefill_length,
        config.tp,
        max_snapshots=MAX_SNAPSHOTS if config.num_snapshots != 0 else 0,
        max_run=config.max_run,
        max_run_rows=config.max_run_rows,
    )
    return list(dict.fromkeys(key.divided(config.num_attending) for key in keys))


def rank_device(config: ResolvedConfig, local_rank: int) -> torch.device:
    """The device of the rank with this number on its machine."""
    several_gpus = config.device == "cuda" and config.num_ranks > 1
    return torch.device("cuda", local_rank) if several_gpus else torch.device(config.device)


def _load_model(
    config: ResolvedConfig,
    model_config: ModelConfig,
    folder: Path,
    report: Report,
    device: torch.device,
    free_at_start: int,
    ranks: Communicator,
    layers: range,
) -> Decoder:
    report("loading weights", 0.0)
    try:
        return load_model(
            replace(model_config, experts_by_rank=config.ep),
            folder,
            dtype=getattr(torch, config.dtype),
            device=device,
            load_format=config.load_format,
            max_seq_len=config.max_seq_len,
            progress=lambda done, total: report("loading weights", done / total),
            ranks=ranks,
            layers=layers,
        )
    except RuntimeError as error:
        if not (isinstance(error, torch.OutOfMemoryError) or CPU_OUT_OF_MEMORY in str(error)):
            raise
        room = "memory of this machine"
        if config.device == "cuda":
            room = f"{free_at_start / GIB:.1f} GiB that are free on the device"
        what, remedy = "weights", "choose a smaller model, --quantization fp8 or --dtype bfloat16"
        if config.max_seq_len > model_config.max_seq_len:
            what = f"weights, with a table of {config.max_seq_len:,} positions,"
            remedy = f"lower --max-seq-len-override, or {remedy}"
        raise DeviceMemoryError(f"The {what} do not fit into the {room}; {remedy}.") from error


@dataclass(eq=False, repr=False)
class _Builder:
    """Makes runners of one model with different numbers of pages."""

    config: ResolvedConfig
    facts: ModelFacts  # for this rank of its stage
    model: Decoder
    layer_specs: Sequence[LayerSpec]
    network: DraftNetwork | None  # that drafts, if it is one
    lanes: Lanes
    ranks: Communicator
    stage: Stage
    disk: tuple[PageFiles, bytes] | None = None  # of the final runner, its fingerprint

    def __post_init__(self) -> None:
        config = self.config
        shape = AttentionShape(
            layers=frozenset(self.facts.attention),
            page_size=config.page_size,
            dtype=getattr(torch, config.dtype),
            kv_dtype=getattr(torch, config.kv_dtype),
        )
        self._attention, self._captured_attention = self._make_attention(shape)
        pair = (self._attention.prefill_backend, self._attention.decode_backend)
        if config.windows is not None and any(isinstance(each, HostPlanned) for each in pair):
            # They plan for one page table.
            layers = filter(config.windows.hold_all_of, shape.layers)
            windowed, captured = self._make_attention(replace(shape, layers=frozenset(layers)))
            self._attention = replace(self._attention, windowed=windowed)
            self._captured_attention = replace(self._captured_attention, windowed=captured)

    def _make_attention(self, shape: AttentionShape) -> tuple[Attention, Attention]:
        """That of steps, and of captured steps."""
        config = self.config
        attention = make_attention(config.attn_prefill, config.attn_decode, shape)
        if config.device != "cuda" or not config.cuda_graph_max_bs:
            return attention, attention
        return attention, make_captured_attention(attention, config.attn_prefill, shape)

    def __call__(
        self,
        num_pages: int,
        num_snapshots: int = 0,
        num_window_pages: int = 0,
        prefill_s: float | None = None,
        report: Report | None = None,
    ) -> ModelRunner:
        """prefill_s: seconds to compute a token of a prompt, for the final runner, which may have a
        host cache."""
        config = self.config
        windows = config.windows if num_window_pages else None
        states = allocate_states(
            self.layer_specs,
            num_pages=num_pages,
            page_size=config.page_size,
            num_slots=config.max_running_requests // config.num_attending,
            num_snapshots=num_snapshots,
            windows=windows,
            num_window_pages=num_window_pages,
            device=self.lanes.device,
        )
        tiers: Tiers | None = None
        load_rule = ALWAYS
        disk: Disk | None = None
        if prefill_s is not None and config.num_host_pages:
            assert report is not None
            store, fingerprint = self.disk or (None, b"")
            tiers = Tiers(
                states,
                config.num_host_pages,
                self.lanes,
                store=store,
                report=lambda fraction: report("pinning host memory", fraction),
            )
            self.lanes.synchronize()
            load_rule = slowest_rule(
                tiers.copies.measure(prefill_s * config.page_size), self.stage.pipeline
            )
            if store is not None:
                report("timing the disk", 0.0)
                disk = Disk(store, fingerprint, tiers.measure_disk(load_rule))
        capacity = Capacity.of(config, num_pages, num_snapshots, num_window_pages)
        acceptance = self.config.draft_acceptance
        make = Computation if acceptance < 0 else partial(AssumedAcceptance, acceptance)
        computation = make(
            model=self.model,
            states=states,
            capacity=capacity,
            vocab_size=self.facts.vocab_size,
            attention=self._attention,
            captured_attention=self._captured_attention,
            lanes=self.lanes,
            ranks=self.ranks,
            stage=self.stage,
            max_run=config.max_run,
            drafter=self._drafter(capacity),
            window=0 if windows is None else windows.window,
        )
        parts = device_parts(
            self.lanes,
            computation.vocab_size,
            computation.whole_logits,
            computation.sampler.mask,
            None if tiers is None else tiers.copies,
        )
        runner = ModelRunner(
            computation, capacity, parts, tiers=tiers, load_rule=load_rule, disk=disk
        )
        # Weights, tables and pages were written on the default stream, which no lane waits for.
        self.lanes.synchronize()
        return runner

    def _drafter(self, capacity: Capacity) -> Drafter | None:
        if not self.config.num_drafts or not self.stage.is_last:
            return None
        if self.network is not None:
            return NetworkDrafter(self.network, self.ranks.rank)
        return NgramDrafter(capacity.num_slots, capacity.max_seq_len, self.lanes)


def slowest_rule(own: LoadRule, pipeline: Pipeline) -> LoadRule:
    """The rule for all ranks, each of which waits for the slowest. The last stage, which waits for
    the others, has measured what a token takes to compute. All ranks must call this together."""
    return LoadRule(*(-pipeline.host_min(-round(s / TICK_S)) * TICK_S for s in astuple(own)))


def _try_largest_steps(runner: ModelRunner, config: ResolvedConfig) -> int:
    """Run the largest steps; returns the peak memory in bytes on a GPU, 0 on a CPU, where this is
    only a self-test.

    Raises CheckpointError if the model's logits are not finite.
    """
    on_gpu = config.device == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    try:
        for rank in range(config.num_attending):
            plan = longest_step(config, runner.vocab_size, rank=rank)
            result = runner.collect(runner.launch(plan))
        if on_gpu:
            runner.collect(runner.launch(widest_step(config)))
    except StepError as error:
        raise DeviceMemoryError(f"The largest step cannot run here. {error}") from error
    [scores] = result.parts
    assert isinstance(scores, dict)
    if not all(math.isfinite(entry.logprob) for entry in scores.get(0, ())):
        raise CheckpointError(
            f"The model's logits are not finite in {config.dtype}: its weights are broken, or too "
            "large for this --dtype."
        )
    return torch.cuda.max_memory_allocated() if on_gpu else 0


def _time_prefill(runner: ModelRunner, config: ResolvedConfig) -> float:
    """Seconds to compute a token of a prompt in the largest step, whose kernels are compiled."""
    plan = longest_step(config, runner.vocab_size, scored=False)
    runner.collect(runner.launch(plan))
    began = time.perf_counter()
    runner.collect(runner.launch(plan))
    return (time.perf_counter() - began) / plan.num_tokens


def _try_graphs(runner: ModelRunner, config: ResolvedConfig) -> int:
    """Estimate the bytes of all graphs: those of the first, which allocates the shared pool, plus
    the average of two smaller ones for each graph."""
    keys = _graph_keys(config)
    if not keys or config.device != "cuda":
        return 0
    free = [free_bytes(runner.lanes.device)]
    tried = (keys[:1], keys[len(keys) // 2 :][:2])
    for some in tried:  # the graphs live until the runner is closed
        runner.capture(some, lambda done: None)
        free.append(free_bytes(runner.lanes.device))
    each = (free[1] - free[2]) // len(tried[1])
    return max(0, free[0] - free[1]) + max(0, each) * len(keys)
