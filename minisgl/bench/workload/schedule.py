"""The reproducible schedule of the requests of a benchmark."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from minisgl.bench.config import Sizes
from minisgl.bench.workload.config import WorkloadConfig
from minisgl.bench.workload.dataset import Conversation
from minisgl.bench.workload.requests import ScheduledRequest, make_workload, random_tokens
from minisgl.bench.workload.structured import is_structured
from minisgl.bench.workload.trace import TraceEntry


def schedule_shared_prefix(
    sizes: Sizes, vocab_size: int, seed: int, config: WorkloadConfig
) -> list[ScheduledRequest]:
    """Random prompts, each after one of the prefixes, in round-robin order."""
    rng = random.Random(f"prefixes of {seed}")
    prefixes = [
        random_tokens(rng, config.prefix_len, vocab_size) for _ in range(config.num_prefixes)
    ]
    return [
        replace(request, prompt=prefixes[index % len(prefixes)] + request.prompt)
        for index, request in enumerate(make_workload(sizes, vocab_size=vocab_size, seed=seed))
    ]


def schedule_multi_turn(
    sizes: Sizes, vocab_size: int, seed: int, config: WorkloadConfig
) -> list[ScheduledRequest]:
    """Conversations in sequence; each question waits for the answer before it."""
    num_turns = config.num_turns
    num_conversations = max(1, sizes.num_requests // num_turns)
    whole = replace(sizes, num_requests=num_conversations * num_turns)
    return [
        replace(
            request,
            parent=index - 1 if index % num_turns else None,
            pause_s=config.think_time if index % num_turns else 0.0,
            continues=index % num_turns > 0,
        )
        for index, request in enumerate(make_workload(whole, vocab_size=vocab_size, seed=seed))
    ]


def schedule_trace(
    rows: Sequence[TraceEntry], vocab_size: int, seed: int, config: WorkloadConfig
) -> list[ScheduledRequest]:
    """The requests of a trace at its times; a child waits for the answer of its parent, too.

    Prompts are made up. Equal hash_ids are equal blocks, so that prompts have in common what they
    had in the trace; what follows a prompt's last hash is its own.
    """
    rng = random.Random(f"tails of {seed}")
    blocks: dict[int, list[int]] = {}
    places: dict[int | str, int] = {}  # of chats
    schedule: list[ScheduledRequest] = []
    for index, row in enumerate(rows):
        prompt: list[int] = []
        for hash_id in row.hash_ids:
            if hash_id not in blocks:
                block_rng = random.Random(f"block {hash_id} of {seed}")
                blocks[hash_id] = random_tokens(block_rng, config.trace_block_size, vocab_size)
            prompt += blocks[hash_id]
        del prompt[row.input_length :]
        prompt += random_tokens(rng, row.input_length - len(prompt), vocab_size)
        schedule.append(
            ScheduledRequest(
                prompt=prompt,
                max_tokens=max(1, row.output_length),
                seed=index,
                due_s=(row.timestamp - rows[0].timestamp) * config.trace_scale,
                parent=None if row.parent is None else places.get(row.parent),
            )
        )
        if row.chat_id is not None:
            places[row.chat_id] = index
    return schedule


def schedule_dataset(
    conversations: Sequence[Conversation], sizes: Sizes, seed: int
) -> list[ScheduledRequest]:
    """The questions of conversations; each after the first waits for the answer before it.

    An answer is as long as in the file, or as drawn from `sizes` where that is not known.
    """
    rng = random.Random(f"outputs of {seed}")
    schedule: list[ScheduledRequest] = []
    for conversation in conversations:
        for turn, text in enumerate(conversation.turns):
            known = conversation.num_answer_tokens
            drawn = rng.randint(sizes.output.low, sizes.output.high)
            index = len(schedule)
            schedule.append(
                ScheduledRequest(
                    prompt=[],
                    text=text,
                    max_tokens=drawn if known is None else max(1, known),
                    seed=index,
                    parent=index - 1 if turn else None,
                    continues=turn > 0,
                )
            )
    return schedule


def make_schedule(
    config: WorkloadConfig,
    sizes: Sizes,
    *,
    rows: Sequence[TraceEntry] = (),
    conversations: Sequence[Conversation] = (),
    vocab_size: int,
    seed: int,
    structured: float = 0.0,
) -> list[ScheduledRequest]:
    """The requests of a workload, due at the trace's times or all at once.

    rows: of the trace. conversations: of the data set, sampled. structured: the share of the
    requests that follow a schema.
    """
    match config.kind:
        case "shared-prefix":
            schedule = schedule_shared_prefix(sizes, vocab_size, seed, config)
        case "multi-turn":
            schedule = schedule_multi_turn(sizes, vocab_size, seed, config)
        case "trace":
            schedule = schedule_trace(rows, vocab_size, seed, config)
        case "dataset":
            schedule = schedule_dataset(conversations, sizes, seed)
        case _:
            schedule = make_workload(sizes, vocab_size=vocab_size, seed=seed)
    return [
        replace(request, structured=is_structured(index, structured))
        for index, request in enumerate(schedule)
    ]


def at_rate(
    schedule: Sequence[ScheduledRequest], rate: float, arrivals: str, seed: int
) -> list[ScheduledRequest]:
    """The same requests at `rate` a second; of a conversation only the first is timed."""
    rng = random.Random(f"arrivals of {seed}")
    timed: list[ScheduledRequest] = []
    now_s = 0.0
    for request in schedule:
        if request.continues and request.parent is not None:
            timed.append(replace(request, due_s=timed[request.parent].due_s))
            continue
        timed.append(replace(request, due_s=now_s))
        now_s += rng.expovariate(rate) if arrivals == "poisson" else 1 / rate
    return timed


# Common and short, so that almost every tokenizer has one token for each of them.
WORDS = (
    "the of and to in is that it was for on are as with his they at be this from have or by one "
    "had not but what all were when we there can an your which their said if do will each about "
    "how up out them then she many some so these would other into has more her two like him see"
).split()


def chat_text(prompt: Sequence[int]) -> str:
    """A text with as many words as token ids, for chats, which take only text."""
    return " ".join(WORDS[token_id % len(WORDS)] for token_id in prompt)
