"""The server under all kinds of clients at once, and that none of them leaves anything behind.

Each client does one thing after another: streams, waits for whole answers, leaves in the middle,
reads slowly, sends malformed or too long requests. The server has few pages and a short queue. In
the end every page is free or cached and the audit passes, every accepted request has ended once,
the same questions got the same answers, and rejections had the expected errors.

Two rounds of each client are enough for a test. A soak of ten minutes also prints how often what
was done, and fails if memory grew: SOAK_MINUTES=10 pytest -s tests/server/test_soak.py
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.http_server import server_on
from support.waiting import until

from minisgl.bench.online.client import RecordedAnswer, post
from minisgl.client.address import Address
from minisgl.config import EngineConfig
from minisgl.engine import AsyncEngine
from minisgl.engine.stream import OutputStream
from minisgl.request import Request

MINUTES = float(os.environ.get("SOAK_MINUTES", "0"))
NUM_CLIENTS, LEAST_ROUNDS = 24, 2
MAX_GROWTH_BYTES = 24 << 20
# Until then caches and pools fill, and memory that grows says nothing.
MIN_MINUTES_TO_JUDGE_MEMORY = 2.0
ENGINE = EngineConfig(
    device="cpu",
    num_pages=120,
    page_size=16,
    max_running_requests=16,
    max_queued_requests=16,
    max_prefill_length=64,
    schedule_conservativeness=0.05,
)
HOST, CHAT, COMPLETIONS = "127.0.0.1", "/v1/chat/completions", "/v1/completions"
QUESTIONS = [
    *("Hello! What is minisgl?", "What is 17 + 25?", "Spell the word garden.", "Who are you?"),
    *("What does --page-size do?", "What is the capital of France?", "Count from 3 to 9."),
    "I am Ada and I live in Turin. Where do I live?",
]
ASKED = {"messages": [{"role": "user", "content": "x"}]}
MALFORMED = [
    *((400, body) for body in (b"{", b"[]", b"{}")),
    (400, json.dumps({"messages": "hello"}).encode()),
    (400, json.dumps({**ASKED, "n": -1}).encode()),
    (400, json.dumps({**ASKED, "temperature": 9}).encode()),
    (404, json.dumps({**ASKED, "model": "x"}).encode()),
]


class Watched(AsyncEngine):
    """Knows what it has accepted and how it ended."""

    def watch(self) -> None:
        self.endings: Counter[str] = Counter()
        self.open: list[Request] = []
        self.num_accepted = 0

    def submit(self, *args: Any, **options: Any) -> OutputStream:
        stream = super().submit(*args, **options)
        self.num_accepted += 1
        self.open.append(stream.request)
        if len(self.open) > 500:
            self.count_endings()
        return stream

    def count_endings(self) -> None:
        ended = [request for request in self.open if request.finished]
        self.endings.update(request.finish_reason.value for request in ended)
        self.open = [request for request in self.open if not request.finished]


class Clients:
    def __init__(self, port: int) -> None:
        self._port = port
        self._until = time.monotonic() + 60 * MINUTES
        self._answers: dict[str, str] = {}  # by question
        self.counts: Counter[str] = Counter()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for seed in range(NUM_CLIENTS):
                group.create_task(self._client(random.Random(seed)))

    async def _client(self, rng: random.Random) -> None:
        kinds = {
            self._stream: 5,
            self._whole: 2,
            self._choices: 1,
            self._leave: 4,
            self._read_slowly: 1,
            self._malformed: 2,
            self._too_long: 1,
        }
        num_rounds = 0
        while num_rounds < LEAST_ROUNDS or time.monotonic() < self._until:
            [kind] = rng.choices([*kinds], [*kinds.values()])
            await kind(rng)
            self.counts[kind.__name__.strip("_")] += 1
            num_rounds += 1

    async def _stream(self, rng: random.Random) -> None:
        question = rng.choice(QUESTIONS)
        answer = await self._ask(CHAT, chat(question, stream=True))
        if not await self._refused(answer):
            check_endings(answer, 1)
            choices = [each for _, chunk in answer.chunks() for each in chunk.get("choices", ())]
            pieces = [choice["delta"].get("content") or "" for choice in choices]
            self._check_text(question, "".join(pieces))

    async def _whole(self, rng: random.Random) -> None:
        question = rng.choice(QUESTIONS)
        answer = await self._ask(CHAT, chat(question))
        if not await self._refused(answer):
            [choice] = json.loads(answer.rest)["choices"]
            self._check_text(question, choice["message"]["content"])
            assert choice["finish_reason"] in ("stop", "length")

    async def _choices(self, rng: random.Random) -> None:
        """Long random answers, which fill the pages and lead to retraction."""
        body = {"prompt": [rng.randrange(3, 2000) for _ in range(rng.randrange(1, 200))]}
        body |= {"n": 3, "max_tokens": 250, "ignore_eos": True, "stream": True}
        answer = await self._ask(COMPLETIONS, json.dumps(body).encode())
        if not await self._refused(answer):
            check_endings(answer, 3)

    async def _leave(self, rng: random.Random) -> None:
        asking = asyncio.ensure_future(
            self._ask(CHAT, chat(rng.choice(QUESTIONS), stream=rng.random() < 0.7, n=2))
        )
        await asyncio.wait([asking], timeout=rng.expovariate(10))
        asking.cancel()
        await asyncio.wait([asking])

    async def _read_slowly(self, rng: random.Random) -> None:
        """Through a small window, with pauses; some never come to the end."""
        with socket.socket() as stream:
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            stream.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(stream, (HOST, self._port))
            body = chat(rng.choice(QUESTIONS), stream=True, logprobs=True, top_logprobs=20)
            head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            await loop.sock_sendall(stream, head.encode() + body)
            received = b""
            while data := await loop.sock_recv(stream, 1024):
                received += data
                await asyncio.sleep(0.005)
                if rng.random() < 0.002:
                    return
            assert b" 200 " not in received[:20] or b"data: [DONE]" in received

    async def _malformed(self, rng: random.Random) -> None:
        status, body = rng.choice(MALFORMED)
        check_error(await self._ask(CHAT, body), status)

    async def _too_long(self, rng: random.Random) -> None:
        if rng.random() < 0.5:
            answer = await self._ask(CHAT, chat("much " * rng.randrange(5000, 20_000)))
        else:
            answer = await self._ask(COMPLETIONS, b'{"prompt": [5], "max_tokens": 100000}')
        assert check_error(answer, 400)["code"] == "context_length_exceeded"

    async def _ask(self, path: str, body: bytes) -> RecordedAnswer:
        return await post(Address("http", HOST, self._port, path), body)

    async def _refused(self, answer: RecordedAnswer) -> bool:
        """By a full queue, as it may be. Waits a while then."""
        if answer.status == 200:
            return False
        check_error(answer, 429)
        self.counts["refused by a full queue"] += 1
        await asyncio.sleep(0.2)
        return True

    def _check_text(self, question: str, text: str) -> None:
        """Greedy, so it is what the same question got before, whatever went on beside it."""
        assert text == self._answers.setdefault(question, text), question


def chat(question: str, **fields: Any) -> bytes:
    messages = [{"role": "user", "content": question}]
    return json.dumps({"messages": messages, "temperature": 0, "max_tokens": 60} | fields).encode()


def check_error(answer: RecordedAnswer, status: int) -> dict[str, Any]:
    assert answer.status == status, answer.rest[:200]
    error: dict[str, Any] = json.loads(answer.rest)["error"]
    assert error["message"]
    return error


def check_endings(answer: RecordedAnswer, num_choices: int) -> None:
    endings: Counter[int] = Counter()
    for _, chunk in answer.chunks():
        assert "error" not in chunk, chunk
        for choice in chunk.get("choices", ()):
            endings[choice["index"]] += choice["finish_reason"] is not None
    assert answer.done, "a stream without [DONE]"
    assert endings == dict.fromkeys(range(num_choices), 1)


def resident_bytes() -> int:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.timeout(300 + 60 * MINUTES)
async def test_clients_of_all_kinds_leave_nothing_behind() -> None:
    async with await Watched.start(ENGINE) as engine, server_on(engine) as (_, port):
        engine.watch()
        clients = Clients(port)
        running = asyncio.ensure_future(clients.run())
        sizes: list[int] = []
        while not running.done():
            await asyncio.wait([running], timeout=MINUTES or None)  # so 60 samples
            sizes.append(resident_bytes())
        await running

        def is_idle() -> bool:  # the server has noticed the last who left
            stats = engine.stats()
            return stats.num_running + stats.num_queued == 0

        await until(is_idle)
        engine.audit()
        stats = engine.stats()
        assert stats.num_free_pages + stats.num_cached_pages == stats.num_pages
        engine.count_endings()
        assert not engine.open
        assert engine.endings.total() == engine.num_accepted > 0
        assert not engine.endings["error"] and not engine.failure
    settled = sizes[len(sizes) // 3 :]  # before, caches and pools fill
    half = len(settled) // 2
    growth = statistics.median(settled[half:]) - statistics.median(settled[: half or 1])
    counts = clients.counts + Counter(
        {f"ended by {reason}": count for reason, count in engine.endings.items()}
        | {"retractions": stats.counters.num_retractions, "steps": stats.counters.num_steps}
    )
    for what, count in sorted(counts.items()):
        print(f"{what:24} {count:8,}")
    print(f"memory {statistics.median(settled) / 1e6:.1f} MB, growth {growth / 1e6:.1f} MB")
    if MINUTES >= MIN_MINUTES_TO_JUDGE_MEMORY:
        assert growth <= MAX_GROWTH_BYTES, [size >> 20 for size in sizes]
