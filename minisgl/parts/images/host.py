"""The scheduler's half: which images have their rows on the device, and which requests wait for
theirs.

A request joins once the rows of all its images are there. So no step holds up the rows of others
for a tower, and a tower that fails ends the requests of its image, before any of their tokens is
computed. Where no request has rows, it joins once the tower's work is queued."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import ClassVar, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from minisgl.errors import InvalidRequestError, StepError
from minisgl.images.picture import Picture, Span, check_rows
from minisgl.parts.images.positions import rope_positions
from minisgl.request import Extra, Request, RequestStatus, SamplingParams
from minisgl.scheduler.parts import Failed, Part
from minisgl.scheduler.plan import Chunk, PartPlan, StepPlan, StepResult
from minisgl.scheduler.state import Running, StepWork


@dataclass(frozen=True, eq=False)
class Pictured(Extra):
    """The images of a prompt, in the order of their places."""

    takes_drafts: ClassVar[bool] = False

    spans: tuple[Span, ...]
    # No chunk ends within a run of rows, which see each other.
    keeps_whole: bool = False

    @cached_property
    def blocks(self) -> tuple[tuple[int, int], ...]:
        """Where the runs of rows begin and end: an image has several if there is text in it."""
        return tuple(
            (span.start + start, span.start + end)
            for span in self.spans
            for start, end in _runs(span.picture.is_row)
        )

    def chunk_end(self, end: int) -> int:
        cut = (start for start, stop in self.blocks if start < end < stop)
        return next(cut, end) if self.keeps_whole else end

    def last_seen(self, start: int, end: int) -> NDArray[np.int32]:
        """The last position that each of the tokens `start` to `end` sees, [end - start], where the
        rows of an image see each other."""
        found = np.arange(start, end, dtype=np.int32)
        for first, stop in self.blocks:
            found[max(0, first - start) : max(0, stop - start)] = stop - 1
        return found

    @cached_property
    def _positions(self) -> tuple[NDArray[np.int32], int]:
        return rope_positions(self.spans)

    @property
    def offset(self) -> int:
        """What is added to the positions of tokens behind the images for rotating them, where a
        model counts in three directions."""
        return self._positions[1]

    def rope(self, start: int, end: int) -> NDArray[np.int32]:
        """The positions by which such a model rotates tokens `start` to `end`: [3, end - start]."""
        known, offset = self._positions
        known = known[:, start:end]
        others = np.arange(start + known.shape[1], end, dtype=np.int32) + offset
        return np.concatenate((known, np.broadcast_to(others, (3, len(others)))), axis=1)

    def as_text(self, prompt: Sequence[int]) -> Sequence[int]:
        """Raises InvalidRequestError if the prompt has not the keys of its images."""
        text, end = list(prompt), 0
        for span in self.spans:
            keys = span.picture.keys()
            if span.start < end or list(prompt[span.start : span.end]) != keys.tolist():
                raise InvalidRequestError("prompt", "has other tokens than those of its images.")
            text[span.start : span.end] = np.maximum(keys, 0).tolist()
            end = span.end
        return text


_NO_IMAGES = Pictured(())


@dataclass(frozen=True, slots=True)
class Array:
    """Numbers that the tower takes, by name."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview


@dataclass(frozen=True, slots=True)
class Encode:
    """An image that the tower makes rows of."""

    number: int  # of its entry, which no other has
    rows: Sequence[int]  # of the buffer
    inputs: tuple[Array, ...]


# Of the rows of a chunk, and the slot of its request.
OfChunk = tuple[int, bytes]


@dataclass(frozen=True, slots=True)
class ImagePlan(PartPlan):
    """What a step does for images. The ids of its chunks are negative where rows of the buffer take
    the places of embeddings: -1 is row 0, -2 is row 1."""

    is_alone: bool = False  # the step has no rows
    is_quick: bool = False  # nothing is to be done
    is_eager: bool = False  # chunks read rows, or count in three directions
    adapts_rows: bool = False  # some rows are rotated by other positions than theirs
    # Slots, and what is added to the positions of their decode rows for rotating them.
    offsets: tuple[tuple[int, int], ...] = ()
    # Of each chunk its slot and, [3, num_rows] int32, what its rows are rotated by; empty: their
    # positions.
    rope: tuple[OfChunk, ...] = ()
    # The same, [num_rows] int32: the last position that each sees; empty: the rows before them.
    last_seen: tuple[OfChunk, ...] = ()
    encodes: tuple[Encode, ...] = ()  # to begin
    reads: tuple[int, ...] = ()  # the numbers of the images whose rows the chunks read


