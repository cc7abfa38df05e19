"""Sends scheduled requests to a server, each over its own connection, and streams the answers."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from typing import Annotated, Any

import msgspec

from minisgl.bench.figures import Distribution, Figures, Goodput
from minisgl.bench.offline_run import RequestRecord, StepCounts
from minisgl.bench.online.client import RecordedAnswer, RunProgress
from minisgl.bench.online.target import Endpoint, Message, question
from minisgl.bench.workload.requests import ScheduledRequest
from minisgl.client.chunk import StreamChunk, StreamDelta, StreamUsage
from minisgl.client.errors import AnswerError, Refusal, unreachable
from minisgl.client.exchange import describe_redirect
from minisgl.errors import MinisglError

TIMEOUT_S = 600.0

_decode = msgspec.json.Decoder(StreamChunk).decode


class OnlineRunError(MinisglError):
    """The server rejected a request of the workload, or did not finish it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedRequest:
    """One finished request, as its client saw it. Times are in seconds since the run began."""

    record: RequestRecord  # from sending it to the last event with text
    times_s: list[float]  # when each event with text arrived
    late_s: float = 0.0  # how long after it could have been sent
    counted: bool = True  # by the server; else by the schedule and the events
    tells_cached: bool = True  # the server reports how many tokens were cached

    @property
    def itls_s(self) -> list[float]:
        """Seconds between consecutive events."""
        return [after - before for before, after in pairwise(self.times_s)]

    def keeps(self, limits_s: Mapping[str, float]) -> bool:
        """Whether it met every latency limit of goodput."""
        found = {
            "ttft": self.record.ttft_s,
            "tpot": self.record.tpot_s or 0.0,  # a single token meets any limit
            "itl": max(self.itls_s, default=0.0),
            "e2e": self.record.e2e_s,
        }
        return all(found[name] <= limit for name, limit in limits_s.items())


@dataclass(frozen=True, slots=True)
class OnlineRun:
    """The answered requests, in the order of the schedule, and the reasons of failures."""

    requests: list[StreamedRequest]
    failures: Counter[str] = field(default_factory=Counter)  # how many, by reason

    @property
    def elapsed_s(self) -> float:
        """From the first request sent to the last token."""
        records = [request.record for request in self.requests]
        last = max(record.last_token_s for record in records)
        return last - min(record.submitted_s for record in records)

    @property
    def num_output_tokens(self) -> int:
        return sum(request.record.num_output_tokens for request in self.requests)

    @property
    def num_events(self) -> int:
        return sum(len(request.times_s) for request in self.requests)

    @property
    def single_share(self) -> float:
        """A lower bound of the share of events with a single token."""
        return max(0.0, 1 - max(0, self.num_output_tokens - self.num_events) / self.num_events)

    @property
    def itls_s(self) -> list[float]:
        """Seconds between consecutive events of each request."""
        return [*chain.from_iterable(request.itls_s for request in self.requests)]

    def figures(self, counts: StepCounts | None, limits_s: Mapping[str, float]) -> Figures:
        """Figures as seen by the clients. counts: from the server's metrics. limits_s: of goodput,
        which failed requests never meet."""
        requests, num_failed = self.requests, self.failures.total()
        records = [request.record for request in requests]
        figures = Figures.of_requests(records, self.elapsed_s, counts)
        told = any(request.tells_cached for request in requests)
        num_good = sum(request.keeps(limits_s) for request in requests)
        good = Goodput(
            limits_s=dict(limits_s),
            requests_per_s=num_good / self.elapsed_s,
            share=num_good / (len(requests) + num_failed),
        )
        return replace(
            figures,
            num_failed=num_failed,
            num_cached_tokens=figures.num_cached_tokens if told else None,
            cache_hit_rate=figures.cache_hit_rate if told else None,
            itl_s=Distribution.of(self.itls_s) if self.itls_s else None,
            goodput=good if limits_s else None,
        )


