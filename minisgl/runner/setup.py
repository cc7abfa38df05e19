"""The first phase of start-up: what is loaded, and with which options."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path

from minisgl import __version__
from minisgl.config import (
    EngineConfig,
    ModelFacts,
    ResolvedConfig,
    overlap_enabled,
    resolve,
    with_layout,
)
from minisgl.config.options import refuse
from minisgl.config.resolve import INVARIANT_WITH
from minisgl.drafting.networks.loading import NetworkConfig, find_network
from minisgl.errors import CheckpointError
from minisgl.lora.files import AdapterError, look_at
from minisgl.models.config import ModelConfig
from minisgl.models.fingerprint import weights_fingerprint
from minisgl.models.hub import locate_model
from minisgl.models.invariant import is_pinned
from minisgl.models.kv_scales import with_kv_scales
from minisgl.models.pooling import EmbeddingRules, default_rules, read_embedding_rules
from minisgl.models.registry import read_model_config
from minisgl.models.towers.sight import Sight, read_sight
from minisgl.runner.facts import device_facts


@dataclass(frozen=True, slots=True)
class Setup:
    """What is known before weights are read. All ranks of a machine have the same."""

    config: ResolvedConfig
    model: ModelConfig
    folder: Path
    network: NetworkConfig | None = None  # that drafts, if it is one
    embedding: EmbeddingRules = field(default_factory=EmbeddingRules)
    sight: Sight | str = "it reads text only"  # or why the model takes no images

    @property
    def name(self) -> str:
        """Of the model, as the user or its folder says."""
        return self.config.model or self.folder.name

    @property
    def facts(self) -> ModelFacts:
        """Of the whole model, with its drafter."""
        return _facts(self.model, self.network)

    def fingerprint(self) -> bytes:
        """32 bytes that differ between models, and between forms in which their KV is kept.

        The same on all ranks. Reads all weights, once per machine. Raises CheckpointError.
        """
        config, network = self.config, self.network
        weights = drafter = b"random"  # which are drawn from a fixed seed
        if config.load_format != "dummy":
            weights = weights_fingerprint(self.folder)
            if network is not None:
                drafter = weights_fingerprint(network.folder)
        parts = (
            __version__,  # computes and lays out KV in its own way
            weights,
            # Rope, quantisation and the scales of an FP8 cache are in it; its notes are only words.
            replace(self.model, notes=(), max_seq_len_reason=None),
            config.device,
            config.dtype,
            config.kv_dtype,
            config.page_size,
            config.tp,
            config.pp,
            config.ep,
            config.batch_invariant,
        )
        # The KV of a drafter is part of the pages.
        of_drafter = () if network is None else (drafter, network.of)
        return blake2b(repr((*parts, *of_drafter)).encode(), digest_size=32).digest()


def read_setup(config: EngineConfig) -> Setup:
    """Locate the model, read what it is, and resolve the options for it. Blocks. Raises
    MinisglError."""
    for name, at in config.adapters.items():  # before a model is downloaded
        try:
            look_at(Path(at))
        except AdapterError as error:
            raise CheckpointError(f"--lora {name}: {error}") from error
    folder = locate_model(config.model, load_format=config.load_format)
    embedding = read_embedding_rules(folder) if config.task in ("auto", "embed") else None
    if config.task == "auto":
        config = replace(config, task="generate" if embedding is None else "embed")
    model = read_model_config(
        folder,
        quantization=config.quantization,
        model_impl=config.model_impl,
        needs_head=config.task != "embed",
    )
    if config.kv_cache_dtype != "model" and config.load_format != "dummy":
        model = with_kv_scales(model, folder)
    if config.dp_attention:
        model = model.by_request()
    drafts, load_format = config.speculative or "", config.load_format
    network = find_network(drafts, model, folder, load_format=load_format, num_ranks=config.tp)
    if network is not None:
        model = network.noted_in(model)
    facts = _facts(model, network)
    # `resolve` refuses a model that cannot be divided, with a better message.
    if config.parallel != "given":  # which backends there are may depend on it
        config = with_layout(config, facts, device_facts(facts))
        if config.dp_attention:
            model = model.by_request()
            network = None if network is None else network.attending_as(model)
            facts = _facts(model, network)
    can_divide = facts.can_divide(config.tp, by_rank=config.ep)
    on_rank = facts.on_rank(config.tp) if can_divide else facts
    resolved = resolve(config, facts, device_facts(on_rank), overlap=overlap_enabled())
    sight = read_sight(folder, model, resolved)
    if config.batch_invariant and not (is_pinned(model) and isinstance(sight, str)):
        reason = "this model has kernels whose bits may depend on other rows"
        refuse(config, "batch_invariant", f"{reason}; allowed: {INVARIANT_WITH}")
    return Setup(resolved, model, folder, network, embedding or default_rules(folder), sight)


def _facts(model: ModelConfig, network: NetworkConfig | None) -> ModelFacts:
    return model.facts() if network is None else network.added_to(model.facts())
