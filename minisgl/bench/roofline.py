"""The least time that the hardware allows a run, from the bytes it moves and its arithmetic.

The roofline (Williams et al., "Roofline: An Insightful Visual Performance Model", 2009) of serving:
each step reads every weight once, each decoded token reads the keys and values of everything before
it, and each token is multiplied by the weights. A state of a request counts as KV cache: each
decoded token reads and writes it, and so does each prompt, once.

A kernel computes while it loads, so that the longer of the two counts (`KernelWork`). Kernels run
one after the other: the products of the layers, the experts, the head and attention of a step add
up, although they could overlap: the limit is that of engines like this one. With many rows, a
decode step's products are limited by arithmetic, and its attention by memory.

Which rows share a step follows from the requests of a run (`Work.of`): each decodes as early as
possible, as many together as may run. The other steps are one for each prompt at most, whose
tokens they share evenly, and beyond those, as where requests arrive by and by, decode steps of one
row. Neither padding nor what retraction computes again counts.

Only experts that some row of a step has chosen count: if each row chooses k of E at random, their
expected number is E · (1 - (1 - k/E) ** rows).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapreplace
from itertools import accumulate

from minisgl.bench.offline_run import RequestRecord, RunRecord
from minisgl.bench.peak import Peak
from minisgl.config import DTYPE_BYTES, ModelFacts, slot_bytes


@dataclass(frozen=True, slots=True)
class KernelWork:
    """What the kernels of one kind move and compute, in one step or in several that are alike."""

    num_bytes: float
    operations: float
    in_layers: bool = False  # products of layers, which may multiply in FP8

    def seconds(self, peak: Peak) -> float:
        """The longer of moving and computing."""
        reached = peak.layer_operations_per_s if self.in_layers else peak.operations_per_s
        return max(self.num_bytes / peak.bytes_per_s, self.operations / reached)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The minimum of memory traffic and arithmetic of a run, and of its time."""

    weight_bytes: int
    kv_bytes: int
    prefill_operations: int
    decode_operations: int
    seconds: float

    @classmethod
    def of(
        cls,
        run: RunRecord,
        model: ModelFacts,
        peak: Peak,
        *,
        dtype: str,
        kv_dtype: str,
        max_running: int,
    ) -> Work:
        """The work of the requests and steps of `run`, if at most `max_running` run at a time.

        dtype: what the model computes in; kv_dtype: what its KV cache stores.
        """
        requests = run.requests
        batches = Counter(_decode_batches(requests, max_running)[: run.num_steps])
        num_others = run.num_steps - batches.total()
        num_prefills = min(num_others, len(requests))
        batches[1] += num_others - num_prefills
        decoding = [
            load
            for size, count in batches.items()
            for load in _decode_products(model, dtype, count, size)
        ]
        num_new = sum(each.num_prompt_tokens - each.num_cached_tokens for each in requests)
        prefilling = [*_products(model, dtype, num_prefills, num_new, len(requests))]
        decode_attention = _decode_attention(requests, model, kv_dtype)
        prefill_attention = KernelWork(
            num_new * model.kv_bytes_per_token(kv_dtype) + len(requests) * _state_traffic(model),
            sum(
                _num_seen(each.num_cached_tokens, each.num_prompt_tokens, window) * operations
                for window, operations in _operations_per_pair(model).items()
                for each in requests
            ),
        )
        products, attention = (*decoding, *prefilling), (decode_attention, prefill_attention)
        decode_loads = (*decoding, decode_attention)
        prefill_loads = (*prefilling, prefill_attention)
        return cls(
            weight_bytes=round(sum(load.num_bytes for load in products)),
            kv_bytes=round(sum(load.num_bytes for load in attention)),
            prefill_operations=round(sum(load.operations for load in prefill_loads)),
            decode_operations=round(sum(load.operations for load in decode_loads)),
            seconds=sum(load.seconds(peak) for load in (*products, *attention)),
        )


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """The minimum of work of a decode step, averaged over the decode steps of a run."""

    products: tuple[KernelWork, ...]
    attention: KernelWork

    @classmethod
    def of(cls, run: RunRecord, model: ModelFacts, *, dtype: str, kv_dtype: str) -> DecodeStep:
        """The step of requests that decode together, all with outputs of one length >= 2."""
        [num_output_tokens] = {request.num_output_tokens for request in run.requests}
        num_steps, batch_size = num_output_tokens - 1, len(run.requests)
        attention = _decode_attention(run.requests, model, kv_dtype)
        return cls(
            products=_decode_products(model, dtype, 1, batch_size),
            attention=KernelWork(attention.num_bytes / num_steps, attention.operations / num_steps),
        )

    @property
    def weight_bytes(self) -> float:
        return sum(load.num_bytes for load in self.products)

    @property
    def kv_bytes(self) -> float:
        return self.attention.num_bytes

    @property
    def operations(self) -> float:
        return sum(load.operations for load in (*self.products, self.attention))

    def seconds(self, peak: Peak) -> float:
        return sum(load.seconds(peak) for load in (*self.products, self.attention))


