"""The decoder of Llama and its relatives: config in, logits out.

Modules are named as in Hugging Face checkpoints (without the prefix 'model.'), so that the loader
finds the parameter of each tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from minisgl.attention.base import Attention, ForwardBatch
from minisgl.attention.state import LayerState
from minisgl.config import LayerSpec
from minisgl.distributed.communicator import SINGLE_RANK, Communicator
from minisgl.kernels.linear import select_product
from minisgl.kernels.linear.dense_product import DenseProduct
from minisgl.kernels.linear.product import Product
from minisgl.kernels.residual import Residual, joined
from minisgl.layers.attention import SelfAttention
from minisgl.layers.by_request import mixed
from minisgl.layers.formats import WeightFormat
from minisgl.layers.latent_attention import linears_in, prepare_latents
from minisgl.layers.linear import Linear, VocabParallelEmbedding
from minisgl.layers.norm import RMSNorm
from minisgl.layers.step import Step
from minisgl.models.config import NativeConfig
from minisgl.models.decoder import Taps
from minisgl.models.experts import mlp_or_experts
from minisgl.models.rope import rotary_tables
from minisgl.shards import vocab_shard, whole


class DecoderLayer(nn.Module):
    """Attention, then an MLP, each on the norm of the residual stream and added to the stream."""

    def __init__(
        self, config: NativeConfig, index: int, format: WeightFormat, comm: Communicator
    ) -> None:
        super().__init__()
        self.input_layernorm = _norm(config, format.dtype)
        self._mixer = self.mixer_name(config, index)
        self._ranks, of_mixer = comm, comm if config.divides_heads else SINGLE_RANK
        mixer = self.make_mixer(config, index, format.within(self._mixer), of_mixer)
        self.add_module(self._mixer, mixer)
        self.post_attention_layernorm = _norm(config, format.dtype)
        self.mlp: nn.Module = self.make_mlp(config, index, format.within("mlp"), comm)

    def mixer_name(self, config: NativeConfig, index: int) -> str:
        """What a checkpoint calls the module of layer `index` through which its rows see others."""
        return "self_attn"

    def make_mixer(
        self, config: NativeConfig, index: int, format: WeightFormat, comm: Communicator
    ) -> nn.Module:
        """That module: called with the residual stream, the norm of its input, and the step, it
        returns the stream with its output added. comm: of the ranks that divide its heads."""
        return SelfAttention(
            config.hidden_size,
            index,
            config.attention(index),
            format,
            comm,
            qkv_bias=config.qkv_bias,
            o_bias=config.o_bias,
            qk_norm_eps=config.norm_eps if config.qk_norm else None,
            adds_one=config.norm_adds_one,
            has_gate=config.has_gate,
        )

    def make_mlp(
        self, config: NativeConfig, index: int, format: WeightFormat, comm: Communicator
    ) -> nn.Module:
        """What follows the attention of layer `index`, an MLP or experts: called with the residual
        stream, the norm of its input, and the rows, it returns the stream with its output added."""
        return mlp_or_experts(config, index, format, comm)

    def forward(self, residual: Residual, step: Step) -> Residual:
        mixer = self.get_submodule(self._mixer)
        residual = mixed(mixer, residual, self.input_layernorm, step, self._ranks)
        added: Residual = self.mlp(residual, self.post_attention_layernorm, step.batch.rows)
        return added


def _norm(config: NativeConfig, dtype: torch.dtype) -> RMSNorm:
    """Of the residual stream."""
    return RMSNorm(config.hidden_size, config.norm_eps, dtype, adds_one=config.norm_adds_one)


class CausalLM(nn.Module):
    """The Decoder of a family: layers and head, or one rank's part of them. Constructed with
    uninitialised weights; `load_model` fills them.

    A pipeline stage has some of the layers. Only the first stage has the embedding, and only the
    last the final norm and the head, for which it has an embedding, too, if both are one.

    A family whose layers differ derives a class with another `layer_type`.
    """

    layer_type: ClassVar[type[DecoderLayer]] = DecoderLayer

    def __init__(
        self,
        config: NativeConfig,
        *,
        max_seq_len: int,
        format: WeightFormat,
        device: torch.device,
        comm: Communicator = SINGLE_RANK,
        layers: range | None = None,
    ) -> None:
        """format: of the layers' weights. Its dtype is that of the activations, and so of the
        logits. layers: those of this stage, all if not given."""
        super().__init__()
        layers = range(config.num_layers) if layers is None else layers
        self.is_first, self.is_last = layers.start == 0, layers.stop == config.num_layers
        self.num_layers = config.num_layers  # of all stages
        self.num_left_out = config.num_drafting_layers  # behind these in a checkpoint
        self._numbers = layers
        # States are kept in the dtype of the activations, unless they have one of their own.
        facts = replace(config, dtype=str(format.dtype).removeprefix("torch.")).facts()
        self._facts = facts.on_rank(comm.size).on_stage(layers)
        self.is_tied = config.tie_word_embeddings
        hidden_size, dtype = config.hidden_size, format.dtype
        self.vocab = vocab_shard(config.vocab_size, comm.rank, comm.size)
        with device:  # every parameter is created where and as it stays
            self.embed_tokens: VocabParallelEmbedding | None = None
            if self.is_first or (self.is_last and self.is_tied):
                self.embed_tokens = VocabParallelEmbedding(self.vocab, hidden_size, dtype, comm)
            # By their names in a checkpoint, which count the layers of all stages.
            self.layers = nn.ModuleDict(
                {
                    str(index): self.layer_type(
                        config, index, format.within(f"layers.{index}"), comm
                    )
                    for index in layers
                }
            )
            self.norm: RMSNorm | None = None
            if self.is_last:
                self.norm = _norm(config, dtype)
            self.lm_head: Linear | None = None
            if self.is_last and not self.is_tied:
                head = {"lm_head": self.vocab}
                self.lm_head = Linear(whole(hidden_size), head, format)
        self.head: Product | None = None
        if self.lm_head is not None:
            self.head = self.lm_head.product
        elif self.is_last and self.embed_tokens is not None:
            self.head = DenseProduct(self.embed_tokens.weight)
        select_product.share_kernels(self._products(), dtype, device)
        self._dtype = dtype
        self.rotary_tables = rotary_tables(config, layers, max_seq_len, device)

    def forward(
        self,
        batch: ForwardBatch,
        states: Sequence[LayerState],
        attention: Attention,
        received: Tensor | None = None,
        taps: Taps | None = None,
    ) -> Tensor:
        """Run the rows of one step. Returns them after the final norm; of a stage that is not the
        last, the residual stream."""
        if self.is_first:
            assert self.embed_tokens is not None
            received = self.embed_tokens(batch.token_ids)
        assert received is not None, "every stage but the first receives rows"
        residual = Residual(received)
        by_number = dict(zip(self._numbers, states, strict=True))
        step = Step(batch, by_number, attention, self.rotary_tables)
        for number, layer in zip(self._numbers, self.layers.values(), strict=True):
            if taps is not None:
                residual = taps.tapped(residual, number, layer)
            residual = layer(residual, step)
        if self.norm is None:
            assert isinstance(layer, DecoderLayer)
            return joined(residual, layer.input_layernorm)
        hidden: Tensor = self.norm(residual)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """The rank's part of the logits: [n, vocab.size]."""
        assert self.head is not None
        return self.head(hidden)

    def layer_specs(self, kv_dtype: str) -> Sequence[LayerSpec]:
        """What each layer keeps between steps, with the KV cache in `kv_dtype`."""
        return self._facts.layer_specs(kv_dtype)

    @property
    def dense_copy_bytes(self) -> int:
        """The memory of the dense copies that `prepare` can make."""
        return select_product.dense_copy_bytes(self._products(), self._dtype)

    def prepare(self, *, dense_copies: bool = False) -> None:
        """Prepare the kernels for the weights that were filled in, and choose the GEMMs of steps
        with few rows on a GPU by trying. Call it before anything is captured.

        dense_copies: see select_product.prepare.
        """
        prepare_latents(self)
        select_product.prepare(self._products(), self._dtype, dense_copies=dense_copies)
        for linear in linears_in(self):
            linear.register_weights()

    def _products(self) -> list[Product]:
        head = [] if self.head is None else [self.head]
        return [*(linear.product for linear in linears_in(self.layers)), *head]
