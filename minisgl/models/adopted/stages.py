"""Leaves out of a model what other stages of a pipeline have."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from minisgl.errors import UnsupportedModelError
from minisgl.models.adopted.discover import Discovered
from minisgl.models.adopted.rows import computed, rows_of


def why_one_stage(model: Any, found: Discovered) -> str | None:
    """The reason why a model cannot be split into stages; None if it can."""
    kind = type(model).__name__
    if not model.config.base_model_pp_plan:
        return f"transformers has no plan to split {kind} into stages"
    if found.sources != tuple(range(len(found.sources))):
        return f"layers of {kind} read the keys of others"
    embedding = model.get_input_embeddings()
    for name, module in body_of(model).named_children():
        if _has_weights(module) and module is not embedding and "norm" not in name.lower():
            return f"{name} of {kind} is in none of its layers"
    return None


def _has_weights(module: nn.Module) -> bool:
    """Whether there are weights beside those of layers."""
    return not isinstance(module, nn.ModuleList) and any(True for _ in module.parameters())


def body_of(model: Any) -> nn.Module:
    """The part of a model that its head follows."""
    bodies: list[Any] = [model.get_decoder(), model.base_model, getattr(model, "model", None)]
    for body in bodies:
        is_a_part = isinstance(body, nn.Module) and body is not model
        if is_a_part and "input_ids" in inspect.signature(body.forward).parameters:
            found: nn.Module = body
            return found
    raise UnsupportedModelError(f"{type(model).__name__} has no body that its head follows.")


class OtherStages:
    """The layers of other stages. The code of the model still calls them; they return the rows as
    they are, and have no weights."""

    def __init__(self, model: Any, body: nn.Module, found: Discovered, layers: range) -> None:
        """layers: of this stage."""
        self._received: Tensor | None = None
        self._left: Any = None  # the rows after the last layer of this stage
        self._num_outputs = found.layer_outputs
        self._layers, self._is_last = layers, layers.stop == len(found.layers)
        self._embedding = model.get_input_embeddings()
        self.left_out = [name for layer, name in enumerate(found.layers) if layer not in layers]
        for number, name in enumerate(found.layers):
            if number not in layers:
                self._leave_out(model.get_submodule(name), number)
        names = {module: name for name, module in model.named_modules()}
        for name, module in list(body.named_children()):
            if _has_weights(module):
                around = self._around(module)
                setattr(body, name, around)
                if around is not module:
                    self.left_out.append(names[module])
        if not self._is_last:
            self.left_out.append(names[model.get_output_embeddings()])

    def begin(self, received: Tensor | None) -> None:
        """Note what the stage before has sent, before a forward pass."""
        self._received, self._left = received, None

    def take(self) -> Tensor | None:
        """What the forward pass sends to the next stage; None on the last."""
        left, self._left = self._left, None
        return None if left is None else computed(rows_of(left))

    def _leave_out(self, layer: nn.Module, number: int) -> None:
        layers = self._layers

        def forward(hidden_states: Any, *args: Any, **given: Any) -> Any:
            rows = hidden_states
            if number == layers.start - 1:
                assert self._received is not None
                rows = self._received.view(rows.shape)
            elif number == layers.stop:
                self._left = rows
                rows = torch.zeros(rows.shape, dtype=rows.dtype, device=rows.device)
            return (rows, *(None,) * (self._num_outputs - 1)) if self._num_outputs else rows

        for part in layer.modules():
            part._parameters.clear()
            part._buffers.clear()
        layer.forward = forward

    def _around(self, module: nn.Module) -> nn.Module:
        """What stands for the embedding, or the norm at the end."""
        if module is self._embedding:
            return module if self._layers.start == 0 else _NoEmbedding(module)
        return module if self._is_last else nn.Identity()


class _NoEmbedding(nn.Module):
    """Stands for the embedding on a stage that receives rows."""

    def __init__(self, embedding: Any) -> None:
        super().__init__()
        self._size, self._dtype = embedding.weight.shape[1], embedding.weight.dtype

    def forward(self, token_ids: Tensor) -> Tensor:
        shape = (*token_ids.shape, self._size)
        return torch.zeros(shape, dtype=self._dtype, device=token_ids.device)