# The number of an image whose encoding has ended, and why it failed or "".
Encoded = tuple[int, str]


def encoded_in(plan: StepPlan, result: StepResult) -> Sequence[Encoded]:
    """The images whose encoding was seen to end by the end of a step."""
    found = (
        outcome
        for part, outcome in zip(plan.parts, result.parts, strict=True)
        if isinstance(part, ImagePlan)
    )
    return cast(Sequence[Encoded], next(found, ()))


_UNKNOWN = 1  # an offset that no slot has: images take fewer positions than rows


class _Of(NamedTuple):
    """Of which image rows are. No client sees by the time that an image takes whether another has
    sent it."""

    namespace: bytes
    digest: bytes


@dataclass(slots=True, eq=False)
class _Entry:
    """The rows that an image has in the buffer."""

    number: int
    rows: tuple[int, ...]
    picture: Picture
    begun: int = 0  # the step that encodes it; 0: it waits for one
    is_ready: bool = False
    users: set[Request] = field(default_factory=set)  # that may still read it

    def add_user(self, request: Request) -> None:
        if request not in self.users:  # others have ended: they would be kept as long as the image
            self.users = {each for each in self.users if not each.finished}
            self.users.add(request)


class Blind(Part):
    """Of a model that takes no images."""

    kind = Pictured

    def __init__(self, why: str) -> None:
        self._why = why

    def extra(
        self, params: SamplingParams, prompt: Sequence[int], given: Extra | None
    ) -> Extra | None:
        if given is not None:
            raise InvalidRequestError("messages", f"the model takes no images: {self._why}.")
        return None


