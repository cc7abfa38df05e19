"""Self-attention of a layer, around whichever backend attends."""

from __future__ import annotations

from torch import Tensor, nn

from minisgl.attention.base import Attention, LayerKV, StepInputs
from minisgl.distributed.communicator import Communicator
from minisgl.kernels import dispatch
from minisgl.kernels.dispatch import Residual
from minisgl.kernels.elementwise.reference import NormRope
from minisgl.layers.linear import MergedLinear, SummedLinear
from minisgl.layers.norm import RMSNorm
from minisgl.shards import even_shard, kv_head_shard, whole


class SelfAttention(nn.Module):
    """Project the norm of the residual stream, norm and turn the heads, attend over the cache,
    project back; added to the stream. A rank does this for its share of the heads.

    `qk_norm_eps` None: queries and keys are not normed.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        qkv_bias: bool,
        o_bias: bool,
        qk_norm_eps: float | None,
        ranks: Communicator,
    ) -> None:
        super().__init__()
        self.scale = head_dim**-0.5
        heads = even_shard(num_heads, ranks.rank, ranks.size).times(head_dim)
        kv_heads = kv_head_shard(num_kv_heads, ranks.rank, ranks.size).times(head_dim)
        parts = {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads}
        self.qkv_proj = MergedLinear(whole(hidden_size), parts, bias=qkv_bias)
        self.o_proj = SummedLinear(heads, hidden_size, ranks, bias=o_bias)
        self.q_norm = None if qk_norm_eps is None else RMSNorm(head_dim, qk_norm_eps)
        self.k_norm = None if qk_norm_eps is None else RMSNorm(head_dim, qk_norm_eps)

    def forward(
        self,
        residual: Residual,
        norm: RMSNorm,
        rotary_table: Tensor,
        inputs: StepInputs,
        kv: LayerKV,
        attention: Attention,
    ) -> Residual:
        """Writes the rows' K and V. rotary_table: RotaryEmbedding.table."""
        first, q_norm, k_norm = self.qkv_proj, self.q_norm, self.k_norm
        qkv, rows = dispatch.norm_linear(
            residual, norm.weight, norm.eps, first.weight, first.bias, first.kernels
        )
        norm_rope = NormRope(rotary_table)
        if q_norm is not None and k_norm is not None:
            norm_rope = NormRope(rotary_table, q_norm.weight, k_norm.weight, q_norm.eps)
        out = attention.attend_qkv(qkv, kv, inputs, norm_rope, self.scale)
        return self.o_proj.add(out.flatten(1), rows)
