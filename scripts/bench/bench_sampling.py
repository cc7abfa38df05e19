"""Time of sampling on the device: `python scripts/bench/bench_sampling.py`, with a GPU.

Each figure is the median over replays of a CUDA graph that samples several times in a row, so that
no launch is timed. TB/s counts each row of logits once: the first pass, which is unavoidable.
Nearly uniform logits are the worst case (dummy weights); peaked ones resemble a trained model.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Literal

import torch
from graph_timer import graph_s

from minisgl.request import SamplingParams
from minisgl.runner.sampler import Sampler
from minisgl.runner.sampling_features import VARIANT_FEATURES, SamplingFeatures, SamplingVariant
from minisgl.scheduler.plan import SlotJoin

# What the runner captures a step for: any mix of requests.
PLAIN = VARIANT_FEATURES[SamplingVariant.FILTERED]
FULL = VARIANT_FEATURES[SamplingVariant.FULL]

CASES = {
    "greedy": SamplingParams(temperature=0),
    "temperature": SamplingParams(temperature=0.6),
    "min_p 0.05": SamplingParams(temperature=0.6, min_p=0.05),
    "top_k 50": SamplingParams(temperature=0.6, top_k=50),
    "top_p 0.9": SamplingParams(temperature=0.6, top_p=0.9),
    "top_p 0.5": SamplingParams(temperature=0.6, top_p=0.5),
    "top_k 50, top_p 0.9": SamplingParams(temperature=0.6, top_k=50, top_p=0.9),
    "top_k 1000, top_p 0.9": SamplingParams(temperature=0.6, top_k=1000, top_p=0.9),
    "full: nothing": SamplingParams(temperature=0.6),
    "full: top_n_sigma 1.5": SamplingParams(temperature=0.6, top_n_sigma=1.5),
    "full: penalties": SamplingParams(temperature=0.6, frequency_penalty=0.5),
    "full: logprobs": SamplingParams(temperature=0.6, logprobs=20),
    "full: all": SamplingParams(
        temperature=0.6,
        top_k=50,
        top_p=0.9,
        repetition_penalty=1.1,
        logit_bias={7: 1.0},
        min_tokens=9,
        logprobs=20,
    ),
}
INNER = 8  # times a graph samples


def microseconds(work: Callable[[], None], repeats: int) -> float:
    return 1e6 * graph_s([work] * INNER, rounds=repeats)


def sampling(
    params: SamplingParams,
    features: SamplingFeatures | None,
    logits: torch.Tensor,
    backend: Literal["torch"] | None = None,
) -> Callable[[], None]:
    """Samples a row of logits for each of as many requests. features: None for theirs."""
    rows, device = len(logits), logits.device
    sampler = Sampler(rows, logits.shape[1], device, backend)
    sampler.allocate_history()
    sampler.join(
        [
            SlotJoin(row, params, row * 99_991, frozenset([2]), [1, 2, 3], [4, 5])
            for row in range(rows)
        ]
    )
    slots = torch.arange(rows, device=device)
    index = torch.full((rows,), 3, device=device)
    features = features or sampler.features(range(rows))

    def work() -> None:
        sampler.sample(logits, slots, index, features)

    return work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 256])
    parser.add_argument("--vocab-size", type=int, default=151_936)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--scale", type=float, nargs="+", default=[0.5, 3.0])
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--torch", action="store_true", help="time the torch reference too")
    args = parser.parse_args()
    device, dtype = torch.device("cuda"), getattr(torch, args.dtype)

    print(f"{'rows':>5} {'scale':>5}  {'case':24} {'µs':>8} {'TB/s':>6}")
    for rows in args.rows:
        for scale in args.scale:
            logits = (torch.randn(rows, args.vocab_size, device=device) * scale).to(dtype)
            for name, params in CASES.items():
                features = FULL if name.startswith("full") else PLAIN
                time_us = microseconds(sampling(params, features, logits), args.repeats)
                speed = logits.nbytes / time_us / 1e6
                print(f"{rows:5} {scale:5g}  {name:24} {time_us:8.1f} {speed:6.2f}", flush=True)
                if args.torch:
                    reference = sampling(params, None, logits, "torch")
                    time_us = microseconds(reference, args.repeats)
                    print(f"{'':11}  {'  torch reference':24} {time_us:8.1f}", flush=True)


if __name__ == "__main__":
    main()
