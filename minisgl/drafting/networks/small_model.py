"""A smaller model of the same vocabulary, which guesses by itself."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from minisgl.attention.base import Attention, ForwardBatch
from minisgl.attention.state import LayerState
from minisgl.config import LayerSpec
from minisgl.drafting.networks.network import Drafted
from minisgl.models.decoder import Decoder


class SmallModel:
    """The DraftNetwork of a Decoder with all its layers."""

    follows = False
    taps: tuple[int, ...] = ()

    def __init__(self, model: Decoder) -> None:
        self._model = model

    def layer_specs(self, kv_dtype: str) -> Sequence[LayerSpec]:
        return self._model.layer_specs(kv_dtype)

    def prepare(self) -> None:
        self._model.prepare()

    def combine(self, target: Tensor) -> Tensor:
        raise AssertionError("a model of its own takes nothing of the target")

    def __call__(
        self,
        batch: ForwardBatch,
        hidden: Tensor | None,
        states: Sequence[LayerState],
        attention: Attention,
    ) -> Drafted:
        return Drafted(self._model(batch, states, attention), None)

    def logits(self, rows: Tensor) -> Tensor:
        return self._model.logits(rows)
