"""Runs a workload on a server, every request over a connection of its own, and streams it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec

from minisgl.bench.client import Answer, post
from minisgl.bench.workload import Job
from minisgl.errors import MinisglError


class OnlineRunError(MinisglError):
    """The server refused a request of the workload, or did not finish it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedRequest:
    """One finished request, as its client saw it. Times are in seconds since the run began."""

    sent_s: float
    times_s: list[float]  # when each event with text arrived
    num_prompt_tokens: int
    num_cached_tokens: int  # of the prompt
    num_output_tokens: int

    @property
    def ttft_s(self) -> float:
        return self.times_s[0] - self.sent_s

    @property
    def itls_s(self) -> list[float]:
        """Between one event and the next."""
        return [after - before for before, after in pairwise(self.times_s)]


@dataclass(frozen=True, slots=True)
class OnlineRun:
    requests: list[StreamedRequest]

    @property
    def elapsed_s(self) -> float:
        """From the first request sent to the last token."""
        last = max(request.times_s[-1] for request in self.requests)
        return last - min(request.sent_s for request in self.requests)

    @property
    def num_output_tokens(self) -> int:
        return sum(request.num_output_tokens for request in self.requests)

    @property
    def num_events(self) -> int:
        return sum(len(request.times_s) for request in self.requests)

    @property
    def single_share(self) -> float:
        """At least this share of the events has one token: n too few are at most n with more."""
        return max(0.0, 1 - max(0, self.num_output_tokens - self.num_events) / self.num_events)


async def run_online(host: str, port: int, jobs: Sequence[Job]) -> OnlineRun:
    """Send all jobs at once and take every event as it comes.

    Raises OnlineRunError, and OSError where a connection breaks.
    """
    bodies = [completion_body(job) for job in jobs]
    tasks = [asyncio.ensure_future(post(host, port, "/v1/completions", body)) for body in bodies]
    try:
        answers = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    began = min(answer.sent for answer in answers)
    return OnlineRun([_streamed(answer, began) for answer in answers])


def completion_body(job: Job) -> bytes:
    """A request for exactly the tokens of `job`."""
    params = job.params
    return msgspec.json.encode(
        {
            "prompt": job.prompt_token_ids,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "seed": params.seed,
            "ignore_eos": params.ignore_eos,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )


def _streamed(answer: Answer, began: float) -> StreamedRequest:
    times: list[float] = []
    usage = None
    for at, chunk in answer.chunks():
        if "error" in chunk:
            raise OnlineRunError(chunk["error"]["message"])
        times += [at - began for choice in chunk["choices"] if choice["text"]]
        usage = chunk.get("usage")
    if answer.status != 200:
        raise OnlineRunError(f"{answer.status}: {answer.rest[:500].decode(errors='replace')}")
    if not answer.done or not times or usage is None:
        raise OnlineRunError("An answer ended without text, usage or [DONE].")
    return StreamedRequest(
        sent_s=answer.sent - began,
        times_s=times,
        num_prompt_tokens=usage["prompt_tokens"],
        num_cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        num_output_tokens=usage["completion_tokens"],
    )
