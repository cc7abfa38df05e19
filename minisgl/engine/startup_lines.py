"""What start-up says of an engine that has loaded: its sizes, and what they cost or bring."""

from __future__ import annotations

import logging

from minisgl.config import Capacity, ModelFacts, ResolvedConfig, page_bytes, slot_bytes
from minisgl.kvcache.copies import LoadRule
from minisgl.kvcache.disk import Disk
from minisgl.models.generation import GenerationDefaults
from minisgl.ranks.several_ranks import SeveralRanks
from minisgl.runner.runner import ModelRunner
from minisgl.runner.setup import Setup

logger = logging.getLogger(__name__)


def tell(
    setup: Setup, runner: ModelRunner | SeveralRanks, defaults: GenerationDefaults, seconds: float
) -> None:
    """Log all lines. seconds: that it took to load."""
    config, facts, capacity = setup.config, setup.facts, runner.capacity
    for note in (*setup.model.notes, *config.notes):
        logger.info("%s", note)
    if defaults.values:
        chosen = ", ".join(f"{name} {value}" for name, value in defaults.values.items())
        logger.info("The checkpoint's sampling defaults: %s", chosen)
    num_ranks = capacity.num_attending
    own, graphs = "", ""
    if num_ranks > 1:
        own = f" ({capacity.num_tokens // num_ranks} on each of {num_ranks} ranks)"
    if config.device != "cpu":
        graphs = f", CUDA graphs up to batch {capacity.max_graph_batch}"
    logger.info(
        f"Loaded {setup.name} in {seconds:.1f} s: {config.dtype} on "
        f"{config.device}, KV cache of {capacity.num_tokens} tokens{own} in {config.kv_dtype}, "
        f"in pages of {capacity.page_size}, context {capacity.max_seq_len}{graphs}"
    )
    tell_of_windows(config, facts, capacity)
    if facts.states:
        _tell_of_states(config, facts, capacity)
    if capacity.max_graph_batch < config.cuda_graph_max_bs:
        logger.warning(
            "No memory for CUDA graphs of batches over %d: larger ones run without; lower "
            "--memory-ratio or --cuda-graph-max-bs.",
            capacity.max_graph_batch,
        )
    if capacity.max_seq_len < config.max_seq_len:
        logger.warning(
            f"The longest sequence is capped at the KV cache: {capacity.max_seq_len} tokens "
            f"instead of {config.max_seq_len}"
        )
    if config.num_host_pages:
        _tell_of_tiers(config, facts, runner.load_rule, runner.disk)


def tell_of_windows(config: ResolvedConfig, model: ModelFacts, capacity: Capacity) -> None:
    """Say what pages cost that no layer with a sliding window reads again, or what it brings that
    they are freed."""
    max_seq_len, page_size = capacity.max_seq_len, capacity.page_size
    share = model.seen_share(max_seq_len)
    if share == 1:
        return
    num_windows = sum(spec.window is not None for spec in model.attention)
    of_all = f"{num_windows} of {len(model.layers)} layers have sliding windows"
    if config.windows is None or not capacity.num_window_pages:
        logger.info(
            f"{of_all}: a request of {max_seq_len} tokens reads {100 * share:.0f} % of the KV "
            "cache that it holds, since pages behind windows are kept"
        )
        return
    sizes, num_pages, num_windowed = config.windows, capacity.num_pages, capacity.num_window_pages
    full, windowed = sizes.page_bytes(model.layer_specs(config.kv_dtype))
    alike = (num_pages * full + num_windowed * windowed) // (full + windowed)
    logger.info(
        f"{of_all}, of at most {sizes.window} tokens: pages behind them are freed. The KV cache of "
        f"{(num_pages - 1) * page_size} tokens has {(num_windowed - 1) * page_size} for these "
        f"layers, of which a request takes at most {sizes.span * page_size}; in the same memory it "
        f"would have {(alike - 1) * page_size} if pages were kept: "
        f"{(num_pages - 1) / max(1, alike - 1):.2f} times as many"
    )


def _tell_of_states(config: ResolvedConfig, model: ModelFacts, capacity: Capacity) -> None:
    """Say how many states of requests there is room for, and snapshots for the prefix cache."""
    megabytes, snapshots = slot_bytes(model.layer_specs(config.kv_dtype)) / 1e6, ""
    if capacity.num_snapshots:
        num_snapshots = capacity.num_snapshots * capacity.num_attending
        snapshots = (
            f", and for {num_snapshots} snapshots, one at the end of each prompt, from which the "
            "prefix cache goes on"
        )
    logger.info(
        f"{len(model.states)} of {len(model.layers)} layers keep a state of {megabytes:.4g} MB for "
        f"each request: room for {capacity.num_slots} requests at once{snapshots}"
    )
    if capacity.num_slots < config.max_running_requests:
        logger.warning(
            f"Of {config.max_running_requests} requests at most {capacity.num_slots} run at once: "
            "the states of more would take over half of the memory that the weights leave"
        )


def _tell_of_tiers(
    config: ResolvedConfig, facts: ModelFacts, rule: LoadRule, disk: Disk | None
) -> None:
    """Say what tokens take to load and to compute, and where loading is never worth it."""

    def of_token(seconds: float) -> str:
        return f"{1e6 * seconds / config.page_size:.2f} us"

    on_rank = facts.on_rank(config.tp)
    num_bytes = max(  # of the stage that waits longest
        page_bytes(config.whole_layers(each.kv_specs(config.kv_dtype)), config.page_size)
        for each in map(on_rank.on_stage, facts.stages(config.pp))
    )
    num_tokens = config.num_attending * config.num_host_pages * config.page_size
    logger.info(
        f"Host cache of {num_tokens} tokens: a token is loaded in "
        f"{of_token(rule.load_s)} ({num_bytes / rule.load_s / 1e9:.1f} GB/s per rank), computed "
        f"in {of_token(rule.compute_s)}"
    )
    _warn_if_useless(rule, config, "host memory", "--host-cache")
    if disk is not None:
        logger.info(
            f"Disk cache in {config.disk_cache}: a token comes from there in "
            f"{of_token(disk.rule.load_s)} and is computed in {of_token(disk.rule.compute_s)}"
        )
        _warn_if_useless(disk.rule, config, config.disk_cache, "--disk-cache")


def _warn_if_useless(rule: LoadRule, config: ResolvedConfig, place: str, option: str) -> None:
    if not rule.pays(config.num_host_pages, config.num_host_pages):
        logger.warning(
            f"This model computes tokens faster than they are read from {place}: nothing will be "
            f"read, and {option} is of no use here."
        )
