"""Cases of bench_kernels.py: what stands between the products of a layer, and sampling.

A call follows another of its kind on the same tensors: up to some 50 MB they stay in L2, and the
figure is the cost of launch and latency; above, it is a bandwidth. `torch` is the code that a
kernel replaces; of latents, `separate` is what is done with more rows: cuBLAS maps, and storing is
a launch of its own. Of sampling, bytes count each row of logits once, and nearly uniform logits
(scale 0.5) are the worst case; peaked ones resemble a trained model.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from kernel_timer import DEVICE, DTYPE, MODELS, Case, Problem, nbytes, random
from torch import Tensor

from minisgl.kernels.elementwise import latents, reference
from minisgl.kernels.elementwise.reference import NormRope
from minisgl.kernels.linear.quantized import quantize_rows
from minisgl.kernels.tuning import tuning_of
from minisgl.layers.rope import RotaryEmbedding
from minisgl.request import SamplingParams
from minisgl.runner.sampler import Sampler
from minisgl.runner.sampling_features import VARIANT_FEATURES, SamplingVariant
from minisgl.scheduler.plan import SlotJoin

CALLS, SAMPLES = 20, 8  # of a graph
PAGE_SIZE, MAX_SEQ_LEN, EPS = 16, 40960, 1e-6
Config = Mapping[str, Any]


def timed(ours: Callable[[], object], num_bytes: float, **others: Callable[[], object]) -> Problem:
    calls = {"minisgl": ours} | others
    return Problem(
        calls={name: partial(lambda call: [call] * CALLS, call) for name, call in calls.items()},
        num_bytes=num_bytes,
        rounds=25,
    )


# -- elementwise -----------------------------------------------------------------------------------


def embed(config: Config, m: int) -> Problem:
    from minisgl.kernels.elementwise.embedding import embed

    weight = random(config["vocab_size"], config["hidden_size"])
    token_ids = torch.randint(len(weight), (m,), device=DEVICE)
    return timed(
        lambda: embed(token_ids, weight),
        nbytes(token_ids) + 2 * m * nbytes(weight[0]),
        torch=lambda: reference.embed(token_ids, weight),
    )


def rms_norm(config: Config, m: int) -> Problem:
    from minisgl.kernels.elementwise.norm import rms_norm

    x, weight = random(m, config["hidden_size"]), random(config["hidden_size"])
    return timed(
        lambda: rms_norm(x, weight, EPS),
        nbytes(x, x, weight),
        torch=lambda: reference.rms_norm(x, weight, EPS),
    )


def norm_inputs(config: Config, m: int) -> tuple[Tensor, Tensor, Tensor, float]:
    """What is added, the residual stream, the weight, and eps. Each call adds to the stream."""
    size = config["hidden_size"]
    return random(m, size) * 1e-3, random(m, size), random(size), EPS


def add_rms_norm(config: Config, m: int) -> Problem:
    from minisgl.kernels.elementwise.norm import add_rms_norm

    given = norm_inputs(config, m)
    return timed(
        lambda: add_rms_norm(*given),
        4 * nbytes(given[0]),
        torch=lambda: reference.add_rms_norm(*given),
    )


def gated_mul(config: Config, m: int) -> Problem:
    from minisgl.kernels.elementwise.activation import gated_mul

    gate_up = random(m, 2 * config["intermediate_size"])
    return timed(
        lambda: gated_mul(gate_up),
        1.5 * nbytes(gate_up),
        torch=lambda: reference.gated_mul(gate_up),
    )


def quantize(config: Config, m: int, group: int | None) -> Problem:
    """group: columns of a row that share a scale in FP8; None: a whole row."""
    from minisgl.kernels.elementwise.quantize import quantize

    x = random(m, config["hidden_size"])
    return timed(lambda: quantize(x, group), 1.5 * nbytes(x), torch=lambda: quantize_rows(x, group))


def add_rms_norm_quantize(config: Config, m: int, group: int | None) -> Problem:
    from minisgl.kernels.elementwise.quantize import add_rms_norm_quantize

    given = norm_inputs(config, m)
    return timed(
        lambda: add_rms_norm_quantize(*given, group),
        3.5 * nbytes(given[0]),
        torch=lambda: quantize_rows(reference.add_rms_norm(*given)[0], group),
    )


def gated_mul_quantize(config: Config, m: int, group: int | None) -> Problem:
    from minisgl.kernels.elementwise.quantize import gated_mul_quantize

    gate_up = random(m, 2 * config["intermediate_size"])
    return timed(
        lambda: gated_mul_quantize(gate_up, group),
        1.25 * nbytes(gate_up),
        torch=lambda: quantize_rows(reference.gated_mul(gate_up), group),
    )


def rope_table(size: int) -> Tensor:
    return RotaryEmbedding(torch.logspace(0, -6, size // 2, device=DEVICE), MAX_SEQ_LEN).table


def places(m: int) -> tuple[Tensor, Tensor, int]:
    """Positions and KV slots of m rows, and the pages that these take."""
    slots = torch.randperm(m, device=DEVICE) + PAGE_SIZE
    return torch.arange(m, device=DEVICE) + 1000, slots, m // PAGE_SIZE + 2


def qk_norm_rope_store_kv(config: Config, m: int) -> Problem:
    from minisgl.kernels.elementwise.heads import qk_norm_rope_store_kv

    head_dim, num_kv_heads = config["head_dim"], config["num_key_value_heads"]
    qkv = random(m, (config["num_attention_heads"] + 2 * num_kv_heads) * head_dim)
    positions, slots, num_pages = places(m)
    caches = [random(num_pages, PAGE_SIZE, num_kv_heads, head_dim) for _ in range(2)]
    weight = random(head_dim) if config["model_type"] == "qwen3" else None
    norm_rope = NormRope(rope_table(head_dim), weight, weight, EPS)
    given = (qkv, positions, slots, *caches, norm_rope)
    return timed(
        lambda: qk_norm_rope_store_kv(*given),
        nbytes(qkv, qkv, positions, slots) + m * head_dim * 4,
        torch=lambda: reference.qk_norm_rope_store_kv(*given),
    )


# -- latents ---------------------------------------------------------------------------------------


def store_latents(config: Config, m: int) -> Problem:
    from minisgl.kernels.elementwise import latents_kernel

    num_heads, rank, rope_dim, nope_dim, _ = latent_sizes(config)
    to_keys, _ = latent_maps(config)
    q, kv = random(m, num_heads, nope_dim + rope_dim), random(m, rank + rope_dim)
    positions, slots, num_pages = places(m)
    cache = random(num_pages, PAGE_SIZE, 1, rank + rope_dim)
    norm = latents.LatentNorm(rope_table(rope_dim), random(rank), EPS)
    given = (kv, q, positions, slots, cache, norm, to_keys)
    return timed(
        lambda: latents_kernel.store_latents(*given, tiles=tuning_of(DEVICE).latent_maps),
        nbytes(to_keys, q, kv, kv) + m * num_heads * (rank + rope_dim) * q.itemsize,
        separate=lambda: separately(latents_kernel.store_latents, *given),
    )


def values_of_latents(config: Config, m: int) -> Problem:
    from minisgl.kernels.elementwise import latents_kernel

    num_heads, rank, _, _, value_dim = latent_sizes(config)
    given = (random(m, num_heads, rank), latent_maps(config)[1])
    return timed(
        lambda: latents_kernel.values_of_latents(*given, tiles=tuning_of(DEVICE).latent_maps),
        nbytes(*given) + m * num_heads * value_dim * 2,
        separate=lambda: separately(latents_kernel.values_of_latents, *given),
    )


def latent_sizes(config: Config) -> Iterator[int]:
    """Heads, rank, and the numbers of a head with rotation, without, and of its value."""
    names = ("num_attention_heads", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim")
    return (int(config[name]) for name in (*names, "v_head_dim"))


def latent_maps(config: Config) -> Sequence[Tensor]:
    """To keys and to values, of one tensor."""
    num_heads, rank, _, nope_dim, value_dim = latent_sizes(config)
    return random(num_heads, nope_dim + value_dim, rank).tensor_split((nope_dim,), dim=1)


def separately(function: Callable[..., Tensor], *given: Any) -> Tensor:
    """As with so many rows that no kernel of ours maps them."""
    from minisgl.kernels.elementwise import latents_kernel

    separate = replace(tuning_of(DEVICE), latent_map_rows=0)
    with mock.patch.object(latents_kernel, "tuning_of", lambda device: separate):
        return function(*given)


# -- sampling --------------------------------------------------------------------------------------


def sampling_problem(
    params: SamplingParams, variant: SamplingVariant, rows: int, vocab_size: int, scale: float
) -> Problem:
    """Samples a row of logits for each of as many requests, as a captured step does: for any mix
    of requests. `torch`: for these alone."""
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


# -- tables ----------------------------------------------------------------------------------------

MAPS = {"store_latents": store_latents, "values_of_latents": values_of_latents}
ELEMENTWISE: dict[str, Callable[[Config, int], Problem]] = {
    kernel.__name__: kernel
    for kernel in (embed, rms_norm, add_rms_norm, gated_mul, qk_norm_rope_store_kv)
} | {
    f"{kernel.__name__} by {name}": partial(kernel, group=group)
    for kernel in (quantize, add_rms_norm_quantize, gated_mul_quantize)
    for name, group in (("token", None), ("group", 128))
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


def elementwise_cases(rows: Sequence[int] | None) -> Iterator[Case]:
    models = ("Qwen3-0.6B", "Qwen3-14B", "Llama-3.1-8B")
    for model, (kernel, make) in itertools.product(models, ELEMENTWISE.items()):
        for m in rows or (1, 8, 32, 256, 2048, 16384):
            yield Case(f"{model} {kernel}, {m} rows", partial(make, MODELS[model], m))


def latent_map_cases(rows: Sequence[int] | None) -> Iterator[Case]:
    models = ("GLM-4.7-Flash", "DeepSeek-V2-Lite")
    for model, (kernel, make) in itertools.product(models, MAPS.items()):
        for m in rows or (1, 8, 32, 64):
            yield Case(f"{model} {kernel}, {m} rows", partial(make, MODELS[model], m))


def sampling_cases(rows: Sequence[int] | None) -> Iterator[Case]:
    tables = {SamplingVariant.FILTERED: SAMPLING, SamplingVariant.FULL: FULL_SAMPLING}
    for m, scale in itertools.product(rows or (1, 8, 32, 256), (0.5, 3.0)):
        for variant, table in tables.items():
            for name, fields in table.items():
                given = (SamplingParams(**fields), variant, m, VOCAB_SIZE, scale)
                yield Case(f"{m} rows, scale {scale}, {name}", partial(sampling_problem, *given))
