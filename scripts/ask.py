"""Starts a minisgl server on a free port, asks it a question, prints the answer as it comes.

    python scripts/ask.py [OPTIONS OF minisgl serve, but --host and --port]

The second half of scripts/quickstart.sh, and an example of a client that needs no package.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

from minisgl.models.hub import DEMO_NOTE

QUESTION = "Hello! What is minisgl?"
MAX_TOKENS = 64
STOP_TIMEOUT_S = 30
# The server is on this machine: no proxy from the environment should come between.
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def main(options: list[str]) -> int:
    # As for Ctrl-C, the server must not outlive this script.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if not any(option.startswith("--model") for option in options):
        print(DEMO_NOTE)
    try:
        with running_server(options) as url:
            print(f"\n> {QUESTION}")
            for text in stream_answer(url, QUESTION):
                print(text, end="", flush=True)
            print()
    except ServerFailedError as failure:
        print(failure.log, end="", file=sys.stderr)
        return failure.exit_code
    except urllib.error.HTTPError as refusal:
        print(json.loads(refusal.read())["error"]["message"], file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


class ServerFailedError(Exception):
    def __init__(self, exit_code: int, log: str) -> None:
        super().__init__(f"the server ended with exit code {exit_code}")
        self.exit_code = exit_code
        self.log = log


@contextmanager
def running_server(options: list[str]) -> Iterator[str]:
    """Gives the base URL of a server that is ready, and stops it however the context ends."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    # The last --host and --port count, so these do.
    command = [sys.executable, "-m", "minisgl", "serve", *options]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    print("Starting the server ...", flush=True)
    with tempfile.TemporaryFile("w+") as log:
        # A real model takes its time to load, and says so; the bundled one is quick.
        stderr = None if options else log
        with subprocess.Popen(command, stderr=stderr) as server:
            try:
                while not healthy(url):
                    if server.poll() is not None:
                        log.seek(0)
                        raise ServerFailedError(server.returncode, log.read())
                    time.sleep(0.1)
                print(f"The server listens at {url}.")
                yield url
            finally:
                if server.poll() is None:
                    stop(server)
    print("The server has stopped.")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def healthy(url: str) -> bool:
    try:
        with DIRECT.open(f"{url}/health", timeout=5):
            return True
    except OSError:  # refused while it starts, 503 while it loads
        return False


def stop(server: subprocess.Popen[bytes]) -> None:
    server.send_signal(signal.SIGTERM)
    try:
        server.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        server.kill()


def stream_answer(url: str, question: str) -> Iterator[str]:
    """The pieces of the answer, each as soon as the server has sent it."""
    body = {
        "messages": [{"role": "user", "content": question}],
        "max_tokens": MAX_TOKENS,
        "stream": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with DIRECT.open(request) as response:
        for line in response:
            data = line.decode().removeprefix("data:").strip()
            if data == "[DONE]":
                return
            if data:
                for choice in json.loads(data)["choices"]:
                    yield choice["delta"].get("content") or ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
