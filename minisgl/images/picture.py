"""Images as a request has them: what the tower takes, and the tokens that stand for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minisgl.images.limits import PARAM, TooManyImagesError

BFLOAT16 = np.dtype("V2")  # as what NumPy, which does not have it, holds its bits


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Picture:
    """An image that its checkpoint's processor has prepared.

    Of `token_ids`, which replace its placeholder in a prompt, those that `is_row` marks have no
    embedding: each takes the next row that the tower computes.
    """

    digest: bytes  # of its bytes, and of all else that its rows depend on but the weights
    inputs: Mapping[str, NDArray[Any]]  # what the tower takes of this image alone, by its names
    token_ids: tuple[int, ...]
    is_row: NDArray[np.bool_]  # [len(token_ids)]
    grid: tuple[int, int, int] | None = None  # rows by frame, height and width, for 3-D positions

    @property
    def num_rows(self) -> int:
        return int(self.is_row.sum())

    def keys(self) -> NDArray[np.int32]:
        """The ids by which caches know its tokens: where it has a row, a negative number made of
        the digest and the place among the rows, so that no two images share a page."""
        keys = np.asarray(self.token_ids, dtype=np.int32)
        drawn = np.frombuffer(_stream(self.digest, 4 * self.num_rows), dtype=np.int32)
        keys[self.is_row] = drawn | np.int32(-(2**31))
        return keys


@dataclass(frozen=True, slots=True)
class Span:
    """The place of an image in a prompt."""

    start: int  # of the first of its tokens
    picture: Picture

    @property
    def end(self) -> int:
        return self.start + len(self.picture.token_ids)


def with_pictures(
    token_ids: Sequence[int], placeholder: int, pictures: Sequence[Picture]
) -> tuple[list[int], tuple[Span, ...]]:
    """The prompt in which each placeholder is replaced by the keys of an image, in their order, and
    where these are. Raises ValueError unless there are as many placeholders as images."""
    found = token_ids.count(placeholder)
    if found != len(pictures):
        raise ValueError(f"{found} placeholders for {len(pictures)} images")
    prompt: list[int] = []
    spans: list[Span] = []
    rest = iter(pictures)
    for token_id in token_ids:
        if token_id != placeholder:
            prompt.append(token_id)
            continue
        picture = next(rest)
        spans.append(Span(len(prompt), picture))
        prompt += picture.keys().tolist()
    return prompt, tuple(spans)


def check_rows(pictures: Iterable[Picture], num_rows: int) -> None:
    """Raise TooManyImagesError if the images of a request have more rows than there may be; equal
    images have theirs once."""
    distinct = {picture.digest: picture for picture in pictures}
    wanted = sum(picture.num_rows for picture in distinct.values())
    if wanted > num_rows:
        raise TooManyImagesError(
            PARAM,
            f"the images take {wanted:,} tokens, and there is room for {num_rows:,} of a request; "
            "send fewer or smaller ones, or raise --image-rows.",
        )


def _stream(seed: bytes, num_bytes: int) -> bytes:
    """As many bytes as wanted, all of which depend on the seed."""
    blocks = (
        blake2b(block.to_bytes(4, "little"), key=seed[:64]).digest()
        for block in range(-(-num_bytes // 64))
    )
    return b"".join(blocks)[:num_bytes]
