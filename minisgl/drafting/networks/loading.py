"""From what the option names to a network with its weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from minisgl.config import ModelFacts
from minisgl.distributed.communicator import SINGLE_RANK, Communicator
from minisgl.drafting.networks.eagle3 import Eagle3, Eagle3Config, is_eagle3, read_eagle3
from minisgl.drafting.networks.mtp import Mtp, mtp_config, mtp_name_of
from minisgl.drafting.networks.network import DraftNetwork
from minisgl.drafting.networks.small_model import SmallModel
from minisgl.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError
from minisgl.layers.linear import VocabParallelEmbedding
from minisgl.models.config import ModelConfig, NativeConfig
from minisgl.models.config_reader import CONFIG_FILE, DRAFTING_LEFT_OUT, Fields, read_json
from minisgl.models.decoder import Decoder
from minisgl.models.deepseek import LatentConfig
from minisgl.models.dummy import fill_randomly
from minisgl.models.filling import fill_from_files
from minisgl.models.formats import QuantizedFormat
from minisgl.models.hub import locate_model, safetensors_files
from minisgl.models.kv_scales import is_kv_scale
from minisgl.models.loader import (
    DUMMY_SEED,
    load_model,
    stored_tensors,
    weight_format,
)
from minisgl.models.quantization import is_quantizable, read_quantization
from minisgl.models.registry import read_model_config
from minisgl.models.target import Target
from minisgl.models.targets import Destinations, Names, checkpoint_stacks, checkpoint_targets
from minisgl.models.transformer import CausalLM
from minisgl.paths import path_of
from minisgl.shards import whole

NGRAM, MTP = "ngram", "mtp"  # what --speculative takes beside a folder or an id
_EMBEDDING = "embed_tokens.weight"
# What speaks for quantised weights in the name of a tensor.
_SIGNS = ("scale", "qweight", "weight_packed")


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkConfig:
    """What a network is, before its weights are read."""

    kind: str  # model, eagle3 or mtp
    of: NativeConfig | Eagle3Config
    quantization: QuantizedFormat | None
    folder: Path
    stored_layer: int | None = None  # of mtp: the number of its layer, if it has one there

    @property
    def layers(self) -> NativeConfig:
        """The config of its layers."""
        return self.of.layer if isinstance(self.of, Eagle3Config) else self.of

    def attending_as(self, target: ModelConfig) -> NetworkConfig:
        """The same, with attention as in ModelConfig.by_request if the target's is."""
        if not isinstance(target, NativeConfig) or target.divides_heads:
            return self
        if isinstance(self.of, Eagle3Config):
            return replace(self, of=replace(self.of, layer=self.of.layer.by_request()))
        return replace(self, of=self.of.by_request())

    def added_to(self, model: ModelFacts) -> ModelFacts:
        """The facts of a model with which it drafts."""
        layers = self.layers.facts().attention
        return replace(model, draft_layers=layers, drafts_look_ahead=self.kind != "model")

    def noted_in(self, target: ModelConfig) -> ModelConfig:
        """The config of a model, whose notes say that it drafts."""
        notes, what = target.notes, f"{self.kind} in {self.folder}"
        if self.kind == MTP:
            notes = tuple(note for note in notes if not note.startswith(DRAFTING_LEFT_OUT))
            what = f"{MTP}, a layer of the checkpoint"
        return replace(target, notes=(*notes, f"tokens are drafted by {what}"))


def find_network(
    name: str, target: ModelConfig, folder: Path, *, load_format: str, num_ranks: int = 1
) -> NetworkConfig | None:
    """What --speculative names, if it has weights. folder: of the target.

    Blocks: a Hub id is downloaded. Raises as `read_network` and `locate_model` do.
    """
    if name in ("", NGRAM):
        return None
    if name == MTP:
        return read_mtp(folder, target, num_ranks)
    found = path_of("--speculative", name)
    if not found.is_dir():
        found = locate_model(name, load_format=load_format)
    return read_network(found, target, num_ranks)


