"""Times the host's work for a step, without a model: `python scripts/bench/bench_host.py`.

1. plan + settle at 256 running requests, with a runner that returns at once. Limit: 1.5 µs a
   request and step.
2. The radix cache at a million cached tokens: matching, inserting and evicting, against a small
   cache. Neither may grow with the size of the cache.

Run it on a quiet machine; each figure is the best of five.
"""

from __future__ import annotations

import gc
import random
import time

from minisgl.kvcache.manager import KVCacheManager
from minisgl.kvcache.prefix import pack_tokens
from minisgl.parts.host import host_parts
from minisgl.request import Request, SamplingParams
from minisgl.scheduler.plan import StepPlan, StepResult
from minisgl.scheduler.scheduler import Scheduler

REPEATS = 5
NUM_REQUESTS = 256
NUM_STEPS = 400


def step_cost(page_size: int, context: int) -> float:
    """Seconds that plan + settle take for one request and step, two steps in flight."""
    kv = KVCacheManager(
        num_pages=2 + NUM_REQUESTS * (context + NUM_STEPS + page_size) // page_size,
        page_size=page_size,
        cache_type="radix",
    )
    scheduler = Scheduler(
        kv=kv,
        num_slots=NUM_REQUESTS,
        max_seq_len=context + NUM_STEPS + 8,
        max_prefill_length=1 << 30,
        max_queued_requests=NUM_REQUESTS,
        parts=host_parts([], 50),
    )
    params = SamplingParams(ignore_eos=True)
    for index in range(NUM_REQUESTS):
        prompt = [index] + [1] * (context - 1)
        scheduler.submit(Request(str(index), prompt, params, max_tokens=NUM_STEPS + 8, seed=0))

    def result(plan: StepPlan) -> StepResult:
        return StepResult(plan.step, [2] * plan.num_samples)

    first = scheduler.plan()
    assert first is not None and len(first.chunks) == NUM_REQUESTS
    pending = result(first)
    gc.collect()
    gc.disable()
    started = time.perf_counter()
    for _ in range(NUM_STEPS):
        plan = scheduler.plan()
        assert plan is not None
        scheduler.settle(pending)
        pending = StepResult(plan.step, [2] * NUM_REQUESTS)
    elapsed = time.perf_counter() - started
    gc.enable()
    assert len(plan.decode_slots) == NUM_REQUESTS
    return elapsed / NUM_STEPS / NUM_REQUESTS


def cache_cost(num_nodes: int, tokens_per_node: int) -> tuple[float, float, float]:
    """Seconds to match a 1,000-token prompt, to insert one, and to evict 1,000 tokens."""
    page_size, rng = 16, random.Random(0)
    num_pages = 1 + num_nodes * tokens_per_node // page_size + 1000
    kv = KVCacheManager(num_pages=num_pages, page_size=page_size, cache_type="radix")

    def add(tokens: list[int]) -> None:
        key = pack_tokens(tokens)
        lease = kv.acquire(key, len(tokens))
        assert kv.reserve(lease, len(tokens)) is not None
        kv.commit(lease, key, len(tokens), 1)
        kv.close(lease)

    trunk = [rng.randrange(1000) for _ in range(1008)]
    for index in range(num_nodes):  # every tenth branches off a shared trunk
        own = [index, *(rng.randrange(1000) for _ in range(tokens_per_node - 1))]
        add(trunk[: 16 * (index % 63)] + own if index % 10 == 0 else own)

    prompt = pack_tokens([*trunk[:992], *range(2000, 2008)])
    count = 200

    def match() -> float:
        started = time.perf_counter()
        for _ in range(count):
            kv.close(kv.acquire(prompt, 1000))
        return (time.perf_counter() - started) / count

    def evict() -> float:
        leases = [kv.acquire(b"", 1) for _ in range(10)]
        assert kv.reserve(leases[0], kv.num_free * page_size) is not None  # none is free any more
        started = time.perf_counter()
        for lease in leases[1:]:
            assert kv.reserve(lease, 1000) is not None
        elapsed = time.perf_counter() - started
        for lease in leases:
            kv.close(lease)
        return elapsed / (len(leases) - 1)

    def insert() -> float:
        fresh = [[rng.randrange(1 << 20) for _ in range(1000)] for _ in range(40)]
        started = time.perf_counter()
        for tokens in fresh:
            add(tokens)
        return (time.perf_counter() - started) / len(fresh)

    found = [[measure() for _ in range(REPEATS)] for measure in (match, insert, evict)]
    return min(found[0]), min(found[1]), min(found[2])


def main() -> None:
    print(f"plan + settle, {NUM_REQUESTS} running requests, best of {REPEATS}")
    for page_size, context in ((16, 100), (64, 100), (64, 4000)):
        cost = min(step_cost(page_size, context) for _ in range(REPEATS))
        print(
            f"  page size {page_size:2}, context {context:4}: {cost * 1e6:.2f} µs a request and "
            f"step, {cost * NUM_REQUESTS * 1e3:.3f} ms a step"
        )
    print(f"radix cache, 1,000-token prompts, page size 16, best of {REPEATS}")
    for num_nodes, tokens_per_node in ((100, 1008), (10_000, 112)):
        match, insert, evict = cache_cost(num_nodes, tokens_per_node)
        print(
            f"  {num_nodes * tokens_per_node:9,} tokens in about {num_nodes:6,} nodes: match "
            f"{match * 1e6:.0f} µs, insert {insert * 1e6:.0f} µs, evict {evict * 1e6:.0f} µs"
        )


if __name__ == "__main__":
    main()
