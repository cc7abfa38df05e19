"""EAGLE-3 heads (Li et al., arXiv 2503.01840): one layer, which sees the next token and what three
layers of the target have made of the tokens before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from minisgl.attention.base import Attention, ForwardBatch
from minisgl.attention.state import LayerState
from minisgl.config import LayerSpec
from minisgl.distributed.communicator import SINGLE_RANK, Communicator
from minisgl.drafting.networks.network import Drafted
from minisgl.drafting.networks.products import prepare_products, share_products
from minisgl.errors import CheckpointError, UnsupportedModelError
from minisgl.kernels.residual import Residual, joined, norm
from minisgl.layers.attention import SelfAttention
from minisgl.layers.by_request import own_rows, stream_of_all
from minisgl.layers.formats import WeightFormat
from minisgl.layers.linear import Linear, VocabParallelEmbedding
from minisgl.layers.mlp import GatedMLP
from minisgl.layers.norm import RMSNorm
from minisgl.layers.step import Step
from minisgl.models.config import ModelConfig, NativeConfig
from minisgl.models.config_reader import Fields
from minisgl.models.decoder_reader import read_decoder
from minisgl.models.rope import rotary_tables
from minisgl.shards import vocab_shard, whole

ALGORITHM = "eagle3"
_LAYER = "transformer_layer_config"  # of the speculators format
_TAPS = "eagle_aux_hidden_state_layer_ids"
_NOT_DRAFTED = -torch.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config:
    """An EAGLE-3 head, and which of its optional norms it has."""

    layer: NativeConfig  # of its only layer, with the vocabulary of the target
    draft_vocab_size: int
    taps: tuple[int, ...]  # layers of the target, as they are entered
    norm_before_fc: bool  # of the taps together, before their map
    fc_norm: bool  # of each tap by itself, before their map
    norm_before_residual: bool  # the layer adds to the norm of what it gets
    norm_output: bool  # the next draft gets the norm of the result


def is_eagle3(values: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of an EAGLE-3 head, in any of its formats."""
    speculators = values.get("speculators_config")
    if isinstance(speculators, dict):
        return speculators.get("algorithm") == ALGORITHM
    names = values.get("architectures")
    named = isinstance(names, list) and any(ALGORITHM in str(name).lower() for name in names)
    return named or values.get("draft_vocab_size") is not None


