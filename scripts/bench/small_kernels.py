"""Cases of bench_kernels.py: what stands between the products of a layer, sampling, and the search
for n-grams at the end of a step.

A call follows another of its kind on the same tensors: up to some 50 MB they stay in L2, and the
figure is the cost of launch and latency; above, it is a bandwidth. `torch` is the code that a
kernel replaces; of latents, `separate` is what is done with more rows: cuBLAS maps, and storing is
a launch of its own. Of sampling, bytes count each row of logits once, and nearly uniform logits
(scale 0.5) are the worst case; peaked ones resemble a trained model.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any
from unittest import mock

import torch
from kernel_timer import DEVICE, DTYPE, Case, Config, Problem, model_cases, nbytes, random
from torch import Tensor

from minisgl.kernels.elementwise import latents, reference
from minisgl.kernels.elementwise.reference import NormRope
from minisgl.kernels.linear.quantized import quantize_rows
from minisgl.kernels.slots.ngrams import draft_ngrams
from minisgl.kernels.slots.slot_state import SlotState
from minisgl.kernels.tuning import tuning_of
from minisgl.layers.rope import rotary_table
from minisgl.request import SamplingParams
from minisgl.runner.sampler import Sampler
from minisgl.runner.sampling_features import VARIANT_FEATURES, SamplingVariant
from minisgl.scheduler.plan import SlotJoin

CALLS, SAMPLES = 20, 8  # of a graph
PAGE_SIZE, MAX_SEQ_LEN, EPS = 16, 40960, 1e-6


def timed(num_bytes: float, **ways: Callable[..., object]) -> Problem:
    return Problem(
        calls={name: partial(lambda call: [call] * CALLS, call) for name, call in ways.items()},
        num_bytes=num_bytes,
        rounds=25,
    )


def compared(
    kernel: str,
    given: Sequence[Any],
    num_bytes: float,
    by_torch: Callable[..., object] | None = None,
) -> Problem:
    """Our kernel, such as norm.rms_norm, beside the function of reference.py with its name."""
    module, name = kernel.split(".")
    # Imported here: the names of the cases need no Triton.
    ours = getattr(import_module(f"minisgl.kernels.elementwise.{module}"), name)
    by_torch = by_torch or getattr(reference, name)
    return timed(num_bytes, minisgl=partial(ours, *given), torch=partial(by_torch, *given))


# -- elementwise -----------------------------------------------------------------------------------


def embed(config: Config, m: int) -> Problem:
    weight = random(config["vocab_size"], config["hidden_size"])
    token_ids = torch.randint(len(weight), (m,), device=DEVICE)
    num_bytes = nbytes(token_ids) + 2 * m * nbytes(weight[0])
    return compared("embedding.embed", (token_ids, weight), num_bytes)


def rms_norm(config: Config, m: int) -> Problem:
    [x], weight = rows(config, m), random(config["hidden_size"])
    return compared("norm.rms_norm", (x, weight, EPS), nbytes(x, x, weight))


def rows(config: Config, m: int) -> tuple[Tensor]:
    return (random(m, config["hidden_size"]),)


def norm_inputs(config: Config, m: int) -> tuple[Tensor, Tensor, Tensor, float]:
    """What is added, the residual stream, the weight, and eps. Each call adds to the stream."""
    size = config["hidden_size"]
    return random(m, size) * 1e-3, random(m, size), random(size), EPS


def add_rms_norm(config: Config, m: int) -> Problem:
    given = norm_inputs(config, m)
    return compared("norm.add_rms_norm", given, 4 * nbytes(given[0]))


def gates(config: Config, m: int) -> tuple[Tensor]:
    return (random(m, 2 * config["intermediate_size"]),)


def gated_mul(config: Config, m: int) -> Problem:
    given = gates(config, m)
    return compared("activation.gated_mul", given, 1.5 * nbytes(*given))


def quantize_rows_of(config: Config, m: int, group: int | None) -> Problem:
    """group: columns of a row that share a scale in FP8; None: a whole row."""
    from minisgl.kernels.elementwise.quantize import quantize

    [x] = rows(config, m)
    return timed(
        1.5 * nbytes(x),
        minisgl=lambda: quantize(x, group),
        torch=lambda: quantize_rows(x, group),
    )


def add_rms_norm_quantize(config: Config, m: int, group: int | None) -> Problem:
    from minisgl.kernels.elementwise.quantize import rms_norm_quantize

    delta, residual, weight, eps = given = norm_inputs(config, m)
    return timed(
        3.5 * nbytes(delta),
        minisgl=lambda: rms_norm_quantize(residual, delta, weight, eps, group),
        torch=lambda: quantize_rows(reference.add_rms_norm(*given)[0], group),
    )


def gated_mul_quantize(config: Config, m: int, group: int | None) -> Problem:
    from minisgl.kernels.elementwise.quantize import quantize

    [gate_up] = gates(config, m)
    return timed(
        1.25 * nbytes(gate_up),
        minisgl=lambda: quantize(gate_up, group, gated=True),
        torch=lambda: quantize_rows(reference.gated_mul(gate_up), group),
    )


def rope_table(size: int) -> Tensor:
    return rotary_table(torch.logspace(0, -6, size // 2, device=DEVICE), MAX_SEQ_LEN)


def places(m: int) -> tuple[Tensor, Tensor, int]:
    """Positions and KV slots of m rows, and the pages that these take."""
    slots = torch.randperm(m, device=DEVICE) + PAGE_SIZE
    return torch.arange(m, device=DEVICE) + 1000, slots, m // PAGE_SIZE + 2


def qk_norm_rope_store_kv(config: Config, m: int) -> Problem:
    head_dim, num_kv_heads = config["head_dim"], config["num_key_value_heads"]
    qkv = random(m, (config["num_attention_heads"] + 2 * num_kv_heads) * head_dim)
    positions, slots, num_pages = places(m)
    caches = [random(num_pages, PAGE_SIZE, num_kv_heads, head_dim) for _ in range(2)]
    weight = random(head_dim) if config["model_type"] == "qwen3" else None
    norm_rope = NormRope(rope_table(head_dim), weight, weight, EPS)
    given = (qkv, positions, slots, *caches, norm_rope)
    num_bytes = nbytes(qkv, qkv, positions, slots) + m * head_dim * 4
    return compared("heads.qk_norm_rope_store_kv", given, num_bytes)


# -- latents ---------------------------------------------------------------------------------------


def store_latents(config: Config, m: int) -> Problem:
    num_heads, rank, rope_dim, nope_dim, _ = latent_sizes(config)
    to_keys, _ = latent_maps(config)
    q, kv = random(m, num_heads, nope_dim + rope_dim), random(m, rank + rope_dim)
    positions, slots, num_pages = places(m)
    cache = random(num_pages, PAGE_SIZE, 1, rank + rope_dim)
    norm = latents.LatentNorm(rope_table(rope_dim), random(rank), EPS)
    num_bytes = nbytes(to_keys, q, kv, kv) + m * num_heads * (rank + rope_dim) * q.itemsize
    given = (kv, q, positions, slots, cache, norm, to_keys)
    return mapped("store_latents", given, num_bytes)


def values_of_latents(config: Config, m: int) -> Problem:
    num_heads, rank, _, _, value_dim = latent_sizes(config)
    given = (random(m, num_heads, rank), latent_maps(config)[1])
    return mapped("values_of_latents", given, nbytes(*given) + m * num_heads * value_dim * 2)


def latent_sizes(config: Config) -> Iterator[int]:
    """Heads, rank, and the numbers of a head with rotation, without, and of its value."""
    names = ("num_attention_heads", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim")
    return (int(config[name]) for name in (*names, "v_head_dim"))


def latent_maps(config: Config) -> Sequence[Tensor]:
    """To keys and to values, of one tensor."""
    num_heads, rank, _, nope_dim, value_dim = latent_sizes(config)
    return random(num_heads, nope_dim + value_dim, rank).tensor_split((nope_dim,), dim=1)


def mapped(name: str, given: Sequence[Any], num_bytes: float) -> Problem:
    """`separate`: what the engine does with more rows than our kernels map."""
    from minisgl.kernels.elementwise import latents_kernel

    function, tuning = getattr(latents_kernel, name), tuning_of(DEVICE)

    def separate() -> Tensor:
        none = replace(tuning, latent_map_rows=0)
        with mock.patch.object(latents_kernel, "tuning_of", lambda device: none):
            return function(*given)

    ours = partial(function, *given, tiles=tuning.latent_maps)
    return timed(num_bytes, minisgl=ours, separate=separate)


# -- sampling --------------------------------------------------------------------------------------


def sampling_problem(
    params: SamplingParams, variant: SamplingVariant, rows: int, vocab_size: int, scale: float
) -> Problem:
    """Samples a row of logits for each of as many requests, as a captured step does, for any mix
    of requests. `torch`: for these requests only."""
    logits = (torch.randn(rows, vocab_size, device=DEVICE) * scale).to(DTYPE)
    slots = torch.arange(rows, device=DEVICE)
    index = torch.full((rows,), 3, device=DEVICE)

    def calls(by_torch: bool) -> list[Callable[[], object]]:
        sampler = Sampler(rows, vocab_size, DEVICE, "torch" if by_torch else None)
        sampler.tables.allocate_history()
        stops, prompt, output = frozenset([2]), [1, 2, 3], [4, 5]
        sampler.join(
            [SlotJoin(row, params, row * 99_991, stops, prompt, output) for row in range(rows)]
        )
        features = sampler.features(range(rows)) if by_torch else VARIANT_FEATURES[variant]
        return [partial(sampler.sample, logits, slots, index, features)] * SAMPLES

    by_name = {"minisgl": partial(calls, False), "torch": partial(calls, True)}
    return Problem(calls=by_name, num_bytes=logits.nbytes, rounds=50)


# -- n-grams ---------------------------------------------------------------------------------------


def ngrams_problem(num_slots: int, context: int, num_drafts: int = 3) -> Problem:
    """Drafts for slots that all have runs. Histories are random tokens of a small vocabulary, so
    that places share a few of the last tokens."""
    run, vocab_size, num_prompt = 1 + num_drafts, 1000, 128
    history = torch.randint(vocab_size, (num_slots + 1, context + run), device=DEVICE).int()
    numbers = torch.zeros((num_slots + 1, 3), dtype=torch.int32, device=DEVICE)
    state = SlotState(
        page_table=numbers[:, :1],
        lengths=torch.full_like(numbers[:, 0], context),
        last_tokens=numbers[:, 1],
        drafts=torch.zeros((num_slots + 1, num_drafts), dtype=torch.int32, device=DEVICE),
        takes_drafts=numbers[:, 2] + 1,
        prompt_lengths=torch.full((num_slots + 1,), num_prompt, device=DEVICE),
        page_size=PAGE_SIZE,
    )
    slots = torch.arange(num_slots, device=DEVICE).repeat_interleave(run)
    index = torch.arange(run, device=DEVICE).repeat(num_slots) + context - num_drafts - num_prompt
    tokens = torch.randint(vocab_size, slots.shape, device=DEVICE)
    call = partial(draft_ngrams, history, state, slots, index, tokens, len(slots), run)
    return Problem(calls={"minisgl": lambda: [call] * 10})


# -- tables ----------------------------------------------------------------------------------------

MAPS = {"store_latents": store_latents, "values_of_latents": values_of_latents}
QUANTIZED: dict[str, Callable[[Config, int, int | None], Problem]] = {
    "quantize": quantize_rows_of,
    "add_rms_norm_quantize": add_rms_norm_quantize,
    "gated_mul_quantize": gated_mul_quantize,
}
ELEMENTWISE: dict[str, Callable[[Config, int], Problem]] = {
    kernel.__name__: kernel
    for kernel in (embed, rms_norm, add_rms_norm, gated_mul, qk_norm_rope_store_kv)
} | {
    f"{name} by {scales}": partial(kernel, group=group)
    for name, kernel in QUANTIZED.items()
    for scales, group in (("token", None), ("group", 128))
}
VOCAB_SIZE = 151_936
HOT: dict[str, Any] = {"temperature": 0.6}
SAMPLING = {
    "greedy": {"temperature": 0},
    "temperature": HOT,
    "min_p 0.05": HOT | {"min_p": 0.05},
    "top_k 50": HOT | {"top_k": 50},
    "top_p 0.9": HOT | {"top_p": 0.9},
    "top_p 0.5": HOT | {"top_p": 0.5},
    "top_k 50, top_p 0.9": HOT | {"top_k": 50, "top_p": 0.9},
    "top_k 1000, top_p 0.9": HOT | {"top_k": 1000, "top_p": 0.9},
}
FULL_SAMPLING = {
    "full: nothing": HOT,
    "full: top_n_sigma 1.5": HOT | {"top_n_sigma": 1.5},
    "full: penalties": HOT | {"frequency_penalty": 0.5},
    "full: logprobs": HOT | {"logprobs": 20},
    "full: all": HOT
    | {"top_k": 50, "top_p": 0.9, "repetition_penalty": 1.1, "logit_bias": {7: 1.0}}
    | {"min_tokens": 9, "logprobs": 20},
}


elementwise_cases = partial(
    model_cases,
    ("Qwen3-0.6B", "Qwen3-14B", "Llama-3.1-8B"),
    ELEMENTWISE,
    (1, 8, 32, 256, 2048, 16384),
)
latent_map_cases = partial(model_cases, ("GLM-4.7-Flash", "DeepSeek-V2-Lite"), MAPS, (1, 8, 32, 64))


def ngram_cases(rows: Sequence[int] | None) -> Iterator[Case]:
    for num_slots, context in itertools.product(rows or (1, 8, 64, 256), (1024, 8192, 32768)):
        make = partial(ngrams_problem, num_slots, context)
        yield Case(f"{num_slots} slots, context {context}", make)


def sampling_cases(rows: Sequence[int] | None) -> Iterator[Case]:
    tables = {SamplingVariant.FILTERED: SAMPLING, SamplingVariant.FULL: FULL_SAMPLING}
    for m, scale in itertools.product(rows or (1, 8, 32, 256), (0.5, 3.0)):
        for variant, table in tables.items():
            for name, fields in table.items():
                given = (SamplingParams(**fields), variant, m, VOCAB_SIZE, scale)
                yield Case(f"{m} rows, scale {scale}, {name}", partial(sampling_problem, *given))
