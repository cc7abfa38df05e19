"""The group in which a trainer sends its weights: itself, as rank 0, and the ranks of engines."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from minisgl.distributed.addresses import GroupAddress
from minisgl.errors import ConfigError

LIMIT_S = 120.0  # for all to join, and for each tensor to come
LEFT_S = 5.0  # for what a trainer that has ended has still sent
POLL_S = 0.0001
PACKED_BYTES = 1 << 30  # a bucket of vLLM's senders ends with the tensor that exceeds this
_DEVICES = {"gloo": "cpu", "nccl": "cuda"}  # the first of a backend, as keys in the store have it


class WeightGroup:
    """Receives what rank 0 broadcasts."""

    def __init__(self, address: GroupAddress, rank: int, device: torch.device) -> None:
        """rank: in the group. Blocks until all have joined. Raises ConfigError, RuntimeError or
        OSError.

        The group is one beside those of the engine. Its keys in the store are those of a group that
        torch.distributed forms by its name, which is what trainers do.
        """
        if address.backend == "nccl" and device.type != "cuda":
            raise ConfigError("backend", "nccl", "it sends between GPUs; allowed on a CPU: gloo")
        limit = timedelta(seconds=LIMIT_S)
        place = (address.master_address, address.master_port)
        store: Any = TCPStore(*place, address.world_size, is_master=False, timeout=limit)
        name = address.group_name
        for prefix in (name, f"{name}/", f"{_DEVICES[address.backend]}/"):
            store = PrefixStore(prefix, store)
        self.packed = address.packed
        self._device, self._backend = device, address.backend
        self._group: Any
        if address.backend == "gloo":
            self._group = dist.ProcessGroupGloo(store, rank, address.world_size, timeout=limit)
        else:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            with _no_watchdog():
                self._group = dist.ProcessGroupNCCL(store, rank, address.world_size, options)
        # Who has the store, mostly the trainer, has the other end as long as it lives.
        self._trainer = socket.create_connection(place, timeout=LIMIT_S)
        self._trainer.setblocking(False)

    def receive(
        self, tensors: Iterable[tuple[list[int], torch.dtype]], *, packed: bool = False
    ) -> Iterator[Tensor]:
        """The tensors that rank 0 broadcasts next, given their shapes and dtypes, on the device.
        packed: as the bytes of several. Blocks. Raises RuntimeError if that ends."""
        if not packed:
            yield from itertools.starmap(self._received, tensors)
            return
        bucket: list[tuple[list[int], torch.dtype, int]] = []
        num_bytes = 0
        for shape, dtype in tensors:
            size = math.prod(shape) * dtype.itemsize
            bucket.append((shape, dtype, size))
            num_bytes += size
            if num_bytes > PACKED_BYTES:
                yield from self._unpacked(bucket)
                bucket, num_bytes = [], 0
        if bucket:
            yield from self._unpacked(bucket)

    def _unpacked(self, bucket: list[tuple[list[int], torch.dtype, int]]) -> Iterator[Tensor]:
        sizes = [num_bytes for *_, num_bytes in bucket]
        packed = self._received([sum(sizes)], torch.uint8)
        for (shape, dtype, _), part in zip(bucket, packed.split(sizes), strict=True):
            yield part.clone().view(dtype).view(shape)  # where the alignment suits its dtype

    def _received(self, shape: list[int], dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        options = dist.BroadcastOptions()
        options.rootRank, options.asyncOp = 0, True
        work = self._group.broadcast([tensor], options)
        # NCCL itself notices neither that a trainer on this machine has ended nor that it is late.
        ends, reason = time.monotonic() + LIMIT_S, f"nothing has come for {LIMIT_S:g} s"
        while not work.is_completed():
            now = time.monotonic()
            if ends > now + LEFT_S and self._trainer_has_ended():
                ends, reason = now + LEFT_S, "the trainer has ended"
            if now > ends:
                raise RuntimeError(reason)
            time.sleep(POLL_S)
        work.wait()  # raises what it has ended with
        if self._trainer.fileno() < 0:  # a broadcast that is aborted ends like others
            raise RuntimeError("the group was left")
        return tensor

    def _trainer_has_ended(self) -> bool:
        try:
            return not self._trainer.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        """Leave the group, whatever the others do: a broadcast that has begun ends."""
        self._trainer.close()
        if self._backend == "nccl":
            # To destroy it would wait for the others, and even this has hung in some releases.
            aborting = threading.Thread(target=self._group.abort, daemon=True)
            aborting.start()
            aborting.join(LIMIT_S)


@contextlib.contextmanager
def _no_watchdog() -> Iterator[None]:
    """Keep NCCL's group, which reads this variable when it is formed, from ending the process once
    a broadcast fails."""
    name = "TORCH_NCCL_BLOCKING_WAIT"
    is_set = name in os.environ
    os.environ.setdefault(name, "1")
    try:
        yield
    finally:
        if not is_set:
            del os.environ[name]
