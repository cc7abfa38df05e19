"""The scheduler's half: which adapters have a place on the device, and which requests wait for
one."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from minisgl.errors import ModelNotFoundError
from minisgl.request import Extra, Request, SamplingParams
from minisgl.scheduler.parts import Part
from minisgl.scheduler.plan import PartPlan
from minisgl.scheduler.state import Running, StepWork


@dataclass(frozen=True, slots=True)
class Adapted(Extra):
    """The adapter that all rows of a request have."""

    number: int  # of the adapter, which no other one gets after it
    kv_of: bytes  # what it computes, whatever its name is


@dataclass(frozen=True, slots=True)
class AdapterPlan(PartPlan):
    adapts_rows: bool = False  # a row has an adapter
    is_quick: bool = False  # nothing else is to be done
    is_alone: bool = False  # the step has no rows
    changes: tuple[tuple[int, int], ...] = ()  # slots, and 1 + the place of their adapter, or 0
    loads: tuple[tuple[int, int], ...] = ()  # places, and the adapters that they get
    drops: tuple[int, ...] = ()  # adapters that are not asked for again


@dataclass(slots=True)
class _Place:
    """Room for an adapter on the device."""

    adapter: int | None = None
    is_ready: bool = False  # the adapter has been loaded
    begun: int = 0  # the step that loads it
    last_used: int = 0  # by order of use


class Adapters(Part):
    """Gives places to adapters as requests need them; the least recently used that no running
    request has goes first. A load is copied beside the steps, and its request waits for it."""

    kind = Adapted
    is_always = True

    def __init__(self, num_places: int) -> None:
        self._places = [_Place() for _ in range(num_places)]
        self._to_load: list[int] = []  # places
        self._of_slot: dict[int, int] = {}  # as the device has them: 1 + the place, or 0
        self._loaded: set[int] = set()  # adapters that requests may ask for
        self._leaving: dict[int, Sequence[Request]] = {}  # others, and the last that have them
        self._dropped: dict[int, int] = {}  # and the steps that drop them, until they are settled
        self._num_uses = 0
        self._decoding: tuple[Sequence[Running], bool] = ((), False)  # and whether a row is adapted

    def extra(
        self, params: SamplingParams, prompt: Sequence[int], given: Extra | None
    ) -> Extra | None:
        if isinstance(given, Adapted) and given.number not in self._loaded:
            raise ModelNotFoundError("The adapter of this request has just been unloaded.")
        return given

    def load(self, number: int) -> None:
        """Take requests for an adapter, which all ranks have."""
        self._loaded.add(number)

    def unload(self, number: int, having: Sequence[Request]) -> None:
        """Refuse new requests for an adapter, and let the ranks drop it once those that have it
        have ended."""
        self._loaded.discard(number)
        self._leaving[number] = having

    def _to_drop(self) -> tuple[int, ...]:
        each = self._leaving.items()
        return tuple(number for number, having in each if all(one.finished for one in having))

    def admits(
        self, request: Request, running: Iterable[Running], barred: Collection[str] = ()
    ) -> bool:
        number = _number(request)
        assert number is not None, "it concerns the part"
        self._num_uses += 1
        place = self._find(number)
        if place is None:
            in_use = {_number(other.request) for other in running}
            free = [
                index
                for index, each in enumerate(self._places)
                if each.adapter is None or (each.is_ready and each.adapter not in in_use)
            ]
            if free:
                index = min(free, key=lambda index: self._places[index].last_used)
                self._places[index] = _Place(number, last_used=self._num_uses)
                self._to_load.append(index)
            return False
        self._places[place].last_used = self._num_uses
        return self._places[place].is_ready

    def _find(self, number: int) -> int | None:
        """The place that an adapter has, or will have once it is loaded."""
        found = (index for index, each in enumerate(self._places) if each.adapter == number)
        return next(found, None)

    @property
    def wants_step(self) -> bool:
        on_their_way = (each.begun and not each.is_ready for each in self._places)
        return bool(self._to_load or self._to_drop()) or any(on_their_way)

    def plan(self, work: StepWork) -> AdapterPlan | None:
        changes = {
            running.slot: value
            for running in work.joining
            if self._of_slot.get(running.slot, 0) != (value := self._value(running.request))
        }
        self._of_slot |= changes
        loads: list[tuple[int, int]] = []
        for index in self._to_load:
            place = self._places[index]
            assert place.adapter is not None
            place.begun = work.step
            loads.append((index, place.adapter))
            # Slots that had what was there are told again: a rank waits for the copy then, which
            # may have ended on another one.
            had = [slot for slot, value in self._of_slot.items() if value == 1 + index]
            self._of_slot |= dict.fromkeys(had, -1)
        self._to_load = []
        drops = self._to_drop()
        for number in drops:
            del self._leaving[number]
            self._dropped[number] = work.step
            if (found := self._find(number)) is not None:
                self._places[found].last_used = 0  # the first to be taken
        is_adapted = self._has_adapted_rows(work)
        is_alone = not (work.decoding or work.chunks)
        # While an adapter is on its way, each step tells whether it has come.
        if not (changes or drops or is_adapted or is_alone or self.wants_step):
            return None
        is_quick = not (changes or loads or drops)
        return AdapterPlan(is_adapted, is_quick, is_alone, (*changes.items(),), tuple(loads), drops)

    def _value(self, request: Request) -> int:
        number = _number(request)
        place = None if number is None else self._find(number)
        return 0 if place is None else 1 + place

    def _has_adapted_rows(self, work: StepWork) -> bool:
        if work.decoding is not self._decoding[0]:
            self._decoding = work.decoding, any(map(_is_adapted, work.decoding))
        return self._decoding[1] or any(map(_is_adapted, work.chunk_owners))

    def settle(self, work: StepWork, outcome: object) -> None:
        """outcome: the places whose loads have ended, and the adapters there."""
        assert isinstance(outcome, tuple)
        for index, number in outcome:
            if self._places[index].adapter == number:
                self._places[index].is_ready = True
        for number in [each for each, step in self._dropped.items() if step <= work.step]:
            del self._dropped[number]

    def failed(self, step: int) -> None:
        self._of_slot = dict.fromkeys(self._of_slot, -1)  # which changes took effect is not known
        for index, place in enumerate(self._places):
            if place.begun >= step and not place.is_ready:
                self._places[index] = _Place()
        for number, dropped in self._dropped.items():
            if dropped >= step:
                self._leaving[number] = ()

    def audit(self, running: Iterable[Running]) -> None:
        held = [place.adapter for place in self._places if place.adapter is not None]
        assert len(held) == len({*held}), "an adapter has two places"
        for index, place in enumerate(self._places):
            waits = place.adapter is not None and not (place.begun or place.is_ready)
            assert waits == (index in self._to_load), "a load is lost"
        for each in running:
            value = self._value(each.request)
            known = self._of_slot.get(each.slot, 0)
            assert known in (value, -1), "a slot has another adapter"
            if _is_adapted(each):
                assert value and self._places[value - 1].is_ready, "it runs without its adapter"
                assert _number(each.request) not in self._dropped, "it lacks its adapter"


def _number(request: Request) -> int | None:
    extra = request.extra(Adapted)
    return None if extra is None else extra.number


def _is_adapted(running: Running) -> bool:
    return running.request.extra(Adapted) is not None
