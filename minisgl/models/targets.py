"""Which tensors a checkpoint must have, and where each goes."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor, nn

from minisgl.errors import UnsupportedModelError
from minisgl.kernels.linear.quantized import QuantizedProduct
from minisgl.kernels.moe.quantized_experts import QuantizedExperts
from minisgl.layers.attention import SelfAttention
from minisgl.layers.convolution import Convolution
from minisgl.layers.experts import FusedExperts
from minisgl.layers.formats import EXPERT_MAPS
from minisgl.layers.gated_delta import GatedDeltaNet
from minisgl.layers.linear import Linear, RowParallelLinear, VocabParallelEmbedding
from minisgl.layers.norm import RMSNorm
from minisgl.models import interleaved_experts
from minisgl.models.formats import QuantizedFormat
from minisgl.models.formats.quantized_format import Held
from minisgl.models.target import Store, Target, copy
from minisgl.shards import Shard, whole

_OF_EXPERT = re.compile(r"(.+?\.)(\d+)\.[a-z_]+\.\w+$")  # module, number, map and tensor
_OPTIONAL = frozenset(("layer_scalar",))  # a parameter that stays as it is without a tensor


@dataclass(frozen=True, slots=True)
class Names:
    """How tensors of a checkpoint are called in the model."""

    # None for what the model leaves aside.
    of: Callable[[str], str | None]
    is_quantizable: Callable[[str], bool]  # of a linear map in the model
    head: str | None = None  # the head's, if it may be quantised as the layers are

    def in_format(self, scheme: QuantizedFormat | None) -> Names:
        """The same, where tensors of quantised maps have the names that their format gives them."""
        if scheme is None:
            return self

        def of(stored_name: str) -> str | None:
            name = self.of(stored_name)
            return None if name is None else scheme.named(name)

        return replace(self, of=of)


@dataclass(frozen=True, slots=True)
class TiedHead:
    """A head that is the embedding: a checkpoint may have it once more, and then it must be
    equal."""

    name: str  # of the head's weight
    target: Target  # the other, or its rows that are a head here


@dataclass(frozen=True, slots=True, kw_only=True)
class Destinations:
    """Where the tensors of a checkpoint go, by their names in the model."""

    targets: dict[str, Target]
    stacks: dict[str, Stack]
    scheme: QuantizedFormat | None
    is_left_out: Callable[[str], bool]  # of a tensor that is none of the others
    tied_head: TiedHead | None = None

    def stack(self, name: str) -> Stack | None:
        """All destinations of a tensor; None if it has none here."""
        if name not in self.stacks and name in self.targets:
            return Stack((self.targets[name],), (name,))
        return self.stacks.get(name)


def checkpoint_targets(
    model: nn.Module, scheme: QuantizedFormat | None, prefix: str = ""
) -> dict[str, Target]:
    """Maps the names of the tensors that a checkpoint has of a model to their destinations.

    prefix: left out of the names. A parameter that is on the meta device is no destination.
    """
    targets: dict[str, Target] = {}
    for full_path, module in model.named_modules():
        path = full_path.removeprefix(prefix)
        if isinstance(module, FusedExperts):
            targets |= _expert_targets(path, module, scheme)
        elif isinstance(module, SelfAttention):
            if module.sinks is not None:
                targets[f"{path}.sinks"] = Target(module.sinks, (module.heads,))
        elif isinstance(module, Linear):
            targets |= _linear_targets(path, module, scheme)
        else:
            for kind, weight in _stored(module):
                cut = tuple(map(whole, weight.shape))
                if isinstance(module, VocabParallelEmbedding):
                    cut = (module.vocab, cut[1])
                elif isinstance(module, GatedDeltaNet):
                    cut = (module.value_heads,)
                store: Store = copy
                if isinstance(module, RMSNorm) and module.has_one_added:
                    store = _store_one_more
                if isinstance(module, RMSNorm) and module.factor != 1:
                    store = partial(_store_times, module.factor)
                if not weight.is_meta:
                    targets[f"{path}.{kind}"] = Target(
                        weight, cut, store=store, is_required=kind not in _OPTIONAL
                    )
    return targets


def of_other_ranks(model: nn.Module, prefix: str = "") -> Callable[[str], bool]:
    """Whether a tensor, by its name as in `checkpoint_targets`, is of an expert that another rank
    has."""
    numbers = {
        f"{path.removeprefix(prefix)}.": (module.num_experts, frozenset(module.held))
        for path, module in model.named_modules()
        if isinstance(module, FusedExperts)
    }

    def is_of_others(name: str) -> bool:
        found = _OF_EXPERT.match(name)
        if found is None or found[1] not in numbers:
            return False
        num_experts, held = numbers[found[1]]
        expert = int(found[2])
        return expert < num_experts and expert not in held

    return is_of_others


def _store_one_more(weight: Tensor, part: Tensor) -> None:
    weight.copy_(part.float() + 1)


def _store_times(factor: float, weight: Tensor, part: Tensor) -> None:
    weight.copy_(part.float() * factor)


def _stored(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What a checkpoint has of a module itself."""
    yield from module.named_parameters(recurse=False)
    for name, buffer in module.named_buffers(recurse=False):
        if name not in module._non_persistent_buffers_set:
            yield name, buffer


