"""Arithmetic of how tensor-parallel ranks may divide a model: what a rank holds, what it keeps of a
token, and what it reads in a decode step. Ranks that divide the requests have equally many tokens.

Counted are matrices and the KV cache; norms, biases, states, activations and graphs are small
beside them, or the same for all layouts. A step waits for its fullest rank. Of the experts it reads
those that some row has chosen, as if each row chose at random.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from minisgl.config.facts import DTYPE_BYTES, ExpertFacts, ModelFacts, slot_bytes
from minisgl.shards import block_shard, uneven_shard, vocab_shard

GB = 10**9
USUAL_TOKENS = 1500  # of a request that runs
CLOSE = 0.01  # layouts whose steps read alike within it; the room then decides


@dataclass(frozen=True, slots=True)
class Layout:
    """How the ranks of a stage share it."""

    tp: int
    ep: bool = False  # whole experts on each rank; else a part of each
    dp_attention: bool = False  # whole attention for a part of the requests; else a part of it

    def __str__(self) -> str:
        """In the words of the options, for people."""
        return f"--tp {self.tp}" + " --ep" * self.ep + " --dp-attention" * self.dp_attention

    @property
    def by_head(self) -> Layout:
        """The same with ranks that divide the heads of attention."""
        return replace(self, dp_attention=False)

    def can_divide(self, model: ModelFacts) -> bool:
        """Whether ranks can share the model so."""
        if self.dp_attention:
            if self.tp == 1 or not model.divides_requests:
                return False
            model = replace(model, divides_heads=False)
        experts = model.experts
        if not model.can_divide(self.tp, by_rank=self.ep):
            return False
        if not self.ep:
            return experts is None or not _cuts_chunks(experts, self.tp)
        return (
            experts is not None
            and experts.not_by_rank is None
            and 1 < self.tp <= experts.num_experts
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What runs at once, on all ranks together."""

    num_rows: int  # of a decode step
    num_tokens: int  # in the KV cache, of all rows