def read_network(folder: Path, target: ModelConfig, num_ranks: int = 1) -> NetworkConfig:
    """Read what is in `folder`: a small model, or an EAGLE-3 head.

    num_ranks: that divide it. Raises UnsupportedModelError where it does not fit to the target,
    and ModelNotFoundError, CheckpointError and UnsupportedModelError as read_model_config does.
    """
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise ModelNotFoundError(f"{folder} holds no drafter: it has no {CONFIG_FILE}.")
    values = read_json(path)
    found: NetworkConfig
    if is_eagle3(values):
        if not isinstance(target, NativeConfig):
            raise UnsupportedModelError(
                f"{folder}: EAGLE-3 heads are supported for models that minisgl has code of its "
                f"own for, not for {target.architecture} here; allowed: ngram, or a small model."
            )
        head = read_eagle3(values, str(path), target)
        scheme = read_quantization(Fields(values, str(path)), folder)
        found = NetworkConfig(kind="eagle3", of=head, quantization=scheme, folder=folder)
        if head.layer.hidden_size != target.hidden_size:
            raise UnsupportedModelError(
                f"{folder}: the head was made for a hidden_size of {head.layer.hidden_size:,}; the "
                f"model has {target.hidden_size:,}."
            )
    else:
        config = read_model_config(folder)
        if not isinstance(config, NativeConfig) or config.facts().states:
            raise UnsupportedModelError(
                f"{folder}: {config.architecture} cannot draft; allowed: a model that minisgl has "
                "code of its own for, whose layers all attend, or an EAGLE-3 head."
            )
        scheme = config.quantization
        found = NetworkConfig(kind="model", of=config, quantization=scheme, folder=folder)
    return _fitting(found, target, num_ranks)


def read_mtp(folder: Path, target: ModelConfig, num_ranks: int = 1) -> NetworkConfig:
    """The layers for drafts in the checkpoint of the target itself. Raises as read_network does."""
    config = mtp_config(target)
    values = read_json(folder / CONFIG_FILE)
    text = values.get("text_config")
    fields = Fields(text if isinstance(text, dict) else values, CONFIG_FILE)
    fields.require("mtp_use_dedicated_embeddings", (None, False), ", with mtp")
    name, layer = "mtp_num_hidden_layers", None
    num_layers = fields.values.get(name, 1)
    if isinstance(config, LatentConfig):
        name, layer = "num_nextn_predict_layers", target.num_layers
        num_layers = config.num_drafting_layers
    if num_layers != 1:
        raise UnsupportedModelError(f"{CONFIG_FILE}: {name} is {num_layers}; mtp takes 1.")
    found = NetworkConfig(
        kind=MTP, of=config, quantization=target.quantization, folder=folder, stored_layer=layer
    )
    return _fitting(found, target, num_ranks)


def _fitting(found: NetworkConfig, target: ModelConfig, num_ranks: int) -> NetworkConfig:
    found = found.attending_as(target)
    layers = found.layers
    if layers.vocab_size != target.vocab_size:
        raise UnsupportedModelError(
            f"{found.folder}: the drafter has a vocabulary of {layers.vocab_size:,} tokens, the "
            f"model one of {target.vocab_size:,}; both must be the same."
        )
    if not layers.facts().can_divide(num_ranks):
        raise UnsupportedModelError(
            f"{found.folder}: the heads or sizes of the drafter do not divide into --tp "
            f"{num_ranks}."
        )
    return found