def _linear_targets(path: str, module: Linear, scheme: QuantizedFormat | None) -> dict[str, Target]:
    parent = path[: path.rfind(".") + 1]
    targets: dict[str, Target] = {}
    for part, outputs in module.parts.items():
        targets |= _part_targets(parent + part, module, part, outputs, scheme)
    return targets


def _part_targets(
    name: str, module: Linear, part: str, outputs: Shard, scheme: QuantizedFormat | None
) -> dict[str, Target]:
    """The tensors of the map `name`, of whose outputs `part` has these."""
    sizes = {other: shard.size for other, shard in module.parts.items()}
    first = sum(sizes[other] for other in itertools.takewhile(part.__ne__, sizes))
    rows, product = slice(first, first + outputs.size), module.product.plain
    bias = product.weights.get("bias")
    targets: dict[str, Target] = {}
    if scheme is not None and isinstance(product, QuantizedProduct):
        weights = product.weight.rows(first, outputs.size)
        of_map = scheme.targets(Held(weights, outputs, module.inputs, product.input_scale))
        targets |= {f"{name}.{kind}": target for kind, target in of_map.items()}
    else:
        weight = product.weights["weight"]
        targets[f"{name}.weight"] = Target(weight[rows], (outputs, module.inputs))
    if bias is not None:
        cut = outputs
        if isinstance(module, RowParallelLinear) and not module.holds_bias:
            cut = Shard(outputs.size, outputs.size, outputs.size)
        targets[f"{name}.bias"] = Target(bias[rows], (cut,))
    return targets


def _merged_maps(path: str, module: Linear, scheme: QuantizedFormat | None) -> dict[str, Stack]:
    """The tensors of maps that a checkpoint has of several parts together."""
    stacks: dict[str, Stack] = {}
    parent = path[: path.rfind(".") + 1]
    for merged in module.merged:
        whole_size = sum(module.parts[part].whole for part in merged.parts)
        found: list[dict[str, Target]] = []
        start = 0
        for part in merged.parts:
            outputs, name = module.parts[part], parent + merged.name
            if merged.num_heads == 1:
                outputs = Shard(start + outputs.first, outputs.size, whole_size)
            targets = _part_targets(name, module, part, outputs, scheme)
            if merged.num_heads > 1:
                within = _OfHeads(merged.num_heads, start, module.parts[part].whole, whole_size)
                targets = {kind: within.target(target) for kind, target in targets.items()}
            found.append(targets)
            start += module.parts[part].whole
        for name in found[0]:
            kind = name.removeprefix(parent + merged.name)
            names = tuple(parent + part + kind for part in merged.parts)
            stacks[name] = Stack(tuple(each[name] for each in found), names)
    return stacks


@dataclass(frozen=True, slots=True)
class _OfHeads:
    """What a part has of a map whose heads each have some outputs of every part: of
    `whole_size` outputs `size`, from `start` on, if these were not interleaved."""

    num_heads: int
    start: int
    size: int
    whole_size: int

    def target(self, target: Target) -> Target:
        """The destination of the whole map's tensor, given that of the part's own."""
        at = target.of_outputs
        if target.scalar or target.any_shape or at is None:
            return target
        cut = target.cut[at]
        each, rest = divmod(cut.whole, self.num_heads)
        if rest or cut.first % each or cut.size % each or self.size % cut.whole:
            raise UnsupportedModelError(
                f"the heads of this model share blocks of scales: {self.size} outputs of "
                f"{self.num_heads} heads have {cut.whole}; choose another checkpoint, or a smaller "
                "--tp"
            )
        outputs = self.size // cut.whole  # of each entry of the tensor
        begin, wide = self.start // outputs // self.num_heads, self.whole_size // outputs
        first_head, num_heads = cut.first // each, cut.size // each
        wide_each = wide // self.num_heads

        def store(weight: Tensor, part: Tensor) -> None:
            of_heads = part.unflatten(at, (num_heads, wide_each))
            target.store(weight, of_heads.narrow(at + 1, begin, each).flatten(at, at + 1))

        interleaved = Shard(first_head * wide_each, num_heads * wide_each, wide)
        whole_cut = (*target.cut[:at], interleaved, *target.cut[at + 1 :])
        return replace(target, cut=whole_cut, store=store)