class Images(Part):
    """Gives rows of a buffer to the images of requests, the least recently used of which are given
    up first. Rows are locked from the first request that asks for them until no request that did
    will read them any more. One that waits while its client may have no more join locks none."""

    kind = Pictured
    is_always = True

    def __init__(
        self, num_rows: int, *, turns: bool = False, largest_block: int | None = None
    ) -> None:
        """num_rows: of the buffer. turns: the model counts positions in three directions.
        largest_block: the rows of an image see each other, and a step can compute so many of
        one; None: they see those before them."""
        self._num_rows, self._turns, self._largest = num_rows, turns, largest_block
        self._of_slot: dict[int, int] = {}  # offsets, as the device has them
        self._decoding: tuple[Sequence[Running], bool] = ((), False)  # and whether a row has one
        self._free = [*range(num_rows - 1, -1, -1)]
        self._entries: dict[_Of, _Entry] = {}  # the least recently used first
        self._on_way: dict[int, _Of] = {}  # those that are not ready, by their numbers
        self._last_number = 0

    def extra(
        self, params: SamplingParams, prompt: Sequence[int], given: Extra | None
    ) -> Extra | None:
        if isinstance(given, Pictured):
            pictures = [span.picture for span in given.spans]
            for each in pictures if self._turns else ():
                if each.grid is None or math.prod(each.grid) != each.num_rows:
                    raise InvalidRequestError("messages", "an image has no lines of rows.")
            check_rows(pictures, self._num_rows)
            if self._largest is not None:
                given = replace(given, keeps_whole=True)
                largest = max(stop - start for start, stop in given.blocks)
                if largest > self._largest:
                    raise InvalidRequestError(
                        "messages",
                        f"an image takes {largest} tokens in a row, which one step must compute, "
                        f"and it computes at most {self._largest}; send a smaller image, or raise "
                        "--max-prefill-length.",
                    )
        return given

    def admits(
        self, request: Request, running: Iterable[Running], barred: Collection[str] = ()
    ) -> bool:
        pictures = {of: span.picture for of, span in _images(request)}
        new = {of: picture for of, picture in pictures.items() if of not in self._entries}
        for of in pictures.keys() - new.keys():
            self._entries[of] = self._entries.pop(of)  # it is used
            self._entries[of].add_user(request)
        if not self._make_room(
            sum(each.num_rows for each in new.values()), running, barred, request
        ):
            for of in pictures.keys() - new.keys():  # which another may need meanwhile
                self._entries[of].users.discard(request)
            return False
        for of, picture in new.items():
            self._add(of, picture).add_user(request)
        return all(self._entries[of].is_ready for of in pictures)

    def holds(self, request: Request) -> bool:
        entries = [self._entries.get(of) for of, _ in _images(request)]
        return all(each is not None and request in each.users for each in entries)

    def _add(self, of: _Of, picture: Picture) -> _Entry:
        self._last_number += 1
        first = len(self._free) - picture.num_rows
        entry = _Entry(self._last_number, tuple(self._free[first:]), picture)
        del self._free[first:]
        self._entries[of] = entry
        self._on_way[entry.number] = of
        return entry

    def _make_room(
        self,
        num_rows: int,
        running: Iterable[Running],
        barred: Collection[str],
        asking: Request,
    ) -> bool:
        """Free so many rows for a request, if that is possible."""
        if len(self._free) >= num_rows:
            return True
        by_request = {each.request: each for each in running}
        unused = [of for of in self._entries if not self._is_locked(of, by_request, barred, asking)]
        if len(self._free) + sum(len(self._entries[of].rows) for of in unused) < num_rows:
            return False
        for of in unused:
            if len(self._free) < num_rows:
                self._drop(of)
        return True

    def _is_locked(
        self, of: _Of, running: dict[Request, Running], barred: Collection[str], asking: Request
    ) -> bool:
        """Whether a request may still read the rows of an image, and may join if it waits. Forgets
        those that will not read them, and those that have lost another image: they ask again."""

        def may_read(request: Request) -> bool:
            # While it waits, weights may be replaced: then it has another namespace.
            last = max((span.end for other, span in _images(request) if other == of), default=0)
            if request.status is RequestStatus.RUNNING:
                return running[request].num_scheduled < last
            waits = request.status is RequestStatus.WAITING and last > 0
            return waits and (request is asking or self.holds(request))

        entry = self._entries[of]
        entry.users = {request for request in entry.users if may_read(request)}
        locking = (each in running or each.tenant.client not in barred for each in entry.users)
        return any(locking) or bool(entry.begun and not entry.is_ready)

    def _drop(self, of: _Of) -> _Entry:
        entry = self._entries.pop(of)
        self._free += entry.rows
        self._on_way.pop(entry.number, None)
        return entry

    @property
    def wants_step(self) -> bool:
        return bool(self._on_way)

    def plan(self, work: StepWork) -> ImagePlan | None:
        reads: set[int] = set()
        rope = self._rope(work)
        for index, (chunk, running) in enumerate(work.owned_chunks):
            if running.request.extra(Pictured) is not None:
                work.chunks[index] = self._with_rows(chunk, running.request, reads)
        encodes: tuple[Encode, ...] = ()
        # One image a step: queueing it takes the host about as long as a step of decoding.
        for entry in self._waiting()[:1]:
            entry.begun = work.step
            inputs = tuple(_arrays(entry.picture))
            encodes = (Encode(entry.number, entry.rows, inputs),)
        offsets = self._changed_offsets(work)
        adapts_rows = bool(rope) or self._has_offset(work)
        if not (reads or encodes or self._on_way or offsets or adapts_rows):
            return None
        return ImagePlan(
            is_alone=not (work.decoding or work.chunks),
            is_quick=not (reads or encodes or offsets),
            is_eager=bool(reads or rope),
            adapts_rows=adapts_rows,
            offsets=offsets,
            rope=rope,
            last_seen=self._last_seen(work) if reads else (),
            encodes=encodes,
            reads=tuple(sorted(reads)),
        )

    def _last_seen(self, work: StepWork) -> tuple[OfChunk, ...]:
        return _of_chunks(work, Pictured.last_seen) if self._largest is not None else ()

    def _rope(self, work: StepWork) -> tuple[OfChunk, ...]:
        if not (self._turns and any(each.request.extra(Pictured) for each in work.chunk_owners)):
            return ()
        return _of_chunks(work, Pictured.rope)

    def _changed_offsets(self, work: StepWork) -> tuple[tuple[int, int], ...]:
        if not self._turns:
            return ()
        changes = {
            running.slot: offset
            for running in work.joining
            if self._of_slot.get(running.slot, 0) != (offset := _offset(running))
        }
        self._of_slot |= changes
        return (*changes.items(),)

    def _has_offset(self, work: StepWork) -> bool:
        """Whether a decode row has one."""
        if work.decoding is not self._decoding[0]:
            has_one = self._turns and any(map(_offset, work.decoding))
            self._decoding = work.decoding, has_one
        return self._decoding[1]

    def _waiting(self) -> list[_Entry]:
        """Those to encode; those that no request wants any more are given up."""
        waiting = [of for of in self._on_way.values() if not self._entries[of].begun]
        for of in waiting:
            if all(request.finished for request in self._entries[of].users):
                self._drop(of)
        return [self._entries[of] for of in waiting if of in self._entries]

    def _with_rows(self, chunk: Chunk, request: Request, reads: set[int]) -> Chunk:
        """The chunk with rows of the buffer in the places of keys. reads: gets the images."""
        token_ids = np.array(chunk.token_ids, dtype=np.int64)
        for of, span in _images(request):
            first, end = max(chunk.start, span.start), min(chunk.end, span.end)
            if first >= end:
                continue
            is_row = span.picture.is_row
            places = np.flatnonzero(is_row[first - span.start : end - span.start])
            if len(places):
                entry = self._entries[of]
                before = int(is_row[: first - span.start].sum())
                rows = np.array(entry.rows[before : before + len(places)])
                token_ids[places + (first - chunk.start)] = -1 - rows
                reads.add(entry.number)
        return replace(chunk, token_ids=token_ids.tolist())

    def settle(self, work: StepWork, outcome: object) -> Failed:
        """outcome: the numbers of images whose encoding has ended, and why it failed, or ""."""
        assert isinstance(outcome, tuple)
        failed: dict[Request, StepError] = {}
        for number, why in outcome:
            of = self._on_way.pop(number, None)
            if of is not None and not why:
                self._entries[of].is_ready = True
            elif of is not None:
                error = StepError(f"An image of the request could not be encoded: {why}.")
                failed |= dict.fromkeys(self._drop(of).users, error)
        return [each for each in failed.items() if not each[0].finished]

    def failed(self, step: int) -> None:
        self._of_slot = dict.fromkeys(self._of_slot, _UNKNOWN)
        for of in [*self._on_way.values()]:
            if self._entries[of].begun >= step:
                self._drop(of)

    def audit(self, running: Iterable[Running]) -> None:
        taken = [row for each in self._entries.values() for row in each.rows]
        assert sorted(chain(taken, self._free)) == [*range(self._num_rows)], "a row is lost"
        on_way = {each.number: of for of, each in self._entries.items() if not each.is_ready}
        assert self._on_way == on_way, "an image is never ready"
        for each in running:
            known = self._of_slot.get(each.slot, 0)
            assert not self._turns or known in (_offset(each), _UNKNOWN), "it has another offset"
            for of, span in _images(each.request):
                if each.num_scheduled < span.end:
                    entry = self._entries.get(of)
                    assert entry is not None and entry.is_ready, "it runs without its rows"
                    assert each.request in entry.users, "its rows may be given up"


