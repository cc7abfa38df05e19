"""Makes the runner of a setup, in phases: load the weights, make them ready, measure the largest
steps on a trial runner, allocate the caches in the rest of the memory, capture the graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from minisgl.attention.backends import make_attention, make_captured_attention
from minisgl.attention.base import Attention, AttentionShape, HostPlanned
from minisgl.attention.state import LayerState
from minisgl.config import AttentionSpec, Capacity, LayerSpec, ResolvedConfig, StateSpec
from minisgl.device.lanes import Lanes
from minisgl.distributed.communicator import SINGLE_RANK, Communicator
from minisgl.distributed.layout import RankLayout
from minisgl.distributed.pipeline import OneStage, Pipeline
from minisgl.drafting.drafter import Drafter
from minisgl.drafting.network_drafter import NetworkDrafter
from minisgl.drafting.networks.loading import load_network
from minisgl.drafting.networks.network import DraftNetwork
from minisgl.drafting.ngram import NgramDrafter
from minisgl.errors import CaptureError, DeviceMemoryError
from minisgl.kvcache.copies import ALWAYS, LoadRule
from minisgl.kvcache.disk import Disk
from minisgl.models.decoder import Decoder
from minisgl.models.float32_head import widen_head
from minisgl.models.invariant import make_invariant
from minisgl.models.loader import load_model
from minisgl.models.refilling import Refilling
from minisgl.models.sleeping import Sleep
from minisgl.parts.adapters.device import DeviceAdapters, load_adapters
from minisgl.parts.device import device_parts
from minisgl.parts.experts.device import note_experts
from minisgl.parts.images.device import DeviceImages, load_images
from minisgl.runner.assumed_acceptance import AssumedAcceptance
from minisgl.runner.computation import Computation
from minisgl.runner.dense_copies import prepare_model
from minisgl.runner.graphs import GraphKey, graph_keys
from minisgl.runner.memory import (
    GIB,
    HostPages,
    StepMemory,
    WeightMemory,
    allocate_states,
    fit_capacity,
    fit_slots,
    free_bytes,
    page_table_bytes,
)
from minisgl.runner.runner import ModelRunner
from minisgl.runner.sampling_features import Scoring
from minisgl.runner.setup import Setup
from minisgl.runner.stage import Stage
from minisgl.runner.warmup import run_largest_steps, time_prefill, trial_capacity, try_graphs
from minisgl.tiers.disk.disk_cache import open_store
from minisgl.tiers.disk.page_files import PageFiles
from minisgl.tiers.host.host_copies import staging_bytes
from minisgl.tiers.host.numbering import Numbering
from minisgl.tiers.tiers import Tiers

if TYPE_CHECKING:
    from minisgl.models.adopted.model import AdoptedModel
    from minisgl.models.transformer import CausalLM

NO_ROOM_FOR_GRAPHS = (
    "The CUDA graphs do not fit into memory beside the KV cache: lower --memory-ratio, "
    "--max-running-requests or --cuda-graph-max-bs, which at 0 needs none."
)

# Part of torch's message when a CPU allocation fails.
CPU_OUT_OF_MEMORY = "DefaultCPUAllocator"

TICK_S = 1e-12  # of times that ranks compare as integers

# Called with the name of the phase and the fraction of it that is done, 0 to 1.
Report = Callable[[str, float], None]


def no_report(phase: str, fraction: float) -> None:
    """Take a report to which nobody listens."""


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where a rank computes, and with which others."""

    lanes: Lanes
    ranks: Communicator  # of its stage
    stage: Stage
    number: int  # among all ranks of the engine


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """A model, or what one rank has of it, and what its layers keep between steps."""

    model: Decoder
    network: DraftNetwork | None  # that drafts, if it is one
    layers: list[LayerSpec]  # those of the network last


