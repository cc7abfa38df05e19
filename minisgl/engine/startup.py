"""Loads a model: everything that happens before the first request."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic

from minisgl.config import (
    Capacity,
    EngineConfig,
    ModelFacts,
    ResolvedConfig,
    overlap_enabled,
    resolve,
    slot_bytes,
    with_layout,
)
from minisgl.drafting.networks.loading import find_network
from minisgl.engine.protocols import Handle, Runner
from minisgl.errors import ConfigError
from minisgl.kvcache.copies import ALWAYS, LoadRule
from minisgl.kvcache.disk import Disk
from minisgl.kvcache.manager import KVCacheManager
from minisgl.kvcache.rank_caches import RankCaches
from minisgl.models.config import ModelConfig
from minisgl.models.generation import GenerationDefaults, read_generation_defaults
from minisgl.models.hub import locate_model
from minisgl.models.kv_scales import with_kv_scales
from minisgl.models.pooling import EmbeddingRules, default_rules, read_embedding_rules
from minisgl.models.registry import read_model_config
from minisgl.ranks.nodes.worker_node import work
from minisgl.ranks.processes.remote_ranks import RemoteRanks
from minisgl.ranks.several_ranks import SeveralRanks, load_ranks
from minisgl.runner.facts import device_facts
from minisgl.runner.load import Report, load_runner
from minisgl.runner.model_fingerprint import model_fingerprint
from minisgl.runner.runner import ModelRunner
from minisgl.scheduler.run_lengths import RunChooser
from minisgl.scheduler.runs import Speculation
from minisgl.scheduler.scheduler import Scheduler
from minisgl.text.template_file import check_template, read_template
from minisgl.text.tokenizer import Tokenizer
from minisgl.tiers.disk.disk_cache import check_folder
from minisgl.tiers.host.host_copies import max_loading, offloads_per_plan

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Loaded(Generic[Handle]):
    """The result of start-up: the parts of an engine."""

    runner: Runner[Handle]
    config: ResolvedConfig
    capacity: Capacity
    model: ModelFacts
    tokenizer: Tokenizer | None
    defaults: GenerationDefaults
    model_name: str
    ranks: RemoteRanks | None = None  # None for a single rank
    load_rule: LoadRule = ALWAYS
    disk: Disk | None = None
    # Computes the fingerprint of the model, which reads all of its weights the first time.
    fingerprint: Callable[[], bytes] = bytes
    embedding: EmbeddingRules = field(default_factory=EmbeddingRules)
    hidden_size: int = 0

    def speculation(self) -> Speculation | None:
        """What decides about drafts, if any are made."""
        if not self.config.num_drafts:
            return None
        return Speculation(RunChooser(self.config.num_drafts), self.config.max_run_rows)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What is known of a model before its weights are read."""

    folder: Path
    model_config: ModelConfig
    facts: ModelFacts
    resolved: ResolvedConfig
    embedding: EmbeddingRules


