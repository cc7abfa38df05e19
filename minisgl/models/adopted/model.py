"""The Decoder around a model of transformers."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from minisgl.attention.base import Attention, ForwardBatch
from minisgl.attention.state import LayerState
from minisgl.config import LayerSpec, ModelFacts, SharedKV
from minisgl.errors import UnsupportedModelError
from minisgl.layers.step import Step
from minisgl.models.adopted.attend import Seat, take_seats
from minisgl.models.adopted.discover import Discovered, inputs

_NO_TABLE = torch.empty(0)


class AdoptedModel:
    """Runs the modeling code of transformers on the rows of a step. Implements Decoder."""

    def __init__(self, model: Any, found: Discovered, facts: ModelFacts) -> None:
        """model: of a class of transformers with a causal head, with weights, whose attention is
        ours. facts: of the model."""
        self.module = model
        self._body, self._facts = _body(model), facts
        self._sources = found.sources
        modules = [model.get_submodule(name) for name in found.modules]
        self._seat = Seat(
            {module: layer for layer, module in enumerate(modules)},
            dict(enumerate(found.attention)),
            dict(enumerate(found.sources)),
        )
        take_seats(model, self._seat)
        freeze_rope(model)
        self._head = _Head(model, self._body)

    @property
    def dense_copy_bytes(self) -> int:
        """As in Decoder: nothing is quantised."""
        return 0

    def prepare(self, *, dense_copies: bool = False) -> None:
        """As in Decoder."""

    def layer_specs(self, kv_dtype: str) -> Sequence[LayerSpec]:
        """As in Decoder."""
        own = self._facts.kv_specs(kv_dtype)
        return [
            spec if source == layer else SharedKV(source)
            for layer, (spec, source) in enumerate(zip(own, self._sources, strict=True))
        ]

    @torch.no_grad()
    def __call__(
        self,
        batch: ForwardBatch,
        states: Sequence[LayerState],
        attention: Attention,
        received: Tensor | None = None,
    ) -> Tensor:
        """As in Decoder."""
        assert received is None, "an adopted model has one stage"
        self._seat.step = Step(batch, dict(enumerate(states)), attention, _NO_TABLE)
        try:
            found = self._body(**inputs(batch.token_ids, batch.positions))
        finally:
            self._seat.step = None
        hidden: Tensor = found.last_hidden_state[0]
        return hidden

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """As in Decoder."""
        return self._head(hidden)


def _body(model: Any) -> nn.Module:
    """The part of a model that its head follows."""
    bodies: list[Any] = [model.get_decoder(), model.base_model, getattr(model, "model", None)]
    for body in bodies:
        is_a_part = isinstance(body, nn.Module) and body is not model
        if is_a_part and "input_ids" in inspect.signature(body.forward).parameters:
            found: nn.Module = body
            return found
    raise UnsupportedModelError(f"{type(model).__name__} has no body that its head follows.")


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
