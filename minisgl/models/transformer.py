"""The decoder that Llama, Mistral, Qwen2, Qwen3 and Qwen3-MoE share: config in, logits out.

Modules are named as in Hugging Face checkpoints (without their leading 'model.'), which is how
the loader finds where a tensor goes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from minisgl.attention.base import Attention, LayerKV, StepInputs
from minisgl.distributed.communicator import ALONE, Communicator
from minisgl.kernels import dispatch
from minisgl.kernels.dispatch import Residual
from minisgl.layers.attention import SelfAttention
from minisgl.layers.experts import SparseMLP
from minisgl.layers.linear import Embedding, Linear, share_kernels, tune
from minisgl.layers.mlp import GatedMLP
from minisgl.layers.norm import RMSNorm
from minisgl.layers.rope import RotaryEmbedding
from minisgl.models.config import ModelConfig
from minisgl.models.rope import inverse_frequencies
from minisgl.shards import vocab_shard, whole


class DecoderLayer(nn.Module):
    """Attention, then an MLP or experts, each on the norm of the stream and added to the stream."""

    mlp: GatedMLP | SparseMLP

    def __init__(self, config: ModelConfig, index: int, ranks: Communicator) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = SelfAttention(
            config.hidden_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            qkv_bias=config.qkv_bias,
            o_bias=config.o_bias,
            qk_norm_eps=config.norm_eps if config.qk_norm else None,
            ranks=ranks,
        )
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        experts = config.experts
        if experts is not None and index in experts.layers:
            self.mlp = SparseMLP(
                config.hidden_size,
                num_experts=experts.num_experts,
                num_chosen=experts.num_chosen,
                expert_size=experts.size,
                normalize=experts.normalize,
                ranks=ranks,
            )
        else:
            self.mlp = GatedMLP(
                config.hidden_size, config.intermediate_size, bias=config.mlp_bias, ranks=ranks
            )

    def forward(
        self,
        residual: Residual,
        rotary_table: Tensor,
        inputs: StepInputs,
        kv: LayerKV,
        attention: Attention,
    ) -> Residual:
        residual = self.self_attn(
            residual, self.input_layernorm, rotary_table, inputs, kv, attention
        )
        added: Residual = self.mlp(residual, self.post_attention_layernorm)
        return added


class CausalLM(nn.Module):
    """A decoder with its head, or one rank's part of it. Constructed with uninitialised weights;
    `load_model` fills them."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        max_seq_len: int,
        dtype: torch.dtype,
        device: torch.device,
        ranks: Communicator = ALONE,
    ) -> None:
        super().__init__()
        hidden_size = config.hidden_size
        self.vocab = vocab_shard(config.vocab_size, ranks.rank, ranks.size)
        # On the meta device nothing is allocated before dtype and device are known to all.
        with torch.device("meta"):
            self.embed_tokens = Embedding(self.vocab, hidden_size, ranks)
            self.layers = nn.ModuleList(
                DecoderLayer(config, index, ranks) for index in range(config.num_layers)
            )
            self.norm = RMSNorm(hidden_size, config.norm_eps)
            tied = config.tie_word_embeddings
            self.lm_head = None if tied else Linear(whole(hidden_size), self.vocab)
        self.to(dtype).to_empty(device=device)
        share_kernels(self)
        frequencies = inverse_frequencies(config.rope, config.head_dim).to(device)
        self.rope = RotaryEmbedding(frequencies, max_seq_len, scale=config.rope.attention_factor)

    def forward(self, inputs: StepInputs, kv: Sequence[LayerKV], attention: Attention) -> Tensor:
        """Run the rows of one step: [num_rows, hidden_size], after the final norm.

        `kv` has one entry a layer; the rows' keys and values are written into it.
        """
        residual, table = Residual(self.embed_tokens(inputs.token_ids)), self.rope.table
        for layer, layer_kv in zip(self.layers, kv, strict=True):
            residual = layer(residual, table, inputs, layer_kv, attention)
        hidden: Tensor = self.norm(residual)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [n, hidden_size], rows of what forward returned. Returns [n, vocab.size], of the
        rank's part of the vocabulary, its padding included."""
        return dispatch.linear(hidden, self._head.weight, None, self._head.kernels)

    def tune(self) -> None:
        """Choose what multiplies matrices in steps of few rows on a GPU, by trying. Before anything
        is captured."""
        linears = [m for m in self.layers.modules() if isinstance(m, Linear) and m.bias is None]
        tune([*linears, self._head])

    @property
    def _head(self) -> Linear | Embedding:
        return self.embed_tokens if self.lm_head is None else self.lm_head
