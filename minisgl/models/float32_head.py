"""Logits in float32 of a model that computes in another dtype (--head-dtype)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minisgl.errors import UnsupportedModelError
from minisgl.kernels.linear.dense_product import DenseProduct
from minisgl.kernels.linear.float32_product import Float32Product
from minisgl.models.transformer import CausalLM

if TYPE_CHECKING:
    from minisgl.models.adopted.model import AdoptedModel


def widen_head(model: CausalLM | AdoptedModel) -> None:
    """Compute the logits of a model in float32, from the same weights in the same places. Call it
    before `prepare`; a stage without a head stays as it is."""
    if not isinstance(model, CausalLM):
        model.widen_head()
    elif model.head is not None:
        if not isinstance(model.head, DenseProduct):
            raise UnsupportedModelError(
                "--head-dtype float32 computes with the weights of the head as they are, and this "
                "checkpoint has quantised them; leave the option out, or use another checkpoint."
            )
        model.head = Float32Product(model.head)
