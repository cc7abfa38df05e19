"""What does not fit into a server's context, and what to do about that and other refusals."""

from __future__ import annotations

from collections.abc import Sequence

from minisgl.bench.config import Sizes
from minisgl.bench.workload.config import WorkloadConfig
from minisgl.bench.workload.trace import TraceRow
from minisgl.errors import CallerError

# In what servers say of a request that is too long, and of token ids that they do not take.
LENGTH_WORDS = ("context", "too long", "a sequence holds")
TOKEN_WORDS = ("token id", "token_id", "vocab", "prompt")


class RoomError(CallerError):
    """The requests of a workload do not fit into the context."""


def check_room(
    workload: WorkloadConfig, sizes: Sizes, context: int, *, stop_at_eos: bool = False
) -> None:
    """Raise RoomError where the longest request that may be drawn is longer than the context.

    Of a chat each word is taken for a token, which is the least.
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


def describe_misfits(rows: Sequence[TraceRow], context: int) -> str:
    """Of a trace, whose lengths are its own; nothing if all of it fits.

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
    """The options that make requests shorter; not for a trace."""
    names = [
        "--input-len" if workload.input_len else "--max-prompt-length",
        "--output-len" if workload.output_len else "--max-output-length",
    ]
    if workload.kind == "shared-prefix":
        names.insert(0, "--prefix-len")
    elif workload.kind == "multi-turn":
        names.insert(0, "--num-turns")
    *rest, last = names
    return f"{', '.join(rest)} or {last}"


def with_remedy(reason: str, workload: WorkloadConfig, endpoint: str) -> str:
    """Why a request failed, and the options that help, where the reason sounds like one of them."""
    said = reason.lower()
    if not said.startswith("4"):  # a status; the others are not about the request
        return reason
    if any(words in said for words in LENGTH_WORDS):
        if workload.kind == "trace":
            return reason
        return f"{reason.rstrip('.')}; lower {length_options(workload)}."
    if endpoint == "completions" and any(words in said for words in TOKEN_WORDS):
        return (
            f"{reason.rstrip('.')}; prompts are of token ids: give the size of the vocabulary "
            "with --vocab-size N, or ask with --endpoint chat."
        )
    return reason
