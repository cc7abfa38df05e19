"""The handlers by which who has the admin key loads adapters, below the folder of --lora-root."""

from __future__ import annotations

import os

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from minisgl.errors import InvalidRequestError
from minisgl.server.http.auth import check_admin
from minisgl.server.http.bodies import read_body
from minisgl.server.service import Service

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


class Unloading(Struct):
    lora_name: str


class Loading(Unloading):
    lora_path: str


async def load(service: Service, request: Request) -> Response:
    state, config = service.state, service.state.config
    check_admin(request.scope, config.admin_key)
    asked = await read_body(request, Loading, strict=config.strict_fields)
    name, adapters = asked.lora_name, state.engine().adapters
    if name in state.model_names():
        reason = f"is a name of the model itself; allowed: another one; {adapters.loaded}"
        raise InvalidRequestError("lora_name", reason)
    folder = os.path.join(config.lora_root, asked.lora_path)
    await adapters.load(name, folder, root=config.lora_root)
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


async def unload(service: Service, request: Request) -> Response:
    config = service.state.config
    check_admin(request.scope, config.admin_key)
    asked = await read_body(request, Unloading, strict=config.strict_fields)
    await service.state.engine().adapters.unload(asked.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{asked.lora_name}' removed successfully.")


HANDLERS = {LOAD: load, UNLOAD: unload}