SINGLE_ROW = Load(num_rows=1, num_tokens=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShare:
    """What the fullest rank of a layout has of a model."""

    layout: Layout
    dense_bytes: int  # of the matrices that every step reads
    embedding_bytes: int  # of which a step reads a few rows
    expert_bytes: int  # of all experts on the rank
    kv_bytes: float  # in the KV cache, for each token of all ranks together
    state_bytes: int  # that a step reads and writes, for each request of all ranks together
    experts: ExpertFacts | None

    @property
    def weight_bytes(self) -> int:
        return self.dense_bytes + self.embedding_bytes + self.expert_bytes

    def num_tokens(self, memory_bytes: int) -> int:
        """The tokens of all ranks together for which a rank has room beside its weights."""
        return max(0, int((memory_bytes - self.weight_bytes) / (self.kv_bytes or 1)))

    def step_bytes(self, load: Load, seen_share: float = 1.0) -> float:
        """What the fullest rank reads in a decode step. seen_share: of the KV cache."""
        kv = load.num_tokens * self.kv_bytes * seen_share + load.num_rows * self.state_bytes
        return self.dense_bytes + self._experts_read(load.num_rows) * self.expert_bytes + kv

    def _experts_read(self, num_rows: int) -> float:
        """The share of the experts on the fullest rank that some row has chosen."""
        if self.experts is None:
            return 0.0
        total = self.experts.num_experts
        chosen = 1 - (1 - self.experts.num_chosen / total) ** num_rows
        if not self.layout.ep:
            return chosen
        held = [uneven_shard(total, rank, self.layout.tp).size for rank in range(self.layout.tp)]
        return _expected_largest(held, chosen) / max(held)


def rank_share(
    model: ModelFacts, layout: Layout, *, dtype: str, kv_dtype: str, layers: range | None = None
) -> RankShare:
    """What the fullest rank has of a model that computes in `dtype`. layers: of a stage, all if not
    given. Requires that the model can be divided so."""
    n, width = layout.tp, DTYPE_BYTES[dtype]
    num_layers = len(model.layers)
    layers = range(num_layers) if layers is None else layers
    part = len(layers) / num_layers  # as if layers were alike
    hidden = model.num_head_weights // model.vocab_size
    # Of the matrices of layers that are divided, a weight takes so many bytes.
    num_divided = model.num_layer_weights - model.num_whole_weights
    of_layers = model.weight_bytes(dtype) - model.num_head_weights * width
    each = (of_layers - model.num_whole_weights * width) / max(1, num_divided)
    of_attention = model.num_attention_weights
    attention = of_attention * each
    if not layout.dp_attention:
        whole = sum(spec.kv(dtype).bytes_per_token for spec in model.attention) // width * hidden
        own = model.on_rank(n).attention
        here = sum(spec.kv(dtype).bytes_per_token for spec in own) // width * hidden
        of_latents = model.num_latent_weights  # of queries; those of tokens count as keys
        whole, here = (min(size + of_latents, of_attention) for size in (whole, here))
        attention = ((of_attention - whole) / n + here) * each if n > 1 else attention
    dense = attention + (num_divided - of_attention) / n * each + model.num_whole_weights * width
    dense *= part
    head = vocab_shard(model.vocab_size, 0, n).size * hidden * width
    embedding = head if model.divides_embedding else model.vocab_size * hidden * width
    shares_head = model.tied and (model.divides_embedding or n == 1)
    is_first, is_last = layers.start == 0, layers.stop == num_layers
    of_rank = (model if layout.dp_attention else model.on_rank(n)).on_stage(layers)
    requests = n if layout.dp_attention else 1  # each rank keeps those of its own
    return RankShare(
        layout=layout,
        dense_bytes=round(dense) + head * is_last,
        embedding_bytes=embedding * (is_first and not (shares_head and is_last)),
        expert_bytes=round(_expert_bytes(model.experts, layout, dtype) * part),
        kv_bytes=of_rank.kv_bytes_per_token(kv_dtype) / requests,
        state_bytes=2 * slot_bytes(of_rank.states) // requests,
        experts=model.experts,
    )


def _expert_bytes(experts: ExpertFacts | None, layout: Layout, dtype: str) -> float:
    if experts is None:
        return 0.0
    num_held, num_parts = experts.num_experts, layout.tp
    if layout.ep:
        num_held, num_parts = -(-num_held // layout.tp), 1
    size = experts.size / num_parts
    if experts.inner_block > 1:
        size = block_shard(experts.size, experts.inner_block, 0, num_parts).size
    of_one = experts.weight_bytes(dtype) * (size / experts.size if experts.size else 1)
    return experts.num_layers * num_held * of_one


def _cuts_chunks(experts: ExpertFacts, num_parts: int) -> bool:
    """Whether parts of quantised experts have a number of inputs that no kernel takes."""
    if experts.quantized is None or experts.inner_block > 1:  # of which parts are padded
        return False
    return experts.size // num_parts % experts.quantized.multiple != 0


def _expected_largest(sizes: Sequence[int], probability: float) -> float:
    """The expected maximum of independent binomial numbers, of `sizes` trials each."""
    if probability >= 1:
        return float(max(sizes))
    total = 0.0
    below = dict.fromkeys(sizes, 0.0)  # the probability that a number is less than `value`
    for value in range(1, max(sizes) + 1):
        for size in below:
            if value <= size + 1:
                ways = math.comb(size, value - 1)
                below[size] += (
                    ways * probability ** (value - 1) * (1 - probability) ** (size - value + 1)
                )
        total += 1 - math.prod(min(1.0, below[size]) for size in sizes)
    return total


@dataclass(frozen=True, slots=True)
class Advice:
    """What layouts leave and read, and which is best."""

    best: Layout
    lines: tuple[str, ...]  # for people


def advise(
    model: ModelFacts,
    layouts: Sequence[Layout],
    *,
    dtype: str,
    kv_dtype: str,
    memory_bytes: int,
    max_rows: int,
    num_stages: int = 1,
    startable: Sequence[Layout] = (),
) -> Advice:
    """Compare layouts into which the model can be divided. The best is one of `startable`, by
    default of all: of those that fit the one whose steps read least, if all run at most `max_rows`
    requests with as many tokens as fit into each. Ranks that divide the requests must read less
    already with USUAL_TOKENS of each, since with few tokens they read more.

    memory_bytes: of a rank, for weights and KV cache.
    """
    stages = model.stages(num_stages)
    shares: list[RankShare] = []
    for layout in layouts:
        of_stages = [
            rank_share(model, layout, dtype=dtype, kv_dtype=kv_dtype, layers=layers)
            for layers in stages
        ]
        shares.append(max(of_stages, key=lambda share: share.weight_bytes))
    room = {share.layout: share.num_tokens(memory_bytes) for share in shares}
    num_tokens = min((tokens for tokens in room.values() if tokens), default=0)
    load = Load(num_rows=max_rows, num_tokens=num_tokens)
    seen = model.seen_share(max(1, num_tokens // max_rows))
    read = {share.layout: share.step_bytes(load, seen) for share in shares}
    able = [layout for layout in read if layout in startable or not startable]
    fitting = [layout for layout in able if room[layout]] or able
    of = {share.layout: share for share in shares}
    first = {layout: _first_saving(of[layout], of, max_rows) for layout in read}
    usual = max_rows * USUAL_TOKENS
    fitting = [layout for layout in fitting if (first[layout] or 0) <= usual] or fitting
    least = min(read[layout] for layout in fitting)
    close = [layout for layout in fitting if read[layout] <= least * (1 + CLOSE)]
    best = max(close, key=lambda layout: room[layout])
    lines = [
        f"{share.layout}{'' if share.layout in able else ' (for comparison)'}: "
        f"{share.weight_bytes / GB:.2f} GB of weights a rank, "
        f"{_room(share, memory_bytes, room[share.layout])}; a full step reads "
        f"{read[share.layout] / GB:.2f} GB, one of a single row "
        f"{share.step_bytes(SINGLE_ROW) / GB:.2f} GB"
        f"{_saving(share.layout, first[share.layout], max_rows) if share.layout in able else ''}"
        for share in shares
    ]
    lines.append(
        f"full steps have {load.num_rows} rows with {load.num_tokens:,} tokens, before states, "
        f"activations and graphs; by this arithmetic {best} is best"
    )
    return Advice(best, tuple(lines))


def _room(share: RankShare, memory_bytes: int, num_tokens: int) -> str:
    if not num_tokens:
        return "which do not fit"
    room = memory_bytes - share.weight_bytes
    return f"which leave {room / GB:.2f} GB for the KV cache, {num_tokens:,} tokens"


def _first_saving(share: RankShare, of: Mapping[Layout, RankShare], num_rows: int) -> float | None:
    """From how many tokens in the KV cache on ranks that divide the requests read less than those
    that divide the heads; infinity: never. None: there is nothing to compare."""
    by_head = of.get(share.layout.by_head)
    if by_head is None or by_head is share:
        return None
    saved = by_head.kv_bytes - share.kv_bytes
    none = Load(num_rows=num_rows, num_tokens=0)
    more = share.step_bytes(none) - by_head.step_bytes(none)
    return max(0.0, more / saved) if saved > 0 else math.inf


def _saving(layout: Layout, first: float | None, num_rows: int) -> str:
    """What is said of it."""
    if first is None:
        return ""
    if first == math.inf:
        return f"; never less than {layout.by_head}"
    each = math.ceil(first / num_rows)
    return f"; less than {layout.by_head} with {num_rows} rows of {each:,} tokens or more"
