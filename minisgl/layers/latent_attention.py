"""Attention over latents, as DeepSeek-V2 has it (MLA, arXiv 2405.04434)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from minisgl.attention.base import AttentionCall
from minisgl.config import AttentionSpec
from minisgl.distributed.communicator import Communicator
from minisgl.kernels import dispatch
from minisgl.kernels.elementwise.latents import LatentNorm
from minisgl.kernels.linear.dense_product import DenseProduct
from minisgl.kernels.linear.quantized import QuantizedProduct
from minisgl.kernels.residual import Residual
from minisgl.layers.formats import WeightFormat
from minisgl.layers.linear import Linear, RowParallelLinear
from minisgl.layers.norm import RMSNorm
from minisgl.layers.step import Step
from minisgl.shards import even_shard, whole

_EPS = 1e-6  # of the norms of latents, whatever that of other norms is


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSizes:
    """Widths within a layer: of latents, and of what each head has."""

    rank: int  # of the latent of a token
    q_rank: int | None  # of the latent of its queries; None: they come from the row itself
    nope_dim: int  # numbers of a query and a key that are not rotated
    rope_dim: int  # those that are; of keys all heads have the same
    value_dim: int

    def maps(self, hidden_size: int, num_heads: int) -> list[tuple[int, int]]:
        """Rows and columns of the matrices of a layer."""
        q = num_heads * (self.nope_dim + self.rope_dim)
        to_q = [(q, hidden_size)]
        if self.q_rank is not None:
            to_q = [(self.q_rank, hidden_size), (q, self.q_rank)]
        return [
            *to_q,
            (self.rank + self.rope_dim, hidden_size),
            self.expanding_map(num_heads),
            (hidden_size, num_heads * self.value_dim),
        ]

    def expanding_map(self, num_heads: int) -> tuple[int, int]:
        """Those of the matrix from latents to keys and values."""
        return num_heads * (self.nope_dim + self.value_dim), self.rank


def prepare_latents(network: nn.Module) -> None:
    """Prepare all attention over latents in a model, or in a part of one."""
    for module in network.modules():
        if isinstance(module, LatentAttention):
            module.prepare()


def linears_in(network: nn.Module) -> list[Linear]:
    """The linear maps of a model but those multiplied head by head, which need no kernels."""
    modules = [*network.modules()]
    by_head = {each.kv_b_proj for each in modules if isinstance(each, LatentAttention)}
    return [each for each in modules if isinstance(each, Linear) and each not in by_head]


class LatentAttention(nn.Module):
    """o(attention(q(x), keys, values)) for x the norm of the residual stream; added to the stream.

    The cache has one latent of each token, and behind it the part of its keys that is rotated. A
    head's keys and values are maps of the latent, kv_b. They are never made: its queries are mapped
    to queries of latents, which attend to these, and the result to the head's values. So all heads
    read one key, whose first numbers are the value. A rank computes its share of the heads.

    `layer`: its number. `spec`: of all ranks together, over latents.
    """

    def __init__(
        self,
        hidden_size: int,
        layer: int,
        spec: AttentionSpec,
        sizes: LatentSizes,
        format: WeightFormat,
        comm: Communicator,
    ) -> None:
        super().__init__()
        self._layer, self._sizes = layer, sizes
        self.spec = spec.on_rank(comm.size)
        heads = even_shard(spec.num_heads, comm.rank, comm.size)
        queries = heads.times(sizes.nope_dim + sizes.rope_dim)
        latent = {"kv_a_proj_with_mqa": whole(sizes.rank + sizes.rope_dim)}
        self.q_a_layernorm: RMSNorm | None = None
        if sizes.q_rank is None:
            self._num_first = queries.size
            self.qkv_a_proj = Linear(whole(hidden_size), {"q_proj": queries, **latent}, format)
        else:
            self._num_first = sizes.q_rank
            parts = {"q_a_proj": whole(sizes.q_rank), **latent}
            self.qkv_a_proj = Linear(whole(hidden_size), parts, format)
            self.q_a_layernorm = RMSNorm(sizes.q_rank, _EPS, format.dtype)
            self.q_b_proj = Linear(whole(sizes.q_rank), {"q_b_proj": queries}, format)
        self.kv_a_layernorm = RMSNorm(sizes.rank, _EPS, format.dtype)
        expanded = heads.times(sizes.nope_dim + sizes.value_dim)
        self.kv_b_proj = Linear(whole(sizes.rank), {"kv_b_proj": expanded}, format)
        values = heads.times(sizes.value_dim)
        self.o_proj = RowParallelLinear("o_proj", values, hidden_size, format, comm)
        self._dtype = format.dtype

    def prepare(self) -> None:
        """Bring the map kv_b into the dtype of the activations. Must come before a step, once a
        checkpoint has filled the weights."""
        product = self.kv_b_proj.product
        if isinstance(product, QuantizedProduct):
            weight = product.weight.dequantized().to(self._dtype)
            self.kv_b_proj.replace_product(DenseProduct(weight))

    def forward(self, residual: Residual, norm: RMSNorm, step: Step) -> Residual:
        """Writes the rows' latents into the layer's KV cache."""
        sizes, kv, num_heads = self._sizes, step.kv(self._layer), self.spec.num_heads
        batch, rows = step.batch, step.batch.own
        both, stream = self.qkv_a_proj.product.of_norm(residual, norm, rows)
        q, latents = both.tensor_split((self._num_first,), dim=1)
        if self.q_a_layernorm is not None:
            q = self.q_b_proj.product.of_input_norm(q, self.q_a_layernorm, rows)
        q = q.unflatten(1, (num_heads, -1))
        table, kv_norm = step.rotary_tables[self._layer], self.kv_a_layernorm
        latent_norm = LatentNorm(table, kv_norm.weight, kv_norm.eps)
        by_head = self.kv_b_proj.product.weights["weight"].unflatten(0, (num_heads, -1))
        to_keys, to_values = by_head.tensor_split((sizes.nope_dim,), dim=1)
        queries = dispatch.store_latents(
            latents, q, rows.rope, batch.slot_mapping, kv.k, latent_norm, to_keys, kv.scales.k
        )
        attended = step.attention(AttentionCall(queries, kv, self.spec), batch)
        out = dispatch.values_of_latents(attended, to_values)
        return self.o_proj.add_to(out.flatten(1), stream, rows)
