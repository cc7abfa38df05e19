"""What minisgl computes of the prompts, on each of its paths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from minisgl.config import EngineConfig
from minisgl.llm import LLM
from minisgl.request import DEFAULT_LOGPROBS, RequestOutput, SamplingParams, TokenLogprobs
from minisgl.verify.prompts import NUM_NEW_TOKENS, Prompts

CHUNK = 512  # tokens of a step, so that long prompts are computed in chunks
CAPTURED_BATCH = 4  # so that a batch of one is captured, and one of all prompts is not

WHOLE, CHUNKS = "prefill", "prefill in chunks"
TOGETHER = "prefill, all at once"
DECODE, CAPTURED = "decode", "decode, captured"
BATCHED, BATCHED_CAPTURED = "decode, all at once", "decode, all at once, captured"
CACHED = "after a cached prefix"


@dataclass(frozen=True, slots=True)
class Stretch:
    """The likeliest next tokens behind each of several positions of a sequence, on one path."""

    path: str
    prompt: int  # the number of the prompt
    sequence: tuple[int, ...]  # the prompt, and what was generated
    first: int  # the first position; the others follow it
    ids: list[list[int]]  # [positions, tokens]
    logprobs: list[list[float]]  # [positions, tokens]
    num_chosen: int  # the last positions, whose first token was chosen


def for_verifying(config: EngineConfig) -> EngineConfig:
    """The options of an engine in which few and short prompts go all ways."""
    defaults = EngineConfig()
    if config.max_prefill_length == defaults.max_prefill_length:
        config = replace(config, max_prefill_length=CHUNK)
    if config.cuda_graph_max_bs is None and config.device != "cpu" and torch.cuda.is_available():
        config = replace(config, cuda_graph_max_bs=CAPTURED_BATCH)
    return config


def answers(llm: LLM, prompts: Prompts) -> list[Stretch]:
    """Compute the prompts, each with some tokens behind it: alone, all at once, and once more from
    the middle of the answer, whose beginning is cached then."""
    chunk = llm.engine.config.max_prefill_length
    found: list[Stretch] = []
    alone: list[RequestOutput] = []
    for number, prompt in enumerate(prompts.all):
        [output], captured = _generate(llm, [prompt], salt="alone")
        alone.append(output)
        found.append(_prefill(WHOLE if len(prompt) <= chunk else CHUNKS, number, output))
        found.append(_decode(CAPTURED if captured else DECODE, number, output))
    together, captured = _generate(llm, prompts.all, salt="together")
    for number, output in enumerate(together):
        found.append(_prefill(TOGETHER, number, output))
        found.append(_decode(BATCHED_CAPTURED if captured else BATCHED, number, output))
    for number, output in enumerate(alone):
        half = len(output.token_ids) // 2
        prompt = output.prompt_token_ids + output.token_ids[:half]
        [again], _ = _generate(
            llm, [prompt], salt="alone", num_new=len(output.token_ids) - half, scores_prompt=False
        )
        if again.num_cached_tokens:
            found.append(_decode(CACHED, number, again, from_prompt=True))
    return [stretch for stretch in found if stretch.ids]


def _generate(
    llm: LLM,
    prompts: Sequence[list[int]],
    *,
    salt: str,
    num_new: int = NUM_NEW_TOKENS,
    scores_prompt: bool = True,
) -> tuple[list[RequestOutput], bool]:
    """The outputs, and whether most tokens came from captured steps."""
    num = min(DEFAULT_LOGPROBS, llm.engine.vocab_size)
    params = SamplingParams(
        temperature=0,
        max_tokens=num_new,
        ignore_eos=True,
        logprobs=num,
        prompt_logprobs=num if scores_prompt else None,
    )
    before = llm.engine.stats().totals.num_graph_steps
    outputs = llm.generate(prompts, params, cache_salt=salt, progress=False)
    num_captured = llm.engine.stats().totals.num_graph_steps - before
    return outputs, num_captured > num_new // 2


def _prefill(path: str, number: int, output: RequestOutput) -> Stretch:
    """The rows of the prompt. The last one chooses the first token."""
    assert output.prompt_logprobs is not None and output.logprobs is not None
    scores = [one for one in output.prompt_logprobs if one is not None]
    return _stretch(path, number, output, 0, [*scores, output.logprobs[0]], num_chosen=1)


def _decode(path: str, number: int, output: RequestOutput, *, from_prompt: bool = False) -> Stretch:
    """The rows behind the prompt. from_prompt: with its last one."""
    assert output.logprobs is not None
    scores = output.logprobs[0 if from_prompt else 1 :]
    first = len(output.prompt_token_ids) - from_prompt
    return _stretch(path, number, output, first, scores, num_chosen=len(scores))


def _stretch(
    path: str,
    number: int,
    output: RequestOutput,
    first: int,
    scores: list[TokenLogprobs],
    *,
    num_chosen: int,
) -> Stretch:
    for score in scores[len(scores) - num_chosen :]:
        assert score.top[0][1] == score.logprob, "the token is not one of the likeliest"
    return Stretch(
        path,
        number,
        (*output.prompt_token_ids, *output.token_ids),
        first,
        [[token_id for token_id, _ in score.top] for score in scores],
        [[logprob for _, logprob in score.top] for score in scores],
        num_chosen,
    )
