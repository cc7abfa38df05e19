"""The Decoder around a model of transformers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from minisgl.attention.base import Attention, ForwardBatch
from minisgl.attention.state import LayerState
from minisgl.config import LayerSpec, ModelFacts, SharedKV
from minisgl.distributed.communicator import Communicator
from minisgl.kernels.linear import select_product
from minisgl.kernels.linear.dense_product import DenseProduct
from minisgl.kernels.linear.float32_product import Float32Product
from minisgl.kernels.linear.product import Product
from minisgl.layers.linear import Linear
from minisgl.layers.step import Step
from minisgl.models.adopted.attend import Seat, take_seats
from minisgl.models.adopted.discover import Discovered, inputs
from minisgl.models.adopted.heads import Heads
from minisgl.models.adopted.modules import ExpertsOf, HeadOf, MapOf, NormOf
from minisgl.models.adopted.names import joined_maps
from minisgl.models.adopted.own_rows import OwnRows
from minisgl.models.adopted.rows import computed, rows_of
from minisgl.models.adopted.stages import OtherStages
from minisgl.models.adopted.swap import PACKED
from minisgl.models.decoder import Taps
from minisgl.models.formats import QuantizedFormat
from minisgl.models.target import Target
from minisgl.models.targets import (
    Destinations,
    Stack,
    TiedHead,
    checkpoint_stacks,
    checkpoint_targets,
    of_other_ranks,
)
from minisgl.shards import Shard

_NO_TABLE = torch.empty(0)


class AdoptedModel:
    """Runs the modeling code of transformers on the rows of a step. Implements Decoder."""

    def __init__(
        self,
        model: Any,
        body: nn.Module,
        found: Discovered,
        facts: ModelFacts,
        layers: range,
        *,
        heads: Heads,
        products: Sequence[Product],
        split: dict[str, Shard],
        stages: OtherStages | None,
        tied: tuple[str, str] | None,
        comm: Communicator,
        by_request: bool,
    ) -> None:
        """model: of a class of transformers with a causal head, with minisgl's modules in it; body:
        the part of it that its head follows. facts: of the whole model, of all ranks. layers: of
        this stage. products: of the modules. split: the parameters of which a rank has a part, in
        their first dimension. stages: what stands for the layers of others, if there are some.
        tied: the names of a head that is the embedding, and of this. comm: of the stage.
        by_request: whether its ranks divide the requests in attention."""
        self.module = model
        self._body = body
        self._layers, self._stages, self._products = layers, stages, products
        self._split, self._tied, self._comm = split, tied, comm
        self._num_layers = len(found.layers)
        self._facts = facts.on_rank(comm.size)
        self._sources = dict(enumerate(found.sources))
        modules = {layer: model.get_submodule(found.modules[layer]) for layer in layers}
        self._seat = Seat(
            {module: layer for layer, module in modules.items()},
            dict(enumerate(self._facts.attention)),
            self._sources,
            heads,
        )
        take_seats(model, self._seat)
        if by_request:
            for module in modules.values():
                module.forward = OwnRows(module.forward, self._seat, comm)
        freeze_rope(model)
        self._head = _Head(model, body)
        weight = next(iter(products[0].weights.values())) if products else _NO_TABLE
        self._dtype = getattr(torch, facts.dtype)
        select_product.share_kernels(products, self._dtype, weight.device)

    @property
    def dense_copy_bytes(self) -> int:
        """The memory of the dense copies that `prepare` can make."""
        return select_product.dense_copy_bytes(self._products, self._dtype)

    def prepare(self, *, dense_copies: bool = False) -> None:
        """Prepare the kernels for the weights. Must be called before anything is captured."""
        select_product.prepare(self._products, self._dtype, dense_copies=dense_copies)
        for module in self.module.modules():
            if isinstance(module, Linear):
                module.register_weights()
            elif isinstance(module, NormOf):
                module.prepare()

    def layer_specs(self, kv_dtype: str) -> Sequence[LayerSpec]:
        """What each layer keeps between steps, with the KV cache in `kv_dtype`."""
        own, first = [*self._facts.kv_specs(kv_dtype)], self._layers.start
        for layer, source in self._sources.items():
            own[source] = own[source].read_by(self._facts.attention[layer])
        return [
            own[layer] if self._sources[layer] == layer else SharedKV(self._sources[layer] - first)
            for layer in self._layers
        ]

    @torch.no_grad()
    def __call__(
        self,
        batch: ForwardBatch,
        states: Sequence[LayerState],
        attention: Attention,
        received: Tensor | None = None,
        taps: Taps | None = None,
    ) -> Tensor:
        """Run the rows of one step: [num_rows, hidden_size], for `logits` or the next stage. It
        leaves no residual stream in `taps`."""
        assert taps is None, "the code of transformers leaves no residual stream"
        by_number = dict(zip(self._layers, states, strict=True))
        seat = self._seat
        seat.step, seat.rows = Step(batch, by_number, attention, {}), batch.rows
        if self._stages is not None:
            self._stages.begin(received)
        try:
            found = self._body(**inputs(batch.token_ids, batch.own.rope))
        finally:
            seat.step = seat.rows = None
        left = None if self._stages is None else self._stages.take()
        return computed(rows_of(found.last_hidden_state)) if left is None else left

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """The rank's part of the logits: [n, part]."""
        return self._head(hidden)

    def widen_head(self) -> None:
        """Compute the logits in float32; see models/float32_head.py."""
        head: Any = self.module.get_output_embeddings()
        if isinstance(head, HeadOf):
            assert isinstance(head.product, DenseProduct)
            head.product = Float32Product(head.product)
        elif isinstance(head, MapOf):
            assert isinstance(head.linear.product, DenseProduct)
            head.linear.replace_product(Float32Product(head.linear.product))

    def destinations(self, scheme: QuantizedFormat | None) -> Destinations:
        """Where the tensors of a checkpoint go. scheme: of its quantised weights."""
        prefix = f"{self.module.base_model_prefix}."
        targets = checkpoint_targets(self.module, scheme, prefix)
        stacks = checkpoint_stacks(self.module, scheme, prefix)
        for full_name, shard in self._split.items():
            name = full_name.removeprefix(prefix)
            targets[name] = replace(targets[name], cut=(shard, *targets[name].cut[1:]))
        packed: dict[str, list[str]] = {}  # the parts of a map, by the name of its tensor
        for name in targets:
            if PACKED in name:
                path, _, rest = name.partition(PACKED)
                packed.setdefault(f"{path}.{rest.partition('.')[2]}", []).append(name)
        for name, parts in packed.items():
            stacks[name] = Stack(tuple(targets[part] for part in parts), tuple(parts))
        for path, module in self.module.named_modules():
            if isinstance(module, ExpertsOf) and module.transposed and not module.interleaved:
                for name in (
                    f"{path.removeprefix(prefix)}.{each}" for each in ("gate_up_proj", "down_proj")
                ):
                    stacks[name] = _transposed(stacks[name])
        for joint, maps in joined_maps(self.module):
            for name in [name for name in targets if maps[0] in name]:
                parts = [name.replace(maps[0], each) for each in maps]
                stacks[name.replace(maps[0], joint)] = _stacked(parts, targets)
        tied_head = None
        if self._tied is not None:
            head, embedding = (f"{name.removeprefix(prefix)}.weight" for name in self._tied)
            ends = tuple(name for name in (embedding, head) if name in targets)
            if head in targets:  # by itself, beside the embedding or without it
                stacks[embedding] = Stack(tuple(targets[name] for name in ends), ends)
            if ends:
                tied_head = TiedHead(head, targets[ends[0]])
        elsewhere = () if self._stages is None else self._stages.left_out
        of_others = of_other_ranks(self.module, prefix)
        left_out = tuple(f"{name}.".removeprefix(prefix) for name in elsewhere)
        # What transformers leaves aside itself, such as layers that draft.
        ignored = [
            re.compile(each) for each in self.module._keys_to_ignore_on_load_unexpected or ()
        ]
        return Destinations(
            targets=targets,
            stacks=stacks,
            scheme=scheme,
            is_left_out=lambda name: (
                name.startswith(left_out)
                or of_others(name)
                or any(each.search(prefix + name) for each in ignored)
            ),
            tied_head=tied_head,
        )


