"""Weights into a model: streamed from safetensors, or random for benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from minisgl.errors import CheckpointError
from minisgl.layers.linear import MergedLinear
from minisgl.layers.norm import RMSNorm
from minisgl.models.config import ModelConfig
from minisgl.models.hub import safetensors_files
from minisgl.models.transformer import CausalLM

_WEIGHT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_HEAD, _EMBEDDING = "lm_head.weight", "embed_tokens.weight"
_DUMMY_SEED = 0

# Called with the bytes filled so far and the bytes in all.
Progress = Callable[[int, int], None]


def load_model(
    config: ModelConfig,
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str,
    max_seq_len: int,
    progress: Progress | None = None,
) -> CausalLM:
    """Build the model on `device` and fill every parameter.

    load_format 'safetensors' reads the files in `folder`, one tensor at a time; 'dummy' draws
    random weights and reads nothing. Blocks. Raises CheckpointError where the files are not
    exactly what `config` describes.
    """
    model = CausalLM(config, max_seq_len=max_seq_len, dtype=dtype, device=device)
    if load_format == "dummy":
        _fill_randomly(model, device)
    else:
        _fill_from_files(model, safetensors_files(folder), progress or (lambda done, total: None))
    return model


def checkpoint_slots(model: CausalLM) -> dict[str, Tensor]:
    """Where each tensor of a checkpoint goes: its name without 'model.' to (a part of) a weight."""
    slots: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        for kind, weight in module.named_parameters(recurse=False):
            if isinstance(module, MergedLinear):
                parent = path.rpartition(".")[0]
                parts = weight.split(list(module.parts.values()))
                for part, piece in zip(module.parts, parts, strict=True):
                    slots[f"{parent}.{part}.{kind}"] = piece
            else:
                slots[f"{path}.{kind}"] = weight
    return slots


def _fill_from_files(model: CausalLM, files: list[Path], progress: Progress) -> None:
    slots = checkpoint_slots(model)
    total_bytes = sum(slot.nbytes for slot in slots.values())
    done_bytes = 0
    filled: set[str] = set()
    unexpected: list[str] = []
    tied_head: Tensor | None = None
    for file in files:
        for full_name, tensor in _tensors(file):
            name = full_name.removeprefix("model.")
            if name == _HEAD and model.lm_head is None:
                tied_head = tensor
                continue
            if name.endswith("rotary_emb.inv_freq"):  # old checkpoints; computed from the config
                continue
            if name not in slots or tensor.dtype not in _WEIGHT_DTYPES:
                unexpected.append(f"{full_name} ({str(tensor.dtype).removeprefix('torch.')})")
                continue
            slot = slots[name]
            if name in filled:
                raise CheckpointError(
                    f"{file.parent} holds {full_name} twice, again in {file.name}."
                )
            if tensor.shape != slot.shape:
                raise CheckpointError(
                    f"{file}: {full_name} has the shape {list(tensor.shape)}; "
                    f"the config asks for {list(slot.shape)}."
                )
            slot.copy_(tensor)
            filled.add(name)
            done_bytes += slot.nbytes
            progress(done_bytes, total_bytes)
    folder = files[0].parent
    if unexpected:
        raise CheckpointError(
            f"{folder} holds weights that the model does not take: {_few(unexpected)}."
        )
    if missing := slots.keys() - filled:
        raise CheckpointError(f"{folder} lacks weights: {_few(sorted(missing))}.")
    embedding = slots[_EMBEDDING]
    if tied_head is not None and not torch.equal(tied_head.to(embedding), embedding):
        raise CheckpointError(
            f"{folder}: {_HEAD} differs from the embedding, to which the config ties it; "
            "set tie_word_embeddings to false in config.json."
        )


def _tensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of one file, read from disk as they are asked for."""
    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            for name in opened.offset_keys():
                yield name, opened.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error


def _few(names: list[str]) -> str:
    rest = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + rest


def _fill_randomly(model: CausalLM, device: torch.device) -> None:
    """Seeded weights, scaled so that activations keep their size and logits stay moderate."""
    generator = torch.Generator(device).manual_seed(_DUMMY_SEED)
    for module in model.modules():
        for weight in module.parameters(recurse=False):
            if isinstance(module, RMSNorm):
                weight.fill_(1.0)
            elif weight.dim() == 1:
                weight.zero_()
            else:
                weight.normal_(std=weight.shape[-1] ** -0.5, generator=generator)