def _decode_products(
    model: ModelFacts, dtype: str, num_steps: int, batch_size: int
) -> tuple[KernelWork, ...]:
    """The products of `num_steps` steps of one row for each of `batch_size` requests."""
    experts = model.experts
    missed = 0.0
    if experts is not None:
        missed = (1 - experts.num_chosen / experts.num_experts) ** batch_size
    num_rows = num_steps * batch_size
    return tuple(_products(model, dtype, num_steps, num_rows, num_rows, 1 - missed))


def _products(
    model: ModelFacts,
    dtype: str,
    num_steps: int,
    num_rows: int,
    num_sampled: int,
    experts_read: float = 1.0,
) -> Iterator[KernelWork]:
    """The products of steps that have `num_rows` rows together, of which `num_sampled` are sampled,
    and that each read a share of the experts."""
    head_bytes = model.num_head_weights * DTYPE_BYTES[dtype]
    layer_bytes = model.weight_bytes(dtype) - head_bytes
    yield KernelWork(
        num_steps * layer_bytes, 2 * model.num_layer_weights * num_rows, in_layers=True
    )
    yield KernelWork(num_steps * head_bytes, 2 * model.num_head_weights * num_sampled)
    if (experts := model.experts) is not None:
        num_read = num_steps * experts_read * experts.num_layers * experts.num_experts
        num_bytes = num_read * experts.weight_bytes(dtype)
        weights_of_row = experts.num_layers * experts.num_chosen * experts.num_weights
        yield KernelWork(num_bytes, 2 * weights_of_row * num_rows, in_layers=True)


def _decode_batches(requests: Iterable[RequestRecord], max_running: int) -> list[int]:
    """Rows of each decode step, if a request starts as soon as another one ends."""
    free = [0] * max_running  # a heap: the step from which on each place is
    changes: Counter[int] = Counter()
    for request in requests:
        first, end = free[0], free[0] + request.num_output_tokens - 1
        heapreplace(free, end)
        changes[first] += 1
        changes[end] -= 1
    return list(accumulate(changes[step] for step in range(max(free))))


def _decode_attention(
    requests: Sequence[RequestRecord], model: ModelFacts, kv_dtype: str
) -> KernelWork:
    """The attention of all decode steps of the requests."""
    num_decoded = sum(request.num_output_tokens - 1 for request in requests)
    stored, computed = _bytes_per_token(model, kv_dtype), _operations_per_pair(model)
    num_bytes, operations = num_decoded * _state_traffic(model), 0
    for window in stored:
        num_read = sum(  # each decoded token reads what is before it, and its own
            _num_seen(prompt := each.num_prompt_tokens, prompt + each.num_output_tokens - 1, window)
            for each in requests
        )
        num_bytes += (num_read + num_decoded) * stored[window]
        operations += num_read * computed[window]
    return KernelWork(num_bytes, operations)


def _state_traffic(model: ModelFacts) -> int:
    """Bytes to read and write the state of a request once."""
    return 2 * slot_bytes(model.states)


def _num_seen(start: int, end: int, window: int | None) -> int:
    """Number of tokens that the tokens from position `start` up to `end` see together."""
    widest = end if window is None else window

    def seen_by_first(count: int) -> int:
        growing = min(count, widest)
        return growing * (growing + 1) // 2 + (count - growing) * widest

    return seen_by_first(end) - seen_by_first(start)


def _bytes_per_token(model: ModelFacts, kv_dtype: str) -> Counter[int | None]:
    """Bytes per token of the KV caches of the layers with each window."""
    sizes: Counter[int | None] = Counter()
    for spec, kv in zip(model.attention, model.kv_specs(kv_dtype), strict=True):
        sizes[spec.window] += kv.bytes_per_token
    return sizes


def _operations_per_pair(model: ModelFacts) -> Counter[int | None]:
    """Operations of a query with one key and value, in all heads of the layers with each window."""
    operations: Counter[int | None] = Counter()
    for spec in model.attention:
        widths = spec.head_dim + (spec.value_dim or spec.head_dim)
        operations[spec.window] += 2 * spec.num_heads * widths
    return operations
