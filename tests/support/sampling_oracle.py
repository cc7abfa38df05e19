"""Sampling in plain Python, one row and one token at a time, as an oracle for the tensor code."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from minisgl.request import SamplingParams
from minisgl.scheduler.plan import SlotJoin


def philox(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """Philox4x32-10 on Python integers, which cannot overflow."""
    x, k = list(counter), list(key)
    for _ in range(10):
        high0, low0 = divmod(x[0] * 0xD2511F53, 1 << 32)
        high1, low1 = divmod(x[2] * 0xCD9E8D57, 1 << 32)
        x = [high1 ^ x[1] ^ k[0], low1, high0 ^ x[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B9) % (1 << 32), (k[1] + 0xBB67AE85) % (1 << 32)]
    return x


def uniform(seed: int, index: int, token_id: int) -> float:
    word = philox((token_id // 4, index, 0, 0), (seed % 2**32, seed // 2**32 % 2**32))
    return ((word[token_id % 4] // 2**9) + 0.5) / 2**23


@dataclass(frozen=True)
class Choice:
    token_id: int
    margin: float  # to the runner-up


def choose(logits: np.ndarray, join: SlotJoin) -> Choice:
    """The next token of a request which has the outputs of `join`, from raw float32 `logits`."""
    scores, index = drawn_from(logits, join), len(join.output_token_ids)
    if join.params.greedy:
        return _best(scores)
    return _best(
        (token_id, score - math.log(-math.log(uniform(join.seed, index, token_id))))
        for token_id, score in scores
    )


def logprobs(logits: np.ndarray, join: SlotJoin) -> dict[int, float]:
    """The logarithm of the probability that the next token is this one; at temperature 0, of that
    at temperature 1 without filters. Tokens that cannot be drawn are left out."""
    scores = [
        (token_id, score) for token_id, score in drawn_from(logits, join) if score > -math.inf
    ]
    most = max(score for _, score in scores)
    total = most + math.log(math.fsum(math.exp(score - most) for _, score in scores))
    return {token_id: score - total for token_id, score in scores}


def drawn_from(logits: np.ndarray, join: SlotJoin) -> list[tuple[int, float]]:
    """The tokens that may come next, and their logits after temperature."""
    params, outputs = join.params, list(join.output_token_ids)
    row = logits.astype(np.float32)
    for token_id, bias in params.logit_bias.items():
        row[token_id] += np.float32(bias)
    for token_id in {*join.prompt_token_ids, *outputs}:
        factor = np.float32(params.repetition_penalty)
        row[token_id] = row[token_id] / factor if row[token_id] > 0 else row[token_id] * factor
    for token_id in set(outputs):
        row[token_id] -= np.float32(outputs.count(token_id)) * np.float32(params.frequency_penalty)
        row[token_id] -= np.float32(params.presence_penalty)
    if len(outputs) < params.min_tokens:
        row[list(join.stop_token_ids)] = -np.inf
    if params.greedy:
        return list(enumerate(row.tolist()))
    if params.top_n_sigma > 0:
        left = row[row > -np.inf].astype(np.float64)
        row[row < left.max() - params.top_n_sigma * left.std()] = -np.inf
    return _filtered((row / np.float32(params.temperature)).tolist(), params)


def _filtered(scaled: list[float], params: SamplingParams) -> list[tuple[int, float]]:
    floor = max(scaled) + (math.log(params.min_p) if params.min_p else -math.inf)
    left = [(i, x) for i, x in enumerate(scaled) if x >= floor and x > -math.inf]
    left.sort(key=lambda item: (-item[1], item[0]))
    if params.top_k > 0:
        left = left[: params.top_k]
    if params.top_p < 1:
        weights = [math.exp(x - left[0][1]) for _, x in left]
        count = 1
        while sum(weights[:count]) < float(np.float32(params.top_p)) * sum(weights):
            count += 1
        left = left[:count]
    return left


def _best(scores: Iterable[tuple[int, float]]) -> Choice:
    ranked = sorted((-score, token_id) for token_id, score in scores)
    margin = ranked[1][0] - ranked[0][0] if len(ranked) > 1 else math.inf
    return Choice(ranked[0][1], margin)
