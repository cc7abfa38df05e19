"""Trains the bundled demo model: `python scripts/demo/train_demo.py FOLDER`.

A Qwen3 of 4.7 million parameters, trained from scratch on generated conversations (scripts/demo/)
and written as a Hugging Face checkpoint, then its drafter, of 0.5 million, in FOLDER/drafter.
Training takes minutes on one GPU, in one process; worker processes generate shards of conversations
ahead.

The run can be interrupted: after --minutes it writes FOLDER/checkpoint.pt, from which the same
command continues. On one machine the resulting model is the same as that of an uninterrupted run.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from multiprocessing.pool import Pool
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from demo_model.batches import BATCH_UNIT, DataShard, make_batches, plan_rows
from demo_model.data import END_ID, END_OF_TEXT_ID
from demo_model.evaluation import (
    FROZEN_HASH,
    Scores,
    TokenizedCase,
    evaluation_hash,
    scores_of,
    table,
    tokenized_cases,
)
from demo_model.model import (
    DRAFTER,
    DemoModel,
    ModelSizes,
    hugging_face_config,
    named_weights,
)
from demo_model.muon import Muon
from demo_model.tables import SNAPSHOT, snapshot
from demo_model.tokenizer import make_tokenizer

BATCHES_PER_STEP = 2  # a batch has one length of conversations; a step mixes lengths
MUON_LR = 0.02
ADAM_LR = 3e-3
ADAM_BETAS = (0.9, 0.95)
WARMUP = 0.01  # of the run
COOLDOWN = 0.50

REPORT_EVERY, EVALUATE_EVERY = 10, 50  # shards
SHARD_TIMEOUT_S = 600.0  # bounds the wait for a worker that was killed

CHECKPOINT = "checkpoint.pt"
FINISHED = "training.json"  # written last: marks a finished model


@dataclass(frozen=True)
class Settings:
    """The settings that determine the weights; a checkpoint continues only with equal ones."""

    seed: int
    shards: int
    shard_tokens: int
    batch_tokens: int
    shape: ModelSizes = field(default_factory=ModelSizes)


@dataclass
class TrainingProgress:
    next_shard: int = 0
    num_tokens: int = 0
    # spent on training, excluding evaluation
    seconds: float = 0.0
    # of these, spent waiting for data
    waited_s: float = 0.0
    # one entry per shard
    curve: list[dict[str, float]] = field(default_factory=list)


# Data.


def make_ahead(
    pool: Pool, folder: Path, settings: Settings, first: int, num_ahead: int
) -> Iterator[DataShard]:
    """The shards in order. Workers generate the next ones during training, the first from now."""
    sizes = (settings.shard_tokens, settings.batch_tokens)
    requests = (
        pool.apply_async(make_batches, (folder, settings.seed, index, *sizes))
        for index in range(first, settings.shards)
    )
    pending = deque(islice(requests, num_ahead))

    def shards() -> Iterator[DataShard]:
        while pending:
            pending.extend(islice(requests, 1))
            yield pending.popleft().get(SHARD_TIMEOUT_S)

    return shards()


# Training.


def lr_scale(progress: float) -> float:
    """The fraction of the full learning rate. progress: fraction of the run, 0 to 1."""
    return min(1.0, progress / WARMUP, (1.0 - progress) / COOLDOWN)


class Trainer:
    """The model, its two optimizers and its progress."""

    def __init__(self, settings: Settings, device: torch.device, compiles: bool = False) -> None:
        self.settings = settings
        self.device = device
        self.progress = TrainingProgress()
        # bfloat16 is slow on most CPUs. The weights stay in float32 either way.
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.model = DemoModel(settings.shape, settings.seed, dtype, compiles).to(device)
        # Muon optimizes the matrices of the layers, the only parameters with three dimensions.
        self.muon = Muon([p for p in self.model.parameters() if p.ndim == 3])
        self.others = [p for p in self.model.parameters() if p.ndim < 3]
        self.adam = torch.optim.AdamW(
            self.others, lr=ADAM_LR, betas=ADAM_BETAS, weight_decay=0.0, fused=True
        )

    def warm_up(self) -> None:
        """Compile with an empty batch, while the workers generate the first shards."""
        nothing = torch.zeros(self.settings.batch_tokens, dtype=torch.int16, device=self.device)
        self.model.loss(nothing, nothing, self.settings.shape.max_positions).backward()
        self.model.zero_grad()

    def train(self, shard: DataShard) -> float:
        """Run all steps of a shard; returns the mean loss. Synchronizes only at the end."""
        ids, targets = self.upload(shard.ids), self.upload(shard.targets)
        total = torch.zeros((), device=self.device)
        num_batches = len(shard.lengths)
        for start in range(0, num_batches, BATCHES_PER_STEP):
            step = range(start, min(start + BATCHES_PER_STEP, num_batches))
            num_learned = max(1, sum(shard.num_learned[batch] for batch in step))
            for batch in step:
                loss = self.model.loss(ids[batch], targets[batch], shard.lengths[batch])
                (loss / num_learned).backward()
                total += loss.detach()
            # The middle of the step, so that no step has a rate of zero.
            self.step((start + len(step) / 2) / num_batches)
        return total.item() / max(1, sum(shard.num_learned))

    def upload(self, array: npt.NDArray[np.int16]) -> Tensor:
        tensor = torch.from_numpy(array)
        if self.device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)

    def step(self, shard_progress: float) -> None:
        scale = lr_scale((self.progress.next_shard + shard_progress) / self.settings.shards)
        self.muon.step(MUON_LR * scale)
        nn.utils.clip_grad_norm_(self.others, 1.0)
        for group in self.adam.param_groups:
            group["lr"] = ADAM_LR * scale
        self.adam.step()
        self.adam.zero_grad()

    def save(self, path: Path) -> None:
        state = {
            "settings": asdict(self.settings),
            "progress": asdict(self.progress),
            "model": self.model.state_dict(),
            "muon": self.muon.momenta,
            "adam": self.adam.state_dict(),
        }
        unfinished = path.with_suffix(".unfinished")
        torch.save(state, unfinished)
        unfinished.replace(path)

    def load(self, path: Path) -> None:
        state = torch.load(path, map_location=self.device, weights_only=True)
        if state["settings"] != asdict(self.settings):
            raise SystemExit(
                f"{path} is of a run with other settings; go on with those, or train in another "
                f"folder: {state['settings']}"
            )
        self.progress = TrainingProgress(**state["progress"])
        self.model.load_state_dict(state["model"])
        self.muon.momenta = state["muon"]
        self.adam.load_state_dict(state["adam"])


def train_until(
    deadline: float,
    trainer: Trainer,
    shards: Iterator[DataShard],
    cases: Sequence[TokenizedCase],
) -> None:
    """Train until the last shard or the deadline, on at least one shard."""
    progress, last = trainer.progress, trainer.settings.shards
    while progress.next_shard < last:
        started = time.monotonic()
        shard = next(shards)
        progress.waited_s += time.monotonic() - started
        loss = trainer.train(shard)
        if not math.isfinite(loss):
            raise SystemExit(f"the loss of shard {progress.next_shard} is {loss}")
        progress.seconds += time.monotonic() - started
        progress.num_tokens += shard.num_tokens
        progress.curve.append(
            {
                "shard": progress.next_shard,
                "tokens": progress.num_tokens,
                "loss": round(loss, 5),
                "seconds": round(progress.seconds, 2),
            }
        )
        progress.next_shard += 1
        done = progress.next_shard
        if done % REPORT_EVERY == 0 or done in (1, last):
            report(progress, last)
        if done % EVALUATE_EVERY == 0 and done < last:
            print(table(evaluate(trainer.model, cases, trainer.settings.batch_tokens)), flush=True)
        if time.monotonic() > deadline:
            return


def report(progress: TrainingProgress, num_shards: int) -> None:
    print(
        f"shard {progress.next_shard:4d}/{num_shards}"
        f"  {progress.num_tokens / 1e6:7.1f} M tokens"
        f"  loss {progress.curve[-1]['loss']:.4f}"
        f"  rate {MUON_LR * lr_scale(progress.next_shard / num_shards):.4f}"
        f"  {progress.num_tokens / progress.seconds / 1e6:6.3f} M tokens/s"
        f"  {progress.seconds:5.0f} s, {progress.waited_s:.0f} s of it without data",
        flush=True,
    )


# Evaluation.


def evaluate(model: DemoModel, cases: Sequence[TokenizedCase], batch_tokens: int) -> Scores:
    pairs = zip(cases, predicted_answers(model, cases, batch_tokens), strict=True)
    return scores_of(
        cases,
        (np.array_equal(predicted, case.ids[-case.num_answer :]) for case, predicted in pairs),
    )


def predicted_answers(
    model: DemoModel, cases: Sequence[TokenizedCase], batch_tokens: int
) -> list[npt.NDArray[np.int64]]:
    """The likeliest token at each position of each answer, given the right ones before it.

    Greedy decoding yields the right answer exactly if the likeliest token at each position, after
    right ones, is the right one. So one forward pass replaces generation.
    """
    predicted: dict[int, npt.NDArray[np.int64]] = {}
    for rows in plan_rows([len(case.ids) for case in cases], batch_tokens):
        ids = np.full((len(rows.members), rows.length), END_OF_TEXT_ID, np.int64)
        for row, member in zip(ids, rows.members, strict=True):
            row[: len(cases[member].ids)] = cases[member].ids
        likeliest = model.logits(torch.from_numpy(ids).to(model.embed.device)).argmax(-1)
        for row, member in zip(likeliest.cpu().numpy(), rows.members, strict=True):
            end = len(cases[member].ids) - 1  # a token is predicted at the position before it
            predicted[member] = row[end - cases[member].num_answer : end]
    return [predicted[member] for member in range(len(cases))]


# The finished model.


@torch.no_grad()
def round_weights(model: DemoModel) -> None:
    """Round to bfloat16, as saved, so that the last evaluation is that of the saved model."""
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16())


def write_model(folder: Path, trainer: Trainer, scores: Scores) -> None:
    def write(name: str, content: object, indent: int | None = None) -> None:
        (folder / name).write_text(json.dumps(content, indent=indent) + "\n", encoding="utf-8")
        (folder / name).chmod(0o644)

    weights = {
        name: weight.bfloat16().cpu() for name, weight in named_weights(trainer.model).items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    config = hugging_face_config(trainer.settings.shape)
    (folder / "config.json").write_text(config.to_json_string(use_diff=False), encoding="utf-8")
    if (folder / "tokenizer.json").exists():  # a drafter has that of its model
        generation = {
            "do_sample": False,
            "eos_token_id": [END_ID, END_OF_TEXT_ID],
            "pad_token_id": END_OF_TEXT_ID,
        }
        write("generation_config.json", generation, indent=2)
        write(SNAPSHOT.name, snapshot() | {"evaluation": evaluation_hash()}, indent=1)
    progress = trainer.progress
    write(
        FINISHED,
        {
            "settings": asdict(trainer.settings),
            "tokens": progress.num_tokens,
            "seconds": round(progress.seconds, 1),
            "waited_s": round(progress.waited_s, 1),
            "evaluation": evaluation_hash(),
            "scores": [
                {"skill": skill, "split": split, "accuracy": round(share, 4)}
                for (skill, split), share in scores.items()
            ],
            "curve": progress.curve,
        },
    )
    # No longer needed.
    (folder / CHECKPOINT).unlink(missing_ok=True)


# The command.


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains the bundled demo model.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shards", type=int, default=180)
    parser.add_argument("--drafter-shards", type=int, default=40)
    parser.add_argument("--shard-tokens", type=int, default=4_000_000)
    parser.add_argument("--batch-tokens", type=int, default=8 * BATCH_UNIT)
    parser.add_argument("--minutes", type=float, default=9.2, help="then leave a checkpoint")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    arguments = parser.parse_args()
    if arguments.batch_tokens <= 0 or arguments.batch_tokens % BATCH_UNIT:
        parser.error(f"--batch-tokens must be a multiple of {BATCH_UNIT}")
    return arguments


def main() -> None:
    started = time.monotonic()
    arguments = parse_arguments()
    folder: Path = arguments.folder
    trained = ((folder, arguments.shards, ModelSizes()),
               (folder / "drafter", arguments.drafter_shards, DRAFTER))  # fmt: skip
    trained = [part for part in trained if not (part[0] / FINISHED).exists()]
    if not trained:
        raise SystemExit(f"{folder} holds a finished model: train in another folder, or remove it")
    if evaluation_hash() != FROZEN_HASH:
        raise SystemExit("the evaluation has changed; freeze it first, in demo_model/evaluation.py")

    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "tokenizer.json").exists():
        make_tokenizer(folder)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # workers already use all cores
    # Forked, so that workers do not import torch, and before CUDA is initialized.
    with multiprocessing.get_context("fork").Pool(arguments.workers) as pool:
        for part, num_shards, shape in trained:
            sizes = (arguments.shard_tokens, arguments.batch_tokens)
            settings = Settings(arguments.seed, num_shards, *sizes, shape)
            part.mkdir(exist_ok=True)
            if not train(part, settings, arguments.workers, pool, started + 60 * arguments.minutes):
                return


def train(folder: Path, settings: Settings, num_workers: int, pool: Pool, deadline: float) -> bool:
    """Train a model into `folder`. Returns whether it is finished."""
    texts = folder.parent if settings.shape == DRAFTER else folder  # has the tokenizer
    on_gpu = torch.cuda.is_available()
    torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN would compile for each shape of batch
    trainer = Trainer(settings, torch.device("cuda" if on_gpu else "cpu"), compiles=on_gpu)
    checkpoint = folder / CHECKPOINT
    if checkpoint.exists():
        trainer.load(checkpoint)
        print(f"going on from shard {trainer.progress.next_shard}")

    shards = make_ahead(pool, texts, settings, trainer.progress.next_shard, 2 * num_workers)
    trainer.warm_up()
    cases = tokenized_cases(texts)
    print(f"ready to train on {trainer.device}", flush=True)
    train_until(deadline, trainer, shards, cases)
    if trainer.progress.next_shard < settings.shards:
        trainer.save(checkpoint)
        print(f"{checkpoint}: run again to go on from shard {trainer.progress.next_shard}")
        return False

    round_weights(trainer.model)
    scores = evaluate(trainer.model, cases, settings.batch_tokens)
    print(table(scores))
    write_model(folder, trainer, scores)
    num_parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    print(f"{folder}: {num_parameters / 1e6:.2f} M parameters")
    return True


if __name__ == "__main__":
    main()