def load_runner(
    setup: Setup,
    report: Report = no_report,
    ranks: Communicator = SINGLE_RANK,
    pipeline: Pipeline | None = None,
    device: torch.device | None = None,
) -> ModelRunner:
    """Load the weights, measure the memory of the largest steps and of the graphs, allocate KV
    pages in the remaining memory, and capture the graphs. All ranks must call this together.

    ranks: the communicator of this rank's stage. pipeline: of the stages, if there are several.
    device: of this rank, if there are others; else the one of the options. Blocks for seconds or
    minutes. Raises CheckpointError or DeviceMemoryError.
    """
    config, pipeline = setup.config, pipeline or OneStage(ranks)
    lanes = Lanes(device or torch.device(config.device))
    lanes.enter_thread()
    free_at_start = free_bytes(lanes.device)
    dtype, has_runs = getattr(torch, config.dtype), config.max_run > 1
    stage = Stage(pipeline, setup.model.hidden_size, dtype, lanes.device, has_runs=has_runs)
    number = RankLayout.of(config).rank(pipeline.stage, ranks.rank)
    place = Place(lanes, ranks, stage, number)
    layers = setup.facts.stages(pipeline.size)[pipeline.stage]

    weights = _load_weights(setup, place, layers, free_at_start, report)
    model = cast("CausalLM | AdoptedModel", weights.model)  # which all decoders are
    if config.head_dtype != config.dtype:
        widen_head(model)
    if config.batch_invariant:
        weights = replace(weights, model=make_invariant(model, lanes.device))
    refilling = Refilling(model, setup.model, lanes, number)
    report("tuning GEMMs", 0.0)
    config, copy_bytes = _make_ready(config, place, weights, free_at_start)
    adapters = None
    if config.max_loras:
        report("loading adapters", 0.0)
        adapters = load_adapters(config, setup.model, weights.model, lanes)
    images = None
    if not isinstance(setup.sight, str):
        report("loading the tower", 0.0)
        images = load_images(
            setup.sight,
            setup.folder,
            weights.model,
            lanes,
            num_rows=config.image_rows,
            num_slots=config.max_running_requests,
            hidden_size=setup.model.hidden_size,
            dtype=dtype,
            load_format=config.load_format,
            is_first=stage.is_first,
            captures=config.cuda_graph_max_bs > 0,
        )
        refilling.tower = images.tower_places
        if images.seeing is not None:
            weights = replace(weights, model=images.seeing)
    keys = graph_keys(config, turns=images is not None and images.offsets is not None)
    routed = None
    if (shape := config.routed_shape(setup.facts)) is not None:
        most = config.max_running_requests + config.max_prefill_length
        most = max([most, *(key.shape.num_rows for key in keys)])
        routed = note_experts(model, most, shape, lanes.device)
    memory = WeightMemory.measured(lanes.device, free_at_start, copy_bytes)
    report("profiling peak memory (the first run also compiles kernels)", 0.0)
    attention = _attentions(config, setup.facts.on_rank(config.tp).on_stage(layers).attention)
    make = _RunnerMaker(
        config,
        setup.model.vocab_size,
        place,
        weights,
        *attention,
        adapters,
        images,
        routed,
        refilling,
    )
    host = HostPages.agreed(config, weights.layers, pipeline)
    steps = _measure_steps(make, memory, host, keys, report)
    if images is not None and not isinstance(setup.sight, str):  # it encodes beside the steps
        num_bytes = steps.activation_bytes + images.peak_bytes(setup.sight)
        steps = replace(steps, activation_bytes=num_bytes)
    disk = _open_disk(setup, place, weights.layers, host, report)
    capacity = fit_capacity(config, weights.layers, pipeline, memory, steps)
    capacity = replace(capacity, state_parts=host.state_parts, window_parts=host.window_parts)
    states = make.states(capacity)
    behind = _make_tiers(make, states, capacity, host, steps.prefill_s, disk, report)
    runner = make(capacity, states, *behind)
    try:
        if keys:
            runner.capture(keys, lambda done: report("capturing graphs", done / len(keys)))
    except CaptureError:
        runner.close()
        raise
    except torch.OutOfMemoryError as error:
        runner.close()
        raise DeviceMemoryError(NO_ROOM_FOR_GRAPHS) from error

    def capture(again: bool) -> None:
        if again and behind[0] is not None:
            behind[0].copies.find_planes()
        if keys:
            runner.capture(keys if again else (), lambda done: None)

    refilling.memory = Sleep([model, weights.model, weights.network], states, lanes, capture)
    return runner


def _load_weights(
    setup: Setup, place: Place, layers: range, free_at_start: int, report: Report
) -> Weights:
    """The model, or the layers that are this rank's, and the network that drafts."""
    config, device = setup.config, place.lanes.device
    dtype, network = getattr(torch, config.dtype), None
    report("loading weights", 0.0)
    try:
        model = load_model(
            replace(setup.model, experts_by_rank=config.ep),
            setup.folder,
            dtype=dtype,
            device=device,
            load_format=config.load_format,
            max_seq_len=config.max_seq_len,
            progress=lambda done, total: report("loading weights", done / total),
            ranks=place.ranks,
            layers=layers,
        )
    except RuntimeError as error:
        if not (isinstance(error, torch.OutOfMemoryError) or CPU_OUT_OF_MEMORY in str(error)):
            raise
        room = "memory of this machine"
        if config.device == "cuda":
            room = f"{free_at_start / GIB:.1f} GiB that are free on the device"
        what, remedy = "weights", "choose a smaller model, --quantization fp8 or --dtype bfloat16"
        if config.max_seq_len > setup.model.max_seq_len:
            what = f"weights, with a table of {config.max_seq_len:,} positions,"
            remedy = f"lower --max-seq-len-override, or {remedy}"
        raise DeviceMemoryError(f"The {what} do not fit into the {room}; {remedy}.") from error
    layer_specs: list[LayerSpec] = [
        spec.for_runs(config.max_run) if isinstance(spec, StateSpec) else spec
        for spec in model.layer_specs(config.kv_dtype)
    ]
    if setup.network is not None:
        report("loading the drafter", 0.0)
        network = load_network(
            setup.network,
            model,
            dtype=dtype,
            device=device,
            load_format=config.load_format,
            max_seq_len=config.max_seq_len,
            ranks=place.ranks,
        )
        layer_specs += network.layer_specs(config.kv_dtype)
    return Weights(model, network, layer_specs)


