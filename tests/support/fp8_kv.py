"""Small checkpoints with KV scales, and what transformers computes with K and V rounded as an FP8
cache does."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import greedy_reference, load_reference, make_checkpoint, spec_named
from support.parity import FOLDER, NUM_TOKENS, Case, case_of
from torch import Tensor
from transformers import PreTrainedModel

from minisgl.config import KVScales
from minisgl.kernels.elementwise.reference import to_stored
from minisgl.models.hub import INDEX_FILE, SINGLE_FILE

# Of small and large values, one that saturates, and one that is no power of two.
SCALES = (KVScales(0.05, 0.01), KVScales(0.011, 0.003), KVScales(0.5, 0.07))


def add_tensors(folder: Path, tensors: Mapping[str, Tensor], file: str = "scales") -> Path:
    """Make these the tensors of another safetensors file of a checkpoint."""
    index, whole = folder / INDEX_FILE, folder / SINGLE_FILE
    if whole.is_file():
        weights = whole.rename(folder / "weights.safetensors")
        weight_map = dict.fromkeys(load_file(weights), weights.name)
        index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    name = f"{file}.safetensors"
    save_file(dict(tensors), folder / name)
    written = json.loads(index.read_text())
    others = {tensor: of for tensor, of in written["weight_map"].items() if of != name}
    index.write_text(json.dumps(written | {"weight_map": others | dict.fromkeys(tensors, name)}))
    return folder


def scale_tensors(scales: Sequence[KVScales]) -> dict[str, Tensor]:
    """As llm-compressor writes them."""
    return {
        f"model.layers.{layer}.self_attn.{kind}_scale": torch.tensor(value)
        for layer, its in enumerate(scales)
        for kind, value in its._asdict().items()
    }


@contextmanager
def rounded_attention(
    reference: PreTrainedModel, scales: Sequence[KVScales]
) -> Iterator[PreTrainedModel]:
    """The reference, whose attention sees K and V as an FP8 cache holds them."""
    modeling: Any = sys.modules[type(reference).__module__]
    plain: Callable[..., Any] = modeling.eager_attention_forward

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **more: Any
    ) -> Any:
        its = scales[module.layer_idx]
        key, value = (
            to_stored(x, scale).float() * scale for x, scale in ((key, its.k), (value, its.v))
        )
        return plain(module, query, key, value, *args, **more)

    modeling.eager_attention_forward = attend
    try:
        yield reference
    finally:
        modeling.eager_attention_forward = plain


@cache
def fp8_case(name: str, *, scaled: bool) -> Case:
    """A case of parity.py with K and V in FP8: with SCALES in the checkpoint, or with none."""
    plain = case_of(name)
    folder = make_checkpoint(spec_named(name), Path(FOLDER.name) / f"{name}-fp8-{scaled}")
    scales = SCALES[: plain.spec.num_layers] if scaled else (KVScales(),) * plain.spec.num_layers
    if scaled:
        add_tensors(folder, scale_tensors(scales))
    with rounded_attention(load_reference(folder), scales) as reference:
        runs = [greedy_reference(reference, prompt, NUM_TOKENS) for prompt in plain.prompts]
    return Case(plain.spec, folder, plain.prompts, runs)
