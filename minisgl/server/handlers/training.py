"""The endpoints by which a trainer with the admin key replaces the weights: --trainer.

Paths and fields are those of SGLang and vLLM. Nothing that comes is unpickled.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from msgspec import Meta, Struct, structs
from starlette.requests import Request
from starlette.responses import Response

from minisgl.distributed.addresses import GroupAddress
from minisgl.errors import CallerError, CheckpointError, ConfigError, InvalidRequestError
from minisgl.parts.weights.host import MAX_VERSION_CHARS
from minisgl.server.endpoint import Endpoint
from minisgl.server.http.encoding import json_response
from minisgl.server.service import Asked, Service

if TYPE_CHECKING:  # they import torch
    from minisgl.engine import AsyncEngine
    from minisgl.engine.weights import InFlight
    from minisgl.models.refilling import TensorInfo

# What becomes of requests that have arrived, by the words of SGLang and vLLM.
_MODES: Mapping[str, InFlight] = {
    "keep": "keep",
    "in_place": "keep",
    "recompute": "recompute",
    "retract": "recompute",
    "abort": "abort",
}
Version = Annotated[str, Meta(min_length=1, max_length=MAX_VERSION_CHARS)]
_GROUP = "weight_update_group"
JOIN = "Join a group in which a trainer sends weights."
A = TypeVar("A")


class Done(Struct):
    message: str
    success: bool = True


class Renamed(Struct):
    new_version: str
    success: bool = True


class WorldSize(Struct):
    world_size: int


class Sleeping(Struct):
    is_sleeping: bool


class PauseGeneration(Struct):
    mode: str = "abort"
    """What becomes of requests that have arrived: in_place, retract or abort. Example:
    `"retract"`"""


class Change(Struct, kw_only=True):
    abort_all_requests: bool = False
    """End the requests that have arrived. Else those that have begun go on with the KV that they
    have. Example: `true`"""

    @property
    def in_flight(self) -> InFlight:
        return "abort" if self.abort_all_requests else "keep"


class Update(Change, kw_only=True):
    weight_version: Version | None = None
    """A name for the weights. Default: a random one. Example: `"step 10"`"""


class Rename(Change, kw_only=True):
    new_version: Version
    """A name for the weights that are there. Example: `"step 10"`"""


class UpdateFromDisk(Update, kw_only=True):
    model_path: str
    """A folder with safetensors files of all weights. Example: `"/models/step-10"`"""


class LeaveGroup(Struct, kw_only=True):
    group_name: str = _GROUP
    """The name of the group. Example: `"policy"`"""


class Place(Struct, kw_only=True):
    master_address: str
    """Where the group meets. Example: `"127.0.0.1"`"""
    master_port: int
    """Its port. Example: `29500`"""
    rank_offset: int
    """The rank of the engine's first rank. Example: `1`"""
    world_size: int
    """The ranks of the group, with the trainer, which is rank 0. Example: `2`"""


class JoinGroup(Place, kw_only=True):
    group_name: str = _GROUP
    """The name of the group. Example: `"policy"`"""
    backend: str = "nccl"
    """nccl, or gloo on CPUs. Example: `"gloo"`"""


class UpdateFromGroup(Update, kw_only=True):
    group_name: str = _GROUP
    """The name of the group. Example: `"policy"`"""
    names: list[str]
    """The tensors that the trainer sends now, in this order. Example: `["model.norm.weight"]`"""
    dtypes: list[str]
    """Their dtypes. Example: `["bfloat16"]`"""
    shapes: list[list[int]]
    """Their shapes. Example: `[[1024]]`"""


class ReadWeight(Struct, kw_only=True):
    name: str
    """The name of a tensor in a checkpoint. Example: `"model.norm.weight"`"""
    truncate_size: int = 100
    """The most rows of it. Example: `10`"""


Handler = Callable[[Service, A], Awaitable[Response]]


def told(handler: Handler[A]) -> Handler[A]:
    """What is wrong with weights is the caller's to hear."""

    async def answered(service: Service, asked: A) -> Response:
        try:
            return await handler(service, asked)
        except (CheckpointError, ConfigError) as error:
            raise CallerError(str(error)) from error

    return answered


async def pause(service: Service, request: Request) -> Response:
    return await _pause(service, request.query_params.get("mode", "abort"))


async def pause_generation(service: Service, asked: Asked[PauseGeneration]) -> Response:
    return await _pause(service, asked.body.mode)


async def _pause(service: Service, mode: str) -> Response:
    await service.state.engine().weights.pause(_mode(mode))
    return json_response(Done("The engine is paused."))


def _mode(mode: str) -> InFlight:
    if mode not in _MODES:
        raise InvalidRequestError("mode", f"allowed: {', '.join(_MODES)}.")
    return _MODES[mode]


async def resume(service: Service, request: Request) -> Response:
    await service.state.engine().weights.resume()
    return json_response(Done("The engine goes on."))


async def sleep(service: Service, request: Request) -> Response:
    level = request.query_params.get("level", "1")
    in_flight = _mode(request.query_params.get("mode", "recompute"))
    await service.state.engine().weights.sleep(int(level) if level in ("1", "2") else 0, in_flight)
    return json_response(Done("The model is asleep."))


