"""Loads a model: everything that happens before the first request."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic

from minisgl.config import (
    Capacity,
    EngineConfig,
    LayerSpec,
    ModelFacts,
    ResolvedConfig,
)
from minisgl.engine.image_proof import proven
from minisgl.engine.protocols import Handle, Runner
from minisgl.engine.startup_lines import tell
from minisgl.errors import ConfigError
from minisgl.images.processor import ImageSupport
from minisgl.kvcache.copies import ALWAYS, LoadRule
from minisgl.kvcache.disk import Disk
from minisgl.kvcache.manager import KVCacheManager
from minisgl.kvcache.moves import Moves
from minisgl.kvcache.rank_caches import RankCaches
from minisgl.lora.files import AdapterReader
from minisgl.models.generation import GenerationDefaults, read_generation_defaults
from minisgl.models.pooling import EmbeddingRules
from minisgl.models.refilling import WeightTaker
from minisgl.models.towers.sight import Sight
from minisgl.parts.host import host_parts
from minisgl.ranks.nodes.worker_node import work
from minisgl.ranks.processes.remote_ranks import RemoteRanks
from minisgl.ranks.several_ranks import SeveralRanks, load_ranks
from minisgl.runner.load import Report, load_runner, no_report
from minisgl.runner.runner import ModelRunner
from minisgl.runner.setup import Setup, read_setup
from minisgl.scheduler.run_lengths import RunChooser
from minisgl.scheduler.runs import Speculation
from minisgl.scheduler.scheduler import Scheduler
from minisgl.text.template_file import check_template, read_template
from minisgl.text.tokenizer import Tokenizer
from minisgl.tiers.disk.disk_cache import check_folder
from minisgl.tiers.host.host_copies import max_loading, offloads_per_plan


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
    adapters: AdapterReader | None = None  # None: there is no room for any
    weights: WeightTaker | None = None
    images: ImageSupport = field(default_factory=ImageSupport)
    sight: Sight | str = "it reads text only"  # how the model sees images, or why it takes none

    def speculation(self) -> Speculation | None:
        """What decides about drafts, if any are made."""
        if not self.config.num_drafts:
            return None
        return Speculation(RunChooser(self.config.num_drafts), self.config.max_run_rows)


def load(config: EngineConfig, report: Report = no_report) -> Loaded[Any]:
    """Locate, read and load the model. Blocks. Raises MinisglError."""
    if config.node_rank:
        reason = "only node 0 takes requests; start the other nodes by `minisgl serve`"
        raise ConfigError("--node-rank", config.node_rank, reason)
    started = time.monotonic()
    setup = proven(read_setup(config), _small_engine)
    folder, resolved = setup.folder, setup.config
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
        runner = load_runner(setup, report)
    else:
        runner = load_ranks(setup, report)
        ranks = runner.others
    tell(setup, runner, defaults, time.monotonic() - started)
    return Loaded(
        runner=runner,
        config=resolved,
        capacity=runner.capacity,
        model=setup.facts,
        tokenizer=tokenizer,
        defaults=defaults,
        model_name=setup.name,
        ranks=ranks,
        load_rule=runner.load_rule,
        disk=runner.disk,
        fingerprint=setup.fingerprint,
        embedding=setup.embedding,
        hidden_size=setup.model.hidden_size,
        adapters=runner.adapters,
        weights=runner.weights,
        images=ImageSupport.of(
            folder,
            blind=setup.sight if isinstance(setup.sight, str) else "",
            dtype=resolved.dtype,
            num_rows=resolved.image_rows,
        ),
        sight=setup.sight,
    )


def scheduler_of(loaded: Loaded[Any]) -> Scheduler:
    """The scheduler for what was loaded."""
    config, capacity = loaded.config, loaded.capacity
    kv = _cache_of(loaded)
    return Scheduler(
        kv=kv,
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
        parts=host_parts(
            [cache.tiers for cache in kv.of_ranks] if config.num_host_pages else [],
            loaded.model.vocab_size,
            loaded.tokenizer,
            config.task,
            config.max_loras,
            config.image_rows,
            max_logprobs=config.max_logprobs,
            logprobs_mode=config.logprobs_mode,
            routed=config.routed_shape(loaded.model),
            **_of_images(loaded.sight, config),
        ),
    )


def _small_engine(setup: Setup) -> tuple[ModelRunner, Scheduler]:
    """What runs a small model in this process."""
    runner = load_runner(setup)
    loaded: Loaded[Any] = Loaded(
        runner=runner,
        config=setup.config,
        capacity=runner.capacity,
        model=setup.facts,
        tokenizer=None,
        defaults=GenerationDefaults(frozenset()),
        model_name=setup.name,
        sight=setup.sight,
    )
    return runner, scheduler_of(loaded)


def _of_images(sight: Sight | str, config: ResolvedConfig) -> dict[str, Any]:
    if isinstance(sight, str):
        return {"blind": sight}
    largest = None
    if sight.both_ways is not None:
        largest = config.max_prefill_length
        if config.windows is not None:
            largest = min(largest, config.windows.spare * config.windows.page_size)
    return {"blind": "", "turns": bool(sight.axes), "largest_block": largest}


def _cache_of(loaded: Loaded[Any]) -> KVCacheManager:
    config, capacity = loaded.config, loaded.capacity
    page_size, num_host_pages = capacity.page_size, config.num_host_pages
    on_rank = loaded.model.on_rank(config.tp)
    layers: Sequence[LayerSpec] = on_rank.kv_specs(config.kv_dtype)
    if num_host_pages:
        layers = config.whole_layers(layers)
    windows = config.windows if capacity.num_window_pages else None
    if windows is not None:
        windows = replace(windows, pages_each=capacity.window_parts)
    pace = offloads_per_plan(layers, page_size, num_host_pages) if num_host_pages else None
    moves = Moves()
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
            pages_each=capacity.state_parts,
            num_window_pages=capacity.num_window_pages,
            window_sizes=windows,
            looks_ahead=loaded.model.drafts_look_ahead,
            rank=rank,
            moves=moves,
        )
        for rank in range(capacity.num_attending)
    ]
    if len(caches) == 1:
        return caches[0]
    return RankCaches(caches, capacity.num_slots // capacity.num_attending)


def work_for_node_0(config: EngineConfig) -> None:
    """Run the ranks of node `config.node_rank` until node 0 ends them. Blocks; from any thread.

    Raises MinisglError if this node cannot take part, or the engine fails.
    """
    work(proven(read_setup(config), _small_engine))
