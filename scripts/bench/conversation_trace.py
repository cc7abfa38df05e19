"""Writes a trace of long conversations that all go on at once, for `minisgl bench --trace`.

Each turn's prompt is that of the turn before, and more. It is sent once that is answered, so a
cache in which all conversations do not fit has lost the prompt by then.

python scripts/bench/conversation_trace.py /tmp/conversations.jsonl --turns 8
minisgl bench --model FOLDER --trace /tmp/conversations.jsonl --host-cache 64
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

BLOCK = 16  # tokens of a hash id, the default of --trace-block-size


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="where the trace goes")
    parser.add_argument("--conversations", type=int, default=48, help="number of them")
    parser.add_argument("--turns", type=int, default=8, help="prompts of each")
    parser.add_argument("--first", type=int, default=8192, help="tokens of the first prompt")
    parser.add_argument("--more", type=int, default=128, help="tokens that each turn adds")
    parser.add_argument("--output-len", type=int, default=32, help="tokens of each answer")
    args = parser.parse_args()

    num_blocks = -(-(args.first + args.more * args.turns) // BLOCK)
    with args.file.open("w") as file:
        for turn in range(args.turns):
            length = args.first + args.more * turn
            for conversation in range(args.conversations):
                first = conversation * num_blocks
                number = turn * args.conversations + conversation
                row = {
                    "timestamp": 0,
                    "chat_id": number,
                    "parent_chat_id": number - args.conversations if turn else -1,
                    "input_length": length,
                    "output_length": args.output_len,
                    "hash_ids": [*range(first, first + -(-length // BLOCK))],
                }
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
