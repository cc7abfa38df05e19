"""A runner without a model, whose tokens betray every wrong page.

The KV of a token is a hash of itself and of the KV in front of it, read through the page table. A
sampled token is a function of that hash, so it depends on every token of its sequence and on
nothing else: one page lost, shared while being written or handed out too early changes the output.

It keeps a state for each slot, too, if told to: the same hash, which a slot starts from nothing or
from a snapshot, and which must agree with the pages.

It keeps a second kind of pages, too, if told a window: they hold the same hashes, and each token
checks those of all tokens that its window shows.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from minisgl.distributed.addresses import Listening
from minisgl.kvcache.copies import Copies, HostTraffic, Load, Traffic
from minisgl.kvcache.moves import Move, Place
from minisgl.matcher import MaskRows, mask_words
from minisgl.parts.adapters.host import AdapterPlan
from minisgl.parts.copies.host import CopyPlan
from minisgl.parts.experts.host import ExpertPlan
from minisgl.parts.masks.host import MaskPlan
from minisgl.parts.scores.host import ScorePlan
from minisgl.request import TokenLogprobs
from minisgl.scheduler.plan import PartPlan, SlotJoin, StepPlan, StepResult

MASK = (1 << 61) - 1
RANK_PAGES = 1 << 20  # more than a rank has


def mix(state: int, token_id: int) -> int:
    return ((state ^ (token_id + 0x9E3779B9)) * 0x2545F4914F6CDD1D + 1) & MASK


def added_by(adapter: int) -> int:
    """What an adapter adds to each token, of which KV depends."""
    return (1 + adapter) << 32


def sample(state: int, seed: int, vocab_size: int, masked: frozenset[int] = frozenset()) -> int:
    """A token that is not among `masked`, unless all of them are."""
    if len(masked) >= vocab_size:
        masked = frozenset()
    drawn = mix(state, seed)
    while (token_id := (drawn >> 20) % vocab_size) in masked:
        drawn = mix(drawn, seed)
    return token_id


def expected_output(
    prompt: Sequence[int],
    *,
    seed: int,
    max_tokens: int,
    stop: frozenset[int],
    vocab_size: int,
    allowed: Callable[[Sequence[int]], Collection[int]] | None = None,
    adapter: int | None = None,
) -> list[int]:
    """The output for a prompt under every correct schedule. allowed: the tokens that may follow
    an output; where there are none the output ends. adapter: its number."""
    state, added = 0, 0 if adapter is None else added_by(adapter)
    for token_id in prompt:
        state = mix(state, token_id + added)
    output: list[int] = []
    every = frozenset(range(vocab_size))
    while len(output) < max_tokens:
        following = every if allowed is None else allowed(output)
        if not following:
            break
        token_id = sample(state, seed, vocab_size, every.difference(following))
        output.append(token_id)
        if token_id in stop:
            break
        state = mix(state, token_id + added)
    return output


def masked_slots(plan: StepPlan) -> tuple[int, ...]:
    masked = plan.part(MaskPlan)
    return () if masked is None else masked.slots


def copies_of_ranks(plan: StepPlan) -> Sequence[Copies]:
    planned = plan.part(CopyPlan)
    return () if planned is None else planned.of_ranks


def copies_of(plan: StepPlan) -> Copies | None:
    """Of the only rank."""
    found = copies_of_ranks(plan)
    assert len(found) <= 1
    return found[0] if found else None


@dataclass
class _Slot:
    join: SlotJoin
    pages: dict[int, int] = field(default_factory=dict)
    window_pages: dict[int, int] = field(default_factory=dict)
    length: int = 0
    state: int = 0  # the KV of the last token that was computed
    advanced: int = 0  # number of tokens by which the state has advanced
    by_rows: int = 0  # the state that the rows have advanced
    last_token: int = -1


@dataclass
class _Adapter:
    number: int
    has_landed: bool = False


class FakeDisk:
    """The index of a disk, and what its pages hold. Several runners may share one."""

    def __init__(self) -> None:
        self.pages: dict[bytes, list[int]] = {}
        self.forgotten: set[bytes] = set()

    def holds(self, key: bytes) -> bool:
        return key in self.pages and key not in self.forgotten

    def forget(self, keys: Sequence[bytes]) -> None:
        self.forgotten.update(keys)


class FakeRunner:
    """Executes plans at launch, in order; `collect` hands the result over later.

    Where a plan allows runs, `runs` draws the length of each. The lane of loads is as slow as can
    be: their pages hold nothing until `land`, or until a plan awaits them.
    """

    def __init__(
        self,
        *,
        page_size: int,
        vocab_size: int = 50,
        fail_at: frozenset[int] = frozenset(),
        runs: random.Random | None = None,
        keeps_states: bool = False,
        window: int | None = None,
        slots_each: int | None = None,
    ):
        """slots_each: of each rank, where ranks divide requests; each has pages and snapshots of
        its own."""
        self.page_size = page_size
        self.vocab_size = vocab_size
        self.fail_at = fail_at
        self.num_computed_tokens = 0
        self._runs = runs or random.Random(0)
        self._has_runs = False
        self._keeps_states = keeps_states
        self._slots_each = slots_each
        # Length and state of each, by its rank and number.
        self._snapshots: dict[tuple[int, int], tuple[int, int]] = {}
        # With a host tier: how many pages one takes there, and the number of the first one's first.
        self.pages_each, self.first_part = 1, 1 << 60
        # The same of pages of windowed layers.
        self.window_pages_each, self.first_window_part = 1, 1 << 60
        self._window = window
        self._window_cells: dict[tuple[int, int], int] = {}
        self._slots: dict[int, _Slot] = {}
        self._adapters: dict[int, _Adapter] = {}  # by place
        self.dropped: set[int] = set()  # adapters
        self._adapter_of: dict[int, int] = {}  # of each slot: 1 + the place, or 0
        self._cells: dict[tuple[int, int], int] = {}
        self._host: dict[int, list[int]] = {}  # those of each rank as `first_page` has it
        self.in_flight: dict[int, Load] = {}  # loads
        self._rank_of_load: dict[int, int] = {}
        self._loads_of: dict[int, tuple[Load, ...]] = {}  # by step
        self.num_copied = [0, 0]  # pages that were offloaded, and loaded
        self.disk = FakeDisk()
        self.moves: list[tuple[Move, Callable[[int, int], None]]] = []  # under way
        self.holds_moves = False  # until `end_move`
        self.num_moved = [0, 0]  # pages that were written, and read
        self._sampled: dict[int, list[int]] = {}  # by slot: runs of a masked plan
        self._forwarded: tuple[StepPlan, list[_Slot], StepResult] | None = None

    def launch(self, plan: StepPlan, masks: MaskRows | None = None) -> StepResult:
        self._forwarded = None
        if plan.step in self.fail_at:
            raise RuntimeError(f"step {plan.step} was told to fail")
        of_ranks = copies_of_ranks(plan)
        for rank, copies in enumerate(of_ranks):
            self._copy(copies, rank)
        self._loads_of[plan.step] = tuple(load for each in of_ranks for load in each.loads)
        adapted = plan.part(AdapterPlan)
        if adapted is not None:
            self._adapter_of |= dict(adapted.changes)
        for join in plan.joins:
            slot = self._slots[join.slot] = _Slot(join)
            if join.snapshot is not None:
                key = self.rank_of(join.slot), join.snapshot
                slot.advanced, slot.by_rows = self._snapshots[key]
        for grant in plan.grants:
            assert not grant.windowed or self._window is not None
            slot = self._slots[grant.slot]
            pages = slot.window_pages if grant.windowed else slot.pages
            for offset, page in enumerate(grant.pages):
                pages[grant.index + offset] = page
        ranks = [*map(self.rank_of, plan.decode_slots)]
        assert ranks == sorted(ranks), "decode rows are in the order of their ranks"
        longest = max((self._slots[slot].length + 1 for slot in plan.decode_slots), default=0)
        if masked_slots(plan):
            return self._launch_masked(plan, masks)
        tokens: list[int] = []
        run_lengths: list[int] = []
        logprobs: dict[int, TokenLogprobs] = {}
        for slot_id in plan.decode_slots:
            run_lengths.append(self._run(self._slots[slot_id], plan.max_run, tokens, logprobs))
        self._has_runs |= plan.max_run > 1
        if not self._has_runs:
            assert plan.longest_decode == longest
        else:  # how long the runs before it were is not known to whoever planned
            assert plan.longest_decode >= longest
        for slot in self._compute_chunks(plan):
            self._report(slot, self._draw(slot), tokens, logprobs)
            run_lengths.append(1)
        self.num_computed_tokens += plan.num_tokens
        if plan.max_run == 1:
            return StepResult(plan.step, tokens, logprobs, self._outcomes(plan))
        num_drafted = self._num_drafted(plan)
        return StepResult(
            plan.step,
            tokens,
            logprobs,
            self._outcomes(plan),
            run_lengths=run_lengths,
            num_drafted=num_drafted,
        )

    def _outcomes(self, plan: StepPlan) -> list[object]:
        return [self._outcome(part) for part in plan.parts]

    def _outcome(self, part: PartPlan) -> object:
        if isinstance(part, ScorePlan):
            return {
                each.index: [TokenLogprobs(t, -1.0, 1) for t in each.token_ids]
                for each in part.chunks
            }
        if isinstance(part, ExpertPlan):
            return bytes(2 * len(part.rows))  # one expert of each token
        if isinstance(part, AdapterPlan):
            for place, adapter in part.loads:
                assert adapter not in self.dropped, "it is not in host memory any more"
                self._adapters[place] = _Adapter(adapter)
            for each in self._adapters.values():
                each.has_landed |= part.is_alone or self._runs.random() < 0.2
            self.dropped |= {*part.drops}
            places = self._adapters.items()
            return tuple((place, each.number) for place, each in places if each.has_landed)
        return {}

    def _num_drafted(self, plan: StepPlan) -> list[int] | None:
        """The drafts of each sampled row, right and wrong; None for a plan without any."""
        if plan.max_run == 1:
            return None
        decoding = (self._slots[slot].join.takes_drafts for slot in plan.decode_slots)
        return [takes * (plan.max_run - 1) for takes in decoding] + [0] * plan.num_chunk_samples

    def _copy(self, copies: Copies, rank: int) -> None:
        first = RANK_PAGES * rank
        for load_id in copies.awaits:
            self.land(load_id)
        self.num_copied[0] += len(copies.offloads)
        for page, of_rank in copies.offloads:
            host_page = first + of_rank
            if page >= self.first_window_part:
                window_page, part = self._window_part(page)
                window_cells = self._cells_of(first + window_page)
                cells = [self._window_cells.get(cell, -1) for cell in window_cells]
                self._host[host_page] = [*cells, part]
                continue
            if page >= self.first_part:
                part, snapshot = self._part(page)
                state = self._snapshots[rank, snapshot]
                self._host[host_page] = [*state, part][:3]
                continue
            cells = [self._cells.get(cell, -1) for cell in self._cells_of(first + page)]
            self._host[host_page] = cells
        for load in copies.loads:
            self.num_copied[1] += len(load.pages)
            self.in_flight[load.id], self._rank_of_load[load.id] = load, rank
            for page in load.pages:
                if page >= self.first_window_part:
                    cells_of = self._cells_of(first + self._window_part(page)[0])
                    self._window_cells |= dict.fromkeys(cells_of, -1)
                    continue
                if page >= self.first_part:
                    self._snapshots[rank, self._part(page)[1]] = (-1, -1)
                    continue
                self._cells |= dict.fromkeys(self._cells_of(first + page), -1)

    def land(self, load_id: int) -> None:
        """Write what a load brings, unless it has landed."""
        load = self.in_flight.pop(load_id, None)
        if load is not None:
            parts: dict[int, list[int]] = {}  # of pages of windowed layers, that have come
            rank = self._rank_of_load[load_id]
            first = RANK_PAGES * rank
            for of_rank, page in zip(load.host_pages, load.pages, strict=True):
                host_page = first + of_rank
                if page >= self.first_window_part:
                    window_page, part = self._window_part(page)
                    *cells, same = self._host[host_page]
                    assert part == same, "parts are mixed up"
                    parts.setdefault(window_page, []).append(part)
                    of_page = self._cells_of(first + window_page)
                    self._window_cells |= zip(of_page, cells, strict=True)
                    continue
                if page >= self.first_part:
                    part, snapshot = self._part(page)
                    advanced, by_rows, same = self._host[host_page]
                    assert part == same and self._snapshots[rank, snapshot] in (
                        (-1, -1),
                        (advanced, by_rows),
                    ), "parts of different snapshots are joined"
                    self._snapshots[rank, snapshot] = advanced, by_rows
                    continue
                for place, value in enumerate(self._host[host_page]):
                    self._cells[first + page, place] = value
            assert all(len(each) == self.window_pages_each for each in parts.values())

    def forget(self) -> None:
        """Lose all KV, and all states."""
        for cells in (self._cells, self._window_cells):
            cells.update(dict.fromkeys(cells, -1))
        self._snapshots.update(dict.fromkeys(self._snapshots, (-1, -1)))

    def _window_part(self, number: int) -> tuple[int, int]:
        """The page of windowed layers, and its part, of a number behind those of snapshots."""
        return divmod(number - self.first_window_part, self.window_pages_each)

    def _cells_of(self, page: int) -> list[tuple[int, int]]:
        return [(page, place) for place in range(self.page_size)]

    def _part(self, number: int) -> tuple[int, int]:
        """The part and the snapshot of a number behind those of pages."""
        snapshot, part = divmod(number - self.first_part, self.pages_each)
        return part, snapshot

    def _launch_masked(self, plan: StepPlan, masks: MaskRows | None) -> StepResult:
        self._has_runs |= plan.max_run > 1
        run_lengths: list[int] | None = [] if plan.max_run > 1 else None
        num_drafted = self._num_drafted(plan)
        result = StepResult(
            plan.step,
            [],
            parts=self._outcomes(plan),
            run_lengths=run_lengths,
            num_drafted=num_drafted,
        )
        rows = [self._slots[slot] for slot in plan.decode_slots]
        self._sampled = {}
        for slot in rows:
            if slot.join.masked:
                self._compute(slot, slot.length, slot.last_token)
            else:  # what it samples depends on no mask
                tokens: list[int] = []
                self._run(slot, plan.max_run, tokens, {})
                self._sampled[slot.join.slot] = tokens
        rows += self._compute_chunks(plan)
        self.num_computed_tokens += plan.num_tokens
        masked = [slot.join.slot for slot in rows if slot.join.masked]
        assert masked_slots(plan) == tuple(masked), "a row lacks its mask, or has another's"
        self._forwarded = plan, rows, result
        assert plan.deferred == (masks is None)
        if masks is not None:
            self.sample(result, masks)
        return result

    def sample(self, handle: StepResult, masks: MaskRows) -> None:
        assert self._forwarded is not None
        plan, rows, result = self._forwarded
        assert result is handle, "sampled is what was launched last"
        assert masks.shape == (len(masked_slots(plan)), mask_words(self.vocab_size))
        self._forwarded = None
        tokens: list[int] = []
        left = iter(masks)
        for slot in rows:
            words = next(left) if slot.join.masked else None
            run = self._sampled.pop(slot.join.slot, None) or [self._draw(slot, words)]
            for token in run:
                self._report(slot, token, tokens, result.logprobs)
            if handle.run_lengths is not None:
                handle.run_lengths.append(len(run))  # type: ignore[attr-defined]
        masks.fill(0)  # nobody may read it again
        handle.token_ids[:] = tokens  # type: ignore[index]

    def new_masks(self, step: int, num_rows: int) -> MaskRows:
        return np.zeros((num_rows, mask_words(self.vocab_size)), dtype=np.uint32)

    def _compute_chunks(self, plan: StepPlan) -> list[_Slot]:
        """Compute the chunks' KV; returns the slots of those that sample."""
        sampling: list[_Slot] = []
        for chunk in plan.chunks:
            slot = self._slots[chunk.slot]
            for position, token_id in enumerate(chunk.token_ids, chunk.start):
                self._compute(slot, position, token_id)
                for taken in chunk.snapshots:
                    if taken.end == position + 1:
                        key = self.rank_of(chunk.slot), taken.snapshot
                        self._snapshots[key] = slot.advanced, slot.by_rows
            if chunk.samples:
                sampling.append(slot)
            else:
                slot.last_token = -1  # must not be fed
        return sampling

    def collect(self, handle: StepResult) -> StepResult:
        return handle

    def loads(self, handle: StepResult) -> Iterator[int]:
        for load in self._loads_of[handle.step]:
            self.land(load.id)
            yield load.id

    def move(self, moves: Sequence[Move], done: Callable[[int, int], None]) -> None:
        self.moves += [(move, done) for move in moves]
        while self.moves and not self.holds_moves:
            self.end_move()

    def listen(self, address: str, token: bytes) -> Listening:
        return Listening((f"{address}.0",))

    def end_move(self, index: int = 0) -> None:
        """Do a move that is under way."""
        move, done = self.moves.pop(index)
        num_pages = 0
        for key, of_rank in zip(move.keys, move.pages, strict=True):
            host_page = RANK_PAGES * move.rank + of_rank
            if move.target is Place.DISK:
                self.disk.pages[key] = self._host[host_page]
                self.disk.forgotten.discard(key)
            elif key not in self.disk.pages:
                break
            else:
                self._host[host_page] = self.disk.pages[key]
            num_pages += 1
        self.num_moved[move.source is Place.DISK] += num_pages
        done(move.id, num_pages)

    def traffic(self) -> HostTraffic:
        """A page has 1,000 bytes, and takes a millisecond."""
        return HostTraffic(
            *(Traffic(num, 1000 * num, num / 1000) for num in (*self.num_copied, *self.num_moved))
        )

    def may_compile(self) -> bool:
        return False

    def _run(
        self, slot: _Slot, max_run: int, tokens: list[int], logprobs: dict[int, TokenLogprobs]
    ) -> int:
        """One decode row; returns how many tokens it sampled."""
        if not slot.join.takes_drafts:
            max_run = 1
        wanted = self._runs.randint(1, max_run)
        for length in range(1, wanted + 1):
            self._compute(slot, slot.length, slot.last_token)
            self._report(slot, self._draw(slot), tokens, logprobs)
            if length < wanted and not self._has_room(slot, slot.length):
                wanted = length
                break
        for position in range(slot.length, slot.length + max_run - wanted):  # what was rejected
            if self._has_room(slot, position):
                self._cells[self._cell(slot, position)] = -1
                if self._window is not None:
                    self._window_cells[self._window_cell(slot, position)] = -1
        return wanted

    def _of_adapter(self, slot: _Slot) -> int:
        """What the adapter of a slot adds to each of its tokens."""
        value = self._adapter_of.get(slot.join.slot, 0)
        return added_by(self._adapters[value - 1].number) if value else 0

    def _has_room(self, slot: _Slot, position: int) -> bool:
        return position // self.page_size in slot.pages

    @staticmethod
    def _report(
        slot: _Slot, token_id: int, tokens: list[int], logprobs: dict[int, TokenLogprobs]
    ) -> None:
        if slot.join.params.logprobs is not None:
            logprobs[len(tokens)] = TokenLogprobs(token_id, -1.0, 1)
        tokens.append(token_id)

    def _compute(self, slot: _Slot, position: int, token_id: int) -> None:
        assert token_id >= 0, "a token is fed that was not sampled"
        before = 0 if position == 0 else self._cells[self._cell(slot, position - 1)]
        token_id += self._of_adapter(slot)
        slot.state = self._cells[self._cell(slot, position)] = mix(before, token_id)
        slot.length = position + 1
        slot.last_token = -1
        if self._keeps_states:
            assert slot.advanced == position, "the state is of another position"
            slot.by_rows, slot.advanced = mix(slot.by_rows, token_id), position + 1
            assert slot.by_rows == slot.state, "the state is of another prefix"
        if self._window is not None:
            self._window_cells[self._window_cell(slot, position)] = slot.state
            for seen in range(max(0, position + 1 - self._window), position + 1):
                held = self._window_cells.get(self._window_cell(slot, seen))
                assert held == self._cells[self._cell(slot, seen)], "a windowed page is not there"

    def _draw(self, slot: _Slot, words: MaskRows | None = None) -> int:
        """The token that the slot samples next, which is fed to it."""
        join = slot.join
        masked: frozenset[int] = frozenset()
        if words is not None:
            ids = range(self.vocab_size)
            masked = frozenset(id for id in ids if not words[id // 32] >> (id % 32) & 1)
            assert len(masked) < self.vocab_size, "a mask allows nothing"
        elif slot.length - len(join.prompt_token_ids) < join.params.min_tokens:
            masked = join.stop_token_ids
        slot.last_token = sample(slot.state, join.seed, self.vocab_size, masked)
        return slot.last_token

    def _cell(self, slot: _Slot, position: int) -> tuple[int, int]:
        return self._place(slot, slot.pages, position)

    def _window_cell(self, slot: _Slot, position: int) -> tuple[int, int]:
        return self._place(slot, slot.window_pages, position)

    def _place(self, slot: _Slot, pages: dict[int, int], position: int) -> tuple[int, int]:
        page = pages[position // self.page_size]
        assert page > 0, "the scratch page was handed out"
        return page + self.first_page(slot.join.slot), position % self.page_size

    def first_page(self, slot: int) -> int:
        """What makes the pages of a slot's rank different from those of others."""
        return RANK_PAGES * self.rank_of(slot)

    def rank_of(self, slot: int) -> int:
        """The rank that has the request in a slot."""
        return slot // self._slots_each if self._slots_each else 0
