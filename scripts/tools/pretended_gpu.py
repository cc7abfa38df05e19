"""A GPU that is not there: the engine runs on it, with sizes and without numbers.

Tensors of it are torch's meta tensors, which say that they are on CUDA. Nothing is computed: a
condition on numbers holds (that scales are small, say), and what reads other numbers fails.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from numpy.typing import ArrayLike
from torch import Tensor
from torch.overrides import TorchFunctionMode

from minisgl.device.copy_lanes import HostCopyLane
from minisgl.device.lanes import EventMark, HostCopy, Lanes
from minisgl.distributed.communicator import SINGLE_RANK, Communicator
from minisgl.distributed.peers import PeerCommunicator
from minisgl.kernels.tuning import H200, UNTRIED, DeviceTuning
from minisgl.matcher import MaskRows
from minisgl.models.adopted.rows import Later

GPU = torch.device("cuda")
META = torch.device("meta")
FREE_BYTES = 140 << 30


@dataclass(frozen=True, slots=True)
class Device:
    """What CUDA says of a GPU."""

    capability: tuple[int, int]
    num_sms: int
    shared_bytes: int  # of a program at most

    @property
    def arch(self) -> int:
        return 10 * self.capability[0] + self.capability[1]


DEVICES = {
    "sm_80": Device((8, 0), 108, 163 << 10),  # A100
    "sm_90": Device((9, 0), 132, 227 << 10),  # H100, H200
    "sm_100": Device((10, 0), 148, 227 << 10),  # B200
}


class MetaAsGPU(TorchFunctionMode):
    """Creates meta tensors where CUDA is asked for, and lets them say that they are on CUDA."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(arg, Later) for arg in args):  # computed in this mode, too
            with self:
                return Later.__torch_function__(function, types, args, kwargs)
        if function is torch.device:
            return function(*args, **kwargs)
        if function == torch.Tensor.device.__get__:
            device = function(*args)
            return GPU if device == META else device
        if function is torch.equal:
            return True
        if function == torch.Tensor.is_cuda.__get__:
            return args[0].is_meta
        if function == torch.Tensor.__bool__ and args[0].is_meta:
            return True
        kwargs.pop("pin_memory", None)
        kwargs = {name: _to_meta(value) for name, value in kwargs.items()}
        return function(*map(_to_meta, args), **kwargs)


def _to_meta(value: Any) -> Any:
    return META if isinstance(value, torch.device) and value.type == "cuda" else value


class PretendedLanes(Lanes):
    """Lanes that queue nothing: what a CPU would run at once needs no order."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(torch.device("cpu"))
        self.device = device

    def enter_thread(self) -> None:
        if not torch.empty(0, device=META).is_cuda:  # modes belong to a thread
            MetaAsGPU().__enter__()

    def upload(self, parts: Sequence[ArrayLike]) -> tuple[Tensor, ...]:
        return tuple(part.to(self.device) for part in super().upload(parts))

    def upload_masks(self, masks: MaskRows) -> Tensor:
        return super().upload_masks(masks).to(self.device)

    def download(self, tensors: Sequence[Tensor]) -> HostCopy:
        zeros = (torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in tensors)
        return HostCopy(tuple(zeros), EventMark(None))


class PretendedPeers:
    """Stands for PeerMemory: addresses that no memory has, aligned like those of allocations."""

    error = None

    def addresses(self, own: Tensor, rank: int, num_ranks: int, group: Any) -> tuple[int, ...]:
        return tuple((number + 1) << 40 for number in range(num_ranks))


def pretended_ranks(num_ranks: int, hidden_size: int, dtype: torch.dtype) -> Communicator:
    """The first of `num_ranks` ranks with peer access, whose larger collectives are NCCL's."""
    if num_ranks == 1:
        return SINGLE_RANK
    nccl: Any = SimpleNamespace(
        rank=0,
        size=num_ranks,
        device=GPU,
        group=None,
        host_min=lambda number: number,
        all_gather=lambda part: torch.cat([part] * num_ranks, dim=1),
    )
    return PeerCommunicator(nccl, hidden_size, dtype)


# Where UNTRIED has tiles of its own for a kernel. It lets libraries do what the others would.
UNTRIED_TILES = (
    "prefill_tiles fp8_prefill_tiles latent_decode_tiles latent_prefill_tiles delta_prefill "
    "mxfp4_many_tiles"
).split()


@contextlib.contextmanager
def pretended(device: Device) -> Iterator[None]:
    """Let torch, Triton and the engine find this device, and no other, in a process that has not
    asked for one before. Our kernels count as tried on it, so that all of them are launched, with
    the tiles that ship. Weights stay as they are allocated, and torch does what cuBLASLt would."""
    _let_triton_find(device)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(torch.cuda, **_cuda_of(device)))
        for replaced, stand_in in (
            ("minisgl.runner.load.Lanes", PretendedLanes),
            ("minisgl.parts.adapters.device.copy_lane", lambda lanes: HostCopyLane()),
            ("minisgl.distributed.peers.PeerMemory", PretendedPeers),
            ("minisgl.models.loader.fill_randomly", lambda model, device, seed: None),
            ("minisgl.kernels.linear.cublaslt.load_products", lambda dtype, device: None),
            ("minisgl.kernels.hardware._GENERATIONS", (device.capability[0],)),
            ("minisgl.kernels.tuning.H200", _tuning_of(device)),
        ):
            stack.enter_context(mock.patch(replaced, stand_in))
        stack.enter_context(MetaAsGPU())
        yield


def _tuning_of(device: Device) -> DeviceTuning:
    if device.capability[0] == 9:
        return H200
    return replace(H200, **{name: getattr(UNTRIED, name) for name in UNTRIED_TILES})


def _cuda_of(device: Device) -> dict[str, Callable[..., Any]]:
    """The functions of torch.cuda that the engine calls."""
    return {
        "is_available": lambda: True,
        "device_count": lambda: 8,
        "current_device": lambda: 0,
        "get_device_capability": lambda *_: device.capability,
        "get_device_properties": lambda *_: SimpleNamespace(
            multi_processor_count=device.num_sms, total_memory=FREE_BYTES
        ),
        "is_current_stream_capturing": lambda: False,
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "mem_get_info": lambda *_: (FREE_BYTES, FREE_BYTES),
        "memory_allocated": lambda *_: 0,
        "reset_peak_memory_stats": lambda: None,
        "max_memory_allocated": lambda: 0,
    }


def _let_triton_find(device: Device) -> None:
    """Give Triton a driver for the device, for as long as the process lives."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    properties = {"max_shared_mem": device.shared_bytes, "multiprocessor_count": device.num_sms}
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", device.arch, 32),
            get_current_device=lambda: 0,
            get_current_stream=lambda index: 0,
            utils=SimpleNamespace(get_device_properties=lambda index: properties),
        )
    )
