"""Times single kernels on a GPU, beside the torch code that they replace.

python scripts/bench/bench_kernels.py
python scripts/bench/bench_kernels.py --models Qwen3-0.6B --rows 1 256 --only norm --no-pdl

Each figure is a median over replays of a CUDA graph of 20 calls, so the host's time is not in it. A
call follows another of its kind on the same tensors: up to some 50 MB they stay in the L2 cache,
and the figure is the cost of launch and latency; above, it is a bandwidth. `limit` is the time
that the bytes take at 4.28 TB/s, or the operations at 800 TFLOP/s, as measured on an H200.

A kernel is added as a function from `Dimensions` to cases, named in FAMILIES.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from graph_timer import graph_s
from torch import Tensor

from minisgl.kernels.elementwise import reference
from minisgl.kernels.elementwise.reference import NormRope
from minisgl.kernels.tuning import tuning_of
from minisgl.layers.rope import RotaryEmbedding

sys.path.append(str(Path(__file__).parent.parent / "tools"))
from dummy_config import MODELS

CALLS, REPLAYS = 20, 25
BYTES_PER_S, OPERATIONS_PER_S = 4.28e12, 800e12
MOST_MAPPED = 64  # rows whose maps between heads and latents are worth a kernel, perhaps
PAGE_SIZE, MAX_SEQ_LEN, EPS = 16, 40960, 1e-6
HEADER = "kernel             rows        µs  limit µs    TB/s  TFLOP/s  torch µs  faster"


@dataclass(frozen=True, slots=True)
class Dimensions:
    """The dimensions that a case is made for."""

    model: str
    num_rows: int
    dtype: torch.dtype
    pdl: bool

    def size(self, name: str) -> int:
        return int(MODELS[self.model][name])

    @property
    def normed_heads(self) -> bool:
        return MODELS[self.model]["model_type"] == "qwen3"

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=self.dtype)


@dataclass(frozen=True, slots=True)
class TimedCall:
    """One call to be timed. Both callables can be captured in a CUDA graph."""

    name: str
    run: Callable[[], object]
    reference: Callable[[], object] | None  # the torch code, where there is some worth a time
    num_bytes: int  # that must be read and written at least
    num_operations: int = 0  # where they, not the bytes, set the limit


def embedding_cases(problem: Dimensions) -> Iterator[TimedCall]:
    from minisgl.kernels.elementwise.embedding import embed

    weight = problem.random(problem.size("vocab_size"), problem.size("hidden_size"))
    token_ids = torch.randint(len(weight), (problem.num_rows,), device="cuda")
    yield TimedCall(
        "embed",
        lambda: embed(token_ids, weight, pdl=problem.pdl),
        lambda: reference.embed(token_ids, weight),
        nbytes(token_ids) + 2 * problem.num_rows * nbytes(weight[0]),
    )


def norm_cases(problem: Dimensions) -> Iterator[TimedCall]:
    from minisgl.kernels.elementwise.norm import add_rms_norm, rms_norm

    size, pdl = problem.size("hidden_size"), problem.pdl
    weight = problem.random(size)
    x, residual = problem.random(problem.num_rows, size), problem.random(problem.num_rows, size)
    yield TimedCall(
        "rms_norm",
        lambda: rms_norm(x, weight, EPS, pdl=pdl),
        lambda: reference.rms_norm(x, weight, EPS),
        nbytes(x, x, weight),
    )
    delta = x * 1e-3  # the residual takes it up at each call
    yield TimedCall(
        "add_rms_norm",
        lambda: add_rms_norm(delta, residual, weight, EPS, pdl=pdl),
        lambda: reference.add_rms_norm(delta, residual, weight, EPS),
        nbytes(x, x, x, x, weight),
    )


def activation_cases(problem: Dimensions) -> Iterator[TimedCall]:
    from minisgl.kernels.elementwise.activation import gated_mul

    gate_up = problem.random(problem.num_rows, 2 * problem.size("intermediate_size"))
    yield TimedCall(
        "gated_mul",
        lambda: gated_mul(gate_up, pdl=problem.pdl),
        lambda: reference.gated_mul(gate_up),
        nbytes(gate_up) * 3 // 2,
    )


def heads_cases(problem: Dimensions) -> Iterator[TimedCall]:
    from minisgl.kernels.elementwise.heads import qk_norm_rope_store_kv

    if "head_dim" not in MODELS[problem.model]:
        return
    num_rows, head_dim = problem.num_rows, problem.size("head_dim")
    num_kv_heads = problem.size("num_key_value_heads")
    num_heads = problem.size("num_attention_heads") + 2 * num_kv_heads
    qkv = problem.random(num_rows, num_heads * head_dim)
    positions = torch.arange(num_rows, device="cuda") + 1000
    slot_mapping = torch.randperm(num_rows, device="cuda") + PAGE_SIZE
    pages = (num_rows // PAGE_SIZE + 2, PAGE_SIZE, num_kv_heads, head_dim)
    frequencies = torch.logspace(0, -6, head_dim // 2, device="cuda")
    table = RotaryEmbedding(frequencies, MAX_SEQ_LEN).table
    weights = [problem.random(head_dim) for _ in range(2)] if problem.normed_heads else []
    caches = [problem.random(*pages) for _ in range(2)]
    norm_rope = NormRope(table, *weights, eps=EPS)
    given = (qkv, positions, slot_mapping, *caches, norm_rope)
    yield TimedCall(
        "qk_norm_rope_store_kv",
        lambda: qk_norm_rope_store_kv(*given, pdl=problem.pdl),
        lambda: reference.qk_norm_rope_store_kv(*given),
        nbytes(qkv, qkv, positions, slot_mapping) + num_rows * head_dim * 4,
    )


def latent_cases(problem: Dimensions) -> Iterator[TimedCall]:
    """Beside what is done with more rows: cuBLAS maps, and storing is a launch of its own."""
    from minisgl.kernels.elementwise import latents, latents_kernel

    if "kv_lora_rank" not in MODELS[problem.model] or problem.num_rows > MOST_MAPPED:
        return
    num_rows, num_heads = problem.num_rows, problem.size("num_attention_heads")
    rank, rope_dim = problem.size("kv_lora_rank"), problem.size("qk_rope_head_dim")
    nope_dim, value_dim = problem.size("qk_nope_head_dim"), problem.size("v_head_dim")
    q = problem.random(num_rows, num_heads, nope_dim + rope_dim)
    kv, attended = (
        problem.random(num_rows, rank + rope_dim),
        problem.random(num_rows, num_heads, rank),
    )
    maps = problem.random(num_heads, nope_dim + value_dim, rank)
    to_keys, to_values = maps.tensor_split((nope_dim,), dim=1)
    positions = torch.arange(num_rows, device="cuda") + 1000
    slot_mapping = torch.randperm(num_rows, device="cuda") + PAGE_SIZE
    cache = problem.random(num_rows // PAGE_SIZE + 2, PAGE_SIZE, 1, rank + rope_dim)
    table = RotaryEmbedding(torch.logspace(0, -6, rope_dim // 2, device="cuda"), MAX_SEQ_LEN).table
    norm = latents.LatentNorm(table, problem.random(rank), EPS)
    given = (kv, q, positions, slot_mapping, cache, norm, to_keys)
    tiles = tuning_of(q.device).latent_maps
    separate = replace(tuning_of(q.device), latent_map_rows=0)

    def apart(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
        with mock.patch.object(latents_kernel, "tuning_of", lambda device: separate):
            return function(*arguments, pdl=problem.pdl)

    yield TimedCall(
        "store_latents",
        lambda: latents_kernel.store_latents(*given, tiles=tiles, pdl=problem.pdl),
        lambda: apart(latents_kernel.store_latents, *given),
        nbytes(to_keys, q, kv, kv) + num_rows * num_heads * (rank + rope_dim) * q.itemsize,
    )
    yield TimedCall(
        "values_of_latents",
        lambda: latents_kernel.values_of_latents(attended, to_values, tiles=tiles, pdl=problem.pdl),
        lambda: apart(latents_kernel.values_of_latents, attended, to_values),
        nbytes(to_values, attended) + num_rows * num_heads * value_dim * q.itemsize,
    )


FAMILIES: dict[str, Callable[[Dimensions], Iterator[TimedCall]]] = {
    "embedding": embedding_cases,
    "norm": norm_cases,
    "activation": activation_cases,
    "heads": heads_cases,
    "latents": latent_cases,
}


def nbytes(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def time_s(run: Callable[[], object]) -> float:
    return graph_s([run] * CALLS, rounds=REPLAYS)


def report(case: TimedCall, num_rows: int) -> None:
    took_s = time_s(case.run)
    limit_s = max(case.num_bytes / BYTES_PER_S, case.num_operations / OPERATIONS_PER_S)
    line = f"{case.name:16}{num_rows:>7}{took_s * 1e6:>10.2f}{limit_s * 1e6:>10.2f}"
    line += f"{case.num_bytes / took_s / 1e12:>8.2f}"
    rate = case.num_operations / took_s / 1e12
    line += f"{rate:>9.0f}" if rate else " " * 9
    if case.reference is not None:
        reference_s = time_s(case.reference)
        line += f"{reference_s * 1e6:>10.2f}{reference_s / took_s:>7.1f}x"
    print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    models = ["Qwen3-0.6B", "Qwen3-14B", "Llama-3.1-8B", "GLM-4.7-Flash"]
    rows = [1, 8, 32, 256, 2048, 16384]
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=models)
    parser.add_argument("--rows", nargs="+", type=int, default=rows)
    parser.add_argument("--only", nargs="+", choices=sorted(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--no-pdl", dest="pdl", action="store_false", help="no launches overlap")
    args = parser.parse_args()

    torch.set_grad_enabled(False)
    print(f"{torch.cuda.get_device_name()}, {args.dtype}, overlapping launches: {args.pdl}")
    for model in args.models:
        print(f"\n{model}")
        print(HEADER)
        for family in args.only:
            for num_rows in args.rows:
                problem = Dimensions(model, num_rows, getattr(torch, args.dtype), args.pdl)
                for case in FAMILIES[family](problem):
                    report(case, num_rows)


if __name__ == "__main__":
    main()
