"""Fills the masks of steps, and ends the requests that these complete or fail."""

from __future__ import annotations

import logging
import time
from typing import Any

from minisgl.engine.delivery import Delivery
from minisgl.engine.startup import Loaded
from minisgl.engine.stats import Meter
from minisgl.matcher import MaskRows
from minisgl.parts.masks.filling import FailedRequests, MaskFiller
from minisgl.parts.masks.host import MaskPlan, masked_rows, matcher_of
from minisgl.scheduler.launched import Launched
from minisgl.scheduler.plan import StepPlan
from minisgl.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)


class MaskedSteps:
    """Between the steps of masked requests: told each settled step, asked for masks."""

    def __init__(
        self, loaded: Loaded[Any], scheduler: Scheduler, delivery: Delivery, meter: Meter
    ) -> None:
        self._runner = loaded.runner
        self._scheduler = scheduler
        self._delivery = delivery
        self._meter = meter
        self._masks = MaskFiller(loaded.model.vocab_size, loaded.defaults.eos_token_ids)

    def follow(self, settled: Launched) -> None:
        """Tell matchers their requests' new tokens, and end the requests that are complete."""
        if settled.plan.part(MaskPlan) is None:
            return
        masked = [running.request for running in masked_rows(settled.work)]
        self._end(self._masks.accept(masked))
        for request in masked:
            if matcher_of(request).finished and not request.finished:
                self._scheduler.finish(request, request.num_output_tokens)

    def filled(self, plan: StepPlan) -> MaskRows | None:
        """The masks of a plan in flight, all of whose tokens are settled; None if it has none."""
        if plan.part(MaskPlan) is None:
            return None
        masked = [running.request for running in masked_rows(self._scheduler.work_of(plan))]
        masks: MaskRows = self._runner.new_masks(plan.step, len(masked))
        began = time.perf_counter()
        failed = self._masks.fill(masked, masks)
        self._meter.masks_filled(len(masks), time.perf_counter() - began)
        self._end(failed)
        return masks

    def _end(self, failed: FailedRequests) -> None:
        for request, error in failed:
            logger.warning("request %s: %s", request.id, error)
            self._delivery.cancel(request, error)
