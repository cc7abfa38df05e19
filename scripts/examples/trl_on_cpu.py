"""Lets TRL's asynchronous trainer run on a CPU, and without vLLM.

TRL imports functions of the package vllm that send weights by NCCL. `stand_in_for_vllm` gives it
others, which send through torch.distributed (gloo), as a server of minisgl on a CPU receives.
`compute_on_cpu` replaces what TRL has for GPUs only.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore, distributed_c10d
from torch.nn.functional import scaled_dot_product_attention

VERSION = "0.28.0"  # whose functions these are
GROUP = "weight_transfer"  # as minisgl calls the group
PACKED_BYTES = 1 << 30  # a broadcast ends with the tensor that exceeds this
LIMIT = timedelta(seconds=120)


def get_ip() -> str:
    return "127.0.0.1"


def get_open_port() -> int:
    with socket.socket() as free:
        free.bind((get_ip(), 0))
        return int(free.getsockname()[1])


def trainer_init(info: dict[str, Any]) -> SimpleNamespace:
    """Join the group as rank 0. info: what the server is told of the group."""
    size = info["world_size"]
    store = TCPStore(
        info["master_address"], info["master_port"], size, is_master=True, timeout=LIMIT
    )
    group, _ = distributed_c10d._new_process_group_helper(
        *(size, 0, [], "gloo", PrefixStore(GROUP, store)),
        group_name=distributed_c10d.GroupName(GROUP),
        timeout=LIMIT,
    )
    distributed_c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
    # TRL empties `group` at the end.
    return SimpleNamespace(members=group, group=SimpleNamespace(store=store))


def packed_nccl_broadcast_producer(
    iterator: Iterable[Any],
    group: SimpleNamespace,
    src: int,
    post_iter_func: Callable[[Any], Tensor],
) -> None:
    """Broadcast the tensors that `post_iter_func` finds in items, as the bytes of several."""
    for packed in _packed(map(post_iter_func, iterator)):
        dist.broadcast(packed, src, group.members)


def _packed(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    parts: list[Tensor] = []
    for tensor in tensors:
        parts.append(tensor.detach().contiguous().view(-1).view(torch.uint8))
        if sum(map(len, parts)) > PACKED_BYTES:
            yield torch.cat(parts)
            parts = []
    if parts:
        yield torch.cat(parts)


def stand_in_for_vllm() -> None:
    """Let `import vllm` find these functions. Before TRL is imported, in each of its processes."""
    for name, found in {
        # Those that are None make engines in the trainer's own process.
        "vllm": {
            "__version__": VERSION,
            "LLM": None,
            "RequestOutput": None,
            "SamplingParams": None,
        },
        "vllm.sampling_params": {"StructuredOutputsParams": None},
        "vllm.utils": {},
        "vllm.utils.network_utils": {"get_ip": get_ip, "get_open_port": get_open_port},
        "vllm.distributed": {},
        "vllm.distributed.weight_transfer": {},
        "vllm.distributed.weight_transfer.nccl_common": {"trainer_init": trainer_init},
        "vllm.distributed.weight_transfer.packed_tensor": {
            "packed_nccl_broadcast_producer": packed_nccl_broadcast_producer
        },
    }.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        module.__file__ = __file__  # or it would count as an empty folder
        vars(module).update(found)
        sys.modules[name] = module


def compute_on_cpu() -> None:
    """Let trainers that are made from now on compute without a GPU."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from trl.experimental.async_grpo import async_grpo_trainer as trl

    def register() -> None:
        AttentionInterface.register(trl.TREE_ATTENTION, attend)
        AttentionMaskInterface.register(trl.TREE_ATTENTION, lambda **_: None)

    trl.register_tree_attention = register
    trl.get_peak_flops_per_device = lambda *_: None


def attend(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, **tree: Any
) -> tuple[Tensor, None]:
    """The attention of rows that several answers share, such as those of their prompt.

    They come in segments. A segment attends to itself and to the path that leads to it, whose rows
    `tree_kv_index` has one path after the other.
    """
    paths = tree["tree_kv_index"].tensor_split(tree["tree_cu_seqlens_k"][1:-1].long())
    segments = query.tensor_split(tree["tree_cu_seqlens_q"][1:-1].long(), dim=2)
    outputs = []
    for rows, path in zip(segments, paths, strict=True):
        seen = torch.ones(rows.shape[2], len(path), dtype=torch.bool)
        outputs.append(
            scaled_dot_product_attention(
                *(rows, key[:, :, path], value[:, :, path]),
                attn_mask=seen.tril(len(path) - rows.shape[2]),
                scale=tree["scaling"],
                enable_gqa=True,
            )
        )
    return torch.cat(outputs, dim=2).transpose(1, 2), None
