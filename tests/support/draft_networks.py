"""Small random drafters on disk, and what they guess in plain torch, over whole sequences and
without a cache."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from support.checkpoints import Spec, load_reference, make_checkpoint, spec_named
from support.state_cases import EXPERTS, HYBRID
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe

from minisgl.models.adopted.proof import give_teeth

_FOLDER = TemporaryDirectory()
EPS = 1e-6
THETA = 10_000.0


@dataclass(frozen=True)
class Head:
    """An EAGLE-3 head to make. The same always has the same weights."""

    target: Spec
    taps: tuple[int, ...] = (0, 1, 1)  # layers of the target as they are entered
    draft_vocab_size: int = 300
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    speculators: bool = False  # the format of speculators, else that of SpecForge
    own_embedding: bool = False
    norms: frozenset[str] = frozenset()  # options that are set
    rotary_share: float = 1.0  # of each head that is rotated; `values` say so
    seed: int = 5
    values: dict[str, Any] = field(default_factory=dict)  # other fields of config.json


def head_tensors(head: Head) -> dict[str, Tensor]:
    """By the names of the speculators format."""
    generator = torch.Generator().manual_seed(head.seed)
    size, vocab = head.target.hidden_size, head.target.vocab_size
    q, kv = head.num_heads * head.head_dim, head.num_kv_heads * head.head_dim

    def weights(outputs: int, inputs: int, scale: float = 1.0) -> Tensor:
        return torch.randn((outputs, inputs), generator=generator) * scale / inputs**0.5

    def norm(size: int = size) -> Tensor:
        return 1 + 0.3 * torch.randn(size, generator=generator)

    taps = len(head.taps)
    tensors = {
        "fc.weight": weights(size, taps * size),
        "layers.0.input_layernorm.weight": norm(),
        "layers.0.hidden_norm.weight": norm(),
        "layers.0.post_attention_layernorm.weight": norm(),
        "layers.0.self_attn.q_proj.weight": weights(q, 2 * size, 2.5),
        "layers.0.self_attn.k_proj.weight": weights(kv, 2 * size, 2.5),
        "layers.0.self_attn.v_proj.weight": weights(kv, 2 * size),
        "layers.0.self_attn.o_proj.weight": weights(size, q, 4),
        "layers.0.mlp.gate_proj.weight": weights(2 * size, size),
        "layers.0.mlp.up_proj.weight": weights(2 * size, size),
        "layers.0.mlp.down_proj.weight": weights(size, 2 * size, 3),
        "norm.weight": norm(),
        "lm_head.weight": weights(head.draft_vocab_size, size, 3),
    }
    ids = torch.randperm(vocab, generator=generator)[: head.draft_vocab_size].sort().values
    if head.draft_vocab_size < vocab:
        tensors["d2t"] = ids - torch.arange(head.draft_vocab_size)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, True)
    if head.own_embedding:
        tensors["embed_tokens.weight"] = torch.randn((vocab, size), generator=generator)
    if "norm_before_fc" in head.norms:
        tensors["input_norm.weight"] = norm(taps * size)
    if "fc_norm" in head.norms:
        tensors |= {f"fc_norm.{tap}.weight": norm() for tap in range(taps)}
    return tensors


def save_head(head: Head, folder: Path) -> Path:
    """Write config.json and safetensors; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors, target = head_tensors(head), head.target
    layer = {
        "model_type": "llama",
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": 2 * target.hidden_size,
        "num_hidden_layers": 1,
        "num_attention_heads": head.num_heads,
        "num_key_value_heads": head.num_kv_heads,
        "head_dim": head.head_dim,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "max_position_embeddings": 64,  # less than the target's
    }
    options = dict.fromkeys(head.norms, True)
    values: dict[str, Any] = {"draft_vocab_size": head.draft_vocab_size, "torch_dtype": "float32"}
    if head.speculators:
        values |= {
            "architectures": ["Eagle3Speculator"],
            "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "any"}},
            "transformer_layer_config": layer,
            "eagle_aux_hidden_state_layer_ids": list(head.taps),
            "norm_before_residual": False,
            "target_hidden_size": None,
        }
    else:
        left = [tap - 1 for tap in head.taps]
        config = {"eagle_aux_hidden_state_layer_ids": left, "use_aux_hidden_state": True}
        values |= layer | {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": config}
        tensors = {name.replace("layers.0.", "midlayer."): each for name, each in tensors.items()}
    (folder / "config.json").write_text(json.dumps(values | options | head.values))
    save_file(
        {name: each.contiguous() for name, each in tensors.items()}, folder / "model.safetensors"
    )
    return folder


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def rotated(x: Tensor, share: float) -> Tensor:
    """x: [rows, heads, head_dim], of which a share is rotated, the first numbers of each; row p is
    at position p."""
    x, still = x.tensor_split([int(x.shape[-1] * share)], dim=-1)
    half = x.shape[-1] // 2
    angles = torch.arange(len(x))[:, None] / THETA ** (torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    one, other = x[..., :half], x[..., half:]
    return torch.cat((one * cos - other * sin, other * cos + one * sin, still), dim=-1)


class HeadReference:
    """An EAGLE-3 head of a target in transformers."""

    def __init__(self, head: Head, target: PreTrainedModel) -> None:
        self.head, self.target = head, target
        self.tensors = head_tensors(head)

    def hidden_of(self, token_ids: Sequence[int]) -> Tensor:
        found = self.target(torch.tensor([list(token_ids)]), output_hidden_states=True)
        taps = [found.hidden_states[layer][0] for layer in self.head.taps]
        if "fc_norm" in self.head.norms:
            weights = [self.tensors[f"fc_norm.{place}.weight"] for place in range(len(taps))]
            taps = [norm(tap, weight) for tap, weight in zip(taps, weights, strict=True)]
        x = torch.cat(taps, dim=1)
        if "norm_before_fc" in self.head.norms:
            x = norm(x, self.tensors["input_norm.weight"])
        return x @ self.tensors["fc.weight"].T

    def run(self, token_ids: Sequence[int], hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The logits [rows, vocab_size] of the last row, and `hidden` of the next."""
        w = {name.removeprefix("layers.0."): each for name, each in self.tensors.items()}
        table = w.get("embed_tokens.weight", self.target.get_input_embeddings().weight)
        rows, head = len(token_ids), self.head
        normed = norm(hidden, w["hidden_norm.weight"])
        embedded = norm(table[list(token_ids)], w["input_layernorm.weight"])
        x = torch.cat((embedded, normed), dim=1)
        q, k, v = (
            (x @ w[f"self_attn.{name}_proj.weight"].T).view(rows, -1, head.head_dim)
            for name in "qkv"
        )
        q, k = rotated(q, head.rotary_share), rotated(k, head.rotary_share)
        group = head.num_heads // head.num_kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / head.head_dim**0.5
        scores = scores.masked_fill(torch.ones(rows, rows).triu(1).bool(), -torch.inf)
        out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        stream = normed if "norm_before_residual" in head.norms else hidden
        stream = stream + out @ w["self_attn.o_proj.weight"].T
        x = norm(stream, w["post_attention_layernorm.weight"])
        inner = F.silu(x @ w["mlp.gate_proj.weight"].T) * (x @ w["mlp.up_proj.weight"].T)
        stream = stream + inner @ w["mlp.down_proj.weight"].T
        result = norm(stream, w["norm.weight"])
        of_drafts = result[-1] @ w["lm_head.weight"].T
        ids = torch.arange(head.draft_vocab_size) + w.get("d2t", torch.tensor(0))
        logits = torch.full((head.target.vocab_size,), -torch.inf).index_copy(0, ids, of_drafts)
        return logits, (result if "norm_output" in head.norms else stream)[-1]


# -- layers for multi-token prediction -------------------------------------------------------------


def _mtp_layer(config: Any) -> Any:
    """A layer of a hybrid target that attends, of transformers' own code."""
    has_experts = bool(getattr(config, "num_experts", 0))
    code: Any = modeling_qwen3_5_moe if has_experts else modeling_qwen3_5
    name = "Qwen3_5MoeDecoderLayer" if has_experts else "Qwen3_5DecoderLayer"
    return getattr(code, name)(config, config.layer_types.index("full_attention")).eval()


class Mtp(torch.nn.Module):
    """The layers of a target in transformers. layer: with weights; made up if not given."""

    def __init__(
        self, target: PreTrainedModel, layer: torch.nn.Module | None = None, seed: int = 11
    ) -> None:
        super().__init__()
        config = target.config.get_text_config()
        config._attn_implementation = "eager"
        size = config.hidden_size
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
                self.register_parameter(name, torch.nn.Parameter(torch.zeros(size)))
            self.fc = torch.nn.Linear(2 * size, size, bias=False)
            self.layer = None if layer is not None else _mtp_layer(config)
            give_teeth(self)
        self.layer = self.layer if layer is None else layer
        self._target = [target]
        self._eps = config.rms_norm_eps

    def tensors(self) -> dict[str, Tensor]:
        """As a checkpoint has them."""
        found: dict[str, Tensor] = {}
        for name, weight in self.named_parameters():
            name = name.replace("layer.", "layers.0.", 1) if name.startswith("layer.") else name
            found[f"mtp.{name}" + ("" if "." in name else ".weight")] = weight.detach().clone()
        return found

    def hidden_of(self, token_ids: Sequence[int]) -> Tensor:
        (target,) = self._target
        body: Any = target.get_decoder()
        hidden: Tensor = body(torch.tensor([list(token_ids)])).last_hidden_state[0]
        return hidden  # after the norm

    def run(self, token_ids: Sequence[int], hidden: Tensor) -> tuple[Tensor, Tensor]:
        """As HeadReference.run."""
        (target,) = self._target
        rows = len(token_ids)
        embedded = target.get_input_embeddings().weight[list(token_ids)]
        x = torch.cat(
            (
                self._normed(embedded, self.pre_fc_norm_embedding),
                self._normed(hidden, self.pre_fc_norm_hidden),
            ),
            dim=1,
        )
        body: Any = target.get_decoder()
        positions = torch.arange(rows)[None]
        mask = torch.full((rows, rows), -torch.inf).triu(1)[None, None]
        stream = self.layer(
            self.fc(x)[None],
            position_embeddings=body.rotary_emb(x[None], positions),
            attention_mask=mask,
            position_ids=positions,
        )
        stream = stream[0] if isinstance(stream, tuple) else stream
        result = self._normed(stream[0], self.norm)[-1]
        return target.lm_head(result), result

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self._eps) * (1 + weight)


def add_mtp(folder: Path, mtp: Mtp) -> None:
    """Write the layers into the checkpoint of their target."""
    path = folder / "model.safetensors"
    save_file(load_file(path) | mtp.tensors(), path)
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config", config)
    text["mtp_num_hidden_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config))


@cache
def hybrid(architecture: str) -> tuple[Mtp, Path]:
    """The layers for drafts of a small model of this architecture, and its checkpoint."""
    folder, model_class = Path(_FOLDER.name) / architecture, getattr(transformers, architecture)
    sizes = HYBRID | (EXPERTS if "Moe" in architecture else {})
    config = model_class.config_class(**sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = model_class._from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            give_teeth(model)
            for name, weight in model.named_parameters():
                if name.endswith("A_log"):  # a state of long and of short memory
                    weight.uniform_(-4, 0.5)
                if name.endswith("conv1d.weight"):
                    weight.normal_(std=0.5)
    model.save_pretrained(folder)
    mtp = Mtp(model)
    add_mtp(folder, mtp)
    return mtp, folder


# The names of DeepSeek-V3, whose norms multiply by the weight itself.
_LATENT_NAMES = {
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "shared_head.norm": "norm",
}


def let_last_layer_draft(folder: Path, model: PreTrainedModel) -> Mtp:
    """Turn the last layer of a checkpoint over latents into the one for drafts. model: the same in
    transformers, which loses the layer."""
    body: Any = model.get_decoder()
    number = len(body.layers) - 1
    layer = body.layers[number]
    del body.layers[number]
    body.config.num_hidden_layers = number
    mtp = Mtp(model, layer)
    own = {name: 1 + mtp.get_parameter(here).detach() for name, here in _LATENT_NAMES.items()}
    own |= {"eh_proj": mtp.fc.weight.detach()}
    own |= {"embed_tokens": body.embed_tokens.weight, "shared_head.head": model.lm_head.weight}
    path = folder / "model.safetensors"
    added = {f"model.layers.{number}.{name}.weight": each.clone() for name, each in own.items()}
    save_file(load_file(path) | added, path)
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": number, "num_nextn_predict_layers": 1}
    if kinds := config.get("mlp_layer_types"):
        config["mlp_layer_types"] = kinds[:number]
    (folder / "config.json").write_text(json.dumps(config))
    return mtp


@cache
def latent(name: str) -> tuple[Mtp, Path]:
    """As `hybrid`, of a model that attends over latents."""
    spec = dataclasses.replace(spec_named(name), sharded=False)
    folder = make_checkpoint(spec, Path(_FOLDER.name) / name)
    return let_last_layer_draft(folder, load_reference(folder)), folder


# -- drafts ----------------------------------------------------------------------------------------


@torch.no_grad()
def logits_after(reference: HeadReference | Mtp, token_ids: Sequence[int], num: int) -> Tensor:
    """The logits [num, vocab_size] of the greedy drafts after `token_ids`, of which the target has
    computed all but the last."""
    hidden = reference.hidden_of(token_ids[:-1])
    rows, found = list(token_ids[1:]), list[Tensor]()
    while True:
        logits, last = reference.run(rows, hidden)
        found.append(logits)
        if len(found) == num:
            return torch.stack(found)
        rows.append(int(logits.argmax()))
        hidden = torch.cat((hidden, last[None]))


def drafts_after(reference: HeadReference | Mtp, token_ids: Sequence[int], num: int) -> list[int]:
    """Those drafts."""
    drafts: list[int] = logits_after(reference, token_ids, num).argmax(-1).tolist()
    return drafts


@torch.no_grad()
def drafts_of_model(model: PreTrainedModel, token_ids: Sequence[int], num: int) -> list[int]:
    """The greedy drafts of a small model."""
    known = list(token_ids)
    for _ in range(num):
        known.append(int(model(torch.tensor([known])).logits[0, -1].argmax()))
    return known[len(token_ids) :]