def load(config: EngineConfig, progress: Report | None = None) -> Loaded[Any]:
    """Locate, read and load the model. Blocks. Raises MinisglError."""
    if config.node_rank:
        reason = "only node 0 takes requests; start the other nodes by `minisgl serve`"
        raise ConfigError("--node-rank", config.node_rank, reason)
    report = progress or (lambda phase, fraction: None)
    started = time.monotonic()
    prepared = _prepare(config)
    folder, model_config, resolved = prepared.folder, prepared.model_config, prepared.resolved
    name = config.model or folder.name
    tokenizer = None
    if Tokenizer.found_in(folder) or config.load_format != "dummy":
        template = read_template(config.chat_template) if config.chat_template else None
        tokenizer = Tokenizer.load(folder, chat_template=template)
        if config.chat_template:
            check_template(tokenizer, config.chat_template)
    defaults = read_generation_defaults(folder, tokenizer.eos_token_id if tokenizer else None)
    runner: ModelRunner | SeveralRanks
    ranks: RemoteRanks | None = None
    if resolved.disk_cache:
        check_folder(resolved)  # before the weights are read, which may take minutes
    if resolved.num_ranks == 1:
        runner = load_runner(resolved, model_config, folder, report)
    else:
        runner = load_ranks(resolved, model_config, folder, report)
        ranks = runner.others
    for note in (*model_config.notes, *resolved.notes):
        logger.info("%s", note)
    if defaults.values:
        chosen = ", ".join(f"{name} {value}" for name, value in defaults.values.items())
        logger.info("The checkpoint's sampling defaults: %s", chosen)
    capacity = runner.capacity
    num_ranks = capacity.num_attending
    own, graphs = "", ""
    if num_ranks > 1:
        own = f" ({capacity.num_tokens // num_ranks} on each of {num_ranks} ranks)"
    if resolved.device != "cpu":
        graphs = f", CUDA graphs up to batch {capacity.max_graph_batch}"
    logger.info(
        f"Loaded {name} in {time.monotonic() - started:.1f} s: {resolved.dtype} on "
        f"{resolved.device}, KV cache of {capacity.num_tokens} tokens{own} in {resolved.kv_dtype}, "
        f"in pages of {capacity.page_size}, context {capacity.max_seq_len}{graphs}"
    )
    _tell_of_windows(resolved, prepared.facts, capacity)
    if prepared.facts.states:
        _tell_of_states(resolved, prepared.facts, capacity)
    if capacity.max_graph_batch < resolved.cuda_graph_max_bs:
        logger.warning(
            "No memory for CUDA graphs of batches over %d: larger ones run without; lower "
            "--memory-ratio or --cuda-graph-max-bs.",
            capacity.max_graph_batch,
        )
    if capacity.max_seq_len < resolved.max_seq_len:
        logger.warning(
            f"The longest sequence is capped at the KV cache: {capacity.max_seq_len} tokens "
            f"instead of {resolved.max_seq_len}"
        )
    if resolved.num_host_pages:
        _tell_of_host_cache(resolved, prepared.facts, runner.load_rule)
    if runner.disk is not None:
        _tell_of_disk_cache(resolved, runner.disk)
    return Loaded(
        runner,
        resolved,
        capacity,
        prepared.facts,
        tokenizer,
        defaults,
        name,
        ranks,
        load_rule=runner.load_rule,
        disk=runner.disk,
        fingerprint=partial(model_fingerprint, resolved, model_config, folder),
        embedding=prepared.embedding,
        hidden_size=model_config.hidden_size,
    )


def scheduler_of(loaded: Loaded[Any]) -> Scheduler:
    """The scheduler for what was loaded."""
    config, capacity = loaded.config, loaded.capacity
    return Scheduler(
        kv=_cache_of(loaded),
        num_slots=capacity.num_slots,
        max_seq_len=capacity.max_seq_len,
        max_prefill_length=config.max_prefill_length,
        max_queued_requests=config.max_queued_requests,
        policy=config.schedule_policy,
        conservativeness=config.schedule_conservativeness,
        client_share=config.key_share,
        speculation=loaded.speculation(),
        num_stages=config.pp,
        look_ahead=config.overlap,
    )


