"""The runner's half: a buffer of rows, which the tower fills beside the steps, and from which
chunks take them in the place of embeddings."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from minisgl.device.copy_lanes import CopyMark, copy_lane
from minisgl.device.lanes import Lanes
from minisgl.errors import DeviceMemoryError, in_one_line
from minisgl.models.decoder import Decoder
from minisgl.models.filling import Places
from minisgl.models.towers.both_ways import BothWaysModel
from minisgl.models.towers.largest import largest_inputs, most_pieces
from minisgl.models.towers.repeated import RepeatedTower
from minisgl.models.towers.seeing import SeeingAdopted, SeeingModel, TurningModel
from minisgl.models.towers.sight import BothWays, Sight
from minisgl.models.towers.tower import Tower, load_tower
from minisgl.parts.device_part import StepPart
from minisgl.parts.images.host import Encode, ImagePlan, OfChunk

if TYPE_CHECKING:
    from minisgl.models.adopted.model import AdoptedModel
    from minisgl.models.transformer import CausalLM

logger = logging.getLogger(__name__)

_OF_LAYERS = "embed_tokens_per_layer"  # an embedding with numbers for each layer
# Images of at most this part of the buffer may be captured, so that their graphs need as little
# memory beside the largest image.
CAPTURED_PART = 8


class SeenEmbedding:
    """What the embedding of a model computes, which keeps its place and the name of its weights.
    While `is_open`, negative ids are rows of the buffer: -1 is row 0."""

    def __init__(self, base: nn.Module, rows: Tensor) -> None:
        """rows: the buffer, [num_rows, hidden_size]."""
        self._base, self._rows = base.forward, rows
        self.is_open = False
        base.forward = self.forward

    def forward(self, token_ids: Tensor) -> Tensor:
        if not self.is_open:
            return cast(Tensor, self._base(token_ids))
        text = self._base(token_ids.clamp(min=0))
        seen = self._rows[(-1 - token_ids).clamp(min=0)]
        return torch.where((token_ids < 0).unsqueeze(-1), seen, text)


class PaddedEmbedding:
    """The same of another embedding of these ids. While `is_open`, negative ones are `pad`."""

    def __init__(self, base: nn.Module, pad: int) -> None:
        self._base, self._pad = base.forward, pad
        self.is_open = False
        base.forward = self.forward

    def forward(self, token_ids: Tensor) -> Tensor:
        if self.is_open:
            token_ids = token_ids.masked_fill(token_ids < 0, self._pad)
        return cast(Tensor, self._base(token_ids))


class DeviceImages:
    """The rows of images on a rank. Only the first stage has any; on the others, all are there."""

    def __init__(
        self,
        tower: Tower | None,
        embeddings: Sequence[SeenEmbedding | PaddedEmbedding],
        seeing: TurningModel | BothWaysModel | None,
        rows: Tensor,
        offsets: Tensor | None,
        lanes: Lanes,
        *,
        captures: bool,
    ) -> None:
        """seeing: the model, if it must know of steps with images. rows: the buffer. offsets:
        [num_slots + 1] int64, as in SlotTables, of one that counts positions in three
        directions. captures: images of a shape that comes again."""
        self._tower, self._rows, self._lanes = tower, rows, lanes
        self._repeated: RepeatedTower | None = None
        if captures and tower is not None and tower.repeats:
            pool = lanes.graph_pool()
            self._repeated = RepeatedTower(tower, lambda work: lanes.capture_here(work, pool))
        self._embeddings, self.seeing, self.offsets = embeddings, seeing, offsets
        self._lane = copy_lane(lanes, priority=0)
        # What ends the encoding of an image, by its number: for `open`, which needs no mark that is
        # reached, and, or why it failed, for `landed`, which another thread calls.
        self._marks: dict[int, CopyMark] = {}
        self._to_report: dict[int, CopyMark | str] = {}

    @property
    def tower_places(self) -> Places | None:
        """Of the tower's weights, which an update may change."""
        return None if self._tower is None else self._tower.places

    def open(self, plan: ImagePlan, is_own: Callable[[int], bool]) -> None:
        """Let a step read the rows of images, once they are there, and let it count as its plan
        says. Of an image that is read, all ranks have said that its encoding has not failed.
        is_own: whether attention of the request in a slot is this rank's."""
        if plan.offsets and self.offsets is not None:
            slots, values = self._lanes.upload(
                [[*each] for each in zip(*plan.offsets, strict=True)]
            )
            self.offsets.index_copy_(0, slots, values)
        if plan.rope and isinstance(self.seeing, TurningModel):
            self.seeing.rope = self._uploaded(plan.rope, is_own, 3)
        if plan.last_seen and isinstance(self.seeing, BothWaysModel):
            self.seeing.last_seen = self._uploaded(plan.last_seen, is_own, 1)[0].int()
        for number in plan.reads:
            mark = self._marks.pop(number, None)
            if mark is not None:
                self._lane.hold_compute(mark)
        for embedding in self._embeddings:
            embedding.is_open = bool(plan.reads)

    def _uploaded(
        self, chunks: Sequence[OfChunk], is_own: Callable[[int], bool], num_lines: int
    ) -> Tensor:
        """What a plan says of the rows of this rank's chunks: [num_lines, num_rows] int64."""
        own = [np.frombuffer(data, np.int32) for slot, data in chunks if is_own(slot)]
        parts = [np.zeros((num_lines, 0), np.int32), *(each.reshape(num_lines, -1) for each in own)]
        (sent,) = self._lanes.upload([np.concatenate(parts, axis=1).ravel()])
        return sent.view(num_lines, -1)

    def close(self) -> None:
        if isinstance(self.seeing, TurningModel):
            self.seeing.rope = None
        elif self.seeing is not None:
            self.seeing.last_seen = None
        for embedding in self._embeddings:
            embedding.is_open = False

    def encode(self, image: Encode) -> None:
        """Begin to encode an image. Its rows are written once the steps launched so far, which may
        read what is there, have ended."""
        self._marks = {
            number: mark for number, mark in self._marks.items() if not mark.is_reached()
        }
        try:
            mark = self._marks[image.number] = self._queue(image)
        except Exception as error:  # of whatever code, or there is no memory for it
            logger.warning("an image could not be encoded", exc_info=error)
            self._to_report[image.number] = in_one_line(error)
        else:
            self._to_report[image.number] = mark

    def _queue(self, image: Encode) -> CopyMark:
        found: list[Tensor] = []

        def compute() -> None:
            if self._tower is not None:
                inputs = {
                    each.name: np.frombuffer(each.data, each.dtype).reshape(each.shape)
                    for each in image.inputs
                }
                is_small = CAPTURED_PART * len(image.rows) <= len(self._rows)
                tower = self._repeated if is_small else None
                found.append((tower or self._tower).rows(inputs))

        def write() -> None:
            for rows in found:
                if len(rows) != len(image.rows):
                    raise ValueError(f"it has {len(rows)} rows, and {len(image.rows)} places")
                places = torch.tensor(image.rows, pin_memory=rows.is_cuda)
                self._rows.index_copy_(0, places.to(rows.device, non_blocking=True), rows)

        self._lane.queue(compute, [])
        return self._lane.queue(write, [self._lanes.mark()])

    def peak_bytes(self, sight: Sight) -> int:
        """Encode the largest image that the buffer has room for; returns the memory that it takes
        beside what is there, which is measured on a GPU only. Raises DeviceMemoryError."""
        if self._tower is None or self._lanes.device.type != "cuda":
            return 0
        tower, num_rows = self._tower, len(self._rows)
        inputs = largest_inputs(sight, tower.config, num_rows)
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        found: list[Tensor] = []
        try:
            self._lane.queue(lambda: found.append(tower.rows(inputs)), []).wait()
        except torch.OutOfMemoryError as error:
            raise DeviceMemoryError(
                f"The tower has no memory for an image of {num_rows} tokens; lower --image-rows, "
                "or set it to 0 to run the text part alone."
            ) from error
        num_pieces = most_pieces(sight, num_rows, len(found[0]))
        num_bytes = torch.cuda.max_memory_allocated() - held
        if self._repeated is not None:
            num_bytes += num_bytes // CAPTURED_PART
        return num_pieces * num_bytes

    def landed(self, *, alone: bool) -> tuple[tuple[int, str], ...]:
        """The images whose encoding has ended since the last call, and why it failed, or "". alone:
        no step with rows is launched, so those count that are queued, too. A step that reads them
        waits on the device, and is queued meanwhile."""
        ended: list[tuple[int, str]] = []
        for number, mark in list(self._to_report.items()):
            if isinstance(mark, str):
                ended.append((number, mark))
            elif alone or mark.is_reached():
                ended.append((number, ""))
            else:
                continue
            del self._to_report[number]
        return tuple(ended)


