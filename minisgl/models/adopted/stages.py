"""Leaves out of a model what other stages of a pipeline have."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from minisgl.errors import UnsupportedModelError
from minisgl.models.adopted.discover import Discovered
from minisgl.models.adopted.rows import computed, rows_of


class OtherStages:
    """The layers of other stages. The code of the model still calls them; they return the rows as
    they are, and have no weights."""

    def __init__(self, model: Any, body: nn.Module, found: Discovered, layers: range) -> None:
        """layers: of this stage. Raises UnsupportedModelError for weights that no layer has."""
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
            has_weights = any(True for _ in module.parameters())
            if has_weights and not isinstance(module, nn.ModuleList):
                around = self._around(module, f"{type(model).__name__}: {name}")
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

    def _around(self, module: nn.Module, name: str) -> nn.Module:
        """What stands for a module of the body with weights that is no layer."""
        if module is self._embedding:
            return module if self._layers.start == 0 else _NoEmbedding(module)
        if "norm" not in name.lower():
            raise UnsupportedModelError(f"{name} is in none of the layers that a stage has.")
        return module if self._is_last else nn.Identity()


class _NoEmbedding(nn.Module):
    """Stands for the embedding on a stage that receives rows."""

    def __init__(self, embedding: Any) -> None:
        super().__init__()
        self._size, self._dtype = embedding.weight.shape[1], embedding.weight.dtype

    def forward(self, token_ids: Tensor) -> Tensor:
        shape = (*token_ids.shape, self._size)
        return torch.zeros(shape, dtype=self._dtype, device=token_ids.device)
