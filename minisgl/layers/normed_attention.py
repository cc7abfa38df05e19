"""Attention whose values are normed, too, as Gemma 4 has it."""

from __future__ import annotations

from torch import Tensor

from minisgl.kernels.elementwise.reference import NormRope
from minisgl.kernels.residual import Residual
from minisgl.layers.attention import SelfAttention
from minisgl.layers.norm import RMSNorm
from minisgl.layers.step import Step


class NormedAttention(SelfAttention):
    """With norms of every head of q, k and v; that of v has no weights. Values without a map of
    their own are k(x), before its norm and rotation."""

    def apart(self, residual: Residual, norm: RMSNorm, step: Step) -> tuple[Tensor, Tensor]:
        """(the result, of all ranks together; the stream as one tensor). Writes the rows' K and V
        into the layer's KV cache."""
        qkv, stream = self.qkv_proj.product.of_norm(residual, norm, step.batch.own)
        out = self.o_proj(self._attended(qkv, step), step.batch.own)
        return self.o_proj.summed(out), stream

    def _norm_rope(self, rotary_table: Tensor) -> NormRope:
        v_is_k = "v_proj" not in self.qkv_proj.parts
        return super()._norm_rope(rotary_table)._replace(norms_v=True, v_is_k=v_is_k)
