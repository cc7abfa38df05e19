"""Talks to a server with the openai package: `python scripts/examples/openai_client.py`.

Give the address of a running server, or let the program start one of the demo model.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from openai import OpenAI


def main() -> None:
    # minisgl asks for a key only with --api-key; the package wants one in any case.
    with server() as url, OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=10) as client:
        model = next(iter(client.models.list())).id
        question = {"role": "user", "content": "What is the capital of France?"}
        whole = client.chat.completions.create(model=model, messages=[question], temperature=0)
        print(whole.choices[0].message.content, whole.usage.total_tokens, "tokens")

        question = {"role": "user", "content": "What is minisgl?"}
        stream = client.chat.completions.create(
            model=model, messages=[question], temperature=0, stream=True
        )
        for chunk in stream:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        print()

        question = {"role": "user", "content": "What is 17 + 25?"}
        scored = client.chat.completions.create(
            model=model, messages=[question], temperature=0, logprobs=True, top_logprobs=2
        )
        for token in scored.choices[0].logprobs.content:
            print(f"{token.token!r} {token.logprob:.3f}", end="  ")
        print()


@contextmanager
def server() -> Iterator[str]:
    """The address that was given, or that of a server which ends with the context."""
    if len(sys.argv) > 1:
        yield sys.argv[1]
        return
    command = [sys.executable, "-m", "minisgl", "serve", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as started:
        assert started.stderr is not None
        try:
            line = next(line for line in started.stderr if " at http://" in line)
            yield line.split(" at ")[1].strip()
        finally:
            started.terminate()
            started.stderr.read()  # or a full pipe would keep it from ending


if __name__ == "__main__":
    main()