def _make_ready(
    config: ResolvedConfig, place: Place, weights: Weights, free_at_start: int
) -> tuple[ResolvedConfig, int]:
    """Prepare the kernels. Returns the options, with as many requests at once as their states allow
    on all ranks, and the bytes of dense copies."""
    device, pipeline, layers = place.lanes.device, place.stage.pipeline, weights.layers
    if weights.network is not None:
        weights.network.prepare()
    room = int(free_at_start * config.memory_ratio) - (free_at_start - free_bytes(device))
    if device.type == "cuda":
        num_slots = pipeline.host_min(fit_slots(config, layers, room)) * config.num_attending
        config = replace(
            config,
            max_running_requests=num_slots,
            cuda_graph_max_bs=min(config.cuda_graph_max_bs, num_slots),
        )
    return config, prepare_model(config, weights.model, layers, pipeline, room)


def _attentions(
    config: ResolvedConfig, layers: Sequence[AttentionSpec]
) -> tuple[Attention, Attention]:
    """That of steps, and of captured steps."""

    def both(layers: Iterable[AttentionSpec]) -> tuple[Attention, Attention]:
        shape = AttentionShape(
            layers=frozenset(layers),
            page_size=config.page_size,
            dtype=getattr(torch, config.dtype),
            kv_dtype=getattr(torch, config.kv_dtype),
        )
        attention = make_attention(config.attn_prefill, config.attn_decode, shape)
        if config.batch_invariant and config.device == "cuda":
            from minisgl.attention.invariant_attention import InvariantAttention

            return (Attention(*(InvariantAttention(),) * 2),) * 2
        if config.device != "cuda" or not config.cuda_graph_max_bs:
            return attention, attention
        return attention, make_captured_attention(attention, config.attn_prefill, shape)

    attention, captured = both(layers)
    backends = (attention.prefill_backend, attention.decode_backend)
    if config.windows is None or not any(isinstance(each, HostPlanned) for each in backends):
        return attention, captured
    # They plan for one page table.
    windowed, of_captured = both(filter(config.windows.hold_all_of, layers))
    return replace(attention, windowed=windowed), replace(captured, windowed=of_captured)


@dataclass(frozen=True, slots=True, eq=False)
class _RunnerMaker:
    """Makes runners of one model with different capacities."""

    config: ResolvedConfig
    vocab_size: int
    place: Place
    weights: Weights
    attention: Attention
    captured_attention: Attention
    adapters: DeviceAdapters | None
    images: DeviceImages | None
    routed: Tensor | None  # the experts of the rows of a step; None where layers note none
    refilling: Refilling

    def states(self, capacity: Capacity) -> list[LayerState]:
        device, windows = self.place.lanes.device, self.config.windows
        return allocate_states(self.weights.layers, capacity, device, windows)

    def __call__(
        self,
        capacity: Capacity,
        states: list[LayerState],
        tiers: Tiers | None = None,
        load_rule: LoadRule = ALWAYS,
        disk: Disk | None = None,
    ) -> ModelRunner:
        config, lanes = self.config, self.place.lanes
        acceptance, windows = config.draft_acceptance, config.windows
        make = Computation if acceptance < 0 else partial(AssumedAcceptance, acceptance)
        computation = make(
            model=self.weights.model,
            states=states,
            capacity=capacity,
            vocab_size=self.vocab_size,
            attention=self.attention,
            captured_attention=self.captured_attention,
            lanes=lanes,
            ranks=self.place.ranks,
            stage=self.place.stage,
            max_run=config.max_run,
            drafter=self._drafter(capacity),
            window=windows.window if windows and capacity.num_window_pages else 0,
            adapted_rows=None if self.adapters is None else self.adapters.pool.rows,
            rope_offsets=None if self.images is None else self.images.offsets,
            scoring=Scoring(config.max_logprobs, config.logprobs_mode == "processed_logprobs"),
        )
        parts = device_parts(
            lanes,
            self.vocab_size,
            computation.whole_logits,
            computation.gathered,
            computation.sampler.mask,
            None if tiers is None else tiers.copies,
            computation.tables.order.rank,
            computation.tables.order.rank_of,
            self.adapters,
            self.images,
            self.routed,
            row_by_row=config.batch_invariant,
        )
        runner = ModelRunner(
            computation,
            capacity,
            parts,
            tiers=tiers,
            load_rule=load_rule,
            disk=disk,
            adapters=self.adapters,
            weights=self.refilling,
        )
        # Weights, tables and pages were written on the default stream, which no lane waits for.
        lanes.synchronize()
        return runner

    def _drafter(self, capacity: Capacity) -> Drafter | None:
        if not self.config.num_drafts or not self.place.stage.is_last:
            return None
        if self.weights.network is not None:
            return NetworkDrafter(self.weights.network, self.place.ranks.rank)
        return NgramDrafter(capacity.num_slots, capacity.max_seq_len, self.place.lanes)


