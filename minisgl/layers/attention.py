"""Self-attention of a layer, around whichever backend attends."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from minisgl.attention.base import AttentionCall
from minisgl.config import AttentionSpec
from minisgl.distributed.communicator import Communicator
from minisgl.kernels.elementwise.reference import NormRope
from minisgl.kernels.residual import Residual
from minisgl.layers.formats import WeightFormat
from minisgl.layers.linear import Linear, MergedMap, RowParallelLinear, parameter
from minisgl.layers.norm import RMSNorm
from minisgl.layers.step import Step
from minisgl.shards import even_shard, kv_head_shard, whole

_GATE = "gate"


class SelfAttention(nn.Module):
    """o(attention(q(x), k(x), v(x))) for x the norm of the residual stream, with rotary positions;
    added to the stream. A rank computes its share of the heads.

    `layer`: its number. `spec`: of all ranks together; `self.spec` is this rank's. `qk_norm_eps`:
    of the RMS norm of every head of q and k; None: none. `adds_one`: it is stored less 1.
    `has_gate`: sigmoid(gate(x)) multiplies the result of every head; a checkpoint has that map in
    the one to q, head by head. `norms_v`: values are normed, too, without weights. `v_is_k`: there
    is no map to them; they are k(x), before its norm and rotation.
    """

    def __init__(
        self,
        hidden_size: int,
        layer: int,
        spec: AttentionSpec,
        format: WeightFormat,
        comm: Communicator,
        *,
        qkv_bias: bool,
        o_bias: bool,
        qk_norm_eps: float | None,
        adds_one: bool = False,
        has_gate: bool = False,
        norms_v: bool = False,
        v_is_k: bool = False,
    ) -> None:
        super().__init__()
        self._layer, self._norms_v, self._v_is_k = layer, norms_v, v_is_k
        self.spec = spec.on_rank(comm.size)
        head_dim = spec.head_dim
        self.heads = even_shard(spec.num_heads, comm.rank, comm.size)
        heads = self.heads.times(head_dim)
        kv_heads = kv_head_shard(spec.num_kv_heads, comm.rank, comm.size).times(head_dim)
        parts = {"q_proj": heads, "k_proj": kv_heads}
        if not v_is_k:
            parts["v_proj"] = kv_heads
        self.has_gate, merged = has_gate, list[MergedMap]()
        if has_gate:
            parts[_GATE] = heads
            merged.append(MergedMap("q_proj", ("q_proj", _GATE), spec.num_heads))
        self.qkv_proj = Linear(whole(hidden_size), parts, format, bias=qkv_bias, merged=merged)
        self.o_proj = RowParallelLinear("o_proj", heads, hidden_size, format, comm, bias=o_bias)
        self.sinks: nn.Parameter | None = None
        if spec.sinks:
            self.sinks = parameter(torch.empty(self.heads.size, dtype=torch.float32))
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if qk_norm_eps is not None:
            self.q_norm = RMSNorm(head_dim, qk_norm_eps, format.dtype, adds_one=adds_one)
            self.k_norm = RMSNorm(head_dim, qk_norm_eps, format.dtype, adds_one=adds_one)

    def forward(self, residual: Residual, norm: RMSNorm, step: Step) -> Residual:
        """Writes the rows' K and V into the layer's KV cache."""
        return self.attend(*self.qkv_proj.product.of_norm(residual, norm, step.batch.own), step)

    def apart(self, residual: Residual, norm: RMSNorm, step: Step) -> tuple[Tensor, Tensor]:
        """As forward, but not added: (the result, of all ranks together; the stream)."""
        qkv, stream = self.qkv_proj.product.of_norm(residual, norm, step.batch.own)
        out = self.o_proj(self._attended(qkv, step), step.batch.own)
        return self.o_proj.summed(out), stream

    def attend(self, qkv: Tensor, stream: Tensor, step: Step) -> Residual:
        """As forward, given q, k and v of x, and the stream as one tensor."""
        if not self.has_gate:
            return self.o_proj.add_to(self._attended(qkv, step), stream, step.batch.own)
        qkv, gate = qkv.tensor_split((-self.spec.num_heads * self.spec.head_dim,), dim=1)
        out = self._attended(qkv, step).mul_(gate.sigmoid())
        return self.o_proj.add_to(out, stream, step.batch.own)

    def _attended(self, qkv: Tensor, step: Step) -> Tensor:
        """Returns [num_rows, num_heads * head_dim]."""
        norm_rope = self._norm_rope(step.rotary_tables[self._layer])
        call = AttentionCall(qkv, step.kv(self._layer), self.spec, self.sinks, norm_rope)
        return step.attention(call, step.batch).flatten(1)

    def _norm_rope(self, rotary_table: Tensor) -> NormRope:
        q_norm, k_norm = self.q_norm, self.k_norm
        if q_norm is None or k_norm is None:
            return NormRope(rotary_table)
        weights, eps = (q_norm.weight, k_norm.weight), q_norm.eps
        return NormRope(rotary_table, *weights, eps, norms_v=self._norms_v, v_is_k=self._v_is_k)
