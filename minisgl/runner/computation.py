"""What a step computes on one device: forward, then sample. Both are queued on the compute lane."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from minisgl.attention.base import Attention
from minisgl.attention.state import LayerState, StateBySlot
from minisgl.config import Capacity
from minisgl.device.lanes import Lanes
from minisgl.distributed.communicator import SINGLE_RANK, Communicator
from minisgl.drafting.drafter import Drafter, DraftStep
from minisgl.kernels.adapters import AdaptedRows
from minisgl.models.decoder import Decoder
from minisgl.runner.chunk_tensors import snapshot_slot
from minisgl.runner.graphs import MAX_CHUNKS
from minisgl.runner.row_order import RowOrder
from minisgl.runner.sampled_rows import SampledRows, SampleRows
from minisgl.runner.sampler import Sampler
from minisgl.runner.sampling_features import COMMON_FILTERS, RAW_SCORES, SamplingFeatures, Scoring
from minisgl.runner.stage import Stage, whole_model
from minisgl.runner.step_inputs import SlotTables
from minisgl.runner.step_outputs import RING_SIZE, StepOutputs
from minisgl.runner.step_shape import StepShape
from minisgl.scheduler.plan import SlotJoin, StepPlan


class Computation:
    """The model and all that changes on the device from step to step: its states, the tables of
    slots, the state of sampling, and the ring of outputs.

    Its methods may be captured: what they read of a step is in the tables, or in tensors that a
    replay finds at the same place.
    """

    def __init__(
        self,
        *,
        model: Decoder,
        states: list[LayerState],
        capacity: Capacity,
        vocab_size: int,
        attention: Attention,
        captured_attention: Attention,
        lanes: Lanes,
        ranks: Communicator = SINGLE_RANK,
        stage: Stage | None = None,
        max_run: int = 1,
        drafter: Drafter | None = None,
        window: int = 0,
        adapted_rows: Callable[[Tensor], AdaptedRows] | None = None,
        rope_offsets: Tensor | None = None,
        scoring: Scoring = RAW_SCORES,
    ) -> None:
        """captured_attention: for captured steps, whose chunks only the device knows. ranks: of
        the stage. max_run: of all plans. drafter: on the last stage, if that is more than 1.
        window: of layers that have pages of their own; 0: none. adapted_rows, rope_offsets: of
        SlotTables."""
        self.states = states  # what each layer keeps: paged KV, or a state by slot
        self.vocab_size = vocab_size
        self.lanes = lanes
        self.ranks = ranks
        self.stage = stage = stage or whole_model()
        self._model = model
        self._drafter = drafter
        self._num_layers = len(states) - (len(drafter.layer_specs("float32")) if drafter else 0)
        self._attention = attention
        self._captured_attention = captured_attention
        self.sampler = Sampler(
            capacity.num_slots,
            vocab_size,
            lanes.device,
            ranks=ranks,
            samples=stage.is_last,
            scoring=scoring,
        )
        num_attending = capacity.num_attending
        self.tables = SlotTables(
            order=RowOrder(capacity.num_slots, num_attending, ranks.rank % num_attending),
            max_pages=-(-capacity.max_seq_len // capacity.page_size),
            page_size=capacity.page_size,
            prompt_lengths=self.sampler.num_prompt_tokens,
            lanes=lanes,
            max_run=max_run,
            has_states=any(isinstance(state, StateBySlot) for state in states),
            window=window,
            adapted_rows=adapted_rows,
            rope_offsets=rope_offsets,
        )
        num_rows, ring_size = capacity.num_slots * max_run, RING_SIZE + stage.pipeline.size - 1
        num_rows += MAX_CHUNKS
        self.outputs = StepOutputs(num_rows, lanes.device, ring_size, scoring.most)

    def join(self, joins: Sequence[SlotJoin]) -> None:
        """Assign slots to requests: sampling parameters, and states."""
        if not joins:
            return
        self.sampler.join(joins)
        if self._drafter is not None:
            known = [[*join.prompt_token_ids, *join.output_token_ids] for join in joins]
            self._drafter.join([join.slot for join in joins], known)
        states = [state for state in self.states if isinstance(state, StateBySlot)]
        if not states:
            return
        order = self.tables.order
        own = order.own_states(joins)
        begun = [
            (slot, snapshot_slot(snapshot, order.scratch_state))
            for slot, snapshot in own
            if snapshot is not None
        ]
        fresh = [slot for slot, snapshot in own if snapshot is None]
        zeroed, slots, sources = self.lanes.upload(
            [fresh, [slot for slot, _ in begun], [source for _, source in begun]]
        )
        for tensor in (tensor for state in states for tensor in state.tensors):
            tensor.index_fill_(0, zeroed, 0)
            if begun:
                tensor.index_copy_(0, slots, tensor[sources])

    def forward(
        self,
        shape: StepShape,
        packed_chunks: Tensor | None,
        received: Tensor | None,
        plan: StepPlan | None = None,
    ) -> tuple[Tensor, SampleRows]:
        """Compute the rows of a step: their hidden states, and which of them are sampled.

        packed_chunks: of SlotTables.upload_chunks. received: the rows of the stage before. plan:
        None while a step is captured.
        """
        inputs, samples = self.tables.inputs(plan, shape, packed_chunks)
        attention = self._captured_attention if plan is None else self._attention
        attention.prepare(inputs)
        states, taps = self.states[: self._num_layers], None
        if self._drafter is not None:
            taps = self.stage.taps(self._drafter.taps, len(inputs.token_ids))
        hidden = self._model(inputs, states, attention, received, taps)
        if self._drafter is not None:
            step = DraftStep(
                batch=inputs,
                hidden=hidden,
                state=self.tables.state,
                states=self.states,
                attention=attention,
                slots=samples.slots,
                output_index=samples.output_index,
                sample_rows=samples.rows,
                num_runs=samples.num_runs,
                chunk_ends=samples.chunk_ends,
                tapped=None if taps is None else taps.rows,
            )
            samples = replace(samples, drafting=step)
        return hidden, samples

    def logits(self, hidden: Tensor, samples: SampleRows) -> Tensor | None:
        """The logits of the sampled rows, for `sample`; None if there are none."""
        if not len(samples.slots):
            return None
        return self._model.logits(hidden if samples.rows is None else hidden[samples.rows])

    def whole_logits(self, rows: Tensor) -> Tensor:
        """The logits [n, vocab_size] of rows of hidden states, of all ranks together."""
        return self.gathered(self._model.logits(rows))

    def gathered(self, logits: Tensor) -> Tensor:
        """Logits of this rank as those of all ranks together, [n, vocab_size]."""
        return self.ranks.all_gather(logits)[:, : self.vocab_size]

    def sample(self, logits: Tensor, samples: SampleRows, features: SamplingFeatures) -> None:
        """Draw the tokens of a step, make them the last ones of their slots, send them to the
        ring's open entry, and draft what may follow."""
        sampled = self.draw(logits, samples, features)
        self.outputs.send(samples, sampled, self.tables.state)
        self.draft(samples, sampled.token_ids, features)

    def draft(self, samples: SampleRows, token_ids: Tensor, features: SamplingFeatures) -> None:
        """Let the drafter, if there is one, take note of a step and of what it has sampled. Drafts
        are drawn with the noise of tokens; their logits are not penalized, biased or masked."""
        if self._drafter is None or samples.drafting is None:
            return
        plain = SamplingFeatures(features.random, features.filters & COMMON_FILTERS)

        def draw(logits: Tensor, slots: Tensor, output_index: Tensor) -> Tensor:
            return self.sampler.sample(logits, slots, output_index, plain).token_ids

        self._drafter.draft(samples.drafting, token_ids, draw)

    def draw(self, logits: Tensor, samples: SampleRows, features: SamplingFeatures) -> SampledRows:
        return self.sampler.sample(logits, samples.slots, samples.output_index, features)

    def recount(self) -> None:
        """Let host and device agree on the ring again, after a step that failed."""
        with self.lanes.compute("recount"):
            self.outputs.recount()
