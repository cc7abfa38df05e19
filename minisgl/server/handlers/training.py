"""The handlers by which a trainer with the admin key replaces the weights: --trainer.

The paths and fields are those of SGLang and vLLM. Nothing is unpickled.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from minisgl.distributed.weight_group import GroupAddress
from minisgl.engine.weights import InFlight
from minisgl.errors import (
    CallerError,
    CheckpointError,
    InvalidRequestError,
    UnsupportedModelError,
)
from minisgl.models.filling import DTYPES
from minisgl.models.refilling import TensorInfo
from minisgl.server.http.auth import check_admin
from minisgl.server.http.bodies import read_body
from minisgl.server.http.encoding import json_response
from minisgl.server.service import Service

# By torch's names.
_DTYPES = {str(dtype).removeprefix("torch."): name for name, dtype in DTYPES.items()}
# What becomes of requests that have begun, by the words of SGLang and vLLM.
_MODES: dict[str, InFlight] = {
    "keep": "keep",
    "in_place": "keep",
    "retract": "recompute",
    "recompute": "recompute",
    "abort": "abort",
}


class Pausing(Struct):
    mode: str = "abort"


class FromDisk(Struct):
    model_path: str
    weight_version: str | None = None
    abort_all_requests: bool = False
    flush_cache: bool = True
    load_format: str | None = None


class Joining(Struct):
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = "weight_update_group"
    backend: str = "nccl"


class Leaving(Struct):
    group_name: str = "weight_update_group"


class FromGroup(Struct):
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = "weight_update_group"
    weight_version: str | None = None
    abort_all_requests: bool = False
    flush_cache: bool = True
    load_format: str | None = None


async def _pause(service: Service, mode: str) -> Response:
    if mode not in _MODES:
        raise InvalidRequestError("mode", f"allowed: {', '.join(_MODES)}.")
    await service.state.engine().weights.pause(_MODES[mode])
    return _done("The server is paused.")


async def pause(service: Service, request: Request) -> Response:
    return await _pause(service, request.query_params.get("mode", "keep"))


async def pause_generation(service: Service, request: Request) -> Response:
    return await _pause(service, (await _read(service, request, Pausing)).mode)


async def resume(service: Service, request: Request) -> Response:
    await service.state.engine().weights.resume()
    return _done("The server goes on.")


async def update_from_disk(service: Service, request: Request) -> Response:
    asked = await _read(service, request, FromDisk)
    version = await service.state.engine().weights.update_from_files(
        asked.model_path,
        version=asked.weight_version,
        in_flight="abort" if asked.abort_all_requests else "keep",
    )
    return _done(f"The weights have the version {version}.")


async def join_group(service: Service, request: Request) -> Response:
    asked = await _read(service, request, Joining)
    await service.state.engine().weights.join_group(
        GroupAddress(
            master_address=asked.master_address,
            master_port=asked.master_port,
            rank_offset=asked.rank_offset,
            world_size=asked.world_size,
            group_name=asked.group_name,
            backend=asked.backend,
        )
    )
    return _done(f"The group {asked.group_name} has been joined.")


async def leave_group(service: Service, request: Request) -> Response:
    asked = await _read(service, request, Leaving)
    await service.state.engine().weights.leave_group(asked.group_name)
    return _done(f"The group {asked.group_name} has been left.")


async def update_from_group(service: Service, request: Request) -> Response:
    asked = await _read(service, request, FromGroup)
    if not len(asked.names) == len(asked.dtypes) == len(asked.shapes):
        raise InvalidRequestError("names", "as many names, dtypes and shapes are allowed.")
    for dtype in asked.dtypes:
        if dtype.removeprefix("torch.") not in _DTYPES:
            raise InvalidRequestError(
                "dtypes", f"{dtype:.80} is none; allowed: {', '.join(_DTYPES)}."
            )
    infos = [
        TensorInfo(name, _DTYPES[dtype.removeprefix("torch.")], shape)
        for name, dtype, shape in zip(asked.names, asked.dtypes, asked.shapes, strict=True)
    ]
    version = await service.state.engine().weights.update_from_group(
        asked.group_name,
        infos,
        version=asked.weight_version,
        in_flight="abort" if asked.abort_all_requests else "keep",
    )
    return _done(f"The weights have the version {version}.")


async def world_size(service: Service, request: Request) -> Response:
    return json_response({"world_size": service.state.engine().config.num_ranks})


async def reset_cache(service: Service, request: Request) -> Response:
    service.state.engine().weights.reset_cache()
    return _done("No request matches a cached prefix from before.")


async def _read(service: Service, request: Request, kind: type[Any]) -> Any:
    return await read_body(request, kind, strict=service.state.config.strict_fields)


def _done(message: str) -> Response:
    return json_response({"success": True, "message": message})


Handler = Callable[[Service, Request], Awaitable[Response]]


def _for_admins(handler: Handler) -> Handler:
    async def checked(service: Service, request: Request) -> Response:
        check_admin(request.scope, service.state.config.admin_key)
        try:
            return await handler(service, request)
        except (CheckpointError, UnsupportedModelError) as error:
            raise CallerError(str(error)) from error

    return checked


# By method and path.
HANDLERS: dict[tuple[str, str], Handler] = {
    key: _for_admins(handler)
    for key, handler in {
        ("POST", "/pause"): pause,
        ("POST", "/resume"): resume,
        ("POST", "/pause_generation"): pause_generation,
        ("POST", "/continue_generation"): resume,
        ("POST", "/update_weights_from_disk"): update_from_disk,
        ("POST", "/init_weights_update_group"): join_group,
        ("POST", "/destroy_weights_update_group"): leave_group,
        ("POST", "/update_weights_from_distributed"): update_from_group,
        ("POST", "/reset_prefix_cache"): reset_cache,
        ("GET", "/get_world_size"): world_size,
    }.items()
}
