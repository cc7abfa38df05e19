"""Self-attention of a layer, around whichever backend attends."""

from __future__ import annotations

from torch import Tensor, nn

from minisgl.attention.base import Attention, LayerKV, StepInputs
from minisgl.layers.linear import Linear, MergedLinear
from minisgl.layers.norm import RMSNorm
from minisgl.layers.rope import Rotation


class SelfAttention(nn.Module):
    """Project, norm and turn the heads, attend over the cache, project back.

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
    ) -> None:
        super().__init__()
        self.head_counts = (num_heads, num_kv_heads, num_kv_heads)
        self.head_dim = head_dim
        self.scale = head_dim**-0.5
        names = ("q_proj", "k_proj", "v_proj")
        parts = {name: n * head_dim for name, n in zip(names, self.head_counts, strict=True)}
        self.qkv_proj = MergedLinear(hidden_size, parts, bias=qkv_bias)
        self.o_proj = Linear(num_heads * head_dim, hidden_size, bias=o_bias)
        self.q_norm = None if qk_norm_eps is None else RMSNorm(head_dim, qk_norm_eps)
        self.k_norm = None if qk_norm_eps is None else RMSNorm(head_dim, qk_norm_eps)

    def forward(
        self,
        hidden: Tensor,
        rotation: Rotation,
        inputs: StepInputs,
        kv: LayerKV,
        attention: Attention,
    ) -> Tensor:
        """hidden: [num_rows, hidden_size]; returns the same shape. Writes the rows' K and V."""
        heads = self.qkv_proj(hidden).view(hidden.shape[0], -1, self.head_dim)
        q, k, v = heads.split(self.head_counts, dim=1)
        q, k = self._norm_and_turn(q, k, rotation)
        out = attention(q, k, v, kv, inputs, self.scale)
        projected: Tensor = self.o_proj(out.flatten(1))
        return projected

    def _norm_and_turn(self, q: Tensor, k: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return rotation.apply(q), rotation.apply(k)
