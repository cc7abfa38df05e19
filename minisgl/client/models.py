"""The models of a server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec

from minisgl.client.chunk import Count
from minisgl.client.errors import not_openai, refused
from minisgl.client.exchange import DOCUMENT_S, get

Name = Annotated[str, msgspec.Meta(max_length=1000)]


class ServedModel(msgspec.Struct):
    """One entry of a server's list of models; None: not reported."""

    id: Name | None = None
    max_model_len: Count | None = None  # tokens of prompt and answer, from minisgl and vLLM
    vocab_size: Count | None = None  # from minisgl
    task: Name | None = None  # from minisgl: generate, embed or rerank
    input_modalities: list[Name] | None = None  # from minisgl: text, and image
    parent: Name | None = None  # of an adapter: the model that it adapts


class _ModelList(msgspec.Struct):
    data: list[ServedModel]


def headers_of(api_key: str) -> Mapping[str, str]:
    key = {"authorization": f"Bearer {api_key}"} if api_key else {}
    return {"content-type": "application/json", "accept": "*/*", "user-agent": "minisgl", **key}


async def list_models(
    base_url: str, api_key: str, timeout_s: float = DOCUMENT_S
) -> list[ServedModel]:
    """Lists the models. Raises RefusedError for an error status, else other ServerErrors."""
    status, body = await get(f"{base_url}/models", headers_of(api_key), timeout_s)
    if status != 200:
        raise refused(f"The server at {base_url}", status, body, api_key)
    try:
        return msgspec.json.decode(body, type=_ModelList).data
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise not_openai(base_url, error) from error


def choose_model(listed: Sequence[ServedModel], name: str) -> ServedModel | None:
    """The model called `name`, or the first one if `name` is empty; None if there is none."""
    return next((model for model in listed if name in ("", model.id)), None)
