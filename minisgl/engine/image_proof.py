"""Proves at the start that a model sees here what it sees in transformers.

A small copy of the whole model with random weights runs twice on the CPU in float32: as
transformers runs it, one sequence at a time, and as this engine does, from its files on: in chunks
that cut images, several requests at once, over pages, with a hit inside an image, and decoding.
"""

from __future__ import annotations

import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from minisgl.config import EngineConfig
from minisgl.errors import UnsupportedModelError, in_one_line
from minisgl.images.picture import Span, with_pictures
from minisgl.models.config import NativeConfig
from minisgl.models.text_part import LEFT_OUT
from minisgl.models.towers.small import PLACEHOLDER, SmallModel, quiet
from minisgl.models.towers.tower import check_weights
from minisgl.parts.images.host import Pictured
from minisgl.request import Request, SamplingParams
from minisgl.runner.runner import ModelRunner
from minisgl.runner.setup import Setup, read_setup
from minisgl.scheduler.scheduler import Scheduler

TOLERANCE = 1e-3  # of the standard deviation of the logits
_NUM_TOKENS = 3
_PARAMS = SamplingParams(
    temperature=0, max_tokens=_NUM_TOKENS, logprobs=20, logit_bias={PLACEHOLDER: -100}
)
# Text, with a placeholder for each image. Two requests at once, then one that begins as the first.
_PROMPTS = (
    ((5, 6, 7, PLACEHOLDER, 8, 9, PLACEHOLDER, 10), (5, 6, 11, PLACEHOLDER, 12)),
    ((5, 6, 7, PLACEHOLDER, 8, 9, PLACEHOLDER, 13, 14),),
)
_OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "page_size": 4,
    "num_pages": 257,
    "max_prefill_length": 5,
    "max_running_requests": 4,
    "max_seq_len_override": 256,
    "attn": "torch",
}

# Makes the runner and the scheduler of an engine.
Make = Callable[[Setup], tuple[ModelRunner, Scheduler]]


def proven(setup: Setup, make: Make) -> Setup:
    """The setup of a model that sees, if it does so here; else one that takes no images, and says
    why."""
    sight = setup.sight
    if isinstance(sight, str):
        return setup
    began = time.monotonic()
    try:
        with quiet():
            _prove(setup, make)
    except Exception as error:  # of whatever code
        why = str(error) if isinstance(error, UnsupportedModelError) else in_one_line(error)
        why = f"{sight.architecture} does not see here as it does in transformers: {why}"
        return _noted(replace(setup, sight=why.rstrip(".")), f"images: none, since {why}")
    took = time.monotonic() - began
    notes = filter(None, map(_with_tower, setup.model.notes))
    setup = replace(setup, model=replace(setup.model, notes=(*notes,)))
    return _noted(setup, f"images: shown to be seen as in transformers in {took:.1f} s")


def _noted(setup: Setup, note: str) -> Setup:
    return replace(setup, model=replace(setup.model, notes=(*setup.model.notes, note)))


def _with_tower(note: str) -> str:
    """A note on what is left out of a model, where its tower for images is not; "" without one."""
    model, says_so, towers = note.partition(LEFT_OUT)
    if not says_so:
        return note
    others = [tower for tower in towers.split(", ") if tower != "vision"]
    return model + LEFT_OUT + ", ".join(others) if others else ""


def _prove(setup: Setup, make: Make) -> None:
    """Raise UnsupportedModelError if the numbers differ."""
    assert not isinstance(setup.sight, str)
    small = SmallModel.of(setup.sight)
    if setup.config.load_format != "dummy":
        check_weights(setup.sight, setup.folder)
    wanted_by = "native" if isinstance(setup.model, NativeConfig) else "adopted"
    with tempfile.TemporaryDirectory(prefix="minisgl-proof-") as folder:
        small.save(Path(folder))
        options = EngineConfig(model=folder, model_impl=wanted_by, **_OPTIONS)
        if setup.sight.both_ways is not None:  # its images must fit into a step
            largest = max(each.num_rows for each in small.pictures)
            options = replace(options, max_prefill_length=max(5, largest))
        runner, scheduler = make(read_setup(options))
        try:
            found = [
                request
                for prompts in _PROMPTS
                for request in _run(scheduler, runner, small, prompts)
            ]
        finally:
            runner.close()
    if not found[-1].num_cached_tokens and not setup.facts.states:
        raise UnsupportedModelError("a prefix with an image is not found again")
    for request in found:
        _compare(small, request)


def _run(
    scheduler: Scheduler,
    runner: ModelRunner,
    small: SmallModel,
    prompts: Sequence[Sequence[int]],
) -> list[Request]:
    """Run prompts with images at once."""
    requests: list[Request] = []
    images = next(part for part in scheduler.parts if part.kind is Pictured)
    for prompt in prompts:
        pictures = small.pictures[: prompt.count(PLACEHOLDER)]
        token_ids, spans = with_pictures(prompt, PLACEHOLDER, pictures)
        extra = images.extra(_PARAMS, token_ids, Pictured(spans))
        assert extra is not None
        name = f"{len(scheduler.kv.leases)} {len(requests)} {len(prompt)}"
        made = Request(name, token_ids, _PARAMS, max_tokens=_NUM_TOKENS, seed=0, extras=(extra,))
        scheduler.submit(made)
        requests.append(made)
    handles: deque[Any] = deque()
    while scheduler.num_waiting or scheduler.num_running or handles:
        plan = None if len(handles) == 2 else scheduler.plan()
        if plan is not None:
            handles.append(runner.launch(plan))
        else:
            failed = scheduler.settle(runner.collect(handles.popleft())).finished
            for each in failed:
                if each.error is not None:
                    raise each.error
    return requests


def _compare(small: SmallModel, request: Request) -> None:
    """Raise UnsupportedModelError if the logprobs of the output are not those of transformers."""
    pictured = request.extra(Pictured)
    assert pictured is not None
    pictures = [span.picture for span in pictured.spans]
    token_ids = _whole(request.token_ids, pictured.spans)
    logits = small.logits(token_ids, pictures)[-1 - _NUM_TOKENS : -1]
    wanted = logits.log_softmax(-1)
    for row, scores in zip(wanted, request.logprobs, strict=True):
        ids, got = zip(*scores.top, strict=True)
        worst = float((row[list(ids)] - torch.tensor(got)).abs().max())
        if worst > TOLERANCE * float(logits.std()):
            raise UnsupportedModelError(f"the logits of an answer differ by {worst:.2g}")


def _whole(token_ids: Sequence[int], spans: Sequence[Span]) -> list[int]:
    """The tokens with placeholders in the places of keys."""
    found = list(token_ids)
    for span in spans:
        found[span.start : span.end] = span.picture.token_ids
    return found