def read_eagle3(values: Mapping[str, Any], where: str, target: ModelConfig) -> Eagle3Config:
    """Read a head of SafeAILab, SpecForge or AngelSlim, or in the format of speculators.

    Fields that are not read are not refused, unlike those of models: they could change which tokens
    are guessed, but none that is answered. Raises CheckpointError, UnsupportedModelError.
    """
    of_layer = values.get(_LAYER)
    is_speculators = isinstance(of_layer, dict)
    if isinstance(of_layer, dict):
        # The layer has the dtype of the whole, and both may name sizes of vocabularies.
        values = {"dtype": values.get("torch_dtype")} | of_layer | dict(values)
    fields = Fields({name: values[name] for name in values if name != "layer_types"}, where)
    if (num_layers := fields.count("num_hidden_layers", 1)) != 1:
        raise UnsupportedModelError(f"{where}: {num_layers} layers are not supported; allowed: 1.")
    if fields.values.get("kv_lora_rank"):
        raise UnsupportedModelError(
            f"{where}: an EAGLE-3 head that attends over latents (kv_lora_rank) is not supported; "
            "take one with the attention of Llama, mtp or ngram."
        )
    layer = read_decoder(
        Fields({**fields.values, "num_hidden_layers": 1}, where),
        "Eagle3",
        qkv_bias=fields.flag("attention_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
        rotary_share=1.0,
    )
    draft_vocab_size = fields.count("draft_vocab_size", layer.vocab_size)
    if draft_vocab_size > layer.vocab_size:
        raise CheckpointError(
            f"{where}: draft_vocab_size {draft_vocab_size} is more than vocab_size "
            f"{layer.vocab_size}."
        )
    for_hidden = fields.count("target_hidden_size", layer.hidden_size)
    if layer.hidden_size != for_hidden:
        raise UnsupportedModelError(
            f"{where}: a head whose hidden_size, {layer.hidden_size}, is not its target's, "
            f"{for_hidden}, is not supported."
        )
    return Eagle3Config(
        layer=layer,
        draft_vocab_size=draft_vocab_size,
        taps=_taps(fields, target.num_layers),
        norm_before_fc=fields.flag("norm_before_fc", False),
        fc_norm=fields.flag("fc_norm", False),
        norm_before_residual=fields.flag("norm_before_residual", is_speculators),
        norm_output=fields.flag("norm_output", False),
    )


def _taps(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """The layers of the target, as they are entered. In eagle_config, SpecForge names those that
    they leave; the speculators format those that they enter."""
    within, entered = fields.values.get("eagle_config"), 0
    if isinstance(within, dict) and within.get(_TAPS):
        fields, entered = Fields(within, f"{fields.where}: eagle_config"), 1
    layers = tuple(layer + entered for layer in fields.whole_numbers(_TAPS))
    layers = layers or (2, num_layers // 2, num_layers - 3)
    if len({*layers}) < len(layers) or not all(0 <= layer < num_layers for layer in layers):
        raise CheckpointError(
            f"{fields.where}: the head reads the layers {', '.join(map(str, layers))} of its "
            f"target, whose {num_layers} layers do not have them: it was made for another one."
        )
    return layers


class _Layer(nn.Module):
    """Attention over the next token and `hidden` side by side, then an MLP."""

    def __init__(self, config: Eagle3Config, format: WeightFormat, comm: Communicator) -> None:
        super().__init__()
        layer, size = config.layer, config.layer.hidden_size
        self.input_layernorm = RMSNorm(size, layer.norm_eps, format.dtype)
        self.hidden_norm = RMSNorm(size, layer.norm_eps, format.dtype)
        of_attention, bias = format.within("self_attn"), layer.qkv_bias
        self.self_attn = SelfAttention(
            size,
            0,
            layer.attention(0),
            of_attention,
            comm if layer.divides_heads else SINGLE_RANK,
            qkv_bias=bias,
            o_bias=layer.o_bias,
            qk_norm_eps=None,
        )
        parts = self.self_attn.qkv_proj.parts
        self.self_attn.qkv_proj = Linear(whole(2 * size), parts, of_attention, bias=bias)
        self.post_attention_layernorm = RMSNorm(size, layer.norm_eps, format.dtype)
        self.mlp = GatedMLP(
            size, layer.intermediate_size, format.within("mlp"), comm, bias=layer.mlp_bias
        )
        self._norm_before_residual = config.norm_before_residual
        self._ranks = comm

    def forward(self, embedded: Tensor, hidden: Tensor, step: Step) -> Residual:
        normed = self.hidden_norm(Residual(hidden))
        x = torch.cat((self.input_layernorm(Residual(embedded)), normed), dim=1)
        stream, norm = (
            normed if self._norm_before_residual else hidden,
            self.post_attention_layernorm,
        )
        added: Residual = self.mlp(self._attend(x, stream, step), norm, step.batch.rows)
        return added

    def _attend(self, x: Tensor, stream: Tensor, step: Step) -> Residual:
        """The stream with the attention over x added."""
        attention, shares, ranks = self.self_attn, step.batch.shares, self._ranks
        if not shares:
            return attention.attend(attention.qkv_proj(x, step.batch.own), stream, step)
        x, own = own_rows(x, step, ranks), own_rows(stream, step, ranks)
        if len(own):
            residual = attention.attend(attention.qkv_proj(x, step.batch.own), own, step)
            own = joined(residual, self.post_attention_layernorm)
        return stream_of_all(own, shares, ranks)


class Eagle3(nn.Module):
    """The DraftNetwork of an EAGLE-3 head, with parameters named as in checkpoints of
    speculators. Constructed with uninitialised weights."""

    d2t: Tensor  # [draft_vocab_size] int64: the target's id of a token, less its own

    follows = True

    def __init__(
        self,
        config: Eagle3Config,
        *,
        max_seq_len: int,
        format: WeightFormat,
        device: torch.device,
        comm: Communicator,
    ) -> None:
        super().__init__()
        layer, dtype = config.layer, format.dtype
        size, num_taps = layer.hidden_size, len(config.taps)
        self.taps = config.taps
        self._comm = comm
        self.vocab = vocab_shard(layer.vocab_size, comm.rank, comm.size)
        self._norm_output = config.norm_output
        self._facts = layer.facts().on_rank(comm.size)
        self._num_drafted = config.draft_vocab_size
        # The target's, unless the head has its own.
        self.embed_tokens: VocabParallelEmbedding | None = None
        with device:
            self.input_norm = self.fc_norm = None
            if config.norm_before_fc:
                self.input_norm = RMSNorm(num_taps * size, layer.norm_eps, dtype)
            if config.fc_norm:
                self.fc_norm = nn.ModuleList(
                    RMSNorm(size, layer.norm_eps, dtype) for _ in config.taps
                )
            self.fc = Linear(whole(num_taps * size), {"fc": whole(size)}, WeightFormat(dtype))
            self.layers = nn.ModuleList([_Layer(config, format.within("layers.0"), comm)])
            self.norm = RMSNorm(size, layer.norm_eps, dtype)
            drafted = vocab_shard(config.draft_vocab_size, comm.rank, comm.size)
            self.lm_head = Linear(whole(size), {"lm_head": drafted}, WeightFormat(dtype))
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self._dtype = dtype
        self._places: tuple[Tensor, Tensor] | None = None
        self._rotary_tables = rotary_tables(layer, range(1), max_seq_len, device)
        share_products(self, dtype, device)

    def layer_specs(self, kv_dtype: str) -> Sequence[LayerSpec]:
        return self._facts.layer_specs(kv_dtype)

    def prepare(self) -> None:
        """Prepare the kernels. Raises CheckpointError if d2t names a token that does not exist."""
        ids = torch.arange(self._num_drafted, device=self.d2t.device) + self.d2t
        if not bool(((ids >= 0) & (ids < self.vocab.whole)).all()):
            raise CheckpointError(
                f"d2t of the drafter names tokens outside of the vocabulary of {self.vocab.whole}."
            )
        if len(ids.unique()) < len(ids):
            raise CheckpointError("d2t of the drafter names a token twice.")
        columns = ids - self.vocab.first
        drafted = ((columns >= 0) & (columns < self.vocab.num_real)).nonzero()[:, 0]
        self._places = drafted, columns[drafted]
        prepare_products(self, self._dtype)

    def combine(self, target: Tensor) -> Tensor:
        if self.input_norm is not None:
            target = self.input_norm(Residual(target))
        if self.fc_norm is not None:
            parts = zip(self.fc_norm, target.chunk(len(self.taps), dim=1), strict=True)
            target = torch.cat([norm(Residual(part.contiguous())) for norm, part in parts], dim=1)
        hidden: Tensor = self.fc(target)
        return hidden

    def forward(
        self,
        batch: ForwardBatch,
        hidden: Tensor | None,
        states: Sequence[LayerState],
        attention: Attention,
    ) -> Drafted:
        assert hidden is not None and self.embed_tokens is not None
        step = Step(batch, dict(enumerate(states)), attention, self._rotary_tables)
        (layer,) = self.layers
        residual = layer(self.embed_tokens(batch.token_ids), hidden, step)
        rows, stream = norm(residual, self.norm)
        return Drafted(rows, rows if self._norm_output else stream)

    def logits(self, rows: Tensor) -> Tensor:
        assert self._places is not None, "prepare() has not been called"
        drafted, columns = self._places
        logits: Tensor = self.lm_head(rows)
        if self._comm.size > 1:
            logits = self._comm.all_gather(logits)
        found = logits.new_full((len(rows), self.vocab.size), _NOT_DRAFTED)
        return found.index_copy_(1, columns, logits[:, drafted])
