"""Whether the code of an adopted model can be captured as a CUDA graph, found out without a GPU.

A step runs on the meta device, which stands for the GPU: once, as before a capture, and once more
where an operation that torch refuses in a capture fails. minisgl's attention and its experts are
left out: they return rows of the right shape.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minisgl.attention.base import (
    AttentionCall,
    BatchSlots,
    DecodeBatch,
    ForwardBatch,
    PrefillBatch,
)
from minisgl.attention.state import LayerState, PagedKV
from minisgl.config import KVSpec, SharedKV
from minisgl.distributed.communicator import SINGLE_RANK
from minisgl.kernels.moe.experts_product import ExpertsProduct
from minisgl.kernels.rows import Rows
from minisgl.kernels.segments import Segments
from minisgl.layers.formats import WeightFormat
from minisgl.models.adopted.config import AdoptedConfig
from minisgl.models.adopted.load import Blueprint
from minisgl.models.adopted.model import AdoptedModel
from minisgl.models.adopted.rows import Later

META = torch.device("meta")
NUM_DECODES, CHUNK = 3, 7
MAX_PAGES, PAGE_SIZE = 4, 16

# They read numbers of the device on the host. A grouped product reads where its groups end, unless
# it is of bfloat16 and on a GPU of compute capability 9.0 or 10.0.
ON_HOST = frozenset(
    """_local_scalar_dense nonzero masked_select equal is_nonzero bincount _unique2 unique_dim
    unique_consecutive repeat_interleave _grouped_mm grouped_mm_fallback""".split()
)
# They copy what the host has to the device.
FROM_HOST = frozenset((torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor))


class CaptureRefusedError(AssertionError):
    """What torch refuses in a capture."""


class Capturing(TorchFunctionMode):
    """Fails at what torch refuses in a capture: reading numbers on the host, and copies between it
    and the device."""

    def __init__(self) -> None:
        super().__init__()
        self._operations = _Operations()

    def __enter__(self) -> Any:
        self._operations.__enter__()
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._operations.__exit__(*raised)

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(each, Later) for each in tree_leaves((args, kwargs))):
            with self:  # computed in this mode, too
                return Later.__torch_function__(function, types, args, kwargs)
        result = function(*args, **kwargs)
        if function in FROM_HOST and result.is_meta:
            data = kwargs.get("data", args[function is torch.Tensor.new_tensor :][:1])
            _refuse(not any(map(_is_on_device, data)), f"{function.__name__} copies to the device")
        if function == torch.Tensor.__setitem__ and args[0].is_meta:
            indices = [each for each in tree_leaves(args[1]) if isinstance(each, Tensor)]
            by_number = bool(indices) and not isinstance(args[2], Tensor)
            _refuse(by_number, "a number of the host is copied to places of a tensor")
        return result


class _Operations(TorchDispatchMode):
    """Of an operation by elements a single number of the host is an argument."""

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name, kwargs = operation._schema.name.partition("::")[2], kwargs or {}
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if any(map(_is_on_device, given)):
            _refuse(name in ON_HOST, f"{name} reads numbers on the host")
            masks = [each for each in given if each.dtype == torch.bool]
            _refuse(bool(masks) and name.startswith("index"), f"{name} counts what a mask takes")
        result = operation(*args, **kwargs)
        tensors = [each for each in (*given, *tree_leaves(result)) if isinstance(each, Tensor)]
        by_elements = torch.Tag.pointwise in operation.tags and name != "where"
        on_host = [
            each
            for each in tensors
            if not _is_on_device(each) and not (by_elements and each.dim() == 0)
        ]
        both = bool(on_host) and any(map(_is_on_device, tensors))
        _refuse(both, f"{name} has tensors of the host and of the device")
        return result


def _is_on_device(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta


def _refuse(is_refused: bool, what: str) -> None:
    if is_refused:
        raise CaptureRefusedError(what)


def attend(call: AttentionCall, batch: ForwardBatch) -> Tensor:
    """Stands for attention."""
    spec = call.spec
    width = spec.head_dim if spec.value_dim is None else spec.value_dim
    return call.q.new_empty((len(call.q), spec.num_heads, width))


def check(config: AdoptedConfig) -> None:
    """Raise CaptureRefusedError if a step of the model cannot be captured."""
    dtype, layers = torch.bfloat16, range(config.num_layers)
    blueprint = Blueprint(config, dtype, META, MAX_PAGES * PAGE_SIZE, SINGLE_RANK, layers)
    model = blueprint.build(format=WeightFormat(dtype))
    model.prepare()
    states, batch = _states(model, dtype), _batch()

    def step() -> None:
        model.logits(model(batch, states, attend)[:NUM_DECODES])

    with _stand_ins():
        with patch.object(torch, "equal", lambda one, other: True):  # tables of angles are made
            step()
        with Capturing():
            step()


@contextmanager
def _stand_ins() -> Iterator[None]:
    """Addresses of tensors that have none, and rows of no experts."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(torch.Tensor, "data_ptr", _address))
        stack.enter_context(
            patch.object(ExpertsProduct, "reference", lambda self, x, *_: torch.empty_like(x))
        )
        yield


def _address(tensor: Tensor) -> int:
    """Far from those of other storages."""
    return (tensor.untyped_storage()._cdata << 20) + tensor.storage_offset() * tensor.itemsize


def _states(model: AdoptedModel, dtype: torch.dtype) -> list[LayerState]:
    states: list[LayerState] = []
    for spec in model.layer_specs(str(dtype).removeprefix("torch.")):
        if isinstance(spec, SharedKV):
            states.append(states[spec.layer])
        else:
            assert isinstance(spec, KVSpec)
            pages = [
                torch.empty((MAX_PAGES, PAGE_SIZE, *each), dtype=dtype, device=META)
                for each in spec.shapes
            ]
            states.append(PagedKV.of(spec, *pages))
    return states


def _batch() -> ForwardBatch:
    """Decode rows and a chunk, as a captured step has them."""

    def numbers(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    num_rows, int32 = NUM_DECODES + CHUNK, torch.int32
    rows = Rows.of(numbers(num_rows), numbers(num_rows))
    tables = [numbers(count, MAX_PAGES, dtype=int32) for count in (NUM_DECODES, 1)]
    starts = numbers(2, dtype=int32)
    return ForwardBatch(
        token_ids=numbers(num_rows),
        rows=rows,
        own=rows,
        slot_mapping=numbers(num_rows),
        decodes=DecodeBatch(tables[0], numbers(NUM_DECODES, dtype=int32), MAX_PAGES * PAGE_SIZE),
        chunks=PrefillBatch(tables[1], starts, numbers(1, dtype=int32), CHUNK, (), ()),
        slots=BatchSlots(numbers(NUM_DECODES), Segments(numbers(1), numbers(1), starts)),
    )
