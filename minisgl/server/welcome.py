"""What a server says of itself: where it listens, its page, and commands that try it."""

from __future__ import annotations

import asyncio
import json
import logging
import shlex
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from minisgl.server.config import ServerConfig
from minisgl.server.endpoints import ENDPOINTS

logger = logging.getLogger(__name__)

UNIX = "unix:"  # before the path of a socket
# A browser cannot go to these, which stand for all addresses of the machine.
LOOPBACK_OF = {"0.0.0.0": "127.0.0.1", "::": "::1"}
# In a process of its own: a text browser would take the terminal, and some browsers never return.
OPEN = "import sys, webbrowser; sys.exit(not webbrowser.open(sys.argv[1]))"

# What to try a model with, by its task: the first endpoint for it.
TRIALS = {each.task: each for each in reversed(ENDPOINTS)}
# Calls of the openai package, which has none for reranking, and what is shown of their answers.
CALLS = {
    "generate": (
        "chat.completions.create"
        '(model={model}, messages=[{{"role": "user", "content": "Hello!"}}])',
        "choices[0].message.content",
    ),
    "embed": ('embeddings.create(model={model}, input="Hello!")', "data[0].embedding[:8]"),
}


@dataclass(frozen=True, slots=True)
class Welcome:
    """The lines about a server that is ready to be used."""

    config: ServerConfig
    listener: socket.socket

    @property
    def place(self) -> str:
        """The URL that the server listens at, or `unix:` and its path."""
        return UNIX + self.config.uds if self._is_unix else self._url(self._address)

    @property
    def page(self) -> str | None:
        """The address of the page, on this machine; None if there is none, or no browser can go
        there."""
        return None if self._is_unix or self.config.no_ui else f"{self._local_url}/"

    def log(self, served: str, model: str, task: str) -> None:
        """Tell where `served` is, and how to ask it for an answer of `model`, loaded for `task`."""
        logger.info("Serving %s at %s", served, self.place)
        for line in self.lines(model, task):
            logger.info("%s", line)

    def lines(self, model: str, task: str) -> Iterator[str]:
        """How to try it."""
        if self.page is not None:
            what = "Talk to it" if task == "generate" else "See it at work"
            yield f"{what} in a browser: {self.page}"
        if not self._is_unix and task in CALLS:
            yield f"Or with the openai package: {self._openai(model, *CALLS[task])}"
        trial = TRIALS[task]
        yield f"Try it: {self._curl(trial.path, trial.example)}"

    def _curl(self, path: str, body: Mapping[str, Any]) -> str:
        headers = "-H 'Content-Type: application/json'"
        if self.config.api_key:
            headers += ' -H "Authorization: Bearer $MINISGL_API_KEY"'
        return f"curl {self._local_url}{path} {headers} -d '{json.dumps(body)}'"

    def _openai(self, model: str, call: str, shown: str) -> str:
        # The package wants a key in any case.
        key = "" if self.config.api_key else ', api_key="none"'
        code = (
            f'from openai import OpenAI; client = OpenAI(base_url="{self._local_url}/v1"{key}); '
            f"answer = client.{call.format(model=json.dumps(model))}; print(answer.{shown})"
        )
        environment = 'OPENAI_API_KEY="$MINISGL_API_KEY" ' if self.config.api_key else ""
        return f"{environment}python -c {shlex.quote(code)}"

    @property
    def _is_unix(self) -> bool:
        return self.listener.family == socket.AF_UNIX

    @property
    def _address(self) -> str:
        return str(self.listener.getsockname()[0])

    @property
    def _local_url(self) -> str:
        if self._is_unix:
            return f"--unix-socket {shlex.quote(self.config.uds)} http://localhost"
        return self._url(LOOPBACK_OF.get(self._address, self._address))

    def _url(self, address: str) -> str:
        scheme = "https" if self.config.ssl_certfile else "http"
        host = f"[{address}]" if ":" in address else address
        return f"{scheme}://{host}:{self.listener.getsockname()[1]}"


async def open_browser(page: str) -> None:
    """Open the page in the user's browser; if there is none, log where the page is."""
    quiet = asyncio.subprocess.DEVNULL
    browser = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        OPEN,
        page,
        stdin=quiet,
        stdout=quiet,
        stderr=quiet,
        start_new_session=True,
    )
    if await browser.wait():
        logger.warning("No browser could be opened; the page is at %s", page)