def load_network(
    config: NetworkConfig,
    target: Decoder,
    *,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str,
    max_seq_len: int,
    ranks: Communicator = SINGLE_RANK,
) -> DraftNetwork:
    """Build the network, or this rank's part of it, on `device`, and fill its weights as
    `load_model` does. Blocks. Raises CheckpointError."""
    of, folder = config.of, config.folder
    if config.kind == "model":
        assert isinstance(of, NativeConfig)
        model = load_model(
            of,
            folder,
            dtype=dtype,
            device=device,
            load_format=load_format,
            max_seq_len=max_seq_len,
            ranks=ranks,
        )
        return SmallModel(model)
    assert isinstance(target, CausalLM), "others are refused by read_network"
    files = [] if load_format == "dummy" else _files(folder)
    of_mtp = partial(mtp_name_of, layer=config.stored_layer)
    names = Names(of_mtp if config.kind == MTP else _head_name_of, is_quantizable)
    names = names.in_format(config.quantization)
    stored = stored_tensors(files, names)
    if files and not stored:
        prefix = "mtp" if config.stored_layer is None else f"model.layers.{config.stored_layer}"
        raise CheckpointError(
            f"{folder} holds no layers that draft tokens: no tensor is {prefix}.*. Take a "
            f"checkpoint with them, or another --speculative, such as {NGRAM}."
        )
    scheme = config.quantization
    of_weights = [name for name in stored if not is_kv_scale(name)]
    if files and not any(sign in name for name in of_weights for sign in _SIGNS):
        scheme = None  # as exporters leave the layers for drafts
    format = weight_format(scheme, folder, files, dtype, device, names)
    network: Mtp | Eagle3
    if isinstance(of, Eagle3Config):
        network = Eagle3(of, max_seq_len=max_seq_len, format=format, device=device, comm=ranks)
        if _EMBEDDING in stored:
            with device:
                size = of.layer.hidden_size
                network.embed_tokens = VocabParallelEmbedding(target.vocab, size, dtype, ranks)
    else:
        network = Mtp(of, target, max_seq_len=max_seq_len, format=format, device=device, comm=ranks)
    if files:
        fill_from_files(_destinations(network, scheme), names, files, lambda *_: None)
    else:
        fill_randomly(network, device, DUMMY_SEED + ranks.rank)
    if isinstance(network, Eagle3):
        own, of_target = network.embed_tokens, target.embed_tokens
        if own is None or (of_target is not None and torch.equal(own.weight, of_target.weight)):
            network.embed_tokens = of_target
    return network


def _files(folder: Path) -> list[Path]:
    """As safetensors_files; many heads are published in another format."""
    if not any(folder.glob("*.safetensors")):
        name = next((path.name for path in sorted(folder.glob("*.bin"))), "pytorch_model.bin")
        raise CheckpointError(
            f"{folder} has no weights in safetensors. {name}, as many heads are published, is in "
            "PyTorch's pickle format, which can run any code when it is read; where you trust it, "
            "convert it in that folder: python -c 'import torch, safetensors.torch as s; "
            f'w = torch.load("{name}", weights_only=True); '
            's.save_file({k: w[k].contiguous() for k in w}, "model.safetensors")\''
        )
    return safetensors_files(folder)


def _head_name_of(stored_name: str) -> str | None:
    """What a tensor of an EAGLE-3 checkpoint is called in the network; None for what d2t says,
    too."""
    name = stored_name.removeprefix("model.")
    if name.startswith("midlayer."):
        return name.replace("midlayer.", "layers.0.", 1)
    return None if name == "t2d" else name


def _destinations(network: Mtp | Eagle3, scheme: QuantizedFormat | None) -> Destinations:
    targets = checkpoint_targets(network, scheme)
    if isinstance(network, Eagle3):
        d2t = network.d2t
        is_required = len(d2t) < network.vocab.whole
        cut = (whole(len(d2t)),)
        del targets[".d2t"]
        targets["d2t"] = Target(d2t, cut, dtypes=("I64", "I32"), is_required=is_required)
    return Destinations(
        targets=targets,
        stacks=checkpoint_stacks(network, scheme),
        scheme=scheme,
        is_left_out=lambda name: False,
    )
