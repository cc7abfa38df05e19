"""Runs several ranks through the interface of one: rank 0 here, the others in processes.

    this process                                   rank 1, 2, ...
    launch(plan) ── the encoded plan ────────────▶ launch(plan)
    collect(handle): the tokens of rank 0          (the same tokens, which are dropped, or none)

Rank 0 is in the last stage of a pipeline, which samples.

A step that fails on one rank is fatal for all: the others hang in a collective, which on a GPU
nothing can interrupt. So a thread of this process starts and watches the other ranks; if one ends,
every caller gets an error, even if the calling thread hangs.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_futures
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from minisgl.config import ResolvedConfig
from minisgl.distributed.addresses import GroupAddress, Listening
from minisgl.distributed.layout import RankLayout
from minisgl.distributed.pipeline import Pipeline
from minisgl.errors import CheckpointError, ConfigError, MinisglError
from minisgl.kvcache.copies import HostTraffic
from minisgl.kvcache.moves import Done, Move
from minisgl.lora.files import AdapterError, AdapterFacts, AdapterReader
from minisgl.matcher import MaskRows
from minisgl.models.reading import Piece
from minisgl.models.refilling import TensorInfo, WeightTaker
from minisgl.parts.images.host import ImagePlan, encoded_in
from minisgl.ranks.nodes.agreement import facts_of
from minisgl.ranks.nodes.gathering import gather_nodes
from minisgl.ranks.nodes.main_node import NodesChannel, NodesLauncher
from minisgl.ranks.processes.all_encoded import AllEncoded
from minisgl.ranks.processes.channel import Answered, Channel
from minisgl.ranks.processes.fewest_pages import FewestPages
from minisgl.ranks.processes.launcher import Launcher, spawn_obstacle
from minisgl.ranks.processes.mask_ring import MaskRing, StepMasks
from minisgl.ranks.processes.plan_codec import MOVE, SAMPLE, PlanEncoder, packed
from minisgl.ranks.processes.rank_watch import error_of
from minisgl.ranks.processes.remote_ranks import RemoteRanks
from minisgl.ranks.processes.rendezvous import FileRendezvous
from minisgl.ranks.processes.worker import RankSpec, join_and_load
from minisgl.runner.load import Report, no_report
from minisgl.runner.queued_step import StepHandle
from minisgl.runner.runner import ModelRunner
from minisgl.runner.setup import Setup
from minisgl.scheduler.plan import StepPlan, StepResult

BUCKET_BYTES = 1 << 30
_MEMORY = "/dev/shm"  # files here are in memory, of which containers may give little


def load_ranks(setup: Setup, report: Report = no_report) -> SeveralRanks:
    """Start the other ranks, here and on the nodes that join, and load a part of the model on
    each of them.

    Blocks, for seconds or minutes. Raises ConfigError if ranks cannot be started here or nodes
    cannot join, CheckpointError, DeviceMemoryError, or EngineStoppedError if a rank dies.
    """
    reason = spawn_obstacle()
    if reason is None and dist.is_initialized():
        reason = (
            "this process has ranks already, of another engine or of your own; "
            "close that engine, or use another process"
        )
    if reason:
        raise ConfigError(*_option(setup.config), reason)
    others, own_spec, loaded = _start(setup, report)
    own: tuple[ModelRunner, Pipeline] | None = None
    loading: Future[tuple[ModelRunner, Pipeline]] = Future()

    def load() -> None:
        try:
            loading.set_result(join_and_load(own_spec, report))
        except BaseException as error:
            loading.set_exception(error)

    try:
        # In a daemon thread, which is abandoned if it waits for a rank that has died.
        threading.Thread(target=load, name="minisgl-load", daemon=True).start()
        either: list[Future[Any]] = [loading, others.lost]
        wait_for_futures(either, return_when=FIRST_COMPLETED)
        if not loading.done():
            others.lost.result()
        failed = loading.exception()
        if isinstance(failed, CheckpointError):  # every rank raises the same
            raise failed
        if isinstance(failed, Exception):
            raise others.lose(failed)
        own = loading.result()
        others.wait_ready(lambda fraction: report("waiting for the other ranks", fraction))
        loaded()
    except BaseException as error:
        others.kill(error)
        if not others.may_hang:
            for part in own or ():
                part.close()
        raise
    return SeveralRanks(*own, others)


def _start(setup: Setup, report: Report) -> tuple[RemoteRanks, RankSpec, Callable[[], None]]:
    """Start the other ranks. Returns them, the spec of rank 0, and what to call once all have
    loaded."""
    config = setup.config
    layout = RankLayout.of(config)
    here, elsewhere = layout.ranks_of_node(0)[1:], range(layout.ranks_per_node, layout.world_size)
    context = multiprocessing.get_context("spawn")
    masks = MaskRing.allocate(
        context, config.max_running_requests, setup.model.vocab_size, config.pp
    )
    if config.nnodes == 1:
        try:
            rendezvous = FileRendezvous.make()
        except OSError as obstacle:
            reason = "the temporary file through which ranks exchange addresses cannot be created"
            raise ConfigError(*_option(config), f"{reason}: {obstacle}") from obstacle
        spec = RankSpec(0, setup, rendezvous)
        on_gpu = config.device == "cuda"
        launcher, channel = Launcher(context), Channel(here, context, masks)
        return RemoteRanks(spec, launcher, channel, here, may_hang=on_gpu), spec, lambda: None
    nodes = gather_nodes(
        config,
        facts_of(setup),
        lambda fraction: report("waiting for the other nodes", fraction),
    )
    spec = RankSpec(0, setup, nodes.rendezvous, nodes.interface)
    others = RemoteRanks(
        spec,
        NodesLauncher(context, nodes),
        NodesChannel(here, context, masks, nodes, layout),
        here,
        elsewhere,
        may_hang=True,  # also on a CPU, where gloo waits for a machine that is out of reach
    )
    return others, spec, nodes.loaded


def _option(config: ResolvedConfig) -> tuple[str, int]:
    """The option that asks for several ranks, and its value."""
    return ("--tp", config.tp) if config.tp > 1 else ("--pp", config.pp)


class RankAdapters:
    """Reads adapters on all ranks, of which each checks the files."""

    def __init__(self, own: AdapterReader, others: RemoteRanks) -> None:
        self.first = own.first
        self._own = own
        self._others = others

    def read(self, number: int, folder: str, root: str | None = None) -> AdapterFacts:
        found = self._own.read(number, folder, root)
        for answer in self._others.call("read_adapter", number, folder, root):
            if answer.value(bytes, AdapterError) != found.digest:
                raise AdapterError(
                    f"Rank {answer.rank} has read another adapter: the files have changed "
                    "meanwhile, or differ from machine to machine; allowed: the same on all."
                )
        return found


class RankWeights:
    """Takes the weights of all ranks anew; those in memory by files in memory, if there is room
    for them there."""

    def __init__(self, own: WeightTaker, others: RemoteRanks) -> None:
        self._own, self._others = own, others

    def begin(self, infos: Sequence[TensorInfo], partial: bool) -> None:
        self._own.begin(infos, partial)
        self._call("begin", infos, partial)

    def take(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for bucket, num_bytes in _buckets(tensors):
            folder = _MEMORY if _free_bytes(_MEMORY) > 2 * num_bytes else None
            with tempfile.NamedTemporaryFile(dir=folder, suffix=".safetensors") as file:
                save_file(bucket, file.name)
                self.take_files([file.name])

    def take_files(self, files: Sequence[str]) -> None:
        self._together("take_files", files)

    def join(self, address: GroupAddress) -> None:
        self._together("join", address)

    def leave(self, name: str) -> None:
        self._together("leave", name)

    def take_group(self, name: str, infos: Sequence[TensorInfo], packed: bool) -> None:
        self._together("take_group", name, infos, packed)

    def end(self) -> None:
        self._own.end()
        self._call("end")

    def lacks(self) -> bool:
        return any([self._own.lacks(), *self._call("lacks")])

    def read(self, name: str, num_rows: int) -> list[Piece]:
        own, found = self._own.read(name, num_rows), self._call("read", name, num_rows)
        others = (msgspec.convert(each, list[Piece]) for each in found)
        return [*own, *(piece for pieces in others for piece in pieces)]

    def sleep(self, drops_weights: bool) -> None:
        self._together("sleep", drops_weights)

    def wake(self, tags: Collection[str]) -> None:
        self._together("wake", [*tags])

    def capture(self) -> None:
        self._together("capture")

    def _together(self, method: str, *arguments: object) -> None:
        """Have rank 0 do what the others are called for meanwhile: each may wait for all."""
        with ThreadPoolExecutor(1) as thread:
            others = thread.submit(self._call, method, *arguments)
            getattr(self._own, method)(*arguments)
            others.result()

    def _call(self, method: str, *arguments: object) -> list[object]:
        def refusal(answer: Answered, obstacle: str) -> MinisglError:
            return error_of(answer.kind, CheckpointError)(f"Rank {answer.rank}: {obstacle}")

        found = self._others.call(method, *arguments)
        return [each.value(object, partial(refusal, each)) for each in found]


def _free_bytes(folder: str) -> int:
    """Of a folder that can be written, else 0."""
    return shutil.disk_usage(folder).free if os.access(folder, os.W_OK) else 0


def _buckets(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[dict[str, Tensor], int]]:
    """Copies of the tensors on the host, some BUCKET_BYTES at a time, and their bytes."""
    bucket: dict[str, Tensor] = {}
    num_bytes = 0
    for name, tensor in tensors:
        bucket[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        num_bytes += tensor.nbytes
        if num_bytes >= BUCKET_BYTES:
            yield bucket, num_bytes
            bucket, num_bytes = {}, 0
    if bucket:
        yield bucket, num_bytes


class SeveralRanks:
    """Same interface as ModelRunner (rank 0 runs in this process); any failure raises
    EngineStoppedError.

    `others.lost` fails with it at once, even while `collect` hangs. If a GPU was used, or other
    nodes, the process exits a few seconds later.
    """

    def __init__(self, own: ModelRunner, pipeline: Pipeline, others: RemoteRanks) -> None:
        """own, pipeline: the runner of rank 0, and its place in the pipeline."""
        self.capacity = own.capacity
        self.load_rule = own.load_rule
        self.adapters = None if own.adapters is None else RankAdapters(own.adapters, others)
        self.weights = None if own.weights is None else RankWeights(own.weights, others)
        self.disk = own.disk
        self._fewest_pages = FewestPages(1 + len(others.silence))
        others.moved = self._fewest_pages.ended
        self._all_encoded = AllEncoded(1 + len(others.silence), others.lost)
        others.encoded = self._all_encoded.ended
        self._with_images: dict[int, StepPlan] = {}  # in flight
        self.others = others
        self._own = own
        self._pipeline = pipeline
        self._encoder = PlanEncoder(pipeline.size)
        # If the other ranks were killed during a step, neither the step nor this process would end.
        atexit.register(self.close)

    def launch(self, plan: StepPlan, masks: MaskRows | None = None) -> StepHandle:
        sent = None if masks is None else StepMasks(plan.step, masks)
        self.others.send(self._encoder.encode(plan), sent)
        if plan.part(ImagePlan) is not None:
            self._with_images[plan.step] = plan
        return self._own.launch(plan, masks)

    def new_masks(self, step: int, num_rows: int) -> MaskRows:
        return self.others.channel.masks.rows(step, num_rows)

    def sample(self, handle: StepHandle, masks: MaskRows) -> None:
        self.others.pass_on(SAMPLE, StepMasks(handle.step, masks))
        self._own.sample(handle, masks)

    def may_compile(self) -> bool:
        return self._own.may_compile()

    def collect(self, handle: StepHandle) -> StepResult:
        try:
            result = self._own.collect(handle)
        except Exception as error:
            raise self.others.lose(error) from error
        finally:
            self.others.collected()
        plan = self._with_images.pop(handle.step, None)
        return result if plan is None else self._agreed(plan, result)

    def _agreed(self, plan: StepPlan, result: StepResult) -> StepResult:
        """The result of a step with the images that all ranks have encoded, not rank 0 alone."""
        of_images = plan.part(ImagePlan)
        assert of_images is not None
        agreed = self._all_encoded.agreed(encoded_in(plan, result), wait=of_images.is_alone)
        outcomes = zip(plan.parts, result.parts, strict=True)
        parts = [agreed if part is of_images else outcome for part, outcome in outcomes]
        return replace(result, parts=parts)

    def loads(self, handle: StepHandle) -> Iterator[int]:
        """As of rank 0: the others await each load on their own device, or report those of requests
        of their own."""
        return self._own.loads(handle)

    def move(self, moves: Sequence[Move], done: Done) -> None:
        self._fewest_pages.expect(moves, done)
        self.others.pass_on(packed(MOVE, list(moves)))
        self._own.move(moves, self._fewest_pages.ended)

    def listen(self, address: str, token: bytes) -> Listening:
        """Of all ranks, as ModelRunner does. Blocks."""
        return Listening.of(ranks.listen(address, token) for ranks in (self._own, self.others))

    def traffic(self) -> HostTraffic | None:
        """The copies of rank 0; those of the others are as many."""
        return self._own.traffic()

    def close(self) -> None:
        atexit.unregister(self.close)
        if self.others.lost.done() and self.others.may_hang:
            return  # the steps in flight may never end
        self.others.begin_to_end()
        self._own.close()
        self._pipeline.close()
        self.others.end()
