"""The demo model: a Qwen3 in plain torch, for training.

A batch is a fixed number of tokens: rows of equal length, concatenated. All computation on single
tokens is in three functions over the flat batch, whose shape never changes, so that each is
compiled once for all layers. Only attention, which uses torch's kernel, depends on rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3Config

from demo_model.batches import NOT_LEARNED
from demo_model.data import END_ID, END_OF_TEXT_ID


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of the model; the defaults are those of the bundled model."""

    vocab_size: int = 2048
    hidden_size: int = 256
    intermediate_size: int = 512
    num_layers: int = 7
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    max_positions: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6


# A model that drafts tokens for the bundled one: the same vocabulary, a tenth of the weights.
DRAFTER = ModelSizes(
    hidden_size=128, intermediate_size=192, num_layers=2, num_heads=2, num_kv_heads=2
)


@dataclass(frozen=True)
class Layer:
    """The weights of one layer in the compute dtype; those with the same input are concatenated."""

    input_norm: Tensor
    qkv: Tensor
    q_norm: Tensor
    k_norm: Tensor
    o: Tensor
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x32 = x.float()
    return weight * (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE to pairs of dimensions i and i + head_dim / 2. x: [n, heads, head_dim]."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def before_attention(
    x: Tensor, layer: Layer, cos: Tensor, sin: Tensor, shape: ModelSizes
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute query, key and value, each [n, heads, head_dim]."""
    eps = shape.rms_norm_eps
    heads = F.linear(rms_norm(x, layer.input_norm, eps), layer.qkv)
    q, k, v = heads.unflatten(-1, (-1, shape.head_dim)).split(
        (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads), dim=1
    )
    q = rotate(rms_norm(q, layer.q_norm, eps), cos, sin)
    k = rotate(rms_norm(k, layer.k_norm, eps), cos, sin)
    return q, k, v


def attention(q: Tensor, k: Tensor, v: Tensor, length: int) -> Tensor:
    """Causal attention in each row of `length` tokens; padding on the right needs no mask."""
    q, k, v = (t.unflatten(0, (-1, length)).transpose(1, 2) for t in (q, k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return mixed.transpose(1, 2).flatten(0, 1).flatten(1)


def after_attention(x: Tensor, mixed: Tensor, layer: Layer, shape: ModelSizes) -> Tensor:
    x = x + F.linear(mixed, layer.o)
    gate_up = F.linear(rms_norm(x, layer.post_norm, shape.rms_norm_eps), layer.gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return x + F.linear(F.silu(gate) * up, layer.down)


def head(x: Tensor, norm: Tensor, embed: Tensor, shape: ModelSizes) -> Tensor:
    """Compute the logits [n, vocab_size]."""
    return F.linear(rms_norm(x, norm, shape.rms_norm_eps), embed)


def summed_loss(
    x: Tensor, norm: Tensor, embed: Tensor, targets: Tensor, shape: ModelSizes
) -> Tensor:
    logits = head(x, norm, embed, shape).float()
    return F.cross_entropy(logits, targets.long(), ignore_index=NOT_LEARNED, reduction="sum")


class DemoModel(nn.Module):
    """Weights in float32, computing in `dtype`.

    Each kind of weight is one parameter, stacked over the layers, so that the optimizers update a
    dozen large tensors instead of ninety small ones.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self, shape: ModelSizes, seed: int, dtype: torch.dtype, compiles: bool = False
    ) -> None:
        super().__init__()
        self.shape = shape
        self.dtype = dtype
        compiling = partial(torch.compile, dynamic=False, disable=not compiles)
        self.before_attention = compiling(before_attention)
        self.after_attention = compiling(after_attention)
        self.summed_loss = compiling(summed_loss)

        generator = torch.Generator().manual_seed(seed)
        layers, hidden = shape.num_layers, shape.hidden_size
        intermediate = shape.intermediate_size
        heads, kv_heads = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim

        def matrices(num_rows: int, num_columns: int) -> nn.Parameter:
            random = torch.randn(layers, num_rows, num_columns, generator=generator)
            return nn.Parameter(random * num_columns**-0.5)

        # The order of the calls matters: it determines the weights for a seed.
        self.embed = nn.Parameter(torch.randn(shape.vocab_size, hidden, generator=generator) * 0.02)
        self.q = matrices(heads, hidden)
        self.k = matrices(kv_heads, hidden)
        self.v = matrices(kv_heads, hidden)
        self.gate = matrices(intermediate, hidden)
        self.up = matrices(intermediate, hidden)
        # Zero: initially each layer is the identity.
        self.o = nn.Parameter(torch.zeros(layers, hidden, heads))
        self.down = nn.Parameter(torch.zeros(layers, hidden, intermediate))
        self.input_norm = nn.Parameter(torch.ones(layers, hidden))
        self.post_norm = nn.Parameter(torch.ones(layers, hidden))
        self.q_norm = nn.Parameter(torch.ones(layers, shape.head_dim))
        self.k_norm = nn.Parameter(torch.ones(layers, shape.head_dim))
        self.norm = nn.Parameter(torch.ones(hidden))

        frequencies = shape.rope_theta ** -(torch.arange(0, shape.head_dim, 2) / shape.head_dim)
        angles = torch.arange(shape.max_positions)[:, None] * frequencies
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def loss(self, ids: Tensor, targets: Tensor, length: int) -> Tensor:
        """The summed loss of a batch. ids, targets: [n], rows of `length` tokens."""
        embed = self.embed.to(self.dtype)
        x = self.hidden(ids, embed, length)
        return self.summed_loss(x, self.norm.to(self.dtype), embed, targets, self.shape)

    @torch.no_grad()
    @torch.compiler.set_stance("force_eager")  # otherwise each new size of `ids` would be compiled
    def logits(self, ids: Tensor) -> Tensor:
        """Compute the logits [rows, length, vocab_size] of ids [rows, length]."""
        embed = self.embed.to(self.dtype)
        x = self.hidden(ids.flatten(), embed, ids.shape[1])
        return head(x, self.norm.to(self.dtype), embed, self.shape).unflatten(0, ids.shape)

    def hidden(self, ids: Tensor, embed: Tensor, length: int) -> Tensor:
        """Compute the hidden states [n, hidden_size] after the last layer."""
        num_rows = len(ids) // length
        cos, sin = self.cos[:length].repeat(num_rows, 1), self.sin[:length].repeat(num_rows, 1)
        x = F.embedding(ids.int(), embed)
        for layer in self.layers():
            q, k, v = self.before_attention(x, layer, cos, sin, self.shape)
            mixed = attention(q, k, v, length)
            x = self.after_attention(x, mixed, layer, self.shape)
        return x

    def layers(self) -> list[Layer]:
        stacks = {
            "input_norm": self.input_norm,
            "qkv": torch.cat((self.q, self.k, self.v), dim=1),
            "q_norm": self.q_norm,
            "k_norm": self.k_norm,
            "o": self.o,
            "post_norm": self.post_norm,
            "gate_up": torch.cat((self.gate, self.up), dim=1),
            "down": self.down,
        }
        # The gradient of unbind is one stack; indexing would make a whole stack per layer.
        unbound = {name: stack.to(self.dtype).unbind() for name, stack in stacks.items()}
        return [
            Layer(**{name: weights[number] for name, weights in unbound.items()})
            for number in range(self.shape.num_layers)
        ]