def _measure_steps(
    make: _RunnerMaker,
    weights: WeightMemory,
    host: HostPages,
    keys: Sequence[GraphKey],
    report: Report,
) -> StepMemory:
    """Run the largest steps on a trial runner, and capture some graphs."""
    config, capacity = make.config, trial_capacity(make.config)
    graph_bytes, prefill_s = 0, 0.0
    runner = make(capacity, make.states(capacity))
    try:
        # Activations, sampling tables and slot tables.
        num_bytes = run_largest_steps(runner, config) - weights.held_bytes - runner.state_bytes
        if not config.num_pages:
            graph_bytes = try_graphs(runner, keys)
        if config.num_host_pages:
            report("timing prefill", 0.0)
            prefill_s = time_prefill(runner, config)
    except torch.OutOfMemoryError as error:
        raise DeviceMemoryError(NO_ROOM_FOR_GRAPHS) from error
    finally:
        runner.close()
    if config.num_host_pages:
        num_bytes += staging_bytes(host.num_bytes, config.num_host_pages)
    # The page tables of the trial were only as wide as its small cache.
    num_bytes += page_table_bytes(config)
    num_bytes += make.place.stage.bytes_on_the_way(config.max_prefill_length)
    return StepMemory(num_bytes, graph_bytes, prefill_s)


def _open_disk(
    setup: Setup, place: Place, layers: Sequence[LayerSpec], host: HostPages, report: Report
) -> tuple[PageFiles, bytes] | None:
    """The files of this rank, and the fingerprint of the model."""
    if not setup.config.disk_cache:
        return None
    report("reading the disk cache", 0.0)
    fingerprint = setup.fingerprint()
    rank = place.stage.pipeline.stage * setup.config.tp
    if not setup.config.dp_attention:  # otherwise the pages of all ranks of a stage are alike
        rank += place.ranks.rank
    return open_store(setup.config, layers, fingerprint, rank, host.num_bytes), fingerprint


def _make_tiers(
    make: _RunnerMaker,
    states: Sequence[LayerState],
    capacity: Capacity,
    host: HostPages,
    prefill_s: float,
    on_disk: tuple[PageFiles, bytes] | None,
    report: Report,
) -> tuple[Tiers | None, LoadRule, Disk | None]:
    """The memories behind the device, and by which rules they are read; prefill_s: of a token."""
    config, place = make.config, make.place
    if not config.num_host_pages:
        return None, ALWAYS, None
    store, fingerprint = on_disk or (None, b"")
    tiers = Tiers(
        states,
        config.num_host_pages,
        Numbering(
            page_bytes=host.num_bytes,
            num_pages=capacity.num_pages,
            num_snapshots=capacity.num_snapshots,
            # Behind the slots of this rank, and the scratch slot.
            first_snapshot=capacity.num_slots // capacity.num_attending + 1,
            state_parts=host.state_parts,
            window_parts=host.window_parts,
        ),
        place.lanes,
        store=store,
        report=lambda fraction: report("pinning host memory", fraction),
        rank=place.ranks.rank % capacity.num_attending,
        number=place.number,
    )
    place.lanes.synchronize()
    own = tiers.copies.measure(prefill_s * config.page_size)
    rule = slowest_rule(own, place.stage.pipeline)
    if store is None:
        return tiers, rule, None
    report("timing the disk", 0.0)
    return tiers, rule, Disk(store, fingerprint, tiers.measure_disk(rule))


def slowest_rule(own: LoadRule, pipeline: Pipeline) -> LoadRule:
    """The rule for all ranks, each of which waits for the slowest. The last stage, which waits for
    the others, has measured what a token takes to compute. All ranks must call this together."""
    return LoadRule(*(-pipeline.host_min(-round(s / TICK_S)) * TICK_S for s in astuple(own)))
