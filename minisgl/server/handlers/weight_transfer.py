"""The endpoints by which clients of vLLM, such as TRL's, transfer weights: --trainer."""

from __future__ import annotations

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from minisgl.distributed.addresses import GroupAddress
from minisgl.errors import InvalidRequestError
from minisgl.server.handlers.training import Done, admins, infos_of, told, updated
from minisgl.server.http.encoding import json_response
from minisgl.server.service import Asked, Service

_GROUP = "weight_transfer"


class Place(Struct, kw_only=True):
    master_address: str
    """Where the group meets. Example: `"127.0.0.1"`"""
    master_port: int
    """Its port. Example: `51216`"""
    rank_offset: int
    """The rank of the engine's first rank. Example: `1`"""
    world_size: int
    """The ranks of the group, with the trainer, which is rank 0. Example: `2`"""
    packed: bool = False
    """Whether tensors come as the bytes of several, some GiB at a time. Example: `true`"""
    backend: str | None = None
    """Of a group of torch.distributed: nccl, or gloo, the default on a CPU. Example: `"gloo"`"""


class InitTransfer(Struct, kw_only=True):
    init_info: Place
    """The group in which the trainer sends weights."""


class Coming(Struct, kw_only=True):
    names: list[str]
    """The tensors that the trainer sends now, in this order. Example: `["model.norm.weight"]`"""
    dtype_names: list[str]
    """Their dtypes. Example: `["bfloat16"]`"""
    shapes: list[list[int]]
    """Their shapes. Example: `[[1024]]`"""
    packed: bool = False
    """As of the group. Example: `true`"""


class UpdateWeights(Struct, kw_only=True):
    update_info: Coming
    """What comes."""


class TransferConfig(Struct):
    backend: str


class ModelConfig(Struct):
    model: str
    dtype: str
    max_model_len: int
    logprobs_mode: str


class LoraConfig(Struct):
    max_loras: int
    max_lora_rank: int


class ParallelConfig(Struct):
    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int = 1


class Config(Struct):
    weight_transfer_config: TransferConfig
    model_config: ModelConfig
    lora_config: LoraConfig | None
    parallel_config: ParallelConfig


class ServerInfo(Struct):
    vllm_config: Config


async def server_info(service: Service, request: Request) -> Response:
    """What clients read of vLLM's options, by the names of those."""
    config = service.state.engine().config
    lora = None
    if service.state.config.lora_root:
        lora = LoraConfig(config.max_loras, config.max_lora_rank)
    return json_response(
        ServerInfo(
            Config(
                TransferConfig(backend_of(config.device)),
                ModelConfig(
                    service.state.model_names()[0],
                    f"torch.{config.dtype}",
                    config.max_seq_len,
                    config.logprobs_mode,
                ),
                lora,
                ParallelConfig(config.tp, config.pp),
            )
        )
    )


def backend_of(device: str) -> str:
    return "gloo" if device == "cpu" else "nccl"


async def init_transfer(service: Service, asked: Asked[InitTransfer]) -> Response:
    place, backend = asked.body.init_info, asked.body.init_info.backend
    if backend is None:
        backend = backend_of(asked.engine.config.device)
        if backend == "nccl":
            raise InvalidRequestError(
                "init_info.backend",
                "without it, clients of vLLM join by vLLM's StatelessProcessGroup, which sends "
                "pickles and is not supported; allowed: nccl or gloo, of a group of "
                "torch.distributed.",
            )
    address = GroupAddress(
        place.master_address,
        place.master_port,
        place.rank_offset,
        place.world_size,
        _GROUP,
        backend,
        place.packed,
    )
    await asked.engine.weights.join_group(address)
    return json_response(Done("The group of the trainer was joined."))


async def start_update(service: Service, request: Request) -> Response:
    await service.state.engine().weights.begin()
    return json_response(Done("Weights may come; requests wait until the update is finished."))


async def update_weights(service: Service, asked: Asked[UpdateWeights]) -> Response:
    told_of, weights = asked.body.update_info, asked.engine.weights
    infos = infos_of(told_of.names, told_of.dtype_names, told_of.shapes, "dtype_names")
    return updated(await weights.update_from_group(_GROUP, infos, packed=told_of.packed))


async def finish_update(service: Service, request: Request) -> Response:
    await service.state.engine().weights.finish()
    return json_response(Done("Requests are computed with the weights that have come."))


_PLACE = {"master_address": "127.0.0.1", "master_port": 51216, "rank_offset": 1, "world_size": 2}
_COMING = {"names": ["model.norm.weight"], "dtype_names": ["bfloat16"], "shapes": [[1024]]}
ENDPOINTS = (
    admins(
        "/server_info",
        "Options of the server, by the names of vLLM.",
        server_info,
        answer=ServerInfo,
        method="GET",
    ),
    admins(
        "/init_weight_transfer_engine",
        "Join a group in which a trainer sends weights.",
        told(init_transfer),
        InitTransfer,
        example={"init_info": _PLACE},
    ),
    admins("/start_weight_update", "Let requests wait for weights.", start_update),
    admins(
        "/update_weights",
        "Replace weights by those that the trainer sends now.",
        told(update_weights),
        UpdateWeights,
        example={"update_info": _COMING},
    ),
    admins("/finish_weight_update", "Go on with the weights that have come.", finish_update),
)
