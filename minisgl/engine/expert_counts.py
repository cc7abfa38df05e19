"""How many tokens the experts of a model have taken, and which of them get copies by that."""

from __future__ import annotations

from codecs import BOM_UTF8
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta, Struct

from minisgl.config import EngineConfig, ExpertFacts
from minisgl.errors import ConfigError
from minisgl.expert_copies import Copies, place_copies, ranks_of
from minisgl.paths import path_of

if TYPE_CHECKING:  # it needs torch, and the server's description does not
    from minisgl.models.config import ModelConfig

OPTION = "--expert-counts"
FROM = "allowed: what GET /expert_counts of a server with --ep and this model has answered"
MAX_BYTES = 16 << 20  # more than the counts of any model take


class ExpertCounts(Struct):
    """GET /expert_counts"""

    layers: list[list[Annotated[int, Meta(ge=0)]]]  # with experts: the tokens of each expert


def read_counts(file: str, experts: ExpertFacts) -> list[list[int]]:
    """The tokens of each expert of each layer, as a file has them. Raises ConfigError."""
    path = path_of(OPTION, file)
    if not path.is_file():
        raise ConfigError(OPTION, file, f"there is no such file; {FROM}")
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(OPTION, file, f"it has more than {MAX_BYTES >> 20} MiB; {FROM}")
        content = path.read_bytes().removeprefix(BOM_UTF8)
        layers = msgspec.json.decode(content, type=ExpertCounts).layers
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(OPTION, file, f"it cannot be read: {error}; {FROM}") from error
    sizes = {len(layer) for layer in layers}
    if len(layers) != experts.num_layers or sizes != {experts.num_experts}:
        reason = (
            f"it is of another model, or of one stage of --pp: this model has "
            f"{experts.num_layers} layers with {experts.num_experts} experts each"
        )
        raise ConfigError(OPTION, file, f"{reason}; {FROM}")
    if not any(map(any, layers)):
        raise ConfigError(OPTION, file, f"no expert has taken a token yet; {FROM}")
    return layers


def with_copies(model: ModelConfig, config: EngineConfig) -> tuple[ModelConfig, tuple[str, ...]]:
    """The model with the copies of experts for which the options ask, and for people what they
    bring. Raises ConfigError."""
    if not config.redundant_experts:
        return model, ()
    experts, num_ranks = model.facts().experts, config.tp
    assert config.expert_counts is not None and experts is not None, "else it was refused"
    layers = read_counts(config.expert_counts, experts)
    copies = tuple(place_copies(counts, num_ranks, config.redundant_experts) for counts in layers)
    total = 2 * sum(map(sum, layers))  # in halves of tokens
    before = sum(_fullest(counts, num_ranks, ()) for counts in layers)
    pairs = zip(layers, copies, strict=True)
    after = sum(_fullest(counts, num_ranks, placed) for counts, placed in pairs)
    num_placed = sum(len(of_rank) for layer in copies for of_rank in layer)
    return replace(model, expert_copies=copies), (
        f"{num_placed} copies of experts in {len(layers)} layers: by the counts, the fullest rank "
        f"of a layer has {after / total:.1%} of its tokens, {before / total:.1%} without copies",
    )


def _fullest(counts: list[int], num_ranks: int, copies: Copies) -> int:
    """The halves of tokens of the rank that has the most."""
    load = [0] * num_ranks
    for ranks in ranks_of(len(counts), num_ranks, copies):
        for expert, rank in enumerate(ranks):
            load[rank] += counts[expert]
    return max(load)
