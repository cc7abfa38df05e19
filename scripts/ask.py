"""Starts a minisgl server on a free port, asks it a question, prints the answer as it comes.

    python scripts/ask.py [OPTIONS OF minisgl serve, but --host and --port]

The second half of scripts/quickstart.sh.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys

from minisgl.models.hub import DEMO_NOTE

PROGRAM = (sys.executable, "-m", "minisgl")
QUESTION = "Hello! What is minisgl?"


def main(options: list[str]) -> int:
    # As for Ctrl-C, the server must not outlive this script.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if not any(option.startswith("--model") for option in options):
        print(DEMO_NOTE)
    print("Starting the server ...", flush=True)
    # The last --host and --port count, so these do.
    command = [*PROGRAM, "serve", *options, "--host", "127.0.0.1", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        # A real model takes its time to load, and says so; the bundled one is quick.
        try:
            return ask(server, shows_log=bool(options))
        except KeyboardInterrupt:
            return 130


def ask(server: subprocess.Popen[str], shows_log: bool) -> int:
    """Prints the answer, when the server is ready, and stops the server. Returns the exit code."""
    assert server.stderr is not None
    log = ""
    try:
        for line in server.stderr:
            log += line
            if shows_log:
                print(line, end="", file=sys.stderr, flush=True)
            if serving := re.search(r" at (http://\S+)", line):
                print(f"The server listens at {serving[1]}.\n\n> {QUESTION}", flush=True)
                asking = [*PROGRAM, "chat", "--url", serving[1], "--max-tokens", "64", QUESTION]
                return subprocess.run(asking).returncode
        if not shows_log:
            print(log, end="", file=sys.stderr)
        return server.wait()
    finally:
        if server.poll() is None:
            server.terminate()
            rest = server.stderr.read()  # until it has ended
            if shows_log:
                print(rest, end="", file=sys.stderr)
            print("The server has stopped.")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
