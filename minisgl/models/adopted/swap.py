"""Puts minisgl's modules into a model of transformers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from minisgl.distributed.communicator import Communicator
from minisgl.kernels.linear.dense_product import DenseProduct
from minisgl.kernels.linear.product import Product
from minisgl.kernels.moe.reference import Routing
from minisgl.layers.formats import WeightFormat
from minisgl.layers.linear import Linear, RowParallelLinear
from minisgl.models.adopted.discover import Discovered
from minisgl.models.adopted.division import Division, Kind
from minisgl.models.adopted.heads import Heads
from minisgl.models.adopted.known import ExpertKind, Known, epsilon, expert_kind
from minisgl.models.adopted.modules import (
    ExpertsOf,
    HeadOf,
    MapOf,
    NormOf,
    RouterOf,
    SharedProduct,
)
from minisgl.shards import Shard, even_shard, kv_head_shard, whole


@dataclass(frozen=True, slots=True)
class Way:
    """How much of a model minisgl's kernels compute at once."""

    fuses: bool  # norms with the products after them, products with what is added to the stream
    defers: bool  # norm and rotation of heads with the storing of keys, and with attention

    def __str__(self) -> str:
        fused = ["norms, products and sums"] * self.fuses + ["rotation and attention"] * self.defers
        return f"fused: {'; '.join(fused) or 'nothing'}"


