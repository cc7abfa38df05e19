"""Conversations as token ids, in shards: what train_demo.py learns from."""

from __future__ import annotations

import random
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import numpy as np
import tokenizers

from demo_model.conversation import Dialogue, conversation
from demo_model.world import World

END_OF_TEXT_ID, START_ID, END_ID = 0, 1, 2  # as demo_model/tokenizer.py orders them
MAX_TOKENS = 2048
NOISE = 0.25  # of the questions are worn down

Tokenized = tuple[np.ndarray, np.ndarray]  # ids uint16 [n], learned bool [n]


@cache
def load_tokenizer(folder: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def make_shard(folder: Path, seed: int, index: int, num_tokens: int) -> list[Tokenized]:
    """Make about `num_tokens` tokens of conversations, deterministic in seed and index.

    `learned` is True for tokens of the assistant and the <|im_end|> after them. folder: contains
    tokenizer.json.
    """
    world = World(random.Random(f"{seed} {index}"), noise=NOISE)
    shard: list[Tokenized] = []
    missing = num_tokens
    while missing > 0:
        made = tokenize(folder, [conversation(world) for _ in range(2000)])
        for ids, learned in made:
            if len(ids) <= MAX_TOKENS and missing > 0:
                shard.append((ids, learned))
                missing -= len(ids)
    return shard


def tokenize(folder: Path, conversations: Iterable[Dialogue]) -> list[Tokenized]:
    """Tokenize conversations in the format of the chat template, up to the last <|im_end|>."""
    tokenizer = load_tokenizer(folder)
    whole = [item.messages() for item in conversations]
    contents = list({message["content"] for messages in whole for message in messages})
    encoded = {
        content: encoding.ids
        for content, encoding in zip(contents, tokenizer.encode_batch(contents), strict=True)
    }
    heads = {
        role: [START_ID, *tokenizer.encode(f"{role}\n").ids]
        for role in ("tools", "system", "user", "assistant", "tool")
    }
    gap = tokenizer.encode("\n").ids
    made = []
    for messages in whole:
        ids: list[int] = []
        learned: list[bool] = []
        for message in messages:
            head = [*gap, *heads[message["role"]]] if ids else heads[message["role"]]
            content = encoded[message["content"]]
            ids += [*head, *content, END_ID]
            learned += [False] * len(head)
            learned += [message["role"] == "assistant"] * (len(content) + 1)
        made.append((np.array(ids, np.uint16), np.array(learned)))
    return made
