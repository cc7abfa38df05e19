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
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    # The last --host and --port count, so these do.
    command = [sys.executable, "-m", "minisgl", "serve", *options, "--host", "127.0.0.1"]
    print("Starting the server ...", flush=True)
    # A real model takes its time to load, and says so; the bundled one is quick.
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen([*command, "--port", port], stderr=None if options else log) as server,
    ):
        try:
            return ask(server, f"http://127.0.0.1:{port}")
        except KeyboardInterrupt:
            return 130
        finally:
            if server.poll() is None:
                stop(server)
            else:
                log.seek(0)
                print(log.read(), end="", file=sys.stderr)


def ask(server: subprocess.Popen[bytes], url: str) -> int:
    """Prints the answer, when the server is ready. Returns the exit code."""
    while not healthy(url):
        if server.poll() is not None:
            return server.returncode
        time.sleep(0.1)
    print(f"The server listens at {url}.\n\n> {QUESTION}")
    try:
        for text in stream_answer(url, QUESTION):
            print(text, end="", flush=True)
        print()
    except urllib.error.HTTPError as refusal:
        print(json.loads(refusal.read())["error"]["message"], file=sys.stderr)
        return 1
    return 0


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
    print("The server has stopped.")


def stream_answer(url: str, question: str) -> Iterator[str]:
    """The pieces of the answer, each as soon as the server has sent it."""
    messages = [{"role": "user", "content": question}]
    body = {"messages": messages, "max_tokens": MAX_TOKENS, "stream": True}
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
