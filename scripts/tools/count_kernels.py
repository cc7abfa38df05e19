"""Counts the kernels that a layer launches for a decode step on a GPU, on a machine without one.

python scripts/tools/count_kernels.py Llama-3.1-8B
python scripts/tools/count_kernels.py Qwen3-30B-A3B --model-impl adopted --rows 32

A step of the model (of dummy_config.py) runs on a pretended GPU: Triton's launches are counted, and
torch's operators that compute something. A layer's count is what one layer more adds. Needs Triton
(scripts/tools/try_interpreter.sh installs it into an environment).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from dummy_config import MODELS, config_of
from pretended_gpu import DEVICES, GPU, pretended
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from minisgl.attention.backends import make_attention
from minisgl.attention.base import BatchSlots, DecodeBatch, ForwardBatch, PrefillBatch
from minisgl.models.config import ModelConfig
from minisgl.models.loader import load_model
from minisgl.models.registry import read_model_config
from minisgl.runner.memory import allocate_states

NUM_LAYERS = (6, 12)  # a whole number of the patterns of layers that models have
MAX_SEQ_LEN, PAGE_SIZE = 1024, 16
# Operators that make views, or tensors without contents.
VIEWS = frozenset(
    """view _unsafe_view slice select split split_with_sizes chunk transpose t permute unsqueeze
    squeeze expand as_strided detach alias unbind empty empty_like empty_strided new_empty
    reshape _reshape_alias flatten lift_fresh""".split()
)


class Operators(TorchDispatchMode):
    """Counts the operators that compute something."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self._counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name not in VIEWS:
            self._counts[name] += 1
        return func(*args, **kwargs or {})


def config_with(model: str, num_layers: int, model_impl: str) -> ModelConfig:
    with tempfile.TemporaryDirectory() as name:
        content = config_of(model) | {"num_hidden_layers": num_layers}
        (Path(name) / "config.json").write_text(json.dumps(content))
        return read_model_config(Path(name), model_impl=model_impl)


def counted(config: ModelConfig, num_rows: int) -> Counter[str]:
    """The kernels of a step with that many decode rows, by their names."""
    decoder = load_model(
        config,
        Path(),
        dtype=torch.bfloat16,
        device=GPU,
        load_format="dummy",
        max_seq_len=MAX_SEQ_LEN,
    )
    decoder.prepare()
    states = allocate_states(
        decoder.layer_specs("bfloat16"), num_pages=64, page_size=PAGE_SIZE, num_slots=0, device=GPU
    )
    attention = make_attention("triton", "triton")
    batch = decode_rows(num_rows)
    attention.prepare(batch)
    counts = Counter[str]()

    def run(kernel: Any, *args: Any, **kwargs: Any) -> None:
        counts[kernel.__name__.lstrip("_")] += 1

    with mock.patch.object(JITFunction, "run", run), Operators(counts), torch.inference_mode():
        decoder(batch, states, attention)
    return counts


def decode_rows(num_rows: int) -> ForwardBatch:
    def integers(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=GPU)

    table = integers(num_rows, MAX_SEQ_LEN // PAGE_SIZE, dtype=torch.int32)
    none = integers(0)
    return ForwardBatch(
        token_ids=integers(num_rows),
        positions=integers(num_rows),
        slot_mapping=integers(num_rows),
        decodes=DecodeBatch(table, integers(num_rows, dtype=torch.int32), MAX_SEQ_LEN),
        chunks=PrefillBatch(table[:0], none, none, 0, (), ()),
        slots=BatchSlots(none, none),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=MODELS, metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--rows", type=int, default=1, help="decode rows of the step")
    parser.add_argument("--model-impl", default="auto", choices=("auto", "native", "adopted"))
    given = parser.parse_args()
    few, many = NUM_LAYERS
    configs = [config_with(given.model, number, given.model_impl) for number in NUM_LAYERS]
    with pretended(DEVICES["sm_90"]):
        less, more = (counted(config, given.rows) for config in configs)
    for name, count in (more - less).most_common():
        print(f"{count / (many - few):6.2f}  {name}")
    print(f"{(more.total() - less.total()) / (many - few):6.2f}  kernels a layer")


if __name__ == "__main__":
    main()
