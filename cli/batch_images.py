"""Puts the images of files in the place of their paths, in the requests of a batch."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from minisgl.errors import CallerError, MinisglError
from minisgl.images.local import address_of, is_address

from .batch_file import BatchRequest, Failure, Response
from .batch_post import Post


def with_images(post: Post, folder: Path) -> Post:
    """`post` for requests whose images may be paths below `folder`."""
    inside = folder.resolve()

    async def filled(request: BatchRequest) -> Response | Failure:
        try:
            body = await asyncio.to_thread(_filled, request.body, inside)
        except MinisglError as error:
            return Failure("invalid_image", str(error))
        return await post(replace(request, body=body))

    return filled


def _filled(body: bytes, folder: Path) -> bytes:
    """The body with `data:` addresses for paths. Raises MinisglError."""
    if b"image_url" not in body:
        return body
    decoded = msgspec.json.decode(body)
    messages = decoded.get("messages") if isinstance(decoded, dict) else None
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            _fill(part, folder)
    return msgspec.json.encode(decoded)


def _fill(part: Any, folder: Path) -> None:
    match part:
        case {"type": "image_url", "image_url": {"url": str(path)} as image} if not is_address(
            path
        ):
            try:
                file = (folder / path).resolve()
            except (OSError, ValueError, RuntimeError):  # a zero byte; links that go in a circle
                raise CallerError(f"{path} is not the path of a file.") from None
            if not file.is_relative_to(folder):
                raise CallerError(f"{path} is not below the folder of --image-folder, {folder}.")
            image["url"] = address_of(file)
