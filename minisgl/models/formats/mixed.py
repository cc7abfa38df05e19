"""Several formats in one model: each linear map has one of them, or none."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch

from minisgl.config import Activations, Quantized
from minisgl.layers.experts import FusedExperts
from minisgl.models.formats.quantized_format import Held, Kind, OneFormat, QuantizedFormat, Sign
from minisgl.models.target import Target
from minisgl.shards import Shard

_EXPERTS = re.compile(r"\.experts(\.|$)")
_MLP = re.compile(r"\.(mlp|feed_forward|shared_experts?)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixed(QuantizedFormat):
    """Which format a map of a checkpoint has is read from its tensors. So the formats differ in
    what shows them, and in the class of what a rank holds: no two may share `matrices`."""

    # By the names in the config, without 'model.': of linear maps, or of modules that have some.
    named_maps: Mapping[str, OneFormat] = field(hash=False)

    @property
    def formats(self) -> tuple[OneFormat, ...]:
        return tuple(dict.fromkeys(self.named_maps.values()))

    @property
    def signs(self) -> Mapping[Sign, OneFormat]:
        return {sign: each for format in self.formats for sign, each in format.signs.items()}

    @property
    def rounding(self) -> OneFormat:
        rounds = (each for each in self.formats if each.activations != Activations.NONE)
        return next(rounds, self.formats[0])

    def __str__(self) -> str:
        return ", beside ".join(map(str, self.formats))

    def at(self, name: str) -> OneFormat | None:
        parts = name.split(".")
        ends = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
        return next((self.named_maps[end] for end in ends if end in self.named_maps), None)

    def quantized(self, maps: Iterable[tuple[int, int]], kind: Kind | None = None) -> Quantized:
        """About: as if each matrix were of all formats, by the number of names of this kind."""
        sizes = list(maps)
        of_kinds = ("attention", "mlp") if kind is None else (kind,)
        named = (each for name, each in self.named_maps.items() if _kind(name) in of_kinds)
        counts = Counter(named)
        parts = [(format.quantized(sizes), count) for format, count in counts.items()]
        return Quantized(
            num_weights=parts[0][0].num_weights if parts else 0,
            num_bytes=round(sum(each.num_bytes * n / counts.total() for each, n in parts)),
            rounds=any(each.rounds for each, _ in parts),
            multiple=math.lcm(*(each.multiple for each, _ in parts)),
        )

    def on(
        self, device: torch.device, dtype: torch.dtype, scales: Collection[str] | None = None
    ) -> Self:
        there = {format: format.on(device, dtype, scales) for format in self.formats}
        return replace(
            self, named_maps={name: there[each] for name, each in self.named_maps.items()}
        )

    def targets(self, held: Held[Any]) -> dict[str, Target]:
        return self._format_of(held.weights).targets(held)

    def expert_targets(self, path: str, module: FusedExperts) -> dict[str, Target]:
        product: Any = module.product.plain
        return self._format_of(product.gate_up).expert_targets(path, module)

    def stack_target(
        self, weights: Any, first: int, cut: tuple[Shard, Shard, Shard]
    ) -> Target | None:
        return self._format_of(weights).stack_target(weights, first, cut)

    def _format_of(self, weights: object) -> OneFormat:
        """That of what a rank holds."""
        return next(format for format in self.formats if isinstance(weights, format.matrices))


def alike(formats: Iterable[OneFormat]) -> tuple[OneFormat, OneFormat] | None:
    """Two that a model cannot have beside each other, if there are any."""
    pairs = itertools.combinations(formats, 2)
    return next((pair for pair in pairs if pair[0].matrices is pair[1].matrices), None)


def _kind(name: str) -> Kind:
    """Of a linear map, or of a module that has some."""
    if _EXPERTS.search(name):
        return "experts"
    return "mlp" if _MLP.search(name) else "attention"