def _cache_of(loaded: Loaded[Any]) -> KVCacheManager:
    config, capacity = loaded.config, loaded.capacity
    page_size, num_host_pages = capacity.page_size, config.num_host_pages
    if config.windows is not None and capacity.num_window_pages:
        return KVCacheManager(
            num_pages=capacity.num_pages,
            page_size=page_size,
            cache_type=config.cache_type,
            num_window_pages=capacity.num_window_pages,
            window_sizes=config.windows,
        )
    layers = loaded.model.on_rank(config.tp).kv_specs(config.kv_dtype)
    pace = offloads_per_plan(layers, page_size, num_host_pages) if num_host_pages else None
    caches = [
        KVCacheManager(
            num_pages=capacity.num_pages,
            page_size=page_size,
            cache_type=config.cache_type,
            num_host_pages=num_host_pages,
            offloads_per_plan=pace,
            max_loading=max_loading(layers, page_size),
            load_rule=loaded.load_rule,
            disk=loaded.disk,
            max_in_transit=capacity.max_in_transit,
            num_snapshots=capacity.num_snapshots if loaded.model.states else None,
            looks_ahead=loaded.model.drafts_look_ahead,
        )
        for _ in range(capacity.num_attending)
    ]
    if len(caches) == 1:
        return caches[0]
    return RankCaches(caches, capacity.num_slots // capacity.num_attending)


def work_for_node_0(config: EngineConfig) -> None:
    """Run the ranks of node `config.node_rank` until node 0 ends them. Blocks; from any thread.

    Raises MinisglError if this node cannot take part, or the engine fails.
    """
    prepared = _prepare(config)
    work(prepared.resolved, prepared.model_config, prepared.folder)


def _prepare(config: EngineConfig) -> _Prepared:
    """Locate the model and resolve the options for it."""
    folder = locate_model(config.model, load_format=config.load_format)
    embedding: EmbeddingRules | None = None
    if config.task in ("auto", "embed"):
        embedding = read_embedding_rules(folder)
        if config.task == "auto":
            config = replace(config, task="generate" if embedding is None else "embed")
    model_config = read_model_config(
        folder,
        quantization=config.quantization,
        model_impl=config.model_impl,
        needs_head=config.task != "embed",
    )
    if config.kv_cache_dtype != "model" and config.load_format != "dummy":
        model_config = with_kv_scales(model_config, folder)
    if config.dp_attention:
        model_config = model_config.by_request()
    facts, drafts = model_config.facts(), config.speculative or ""
    if network := find_network(
        drafts, model_config, folder, load_format=config.load_format, num_ranks=config.tp
    ):
        facts, model_config = network.added_to(facts), network.noted_in(model_config)
    # `resolve` refuses a model that cannot be divided, with a better message.
    if config.parallel == "auto":  # which backends there are may depend on it
        config = with_layout(config, facts, device_facts(facts))
        if config.dp_attention:
            model_config, facts = model_config.by_request(), replace(facts, divides_heads=False)
    can_divide = facts.can_divide(config.tp, by_rank=config.ep)
    on_rank = facts.on_rank(config.tp) if can_divide else facts
    resolved = resolve(config, facts, device_facts(on_rank), overlap=overlap_enabled())
    return _Prepared(folder, model_config, facts, resolved, embedding or default_rules(folder))


def _tell_of_windows(config: ResolvedConfig, model: ModelFacts, capacity: Capacity) -> None:
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


def _tell_of_host_cache(config: ResolvedConfig, facts: ModelFacts, rule: LoadRule) -> None:
    num_tokens = config.num_host_pages * config.page_size
    of_rank = facts.on_rank(config.tp).on_stage(facts.stages(config.pp)[-1])
    page_bytes = of_rank.kv_bytes_per_token(config.kv_dtype) * config.page_size
    load_s, compute_s = rule.load_s / config.page_size, rule.compute_s / config.page_size
    logger.info(
        f"Host cache of {num_tokens} tokens: a token is loaded in {1e6 * load_s:.2f} us "
        f"({page_bytes / rule.load_s / 1e9:.1f} GB/s per rank), computed in "
        f"{1e6 * compute_s:.2f} us"
    )
    _warn_if_useless(rule, config, "host memory", "--host-cache")


def _tell_of_disk_cache(config: ResolvedConfig, disk: Disk) -> None:
    load_s, compute_s = disk.rule.load_s / config.page_size, disk.rule.compute_s / config.page_size
    logger.info(
        f"Disk cache in {config.disk_cache}: a token comes from there in {1e6 * load_s:.2f} us and "
        f"is computed in {1e6 * compute_s:.2f} us"
    )
    _warn_if_useless(disk.rule, config, config.disk_cache, "--disk-cache")


def _warn_if_useless(rule: LoadRule, config: ResolvedConfig, place: str, option: str) -> None:
    if not rule.pays(config.num_host_pages):
        logger.warning(
            f"This model computes tokens faster than they are read from {place}: nothing will be "
            f"read, and {option} is of no use here."
        )
