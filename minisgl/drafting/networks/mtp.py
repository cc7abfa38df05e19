"""The layers for multi-token prediction that come with Qwen3-Next, Qwen3.5 to 3.8, DeepSeek-V3
(arXiv 2412.19437, section 2.2) and GLM-4.7-Flash: one layer as the target's, over the next token
and the row that the target has computed before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from minisgl.attention.base import Attention, ForwardBatch
from minisgl.attention.state import LayerState
from minisgl.config import LayerSpec
from minisgl.distributed.communicator import Communicator
from minisgl.drafting.networks.network import Drafted
from minisgl.drafting.networks.products import prepare_products, share_products
from minisgl.errors import UnsupportedModelError
from minisgl.kernels.residual import Residual
from minisgl.layers.formats import WeightFormat
from minisgl.layers.linear import Linear
from minisgl.layers.norm import RMSNorm
from minisgl.layers.step import Step
from minisgl.models.config import ModelConfig, NativeConfig
from minisgl.models.deepseek import LatentConfig, name_in_drafter
from minisgl.models.qwen3_5 import DRAFTER, HybridConfig
from minisgl.models.rope import rotary_tables
from minisgl.models.transformer import CausalLM
from minisgl.shards import whole


def mtp_config(target: ModelConfig) -> NativeConfig:
    """The config of a model that has the one layer of its target's for drafts, and no other.

    Raises UnsupportedModelError if the target is of another family.
    """
    if not isinstance(target, HybridConfig | LatentConfig):
        raise UnsupportedModelError(
            f"{target.architecture} has no layers that draft tokens; mtp is supported for "
            "Qwen3-Next, Qwen3.5 to 3.8, DeepSeek-V3 and GLM-4.7-Flash in minisgl's own code."
        )
    experts = target.experts
    config: NativeConfig = replace(
        target,
        num_layers=1,
        windows=(None,),
        experts=None if experts is None else replace(experts, layers=frozenset((0,))),
        kv_scales=None,
        notes=(),
    )
    return replace(config, delta_layers=frozenset()) if isinstance(config, HybridConfig) else config


def mtp_name_of(stored_name: str, layer: int | None) -> str | None:
    """What a tensor of the target's checkpoint is called in the network; None for the others.

    layer: the number of the layer there; None: its names begin with mtp.
    """
    if layer is not None:
        return name_in_drafter(stored_name, layer)
    prefix = f"{DRAFTER}."
    name = stored_name.removeprefix("model.")
    return name.removeprefix(prefix) if name.startswith(prefix) else None


class Mtp(nn.Module):
    """The DraftNetwork of these layers, with the embedding and the head of the target. Constructed
    with uninitialised weights.

    The row of the target is the one behind its final norm, and that of a draft the one behind the
    norm here, so that all rows that `pre_fc_norm_hidden` gets are alike. The paper leaves that
    open. SGLang has both norms in all these models; vLLM's first code for DeepSeek-V3 lacks the one
    between drafts, without which fewer drafts of GLM-5 were accepted (its pull request 46075). That
    code also takes a zero for the embedding at position 0, where there is the second token of the
    text like any other.
    """

    follows = True
    taps: tuple[int, ...] = ()

    def __init__(
        self,
        config: NativeConfig,
        target: CausalLM,
        *,
        max_seq_len: int,
        format: WeightFormat,
        device: torch.device,
        comm: Communicator,
    ) -> None:
        """config: of `mtp_config`."""
        super().__init__()
        size, dtype = config.hidden_size, format.dtype

        def norm() -> RMSNorm:
            return RMSNorm(size, config.norm_eps, dtype, adds_one=config.norm_adds_one)

        with device:
            self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = norm(), norm()
            self.fc = Linear(whole(2 * size), {"fc": whole(size)}, WeightFormat(dtype))
            layer = target.layer_type(config, 0, format.within("layers.0"), comm)
            self.layers = nn.ModuleList([layer])
            self.norm = norm()
        self._facts = config.facts().on_rank(comm.size)
        self._dtype = dtype
        # In a list, so that its parameters are not among those of this module.
        self._target = [target]
        self._rotary_tables = rotary_tables(config, range(1), max_seq_len, device)
        share_products(self, dtype, device)

    def layer_specs(self, kv_dtype: str) -> Sequence[LayerSpec]:
        return self._facts.layer_specs(kv_dtype)

    def prepare(self) -> None:
        prepare_products(self, self._dtype)

    def combine(self, target: Tensor) -> Tensor:
        return target

    def forward(
        self,
        batch: ForwardBatch,
        hidden: Tensor | None,
        states: Sequence[LayerState],
        attention: Attention,
    ) -> Drafted:
        (target,) = self._target
        assert hidden is not None and target.embed_tokens is not None
        embedded = self.pre_fc_norm_embedding(Residual(target.embed_tokens(batch.token_ids)))
        joined = torch.cat((embedded, self.pre_fc_norm_hidden(Residual(hidden))), dim=1)
        step = Step(batch, dict(enumerate(states)), attention, self._rotary_tables)
        (layer,) = self.layers
        rows = self.norm(layer(Residual(self.fc(joined, batch.rows)), step))
        return Drafted(rows, rows)

    def logits(self, rows: Tensor) -> Tensor:
        return self._target[0].logits(rows)