def _runs(marks: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """Where runs of marked places begin and end."""
    changes = np.flatnonzero(np.diff(marks, prepend=False, append=False)).tolist()
    return zip(changes[::2], changes[1::2], strict=True)


def _images(request: Request) -> Iterator[tuple[_Of, Span]]:
    """The places of images in a prompt, and of which image each is."""
    pictured = request.extra(Pictured)
    for span in () if pictured is None else pictured.spans:
        yield _Of(request.namespace, span.picture.digest), span


def _of_chunks(
    work: StepWork, numbers: Callable[[Pictured, int, int], NDArray[np.int32]]
) -> tuple[OfChunk, ...]:
    """What `numbers` says of the rows of each chunk, from its first to its last."""
    found: list[OfChunk] = []
    for chunk, running in work.owned_chunks:
        pictured = running.request.extra(Pictured) or _NO_IMAGES
        found.append((chunk.slot, numbers(pictured, chunk.start, chunk.end).tobytes()))
    return (*found,)


def _offset(running: Running) -> int:
    """Of the rows of a request, if its model counts in three directions."""
    pictured = running.request.extra(Pictured)
    return 0 if pictured is None else pictured.offset


def _arrays(picture: Picture) -> Iterator[Array]:
    for name, array in picture.inputs.items():
        packed = np.ascontiguousarray(array)
        data = packed.reshape(-1).view(np.uint8).data
        yield Array(name, packed.dtype.str, packed.shape, data)
