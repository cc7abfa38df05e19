"""Checks that requests fit into a server's context, and explains its rejections."""

from __future__ import annotations

from collections.abc import Sequence

from minisgl.bench.config import Sizes
from minisgl.bench.workload.config import FILES, WorkloadConfig
from minisgl.bench.workload.trace import TraceEntry
from minisgl.errors import CallerError

# Words in errors about a request that is too long, and about token ids out of range.
LENGTH_WORDS = ("context", "too long", "a sequence holds")
TOKEN_WORDS = ("token id", "token_id", "vocab", "prompt")


class RoomError(CallerError):
    """The requests of a workload do not fit into the context."""


def check_room(
    workload: WorkloadConfig, sizes: Sizes, context: int, *, stop_at_eos: bool = False
) -> None:
    """Raise RoomError if the longest possible request is longer than the context.

    A word of a chat counts as one token, the minimum.
    """
    prompt, output = sizes.prompt.high, sizes.output.high
    asked = f"Requests of up to {prompt:,} tokens in and {output:,} out"
    length = prompt + output
    if workload.kind == "shared-prefix":
        asked += f", after a prefix of {workload.prefix_len:,},"
        length += workload.prefix_len
    elif workload.kind == "multi-turn":
        asked = (
            f"Conversations of {workload.num_turns} questions of up to {prompt:,} words, with "
            f"answers of up to {output:,} tokens,"
        )
        # Where answers may end by themselves, only the last one's room is known to be needed.
        num_answers = 1 if stop_at_eos else workload.num_turns
        length = workload.num_turns * prompt + num_answers * output
    if length > context:
        raise RoomError(
            f"{asked} do not fit into the server's context of {context:,} tokens; "
            f"lower {length_options(workload)}."
        )


def describe_misfits(rows: Sequence[TraceEntry], context: int) -> str:
    """A sentence about the requests of a trace that do not fit; empty if all fit.

    Raises RoomError if none of it does.
    """
    misfits = sum(row.input_length + max(1, row.output_length) > context for row in rows)
    if misfits == len(rows):
        raise RoomError(f"No request of the trace fits into the context of {context:,} tokens.")
    if not misfits:
        return ""
    return (
        f"{misfits:,} of the trace's {len(rows):,} requests do not fit into the server's context "
        f"of {context:,} tokens and will fail"
    )


def length_options(workload: WorkloadConfig) -> str:
    """The names of the options that make requests shorter; not for a trace."""
    names = [
        "--input-len" if workload.input_len else "--max-prompt-length",
        "--output-len" if workload.output_len else "--max-output-length",
    ]
    if workload.kind == "embed":
        return names[0]
    if workload.kind == "shared-prefix":
        names.insert(0, "--prefix-len")
    elif workload.kind == "multi-turn":
        names.insert(0, "--num-turns")
    *rest, last = names
    return f"{', '.join(rest)} or {last}"


def with_remedy(reason: str, workload: WorkloadConfig, endpoint: str) -> str:
    """The reason of a failure, with the options that help against it, if any."""
    said = reason.lower()
    if not said.startswith("4"):  # a status; the others are not about the request
        return reason
    if any(words in said for words in LENGTH_WORDS):
        if workload.kind in FILES:
            return reason
        return f"{reason.rstrip('.')}; lower {length_options(workload)}."
    if endpoint == "completions" and any(words in said for words in TOKEN_WORDS):
        return (
            f"{reason.rstrip('.')}; prompts are of token ids: give the size of the vocabulary "
            "with --vocab-size N, or ask with --endpoint chat."
        )
    return reason
