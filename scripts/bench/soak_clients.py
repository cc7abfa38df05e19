"""The clients of scripts/bench/soak.py: `python scripts/bench/soak_clients.py PORT MINUTES`.

Each does one thing after another: streams, waits for whole answers, leaves in the middle, reads
slowly, sends malformed or too long requests. Ends with a line of JSON: how often they did
what, and every answer that was not as expected.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import socket
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from minisgl.bench.online.client import RecordedAnswer, post
from minisgl.client.address import Address

HOST = "127.0.0.1"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
NUM_CLIENTS = 24
QUESTIONS = [
    *("Hello! What is minisgl?", "What is 17 + 25?", "Spell the word garden.", "Who are you?"),
    *("What does --page-size do?", "What is the capital of France?", "Count from 3 to 9."),
    "I am Ada and I live in Turin. Where do I live?",
]
MALFORMED = [
    (400, b"{"),
    (400, b"[]"),
    (400, b"{}"),
    (400, json.dumps({"messages": "hello"}).encode()),
    (400, json.dumps({"messages": [{"role": "user", "content": "x"}], "n": -1}).encode()),
    (400, json.dumps({"messages": [{"role": "user", "content": "x"}], "temperature": 9}).encode()),
    (404, json.dumps({"model": "x", "messages": [{"role": "user", "content": "x"}]}).encode()),
]


@dataclass
class Tally:
    """The observations of the clients."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    answers: dict[str, str] = field(default_factory=dict)  # by question

    def expect(self, condition: object, fault: str) -> None:
        if not condition:
            self.faults.append(fault)


class Clients:
    def __init__(self, port: int, minutes: float) -> None:
        self._port = port
        self._until = time.monotonic() + 60 * minutes
        self._tally = Tally()

    async def run(self) -> Tally:
        async with asyncio.TaskGroup() as group:
            for seed in range(NUM_CLIENTS):
                group.create_task(self._client(random.Random(seed)))
        return self._tally

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
        while time.monotonic() < self._until:
            [kind] = rng.choices([*kinds], [*kinds.values()])
            await kind(rng)
            self._tally.counts[kind.__name__.strip("_")] += 1

    async def _stream(self, rng: random.Random) -> None:
        question = rng.choice(QUESTIONS)
        answer = await self._ask(CHAT, chat(question, stream=True))
        if not await self._refused(answer):
            self._check_stream(question, answer)

    async def _whole(self, rng: random.Random) -> None:
        question = rng.choice(QUESTIONS)
        answer = await self._ask(CHAT, chat(question))
        if not await self._refused(answer):
            [choice] = json.loads(answer.rest)["choices"]
            self._check_text(question, choice["message"]["content"])
            self._tally.expect(choice["finish_reason"] in ("stop", "length"), f"{choice}")

    async def _choices(self, rng: random.Random) -> None:
        """Long random answers, which fill the pages and lead to retraction."""
        body = {"prompt": [rng.randrange(3, 2000) for _ in range(rng.randrange(1, 200))]}
        body |= {"n": 3, "max_tokens": 250, "ignore_eos": True, "stream": True}
        answer = await self._ask(COMPLETIONS, json.dumps(body).encode())
        if not await self._refused(answer):
            self._check_endings(answer, 3)

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
            accepted = b" 200 " in received[:20]
            self._tally.expect(not accepted or b"data: [DONE]" in received, "a slow answer broke")

    async def _malformed(self, rng: random.Random) -> None:
        status, body = rng.choice(MALFORMED)
        self._check_error(await self._ask(CHAT, body), status)

    async def _too_long(self, rng: random.Random) -> None:
        if rng.random() < 0.5:
            answer = await self._ask(CHAT, chat("much " * rng.randrange(5000, 20_000)))
        else:
            answer = await self._ask(COMPLETIONS, b'{"prompt": [5], "max_tokens": 100000}')
        error = self._check_error(answer, 400)
        self._tally.expect(error.get("code") == "context_length_exceeded", f"{error}")

    async def _ask(self, path: str, body: bytes) -> RecordedAnswer:
        return await post(Address("http", HOST, self._port, path), body)

    async def _refused(self, answer: RecordedAnswer) -> bool:
        """By a full queue, as it may be. Waits a while then."""
        if answer.status == 200:
            return False
        await asyncio.sleep(0.2)
        self._tally.counts["refused by a full queue"] += 1
        self._check_error(answer, 429)
        return True

    def _check_error(self, answer: RecordedAnswer, status: int) -> dict[str, Any]:
        self._tally.expect(answer.status == status, f"{answer.status} instead of {status}")
        try:
            error = json.loads(answer.rest)["error"]
            return {"message": error["message"], **error}
        except (ValueError, KeyError):
            self._tally.faults.append(f"no error object: {answer.rest[:200]!r}")
            return {}

    def _check_stream(self, question: str, answer: RecordedAnswer) -> None:
        self._check_endings(answer, 1)
        choices = [choice for _, chunk in answer.chunks() for choice in chunk.get("choices", ())]
        pieces = [choice["delta"].get("content") or "" for choice in choices]
        self._check_text(question, "".join(pieces))

    def _check_endings(self, answer: RecordedAnswer, num_choices: int) -> None:
        endings: Counter[int] = Counter()
        for _, chunk in answer.chunks():
            self._tally.expect("error" not in chunk, f"{chunk}")
            for choice in chunk.get("choices", ()):
                endings[choice["index"]] += choice["finish_reason"] is not None
        self._tally.expect(answer.done, "a stream without [DONE]")
        expected = dict.fromkeys(range(num_choices), 1)
        self._tally.expect(endings == expected, f"{num_choices} choices ended {dict(endings)}")

    def _check_text(self, question: str, text: str) -> None:
        """Greedy, so it is what the same question got before, whatever went on beside it."""
        known = self._tally.answers.setdefault(question, text)
        self._tally.expect(text == known, f"{question!r} got {text!r} and {known!r}")


def chat(question: str, **fields: Any) -> bytes:
    messages = [{"role": "user", "content": question}]
    return json.dumps({"messages": messages, "temperature": 0, "max_tokens": 60} | fields).encode()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's to handle
    clients = Clients(int(sys.argv[1]), float(sys.argv[2]))
    tally = asyncio.run(clients.run())
    print(json.dumps({"counts": tally.counts, "faults": tally.faults}))


if __name__ == "__main__":
    main()
