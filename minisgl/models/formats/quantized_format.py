"""What a format of quantised weights is, from a checkpoint's config to the products."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from minisgl.config import Activations, Quantized
from minisgl.errors import UnsupportedModelError
from minisgl.kernels.linear.product import Product
from minisgl.kernels.linear.quantized import QuantizedWeights
from minisgl.layers.experts import FusedExperts
from minisgl.layers.formats import EXPERT_MAPS, HeldExperts, MapFormat, Quantization
from minisgl.models.config_reader import Fields
from minisgl.models.target import Target
from minisgl.shards import Shard, whole


class StoredTensor(NamedTuple):
    """What the header of a safetensors file says of a tensor."""

    name: str
    dtype: str  # as safetensors names it
    file: Path


# Makes a format of what a checkpoint's config says of quantisation: of a group of
# compressed-tensors only what that says. Raises CheckpointError where the config is broken,
# UnsupportedModelError, with what to use instead, for what minisgl does not compute.
Reader = Callable[[Fields], "OneFormat"]
Sign = tuple[str, str]  # the last part of a tensor's name, and its dtype
Kind = Literal["attention", "mlp", "experts"]  # of the part of a layer that a linear map is in
Weights = TypeVar("Weights", bound=QuantizedWeights)


class Held(NamedTuple, Generic[Weights]):
    """What a rank holds of a linear map."""

    weights: Weights
    outputs: Shard
    inputs: Shard
    input_scale: Tensor | None  # the largest of all maps of one input, if the product needs it


class QuantizedFormat(Quantization, ABC):
    """How the linear maps of a model's layers are quantised, in one format or in several.
    Embedding, router and norms are not; the head is only where a checkpoint has it so. A subclass
    is a frozen dataclass; its str is for people."""

    option: ClassVar[str | None] = None  # the value of --quantization that asks for it

    @property
    @abstractmethod
    def signs(self) -> Mapping[Sign, OneFormat]:
        """By what shows that a linear map is quantised, its format. Empty: minisgl quantises while
        it loads."""
        ...

    @property
    @abstractmethod
    def rounding(self) -> OneFormat:
        """That of the maps whose inputs are rounded, if those of any are."""
        ...

    @abstractmethod
    def at(self, name: str) -> OneFormat | None:
        """The format of a linear map by its name without 'model.', as far as the config says; None:
        it is not quantised."""
        ...

    @abstractmethod
    def quantized(self, maps: Iterable[tuple[int, int]], kind: Kind | None = None) -> Quantized:
        """Facts of matrices, given the rows and columns of each. kind: of all of them; None: of
        attention and of MLPs."""
        ...

    @abstractmethod
    def on(
        self, device: torch.device, dtype: torch.dtype, scales: Collection[str] | None = None
    ) -> Self:
        """The same as the products of a device compute with it. dtype: of x. scales: the dtypes of
        those of a checkpoint; None: there is none."""
        ...

    def named(self, name: str) -> str:
        """The name that a tensor has in `targets`, where some exporters give it another one."""
        return name

    @abstractmethod
    def targets(self, held: Held[Any]) -> dict[str, Target]:
        """Where the checkpoint's tensors of a linear map go, by the last part of their names."""
        ...

    @abstractmethod
    def expert_targets(self, path: str, module: FusedExperts) -> dict[str, Target]:
        """Where the checkpoint's tensors of experts go, by their names. path: of the module."""
        ...

    @abstractmethod
    def stack_target(
        self, weights: Any, first: int, cut: tuple[Shard, Shard, Shard]
    ) -> Target | None:
        """Where a tensor of all experts goes: in the rows from `first` on of each of the cut. None:
        no checkpoint has one."""
        ...


