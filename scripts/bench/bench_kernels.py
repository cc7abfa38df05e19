"""Times the kernels of the engine on a GPU, beside torch's and those of libraries.

    python scripts/bench/bench_kernels.py attention-decode linear experts
    python scripts/bench/bench_kernels.py linear --only 'Qwen3-14B gate_up .* int4,' --rows 1 64
    python scripts/bench/bench_kernels.py collectives --gpus 2
    python scripts/bench/bench_kernels.py experts --only bf16 --rows 8 \\
        --tiles inner.block_n=32,64 inner.num_stages=3,4,5

A row has the median time of a call in replays of a CUDA graph (of prompts: without one), the limit,
and the share of it that was reached. The limit is the time that the bytes take at the bandwidth of
a copy, or the operations at the speed of a large GEMM, the larger; both are measured at the start.
Weights and caches are as cold as in a model: the calls of a graph have so many that L2 holds none.
Inputs of elementwise kernels and logits are as warm as L2 has them. What a case is stands at the
top of attention_kernels.py, linear_kernels.py, lora_kernels.py, small_kernels.py and
rank_kernels.py.

`--tiles` times our kernel with all combinations of values of its tiles (minisgl/kernels/tuning.py),
and prints the best three that give the same result. Each is compiled first, which takes seconds.

A result that is not what torch computes is marked as WRONG, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from attention_kernels import TABLES, attention_cases
from kernel_timer import DEVICE, DTYPE, Case, Report
from linear_kernels import expert_cases, layer_cases, linear_cases
from lora_kernels import lora_cases
from rank_kernels import time_collectives
from small_kernels import (
    elementwise_cases,
    latent_map_cases,
    ngram_cases,
    sampling_cases,
)

from minisgl.bench.peak import measure_peak
from minisgl.kernels.hardware import has_fp8_products

SUBJECTS: dict[str, Callable[[Sequence[int] | None], Iterator[Case]]] = {
    **{f"attention-{table}": partial(attention_cases, table) for table in TABLES},
    "linear": linear_cases,
    "layer": layer_cases,
    "experts": expert_cases,
    "lora": lora_cases,
    "elementwise": elementwise_cases,
    "latents": latent_map_cases,
    "sampling": sampling_cases,
    "ngrams": ngram_cases,
}


def tiles_of(text: str) -> tuple[str, list[int]]:
    found = re.fullmatch(r"([\w.]+)=(\d+(?:,\d+)*)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text}: allowed: FIELD=N,N, such as block_n=32,64")
    return found[1], [int(value) for value in found[2].split(",")]


def chosen(subject: str, given: argparse.Namespace) -> Iterator[Case]:
    cases = SUBJECTS[subject](given.rows)
    return (case for case in cases if re.search(given.only, case.name))


def parsed(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("subjects", nargs="+", choices=[*SUBJECTS, "collectives"])
    add("--only", default="", metavar="REGEX", help="cases whose name it matches in part")
    add(
        "--rows",
        nargs="+",
        type=int,
        help="instead of a table's own [of attention: no effect]",
    )
    add("--kernels", nargs="+", help="such as minisgl, triton or cuBLAS [default: all of a case]")
    add("--tiles", nargs="+", type=tiles_of, metavar="FIELD=N,N", help="tiles to try")
    add("--gpus", type=int, help="of collectives [default: all]")
    return parser.parse_args(words)


def main() -> int:
    given = parsed()
    if DEVICE.type != "cuda":
        print("bench_kernels.py needs a GPU.", file=sys.stderr)
        return 1
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    in_fp8 = has_fp8_products(torch.cuda.get_device_capability())
    peak = measure_peak(DEVICE, DTYPE, in_fp8=in_fp8)
    print(f"{torch.cuda.get_device_name()}, {peak}")
    report = Report(peak, given.kernels, dict(given.tiles) if given.tiles else None)
    right = True
    for subject in given.subjects:
        print(f"\n{subject}", flush=True)
        if subject == "collectives":
            time_collectives(given.gpus or torch.cuda.device_count(), given.rows, given.kernels)
        else:
            right &= report.run(chosen(subject, given))
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