class ImageStep(StepPart):
    def __init__(
        self, images: DeviceImages, is_own: Callable[[int], bool], plan: ImagePlan
    ) -> None:
        self._images, self._is_own, self._plan = images, is_own, plan

    def begin(self) -> None:
        self._images.open(self._plan, self._is_own)

    def end(self) -> None:
        self._images.close()
        for image in self._plan.encodes:
            self._images.encode(image)

    def outcome(self) -> tuple[tuple[int, str], ...]:
        return self._images.landed(alone=self._plan.is_alone)


def load_images(
    sight: Sight,
    folder: Path,
    model: Decoder,
    lanes: Lanes,
    *,
    num_rows: int,
    num_slots: int,
    hidden_size: int,
    dtype: torch.dtype,
    load_format: str,
    is_first: bool,
    captures: bool,
) -> DeviceImages:
    """Give a model whose weights are filled its tower, and a buffer of so many rows. is_first:
    whether the model is the first stage, which embeds. captures: as of DeviceImages. Raises
    CheckpointError."""
    device = lanes.device
    num_rows = num_rows if is_first else 0
    rows = torch.zeros((num_rows, sight.row_size), dtype=dtype, device=device)
    seeing: TurningModel | BothWaysModel | None = None
    is_native = isinstance(model, nn.Module)
    offsets = None
    if sight.both_ways is not None:
        only_windowed = sight.both_ways is BothWays.WINDOWED
        seeing = BothWaysModel(model, device, only_windowed=only_windowed)
    elif sight.axes:
        if is_native:
            seeing = SeeingModel(cast("CausalLM", model), sight.axes, rows, hidden_size)
        else:
            seeing = SeeingAdopted(cast("AdoptedModel", model), sight.axes, device)
        offsets = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
    embeddings: list[SeenEmbedding | PaddedEmbedding] = []
    whole: Any = model if is_native else cast("AdoptedModel", model).module
    for name, module in whole.named_modules():
        if name.endswith(_OF_LAYERS):
            embeddings.append(PaddedEmbedding(module, sight.pad))
    if not is_first:
        return DeviceImages(None, embeddings, seeing, rows, offsets, lanes, captures=False)
    tower = load_tower(sight, folder, dtype=dtype, device=device, load_format=load_format)
    base: nn.Module = whole.embed_tokens if is_native else whole.get_input_embeddings()
    embeddings.append(SeenEmbedding(base, rows[:, :hidden_size]))
    return DeviceImages(tower, embeddings, seeing, rows, offsets, lanes, captures=captures)
