"""The endpoints by which clients of vLLM, such as TRL's, transfer weights: --trainer."""

from __future__ import annotations

from typing import Any

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from minisgl.errors import InvalidRequestError
from minisgl.server.handlers.training import (
    JOIN,
    Done,
    Place,
    Update,
    Version,
    admins,
    infos_of,
    joined,
    options_of,
    told,
    updated,
)
from minisgl.server.http.bodies import read_bytes
from minisgl.server.http.decoding import decode
from minisgl.server.http.encoding import json_response
from minisgl.server.service import Asked, Service

_GROUP = "weight_transfer"


class TransferPlace(Place, kw_only=True):
    packed: bool = False
    """Whether tensors come as the bytes of several, some GiB at a time. Example: `true`"""
    backend: str | None = None
    """Of a group of torch.distributed: nccl, or gloo, the default on a CPU. Example: `"gloo"`"""


class InitTransfer(Struct, kw_only=True):
    init_info: TransferPlace
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


class UpdateWeights(Update, kw_only=True):
    update_info: Coming
    """What comes."""


class FinishUpdate(Struct, kw_only=True):
    weight_version: Version | None = None
    """Another name for the weights that have come."""


class ServerInfo(Struct):
    weight_version: str  # empty: of those that were loaded at the start
    vllm_config: dict[str, dict[str, Any] | None]


async def server_info(service: Service, request: Request) -> Response:
    """What clients read of vLLM's options, by the names of those, and the version of the
    weights."""
    engine, has_adapters = service.state.engine(), service.state.config.lora_root
    config = engine.config
    adapters = {"max_loras": config.max_loras, "max_lora_rank": config.max_lora_rank}
    return json_response(
        ServerInfo(
            engine.weights.version,
            {
                "weight_transfer_config": {"backend": backend_of(config.device)},
                "model_config": {
                    "model": service.state.model_names()[0],
                    "dtype": f"torch.{config.dtype}",
                    "max_model_len": config.max_seq_len,
                    "logprobs_mode": config.logprobs_mode,
                },
                "lora_config": adapters if has_adapters else None,
                "parallel_config": {
                    "tensor_parallel_size": config.tp,
                    "pipeline_parallel_size": config.pp,
                    "data_parallel_size": 1,
                },
            },
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
    try:
        return await joined(asked.engine, place, group_name=_GROUP, backend=backend)
    except InvalidRequestError as error:
        error.param = f"init_info.{error.param}"
        raise


async def start_update(service: Service, request: Request) -> Response:
    await service.state.engine().weights.begin()
    return json_response(Done("Weights may come; requests wait until the update is finished."))


async def update_weights(service: Service, asked: Asked[UpdateWeights]) -> Response:
    told_of, weights = asked.body.update_info, asked.engine.weights
    infos = infos_of(told_of.names, told_of.dtype_names, told_of.shapes, "dtype_names")
    options = options_of(asked.body)
    return updated(await weights.update_from_group(_GROUP, infos, packed=told_of.packed, **options))


async def finish_update(service: Service, request: Request) -> Response:
    """Clients of vLLM may send a body, or none."""
    body, strict = await read_bytes(request) or b"{}", service.state.config.strict_fields
    told_of = decode(body, FinishUpdate, strict=strict)
    await service.state.engine().weights.finish(told_of.weight_version)
    return json_response(Done("Requests are computed with the weights that have come."))


ENDPOINTS = (
    admins(
        "/server_info",
        "Options of the server, by the names of vLLM.",
        server_info,
        answer=ServerInfo,
        method="GET",
    ),
    admins("/init_weight_transfer_engine", JOIN, told(init_transfer), InitTransfer),
    admins("/start_weight_update", "Let requests wait for weights.", start_update),
    admins(
        "/update_weights",
        "Replace weights by those that the trainer sends now.",
        told(update_weights),
        UpdateWeights,
    ),
    admins(
        "/finish_weight_update",
        "Go on with the weights that have come. A body may name them: weight_version.",
        finish_update,
    ),
)