async def run_online(
    target: Endpoint,
    schedule: Sequence[ScheduledRequest],
    *,
    max_concurrency: int | None = None,
    timeout_s: float = TIMEOUT_S,
    progress: RunProgress | None = None,
) -> OnlineRun:
    """Send every request when it is due, and take every event as it comes.

    A request that fails is counted, and so are those that continue its conversation. Raises
    nothing of the server.
    """
    run = _Run(target, schedule, max_concurrency, timeout_s, progress or RunProgress())
    return await run.run()


class _Run:
    def __init__(
        self,
        target: Endpoint,
        schedule: Sequence[ScheduledRequest],
        max_concurrency: int | None,
        timeout_s: float,
        progress: RunProgress,
    ) -> None:
        self._target = target
        self._schedule = schedule
        self._timeout_s = timeout_s
        self._progress = progress
        self._room: AbstractAsyncContextManager[Any] = (
            nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)
        )
        # Made before the clock runs, but for those that depend on an answer.
        self._bodies = [None if asked.continues else target.body(asked) for asked in schedule]
        parents = {asked.parent for asked in schedule}
        self._ended = {index: asyncio.Event() for index in range(len(schedule)) if index in parents}
        self._began = 0.0
        self._answers: dict[int, RecordedAnswer] = {}
        self._late_s: dict[int, float] = {}
        self._failed: dict[int, str] = {}

    async def run(self) -> OnlineRun:
        self._began = time.perf_counter()
        tasks = [
            asyncio.ensure_future(self._request(index)) for index in range(len(self._schedule))
        ]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        streamed: list[StreamedRequest] = []
        for index, answer in sorted(self._answers.items()):
            try:
                streamed.append(self._streamed(index, answer))
            except OnlineRunError as error:
                self._failed[index] = str(error)
        return OnlineRun(streamed, Counter(self._failed.values()))

    async def _request(self, index: int) -> None:
        asked = self._schedule[index]
        try:
            due = await self._until_due(asked)
            body = self._bodies[index] or self._target.body(asked, self._history(index))
            async with self._room, asyncio.timeout(self._timeout_s):
                if isinstance(self._room, asyncio.Semaphore):  # it may have waited for room
                    due = max(due, time.perf_counter())
                await self._send(index, body, due)
        except TimeoutError:
            self._failed[index] = f"no whole answer in {self._timeout_s:g} s"
        except AnswerError as error:
            self._failed[index] = f"the server {error}"
        except OSError as error:
            self._failed[index] = str(unreachable("the server", error))
        except OnlineRunError as error:
            self._failed[index] = str(error)
        finally:
            self._progress.num_ended += 1
            if index in self._ended:
                self._ended[index].set()

    async def _until_due(self, asked: ScheduledRequest) -> float:
        """Wait for the due time and the parent. Returns the later one, by time.perf_counter."""
        due = self._began + asked.due_s
        # Again, because a timer of uvloop may end up to a millisecond early.
        while (wait_s := due - time.perf_counter()) > 0:  # noqa: ASYNC110
            await asyncio.sleep(wait_s)
        if asked.parent is None:
            return due
        await self._ended[asked.parent].wait()
        if asked.continues and asked.parent in self._failed:
            raise OnlineRunError("the question before it failed")
        if asked.pause_s:
            await asyncio.sleep(asked.pause_s)
        return max(due, time.perf_counter())

    async def _send(self, index: int, body: bytes, due: float) -> None:
        self._progress.num_running += 1
        try:
            max_tokens = self._schedule[index].max_tokens
            answer = await self._target.ask(body, max_tokens, self._progress)
        finally:
            self._progress.num_running -= 1
        if answer.status != 200:
            raise OnlineRunError(f"{answer.status}: {self._reason(answer)}")
        self._late_s[index] = answer.sent - due
        self._answers[index] = answer
        self._progress.num_answered += 1
        self._progress.num_answered_tokens += max_tokens
        self._progress.num_answered_events += len(answer.events)

    def _history(self, index: int) -> list[Message]:
        """The messages before this question."""
        turns: list[list[Message]] = []
        parent = self._schedule[index].parent
        while parent is not None:
            asked = self._schedule[parent]
            text = "".join(text for _, text in _texts(self._answers[parent]))
            turns.append([question(asked), {"role": "assistant", "content": text}])
            parent = asked.parent if asked.continues else None
        return [message for turn in reversed(turns) for message in turn]

    def _reason(self, answer: RecordedAnswer) -> str:
        """The message of a response that is not a stream."""
        if answer.redirect is not None:
            return describe_redirect(self._target.url, answer.redirect)
        return self._said(answer.body)

    def _said(self, body: bytes) -> str:
        return Refusal.read(body, self._target.api_key).message

    def _streamed(self, index: int, answer: RecordedAnswer) -> StreamedRequest:
        """The record of an answer. One with vectors comes at once and has no tokens.

        Raises OnlineRunError.
        """
        asked = self._schedule[index]
        is_vector = self._target.endpoint == "embeddings"
        usage, times = self._vectors(answer) if is_vector else self._events(answer)
        times_s = [at - self._began for at in times]
        num_prompt_tokens, num_output_tokens = usage.prompt_tokens, usage.completion_tokens
        if is_vector:
            num_output_tokens = 0
        cached, (num_drafted, num_accepted) = usage.details, usage.drafts
        counted = num_prompt_tokens if is_vector else num_output_tokens
        record = RequestRecord(
            submitted_s=answer.sent - self._began,
            first_token_s=times_s[0],
            last_token_s=times_s[-1],
            num_prompt_tokens=asked.num_prompt_tokens
            if num_prompt_tokens is None
            else num_prompt_tokens,
            num_cached_tokens=cached.cached_tokens or 0,
            num_host_tokens=cached.host_cached_tokens or 0,
            num_disk_tokens=cached.disk_cached_tokens or 0,
            num_output_tokens=len(times) if num_output_tokens is None else num_output_tokens,
            num_drafted_tokens=num_drafted,
            num_accepted_tokens=num_accepted,
            structured=asked.structured,
        )
        return StreamedRequest(
            record=record,
            times_s=times_s,
            late_s=self._late_s[index],
            counted=counted is not None,
            tells_cached=cached.cached_tokens is not None,
        )

    def _vectors(self, answer: RecordedAnswer) -> tuple[StreamUsage, list[float]]:
        """The usage, and when the answer ended. Raises OnlineRunError."""
        try:
            usage = msgspec.json.decode(answer.body, type=_Vectors).usage
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise OnlineRunError(f"an answer has no vector: {error}") from error
        return usage, [answer.ended]

    def _events(self, answer: RecordedAnswer) -> tuple[StreamUsage, list[float]]:
        """The usage, and when each event with text came. Raises OnlineRunError."""
        usage = StreamUsage()
        finished = answer.done
        with_choice: list[float] = []
        for at, chunk in _chunks(answer):
            if chunk.error:
                raise OnlineRunError(self._said(msgspec.json.encode({"error": chunk.error})))
            usage = chunk.usage or usage
            choices = chunk.choices or []
            finished |= any(choice.finish_reason for choice in choices)
            with_choice += [at] * bool(choices)
        # An answer may be nothing but tokens without text.
        times = [at for at, text in _texts(answer) if text] or with_choice[-1:]
        if not finished or not times:
            raise OnlineRunError("an answer ended without text or without [DONE]")
        return usage, times


class _Vectors(msgspec.Struct):
    """What is read of an answer with vectors."""

    data: Annotated[list[msgspec.Raw], msgspec.Meta(min_length=1)]
    usage: StreamUsage = msgspec.field(default_factory=StreamUsage)


def _chunks(answer: RecordedAnswer) -> Iterator[tuple[float, StreamChunk]]:
    try:
        for at, payload in answer.payloads():
            yield at, _decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        reason = f"an event of an answer is not as OpenAI's API has it: {error}"
        raise OnlineRunError(reason) from error


def _texts(answer: RecordedAnswer) -> Iterator[tuple[float, str]]:
    """The time and the text of each event with a choice, thinking included."""
    for at, chunk in _chunks(answer):
        for choice in chunk.choices or ():
            delta = choice.delta or StreamDelta()
            yield at, (choice.text or "") + delta.thinking + (delta.content or "")