class OneFormat(QuantizedFormat, MapFormat):
    """A format, the only one of a model or that of some of its linear maps. __init__.py lists the
    subclasses."""

    offered: ClassVar[str]  # for people: which checkpoints have it
    # The tensor that shows that a linear map is quantised, or if only experts are, that these are,
    # and its dtype. None: minisgl quantises while it loads.
    sign: ClassVar[Sign | None]
    matrices: ClassVar[type]  # what a rank holds of a linear map, or of those of experts
    bits: ClassVar[int] = 8  # of a number
    multiple: ClassVar[int] = 1  # of which the inputs of a map must be one on each rank
    activations: Activations = Activations.NONE  # where the device has products of FP8
    group: ClassVar[int] = 0  # columns of a row that share a scale by Activations.GROUP

    @classmethod
    @abstractmethod
    def readers(cls) -> dict[str, Reader]:
        """By quant_method, behind which stand the quant_algo of modelopt, and the format of
        compressed-tensors."""
        ...

    @abstractmethod
    def matrix_bytes(self, n: int, k: int) -> int:
        """The bytes of a matrix of n rows and k columns, with its scales and zero points."""
        ...

    @property
    def signs(self) -> Mapping[Sign, OneFormat]:
        return {} if self.sign is None else {self.sign: self}

    @property
    def rounding(self) -> OneFormat:
        return self

    def at(self, name: str) -> OneFormat | None:
        return self

    def quantized(self, maps: Iterable[tuple[int, int]], kind: Kind | None = None) -> Quantized:
        sizes = list(maps)
        return Quantized(
            num_weights=sum(n * k for n, k in sizes),
            num_bytes=sum(self.matrix_bytes(n, k) for n, k in sizes),
            rounds=self.activations != Activations.NONE,
            multiple=self.multiple,
        )

    def on(
        self, device: torch.device, dtype: torch.dtype, scales: Collection[str] | None = None
    ) -> Self:
        return self

    def targets(self, held: Held[Any]) -> dict[str, Target]:
        return {}

    def stack_target(
        self, weights: Any, first: int, cut: tuple[Shard, Shard, Shard]
    ) -> Target | None:
        return None


class MatrixFormat(OneFormat, Generic[Weights]):
    """A format in which each linear map, of an expert too, is a matrix with tensors of its own."""

    @abstractmethod
    def allocate(self, name: str, parts: Sequence[Shard], inputs: Shard, *leading: int) -> Weights:
        """Uninitialised matrices [*leading, n, k], the arguments as those of `linear`, on torch's
        default device."""
        ...

    @abstractmethod
    def product(self, weights: Weights, bias: Tensor | None) -> Product:
        """The product with such a matrix."""
        ...

    def linear(
        self, name: str, parts: Sequence[Shard], inputs: Shard, bias: Tensor | None
    ) -> Product:
        return self.product(self.allocate(name, parts, inputs), bias)

    def allocate_experts(self, path: str, held: HeldExperts) -> tuple[Weights, Weights]:
        """The matrices of all gates and ups, and those of the second products."""
        first, _, last = (f"{path}0.{name}" for name in EXPERT_MAPS)
        if held.bias or held.clamped is not None:
            raise UnsupportedModelError(
                f"{first} is of experts with biases or a clamped activation, which are not "
                f"supported in {self}; use the checkpoint in MXFP4 or bfloat16 as it is."
            )
        inner, hidden, number = held.inner, whole(held.hidden_size), held.number
        gate_up = self.allocate(first, [inner, inner], hidden, number)
        return gate_up, self.allocate(last, [hidden], inner, number)

    def expert_targets(self, path: str, module: FusedExperts) -> dict[str, Target]:
        found: dict[str, Target] = {}
        product: Any = module.product.plain
        inner, hidden, size = module.inner, module.hidden, module.inner.size
        for index, number in enumerate(module.held):
            gate_up, down = product.products(index)
            parts = (
                Held(gate_up.weight.rows(0, size), inner, hidden, gate_up.input_scale),
                Held(gate_up.weight.rows(size, size), inner, hidden, gate_up.input_scale),
                Held(down.weight, hidden, inner, down.input_scale),
            )
            for name, part in zip(EXPERT_MAPS, parts, strict=True):
                of_map = self.targets(part)
                found |= {f"{path}.{number}.{name}.{kind}": to for kind, to in of_map.items()}
        return found
