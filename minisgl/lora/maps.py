"""From the maps that an adapter names to the products of a model, or of a rank's part of one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from minisgl.layers.experts import FusedExperts
from minisgl.layers.formats import EXPERT_MAPS
from minisgl.layers.latent_attention import linears_in
from minisgl.layers.linear import Linear
from minisgl.lora.files import TENSORS_FILE, Adapter, AdapterError, Pair
from minisgl.models.adopted.swap import PACKED
from minisgl.models.config import ModelConfig
from minisgl.models.loader import destinations
from minisgl.models.registry import FAMILIES
from minisgl.models.transformer import CausalLM
from minisgl.shards import Shard

if TYPE_CHECKING:
    from minisgl.models.adopted.model import AdoptedModel

# What an adapter adds, by the path of each site that it adapts: A and B of each part, in float32, B
# scaled; None of a part that is not adapted.
Fitted = Mapping[str, tuple[Pair | None, ...]]
_BASE_LAYER = ".base_layer"  # of a module with several adapted parameters, all but the last


@dataclass(frozen=True, slots=True)
class Part:
    """Some rows of a product's W, to which adapters add B·A, as far as this rank has them."""

    inputs: Shard  # the columns of A
    outputs: Shard  # the rows of B


@dataclass(frozen=True, slots=True)
class Site:
    """A product to which adapters may add: a linear layer's, whose parts are its columns side by
    side, or that of experts, whose parts are the gates, the ups, and the maps down."""

    module: Linear | FusedExperts
    parts: tuple[Part, ...]
    num_experts: int | None = None  # of this rank; None: it is of a layer

    def shapes(self, part: int, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Those of A and B of an adapter, padded to this rank."""
        leading = () if self.num_experts is None else (self.num_experts,)
        inputs, outputs = self.parts[part].inputs, self.parts[part].outputs
        return (*leading, rank, inputs.size), (*leading, outputs.size, rank)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a map of a checkpoint, or some of its outputs, go."""

    site: str
    part: int
    total: int  # the number of outputs of the map
    start: int = 0  # of the outputs of this part among them, heads aside
    num_heads: int = 1  # each of which has some outputs of every part, one after the other
    expert: int | None = None

    def rows(self, b: Tensor, shard: Shard) -> Tensor:
        """Those of B that this rank has."""
        start, size = (number // self.num_heads for number in (self.start, shard.whole))
        own: Tensor = b.unflatten(0, (self.num_heads, -1))[:, start : start + size]
        return own.flatten(0, 1)[shard.first : shard.first + shard.num_real]


@dataclass(frozen=True, slots=True)
class Maps:
    """The maps of a rank's part of a model by which adapters can find them."""

    sites: Mapping[str, Site]  # by the path of the module in the model
    places: Mapping[str, tuple[_Place, ...]]  # by the name of the map, as a checkpoint has it
    name_of: Callable[[str], str | None]  # the name in the model of a checkpoint's tensor
    is_elsewhere: Callable[[str], bool]  # of a tensor by that name: another rank has it

    def fit(self, adapter: Adapter, rank: int) -> Fitted:
        """What an adapter adds to each part of the sites that it adapts, cut for this rank. All
        parts of a site have one rank, to which they are padded. Raises AdapterError for what meets
        no map, or not its shape, and for ranks above `rank`."""
        # Of each site, by part and expert.
        found: dict[str, dict[tuple[int, int | None], tuple[_Place, Pair]]] = {}
        for path, given in adapter.pairs.items():
            for place, pair in self._placed(adapter, path, given, rank):
                of_site, key = found.setdefault(place.site, {}), (place.part, place.expert)
                if key in of_site:
                    raise AdapterError(
                        f"{TENSORS_FILE} adapts {path:.200} twice, under two names; allowed: one."
                    )
                of_site[key] = place, pair
        return {path: _joined(self.sites[path], [*each.values()]) for path, each in found.items()}

    def _placed(
        self, adapter: Adapter, path: str, pair: Pair, most: int
    ) -> Iterable[tuple[_Place, Pair]]:
        """Where the pair of a map goes that an adapter calls `path`. most: the highest rank."""
        module_path = path.replace(_BASE_LAYER, "")
        stored = self.name_of(f"{module_path}.weight") or ""
        name = stored.removesuffix(".weight")
        site = self.sites.get(name)
        if site is not None and isinstance(site.module, FusedExperts):
            return _stacked(adapter, module_path, pair, most, name, site.module)
        if (places := self.places.get(name)) is not None:
            inputs = self.sites[places[0].site].parts[places[0].part].inputs
            _check(path, pair, inputs.whole, places[0].total, 1, most)
            scaled = Pair(pair.a, pair.b.float() * adapter.scale(module_path, len(pair.a)))
            return [(place, scaled) for place in places]
        if self.is_elsewhere(stored):  # where it is checked
            return ()
        raise AdapterError(self._unknown(path))

    def _unknown(self, path: str) -> str:
        last = sorted({name.rpartition(".")[2] for name in self.places})
        return (
            f"{TENSORS_FILE} adapts {path:.200}, which is no map of this model that can have an "
            f"adapter; allowed: {', '.join(last) or 'none'} of its layers."
        )


def _joined(site: Site, pairs: Sequence[tuple[_Place, Pair]]) -> tuple[Pair | None, ...]:
    """This rank's part of the pairs of a site, put together."""
    rank = max(len(pair.a) for _, pair in pairs)
    found: list[Pair | None] = [None] * len(site.parts)
    for place, pair in pairs:
        part, kept = site.parts[place.part], found[place.part]
        if kept is None:
            kept = Pair(*(torch.zeros(shape) for shape in site.shapes(place.part, rank)))
            found[place.part] = kept
        to_a, to_b = kept.a, kept.b
        if place.expert is not None:
            to_a, to_b = to_a[place.expert], to_b[place.expert]
        first, size = part.inputs.first, part.inputs.num_real
        a, b = pair.a[:, first : first + size], place.rows(pair.b, part.outputs)
        to_a[: len(a), :size] = a
        to_b[: len(b), : b.shape[1]] = b
    return tuple(found)


def _stacked(
    adapter: Adapter, path: str, pair: Pair, most: int, name: str, module: FusedExperts
) -> Iterator[tuple[_Place, Pair]]:
    """Where the pair of a parameter goes that stacks the maps of all experts: A is [experts · r,
    k], and B [n, r · experts]. Which parameter follows from the shapes, of which only one can fit:
    the gates and ups have twice the inner size as their outputs."""
    inner, hidden, number = module.inner.whole, module.hidden.whole, module.num_experts
    is_down = (pair.a.shape[1], pair.b.shape[0]) == (inner, hidden)
    k, n = (inner, hidden) if is_down else (hidden, 2 * inner)
    _check(path, pair, k, n, number, most)
    parameter = f"{path}.{'down_proj' if is_down else 'gate_up_proj'}"
    a = pair.a.unflatten(0, (number, -1))
    b = pair.b.float().unflatten(1, (-1, number)).permute(2, 0, 1)
    b = b * adapter.scale(parameter, a.shape[1])
    if is_down:
        maps = {2: b}
    elif module.interleaved:
        maps = {0: b[:, 0::2], 1: b[:, 1::2]}
    else:
        maps = {0: b[:, :inner], 1: b[:, inner:]}
    for part, of_part in maps.items():
        for place, expert in enumerate(module.held):
            to = _Place(name, part, of_part.shape[1], expert=place)
            yield to, Pair(a[expert], of_part[expert])


def _check(path: str, pair: Pair, k: int, n: int, num_experts: int, most: int) -> None:
    """Raise AdapterError unless a pair fits to a map from k inputs to n outputs."""
    r, rest = divmod(len(pair.a), num_experts)
    if rest or not r or (pair.a.shape[1], pair.b.shape[0]) != (k, n):
        experts = f"{num_experts} · " if num_experts > 1 else ""
        raise AdapterError(
            f"{TENSORS_FILE}: {path:.200} has A {[*pair.a.shape]} and B {[*pair.b.shape]}; "
            f"allowed: [{experts}r, {k}] and [{n}, {experts}r], the shapes of this model."
        )
    if r > most:
        raise AdapterError(
            f"{TENSORS_FILE}: {path:.200} has the rank {r}; allowed: up to {most}, the value of "
            "--max-lora-rank."
        )


# -- the maps of a model --------------------------------------------------------------------------


def maps_of(model: CausalLM | AdoptedModel, config: ModelConfig) -> Maps:
    """The maps of a rank's part of a model, once its weights are loaded and prepared."""
    if isinstance(model, CausalLM):
        module: Any = model
        prefix, name_of = "", FAMILIES[config.architecture].name_of
        first, end = model.num_layers, model.num_layers + model.num_left_out
        ignored = [rf"^layers\.{number}\." for number in range(first, end)]
    else:
        from minisgl.models.adopted.config import AdoptedConfig
        from minisgl.models.adopted.names import names_of

        assert isinstance(config, AdoptedConfig)
        module = model.module
        prefix = f"{module.base_model_prefix}."
        name_of = names_of(module, has_towers=config.has_towers)
        ignored = [*(module._keys_to_ignore_on_load_unexpected or ())]
    sites: dict[str, Site] = {}
    places: dict[str, list[_Place]] = {}
    adaptable = {*linears_in(module)}
    for full_path, each in module.named_modules():
        path = full_path.removeprefix(prefix)
        if isinstance(each, FusedExperts):
            _add_experts(sites, places, path, each)
        elif each in adaptable and "." in full_path:  # the others are heads
            _add_linear(sites, places, path, each)
    is_left_out = destinations(model, config.quantization).is_left_out

    def is_elsewhere(name: str) -> bool:
        """What no rank has, such as layers that draft, is not."""
        return is_left_out(name) and not any(re.search(each, prefix + name) for each in ignored)

    return Maps(
        sites, {name: tuple(found) for name, found in places.items()}, name_of, is_elsewhere
    )


def _add_linear(
    sites: dict[str, Site], places: dict[str, list[_Place]], path: str, module: Linear
) -> None:
    sites[path] = Site(module, tuple(Part(module.inputs, each) for each in module.parts.values()))
    parent, numbers = path[: path.rfind(".") + 1], {part: i for i, part in enumerate(module.parts)}
    merged = {part for each in module.merged for part in each.parts}
    for part in module.parts.keys() - merged:
        of_map = places.setdefault(parent + part.partition(PACKED)[0], [])
        of_map.append(_Place(path, numbers[part], module.parts[part].whole))
    for each in module.merged:
        total, start = sum(module.parts[part].whole for part in each.parts), 0
        for part in each.parts:
            place = _Place(path, numbers[part], total, start, each.num_heads)
            places.setdefault(parent + each.name, []).append(place)
            start += module.parts[part].whole


def _add_experts(
    sites: dict[str, Site], places: dict[str, list[_Place]], path: str, module: FusedExperts
) -> None:
    to_inner, down = Part(module.hidden, module.inner), Part(module.inner, module.hidden)
    site = sites[path] = Site(module, (to_inner, to_inner, down), module.own.size)
    for place, expert in enumerate(module.held):
        for part, map_name in enumerate(EXPERT_MAPS):
            to = _Place(path, part, site.parts[part].outputs.whole, expert=place)
            places.setdefault(f"{path}.{expert}.{map_name}", []).append(to)