WAYS = (Way(True, True), Way(True, False), Way(False, True), Way(False, False))


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
    """Puts minisgl's modules into one model. They are made on torch's default device."""

    model: Any
    found: Discovered
    known: Known
    division: Division
    way: Way
    format: WeightFormat
    comm: Communicator
    experts_by_rank: bool  # each rank has whole experts
    heads: Heads
    products: list[Product] = field(default_factory=list)  # that were made
    split: dict[str, Shard] = field(default_factory=dict)  # parameters, in their first dimension

    def layers(self, names: Sequence[str]) -> None:
        """Swap the modules of the layers with these names."""
        inside = tuple(f"{name}." for name in names)
        modules = [(name, module) for name, module in self.model.named_modules()]
        for name, module in modules:
            if not name.startswith(inside):
                continue
            kind = type(module).__name__
            if kind in self.known.norms:
                self.norm(name)
            elif kind in self.known.routers:
                self._router(name, module)
            elif (experts := expert_kind(module)) is not None:
                self._experts(name, module, experts)
        for maps in self.found.linear_maps:
            if maps[0].startswith(inside):
                self._maps(maps)
        if self.way.defers:
            for name in self.found.modules:
                if name.startswith(inside):
                    self.heads.take_over_rotation(self.model.get_submodule(name))

    def norm(self, name: str) -> None:
        norm = self.model.get_submodule(name)
        if (adds_one := self.known.norms.get(type(norm).__name__)) is None:
            return
        eps = epsilon(norm)
        assert eps is not None
        weight = getattr(norm, "weight", None)
        if weight is not None:
            weight = torch.empty(weight.shape, dtype=weight.dtype)
        made = NormOf(weight, eps, adds_one=adds_one, fuses=self.way.fuses)
        if (
            self.way.defers
            and weight is not None
            and name.startswith(tuple(f"{each}." for each in self.found.modules))
        ):
            made.defers = self.heads.defer_norm
        self.put(name, made)

    def head(self, name: str, vocab: Shard) -> None:
        """Swap the head of the model. vocab: of which this rank computes the logits."""
        head = self.model.get_submodule(name)
        format = WeightFormat(self.format.dtype)
        inputs = whole(head.in_features)
        linear = Linear(inputs, {_last(name): vocab}, format, bias=head.bias is not None)
        self._add(name, linear)
        self.put(name, MapOf(SharedProduct(linear, [vocab.size], fuses=False)))

    def tied_head(self, name: str, weight: Tensor) -> None:
        """Swap a head that is the embedding."""
        bias = self.model.get_submodule(name).bias
        product = DenseProduct(weight, None if bias is None else torch.empty_like(weight[:, 0]))
        self.products.append(product)
        self.put(name, HeadOf(product))

    def parameters(self, names: Iterable[str]) -> None:
        """Keep this rank's part of parameters that are split in their first dimension."""
        for name in names:
            parent, _, last = name.rpartition(".")
            module = self.model.get_submodule(parent)
            weight = module._parameters.get(last)
            if weight is not None:  # of this stage
                shard = even_shard(len(weight), self.comm.rank, self.comm.size)
                part = torch.empty((shard.size, *weight.shape[1:]), dtype=weight.dtype)
                setattr(module, last, nn.Parameter(part, requires_grad=False))
                self.split[name] = shard

    def _router(self, name: str, router: Any) -> None:
        num_experts, size = router.weight.shape
        routing = Routing(router.top_k, self.known.routers[type(router).__name__])
        made = RouterOf(_last(name), num_experts, size, self.format.dtype, routing)
        made.fuses = self.way.fuses
        self.products.append(made.product)
        self.put(name, made)

    def _experts(self, name: str, experts: Any, kind: ExpertKind) -> None:
        num_experts, *sizes = experts.down_proj.shape
        size, hidden_size = sizes if kind.transposed else sizes[::-1]
        # Those with biases are not quantised, unlike the maps around them.
        format = WeightFormat(self.format.dtype) if kind.bias else self._format_of(name)
        made = ExpertsOf(
            *(num_experts, hidden_size, size, format, self.comm),
            bias=kind.bias,
            clamped=kind.clamped,
            interleaved=kind.interleaved,
            by_rank=self.experts_by_rank,
        )
        made.fuses, made.transposed = self.way.fuses, kind.transposed
        self.put(name, made)

    def _maps(self, names: Sequence[str]) -> None:
        """Swap linear maps of the same rows, by one product if they are alike."""
        maps = [self.model.get_submodule(name) for name in names]
        kinds = [self.division.kinds.get(name, Kind.WHOLE) for name in names]
        has_bias = [each.bias is not None for each in maps]
        if len(names) > 1 and not (len(set(kinds)) == len(set(has_bias)) == 1):
            for name in names:
                self._maps([name])
            return
        parent, kind = names[0].rpartition(".")[0], kinds[0]
        format = self._format_of(parent)
        if kind == Kind.INPUTS:
            for name, each in zip(names, maps, strict=True):
                inputs = even_shard(each.in_features, self.comm.rank, self.comm.size)
                linear: Linear = RowParallelLinear(
                    _last(name), inputs, each.out_features, format, self.comm, bias=has_bias[0]
                )
                self._put_maps([name], linear, [each.out_features])
            return
        parts: dict[str, Shard] = {}
        for name, each in zip(names, maps, strict=True):
            parts |= self._parts(name, each.out_features, kind)
        linear = Linear(whole(maps[0].in_features), parts, format, bias=has_bias[0])
        sizes = [part.size for part in parts.values()]
        self._put_maps(names, linear, sizes if len(names) == len(sizes) else [sum(sizes)])

    def _parts(self, name: str, num_outputs: int, kind: Kind) -> dict[str, Shard]:
        """What this rank holds of the outputs of a map, by the names of its parts."""
        rank, size, last = self.comm.rank, self.comm.size, _last(name)
        if kind == Kind.WHOLE or size == 1:
            return {last: whole(num_outputs)}
        parent = name.rpartition(".")[0]
        spec = None
        if parent in self.found.modules:
            spec = self.found.attention[self.found.modules.index(parent)]
        if kind == Kind.OUTPUTS:
            if spec is None or last not in _OF_KV_HEADS:
                return {last: even_shard(num_outputs, rank, size)}
            heads = kv_head_shard(spec.num_kv_heads, rank, size)
            return {last: heads.times(num_outputs // spec.num_kv_heads)}
        within = [even_shard(num_outputs // 2, rank, size)] * 2
        if kind == Kind.HEADS:
            assert spec is not None
            of_kv = kv_head_shard(spec.num_kv_heads, rank, size).times(spec.head_dim)
            within = [even_shard(spec.num_heads, rank, size).times(spec.head_dim), of_kv, of_kv]
        parts, first = {}, 0
        for index, part in enumerate(within):
            parts[f"{last}{PACKED}{index}"] = Shard(first + part.first, part.size, num_outputs)
            first += part.whole
        return parts

    def _put_maps(self, names: Sequence[str], linear: Linear, sizes: Sequence[int]) -> None:
        parent = names[0].rpartition(".")[0]
        is_attention = parent in self.found.modules
        note = self.heads.begin if self.way.defers and is_attention else _nothing
        product = SharedProduct(linear, sizes, fuses=self.way.fuses, note=note)
        self._add(names[0], linear)
        for index, name in enumerate(names):
            self.put(name, MapOf(product, index))

    def _add(self, name: str, linear: Linear) -> None:
        """Add a product beside the module with this name."""
        parent, _, last = name.rpartition(".")
        self.model.get_submodule(parent).add_module(f"minisgl_{last}", linear)
        self.products.append(linear.product)

    def put(self, name: str, module: nn.Module) -> None:
        """Put `module` in the place of the one with this name."""
        parent, _, last = name.rpartition(".")
        setattr(self.model.get_submodule(parent), last, module)

    def _format_of(self, name: str) -> WeightFormat:
        """The format of a module, by its name in a checkpoint without 'model.'. A part of a map is
        quantised as the map is."""
        format, scheme_of = self.format, self.format.scheme_of
        format = replace(format, scheme_of=lambda part: scheme_of(part.partition(PACKED)[0]))
        return format.within(name.removeprefix(f"{self.model.base_model_prefix}."))


_OF_KV_HEADS = ("k_proj", "v_proj")
PACKED = "#"  # between the name of a map and the number of a part of it that is split by itself


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _nothing(y: Tensor) -> None:
    pass