def _expert_targets(
    path: str, module: FusedExperts, scheme: QuantizedFormat | None
) -> dict[str, Target]:
    """The tensors of each matrix of each expert of this rank, or those of all of them."""
    product, inner, hidden = module.product.plain, module.inner, module.hidden
    if scheme is not None and isinstance(product, QuantizedExperts):
        return scheme.expert_targets(path, module)
    if module.interleaved:
        return interleaved_experts.expert_targets(path, module)
    targets: dict[str, Target] = {}
    cuts = [(inner, hidden), (inner, hidden), (hidden, inner)]
    for expert, number in enumerate(module.held):
        gate, up = product.weights["gate_up_proj"][expert].chunk(2)
        weights = gate, up, product.weights["down_proj"][expert]
        for name, weight, cut in zip(EXPERT_MAPS, weights, cuts, strict=True):
            targets[f"{path}.{number}.{name}.weight"] = Target(weight, cut)
    return targets


# -- stacks of experts ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stack:
    """A tensor of a checkpoint that has several destinations: parts of a merged map, or the
    matrices of all experts.

    Some exporters store these transposed. The shapes reveal it, because at most one of a layer's
    two can fit by accident: the gates' if hidden_size is twice an expert's size, the other's if
    both are equal.
    """

    targets: tuple[Target, ...]  # the destinations, each with its own cut
    stands_for: tuple[str, ...]  # the names in `checkpoint_targets` that it replaces


def checkpoint_stacks(
    model: nn.Module, scheme: QuantizedFormat | None, prefix: str = ""
) -> dict[str, Stack]:
    """Maps names, as in `checkpoint_targets`, to the tensors that a checkpoint has of several
    destinations: parts of merged maps, and of experts where these are not quantised."""
    stacks: dict[str, Stack] = {}
    for full_path, module in model.named_modules():
        path = full_path.removeprefix(prefix)
        if isinstance(module, Linear):
            stacks |= _merged_maps(path, module, scheme)
        elif isinstance(module, Convolution):
            stacks |= _convolution(path, module)
        elif isinstance(module, FusedExperts) and not module.interleaved:
            stacks |= _expert_stacks(path, module, scheme)
    return stacks


def _expert_stacks(
    path: str, module: FusedExperts, scheme: QuantizedFormat | None
) -> dict[str, Stack]:
    """The tensors of all gates and ups, and of all second matrices."""
    experts, hidden, inner = module.own, module.hidden, module.inner
    product = module.product.plain
    gates = Shard(inner.first, inner.size, 2 * inner.whole)
    ups = Shard(inner.whole + inner.first, inner.size, 2 * inner.whole)

    def target(kind: str, first: int, outputs: Shard, inputs: Shard) -> Target | None:
        """Of the rows from `first` on of each expert."""
        cut = experts, outputs, inputs
        if scheme is not None and isinstance(product, QuantizedExperts):
            return scheme.stack_target(getattr(product, kind), first, cut)
        weights = product.weights[f"{kind}_proj"]
        return Target(weights[: experts.size, first : first + outputs.size], cut)

    gate, up = target("gate_up", 0, gates, hidden), target("gate_up", inner.size, ups, hidden)
    of_kinds = {"gate_up": (gate, up), "down": (target("down", 0, hidden, inner),)}
    parts = {"gate_up": EXPERT_MAPS[:2], "down": EXPERT_MAPS[2:]}
    return {
        f"{path}.{kind}_proj": Stack(
            tuple(filter(None, targets)),
            tuple(
                f"{path}.{expert}.{part}.weight" for expert in module.held for part in parts[kind]
            ),
        )
        for kind, targets in of_kinds.items()
        if None not in targets
    }


def _convolution(path: str, module: Convolution) -> dict[str, Stack]:
    """Of the channels of several maps, one after the other."""
    weight, parts = module.weight, module.parts
    starts = itertools.accumulate((part.whole for part in parts), initial=0)
    total, first = sum(part.whole for part in parts), 0
    targets = []
    for start, part in zip(starts, parts, strict=False):
        cut = Shard(start + part.first, part.size, total), whole(1), whole(weight.shape[-1])
        targets.append(Target(weight[first : first + part.size], cut))
        first += part.size
    name = f"{path}.weight"
    return {name: Stack(tuple(targets), (name,))}
