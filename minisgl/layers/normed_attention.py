"""Attention whose values are normed, too, as Gemma 4 has it."""

from __future__ import annotations

from torch import Tensor, nn

from minisgl.config import AttentionSpec
from minisgl.distributed.communicator import Communicator
from minisgl.kernels.elementwise.reference import NormRope
from minisgl.kernels.residual import Residual
from minisgl.layers.formats import WeightFormat
from minisgl.layers.linear import Linear, RowParallelLinear
from minisgl.layers.norm import RMSNorm
from minisgl.layers.step import Step
from minisgl.shards import even_shard, kv_head_shard, whole


class NormedAttention(nn.Module):
    """o(attention(q(x), k(x), v(x))) for x the norm of the residual stream, with rotary positions
    and norms of every head of q, k and v; that of v has no weights. A rank computes its share of
    the heads.

    `layer`, `spec`: as of SelfAttention. `v_is_k`: values are k(x), before its norm and rotation;
    there is no map to them.
    """

    def __init__(
        self,
        hidden_size: int,
        layer: int,
        spec: AttentionSpec,
        format: WeightFormat,
        comm: Communicator,
        *,
        bias: bool,
        norm_eps: float,
        v_is_k: bool,
    ) -> None:
        super().__init__()
        self._layer = layer
        self.spec = spec.on_rank(comm.size)
        head_dim = spec.head_dim
        heads = even_shard(spec.num_heads, comm.rank, comm.size).times(head_dim)
        kv_heads = kv_head_shard(spec.num_kv_heads, comm.rank, comm.size).times(head_dim)
        parts = {"q_proj": heads, "k_proj": kv_heads}
        if not v_is_k:
            parts["v_proj"] = kv_heads
        self.qkv_proj = Linear(whole(hidden_size), parts, format, bias=bias)
        self.o_proj = RowParallelLinear("o_proj", heads, hidden_size, format, comm, bias=bias)
        self.q_norm = RMSNorm(head_dim, norm_eps, format.dtype)
        self.k_norm = RMSNorm(head_dim, norm_eps, format.dtype)
        self._v_is_k = v_is_k

    def forward(self, residual: Residual, norm: RMSNorm, step: Step) -> tuple[Tensor, Tensor]:
        """(the result, of all ranks together; the stream as one tensor). Writes the rows' K and V
        into the layer's KV cache."""
        qkv, rows = self.qkv_proj.product.of_norm(residual, norm)
        norm_rope = NormRope(
            step.rotary_tables[self._layer],
            self.q_norm.weight,
            self.k_norm.weight,
            self.q_norm.eps,
            norms_v=True,
            v_is_k=self._v_is_k,
        )
        kv = step.kv(self._layer)
        out = step.attention.attend_qkv(qkv, kv, step.batch, norm_rope, self.spec)
        return self.o_proj.summed(self.o_proj(out.flatten(1))), rows
