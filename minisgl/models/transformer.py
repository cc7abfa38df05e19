"""The decoder that Llama, Mistral, Qwen2 and Qwen3 share: config in, logits out.

Modules are named as in Hugging Face checkpoints (without their leading 'model.'), which is how
the loader finds where a tensor goes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minisgl.attention.base import Attention, LayerKV, StepInputs
from minisgl.layers.attention import SelfAttention
from minisgl.layers.linear import Embedding, Linear
from minisgl.layers.mlp import GatedMLP
from minisgl.layers.norm import RMSNorm
from minisgl.layers.rope import RotaryEmbedding, Rotation
from minisgl.models.config import ModelConfig
from minisgl.models.rope import inverse_frequencies


class DecoderLayer(nn.Module):
    """Attention, then the MLP, each on the norm of the residual stream and added to it."""

    def __init__(self, config: ModelConfig) -> None:
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
        )
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)

    def forward(
        self,
        delta: Tensor | None,
        residual: Tensor,
        rotation: Rotation,
        inputs: StepInputs,
        kv: LayerKV,
        attention: Attention,
    ) -> tuple[Tensor, Tensor]:
        """Take and return what is still to be added to the residual stream, and the stream.

        Both are [num_rows, hidden_size]; before the first layer there is nothing to add. The
        addition is left to the next norm because the two can be one kernel.
        """
        hidden, residual = self.input_layernorm.add(delta, residual)
        hidden = self.self_attn(hidden, rotation, inputs, kv, attention)
        hidden, residual = self.post_attention_layernorm.add(hidden, residual)
        return self.mlp(hidden), residual


class CausalLM(nn.Module):
    """A decoder with its head. Constructed with uninitialised weights; `load_model` fills them."""

    def __init__(
        self, config: ModelConfig, *, max_seq_len: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        # On the meta device nothing is allocated before dtype and device are known to all.
        with torch.device("meta"):
            self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
            self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
            self.norm = RMSNorm(config.hidden_size, config.norm_eps)
            tied = config.tie_word_embeddings
            self.lm_head = None if tied else Linear(config.hidden_size, config.vocab_size)
        self.to(dtype).to_empty(device=device)
        frequencies = inverse_frequencies(config.rope, config.head_dim).to(device)
        self.rope = RotaryEmbedding(frequencies, max_seq_len, scale=config.rope.attention_factor)

    def forward(self, inputs: StepInputs, kv: Sequence[LayerKV], attention: Attention) -> Tensor:
        """Run the rows of one step: [num_rows, hidden_size], after the final norm.

        `kv` has one entry a layer; the rows' keys and values are written into it.
        """
        rotation = self.rope(inputs.positions)
        delta, residual = None, self.embed_tokens(inputs.token_ids)
        for layer, layer_kv in zip(self.layers, kv, strict=True):
            delta, residual = layer(delta, residual, rotation, inputs, layer_kv, attention)
        hidden, _ = self.norm.add(delta, residual)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [n, hidden_size], rows of what forward returned; returns float32 [n, vocab]."""
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        return F.linear(hidden, head.weight).float()