# The Hugging Face name of each stack, within a layer.
LAYER_NAMES = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "input_norm": "input_layernorm",
    "post_norm": "post_attention_layernorm",
}


def named_weights(model: DemoModel) -> dict[str, Tensor]:
    """The tensors of the model by their Hugging Face names. The embedding is also the head."""
    weights = {"model.embed_tokens.weight": model.embed, "model.norm.weight": model.norm}
    for ours, theirs in LAYER_NAMES.items():
        for number, weight in enumerate(model.get_parameter(ours)):
            weights[f"model.layers.{number}.{theirs}.weight"] = weight
    return {name: weight.detach() for name, weight in weights.items()}


def hugging_face_config(shape: ModelSizes) -> Qwen3Config:
    return Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        dtype="bfloat16",
        eos_token_id=END_ID,
        head_dim=shape.head_dim,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        max_position_embeddings=shape.max_positions,
        num_attention_heads=shape.num_heads,
        num_hidden_layers=shape.num_layers,
        num_key_value_heads=shape.num_kv_heads,
        pad_token_id=END_OF_TEXT_ID,
        rms_norm_eps=shape.rms_norm_eps,
        rope_parameters={"rope_theta": shape.rope_theta, "rope_type": "default"},
        tie_word_embeddings=True,
        vocab_size=shape.vocab_size,
    )
