"""Loading and unloading adapters below the folder of --lora-root, for requests with the admin
key."""

from __future__ import annotations

import os
from functools import partial

from msgspec import Struct
from starlette.responses import PlainTextResponse, Response

from minisgl.errors import InvalidRequestError
from minisgl.server.endpoint import READING, Endpoint
from minisgl.server.requests.translation import FieldNames
from minisgl.server.service import Asked, Service

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


class UnloadAdapter(Struct):
    lora_name: str
    """The name of the adapter, which requests give as their model. Example: `"sql"`"""


class LoadAdapter(UnloadAdapter):
    lora_path: str
    """Its folder, as a path below that of --lora-root. Example: `"sql"`"""


async def load(service: Service, asked: Asked[LoadAdapter]) -> Response:
    name, root, adapters = (
        asked.body.lora_name,
        service.state.config.lora_root,
        asked.engine.adapters,
    )
    if name in service.state.model_names():
        reason = f"is a name of the model itself; allowed: another one; {adapters.loaded}"
        raise InvalidRequestError("lora_name", reason)
    await adapters.load(name, os.path.join(root, asked.body.lora_path), root=root)
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


async def unload(service: Service, asked: Asked[UnloadAdapter]) -> Response:
    await asked.engine.adapters.unload(asked.body.lora_name)
    return PlainTextResponse(
        f"Success: LoRA adapter '{asked.body.lora_name}' removed successfully."
    )


_changes = partial(
    Endpoint, naming=FieldNames("", "", fields={"lora": "lora_name"}).used, is_for_admin=True
)
ENDPOINTS = (
    _changes(
        LOAD,
        "Load an adapter (LoRA).",
        load,
        LoadAdapter,
        example={"lora_name": "sql", "lora_path": "sql"},
        errors=(*READING, 409),
    ),
    _changes(
        UNLOAD, "Unload an adapter (LoRA).", unload, UnloadAdapter, example={"lora_name": "sql"}
    ),
)