async def wake_up(service: Service, request: Request) -> Response:
    await service.state.engine().weights.wake(request.query_params.getlist("tags"))
    return json_response(Done("What was to wake up is awake."))


async def is_sleeping(service: Service, request: Request) -> Response:
    return json_response(Sleeping(service.state.engine().weights.is_asleep))


async def update_from_disk(service: Service, asked: Asked[UpdateFromDisk]) -> Response:
    body, weights = asked.body, asked.engine.weights
    return updated(await weights.update_from_files(body.model_path, **options_of(body)))


async def join_group(service: Service, asked: Asked[JoinGroup]) -> Response:
    return await joined(asked.engine, asked.body)


async def joined(engine: AsyncEngine, place: Place, **others: Any) -> Response:
    """others: what of the group's address the place does not say."""
    address = GroupAddress(**structs.asdict(place) | others)
    await engine.weights.join_group(address)
    return json_response(Done(f"The group {address.group_name} was joined."))


async def leave_group(service: Service, asked: Asked[LeaveGroup]) -> Response:
    await asked.engine.weights.leave_group(asked.body.group_name)
    return json_response(Done(f"The group {asked.body.group_name} was left."))


async def update_from_group(service: Service, asked: Asked[UpdateFromGroup]) -> Response:
    body, weights = asked.body, asked.engine.weights
    infos = infos_of(body.names, body.dtypes, body.shapes)
    return updated(await weights.update_from_group(body.group_name, infos, **options_of(body)))


def infos_of(
    names: list[str], dtypes: list[str], shapes: list[list[int]], dtypes_name: str = "dtypes"
) -> list[TensorInfo]:
    """What is said of tensors. Raises InvalidRequestError."""
    from minisgl.models.filling import DTYPES
    from minisgl.models.refilling import TensorInfo

    if not len(names) == len(dtypes) == len(shapes):
        raise InvalidRequestError("names", f"allowed: as many names as {dtypes_name} and shapes.")
    named = {str(dtype).removeprefix("torch."): name for name, dtype in DTYPES.items()}
    for dtype in dtypes:
        if dtype not in named:
            raise InvalidRequestError(
                dtypes_name, f"{dtype:.80} is none; allowed: {', '.join(named)}."
            )
    return [*map(TensorInfo, names, (named[dtype] for dtype in dtypes), shapes)]


def options_of(body: Update) -> dict[str, Any]:
    return {"version": body.weight_version, "in_flight": body.in_flight}


def updated(version: str) -> Response:
    return json_response(Done(f"The weights have the version {version}."))


async def rename(service: Service, asked: Asked[Rename]) -> Response:
    await asked.engine.weights.rename(asked.body.new_version, asked.body.in_flight)
    return json_response(Renamed(asked.body.new_version))


async def read_weight(service: Service, asked: Asked[ReadWeight]) -> Response:
    body = asked.body
    if body.truncate_size < 1:
        raise InvalidRequestError("truncate_size", "allowed: at least 1.")
    return json_response(await asked.engine.weights.read(body.name, body.truncate_size))


async def reset_cache(service: Service, request: Request) -> Response:
    service.state.engine().weights.reset_cache()
    return json_response(Done("No later request matches what is cached."))


async def world_size(service: Service, request: Request) -> Response:
    return json_response(WorldSize(service.state.engine().config.num_ranks))


admins = partial(Endpoint, answer=Done, is_for_admin=True)
ENDPOINTS = (
    admins(
        "/update_weights_from_disk",
        "Take the weights of a folder.",
        told(update_from_disk),
        UpdateFromDisk,
    ),
    admins("/init_weights_update_group", JOIN, told(join_group), JoinGroup),
    admins(
        "/update_weights_from_distributed",
        "Replace weights by those that the trainer of a group sends now.",
        told(update_from_group),
        UpdateFromGroup,
    ),
    admins(
        "/get_weights_by_name",
        "The first rows of a tensor.",
        told(read_weight),
        ReadWeight,
        answer=None,
    ),
    admins(
        "/update_weight_version",
        "Give the weights another name.",
        rename,
        Rename,
        answer=Renamed,
    ),
    admins("/destroy_weights_update_group", "Leave a group.", leave_group, LeaveGroup),
    admins("/pause", "Compute nothing, and let requests wait.", pause),
    admins("/resume", "Go on.", resume),
    admins("/pause_generation", "The same as /pause.", pause_generation, PauseGeneration),
    admins("/continue_generation", "The same as /resume.", resume),
    admins("/reset_prefix_cache", "Let no later request match what is cached.", reset_cache),
    admins("/sleep", "Give the memory of weights and KV cache back.", told(sleep)),
    admins("/wake_up", "Take it again.", told(wake_up)),
    admins("/is_sleeping", "Whether it is.", is_sleeping, answer=Sleeping, method="GET"),
    admins("/get_world_size", "The number of ranks.", world_size, answer=WorldSize, method="GET"),
)