def _stacked(names: list[str], targets: Mapping[str, Target]) -> Stack:
    """The destinations of a tensor that has several, in its first dimension."""
    moved, first = [], 0
    size = sum(targets[name].cut[0].whole for name in names)
    for target in (targets[name] for name in names):
        rows, *others = target.cut
        part = Shard(first + rows.first, rows.size, size)
        moved.append(replace(target, cut=(part, *others)))
        first += rows.whole
    return Stack(tuple(moved), tuple(names))


def _transposed(stack: Stack) -> Stack:
    """The destinations of the matrices of all experts whose inputs come before their outputs."""

    def of(target: Target) -> Target:
        experts, outputs, inputs = target.cut
        return replace(
            target,
            cut=(experts, inputs, outputs),
            store=lambda weight, part: target.store(weight, part.mT),
        )

    return replace(stack, targets=tuple(map(of, stack.targets)))


class _Head:
    """The head of a model with all that its forward does to the logits, such as a scale or a soft
    cap: the model's own forward, around a body that returns given rows."""

    def __init__(self, model: Any, body: nn.Module) -> None:
        self._model, self._body = model, body
        name = next(name for name, module in model.named_modules() if module is body)
        parent, _, self._name = name.rpartition(".")
        self._parent = model.get_submodule(parent)
        self._given = _Given()

    def __call__(self, hidden: Tensor) -> Tensor:
        self._given.hidden = hidden.unsqueeze(0)
        self._parent._modules[self._name] = self._given
        try:
            ids = torch.zeros((1, len(hidden)), dtype=torch.int64, device=hidden.device)
            logits: Tensor = self._model(input_ids=ids, use_cache=False).logits[0]
        finally:
            self._parent._modules[self._name] = self._body
            self._given.hidden = None
        return logits


class _Given(nn.Module):
    """Stands for the body of a model."""

    hidden: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> _Rows:
        assert self.hidden is not None
        return _Rows(self.hidden)


class _Rows:
    """What a body returns: the rows, and none of what else it could."""

    def __init__(self, rows: Tensor) -> None:
        self.last_hidden_state = rows

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]


def freeze_rope(model: nn.Module) -> None:
    """Keep the frequencies of rope that depend on the longest row of a step as they are, which is
    right up to the length of the original context."""
    for module in model.modules():
        kinds: Any = getattr(module, "rope_type", None)
        if isinstance(kinds, str):
            module.__dict__["rope_type"] = _frozen(kinds)
        elif isinstance(kinds, dict):
            module.__dict__["rope_type"] = {name: _frozen(kind) for name, kind in kinds.items()}


def _frozen(kind: str) -> str:
    return "default" if kind in ("dynamic", "longrope") else kind
