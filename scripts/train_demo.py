"""Trains the bundled demo model: `python scripts/train_demo.py FOLDER`.

A Qwen3 of 5.2 million parameters, trained from nothing on generated conversations (scripts/demo/)
and written under the Hugging Face names. One GPU takes minutes, so the whole of it is one process:
workers make shards of conversations ahead of need, the GPU does nothing but steps.

The run can be done in pieces: after --minutes it leaves FOLDER/checkpoint.pt, and the same command
goes on from there. On one machine the pieces give the same model as one run.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.pool import AsyncResult, Pool
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from demo.batches import BATCH_UNIT, NOT_LEARNED, Shard, make_batches, plan_rows
from demo.evaluation import FROZEN_HASH, TokenizedCase, evaluation_hash, tokenized_cases
from demo.tables import tables
from demo.tokenizer import make_tokenizer

VOCAB = 2048
HIDDEN = 256
LAYERS = 8
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 64
INTERMEDIATE = 512
MAX_POSITIONS = 2048
ROPE_THETA = 10000.0
RMS_EPS = 1e-6
PAD_ID, END_ID = 0, 2

BATCHES_PER_STEP = 2  # a batch holds one length of conversation; a step shall see more than one
MUON_RATE = 0.02
MUON_DECAY = 0.01
MUON_MOMENTUM = 0.95
ADAM_RATE = 3e-3
ADAM_BETAS = (0.9, 0.95)
WARM_UP = 0.01  # of the run
COOL_DOWN = 0.50

REPORT_EVERY = 10  # shards
LATEST_SHARD_S = 600.0  # a worker that was killed never answers; this ends the wait

# The name of each parameter here, and in a Hugging Face checkpoint.
LAYER_NAMES = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "input_norm": "input_layernorm",
    "post_norm": "post_attention_layernorm",
}
MODEL_NAMES = {"embed": "embed_tokens", "norm": "norm"}


# The model. All that it does to single tokens is in three functions over a flat batch, whose shape
# never changes: each is compiled once, for all layers. Only attention knows about rows.


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    x32 = x.float()
    return weight * (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + RMS_EPS)).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: dimension i turns with dimension i + half. x is [n, heads, head_dim]."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def before_attention(
    x: Tensor,
    input_norm: Tensor,
    qkv: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value, each [n, heads, head_dim]."""
    heads = F.linear(rms_norm(x, input_norm), qkv).unflatten(-1, (-1, HEAD_DIM))
    q, k, v = heads.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
    return rotate(rms_norm(q, q_norm), cos, sin), rotate(rms_norm(k, k_norm), cos, sin), v


def attention(q: Tensor, k: Tensor, v: Tensor, length: int) -> Tensor:
    """Causal, inside each row of `length` tokens: the padding at its right needs no mask."""
    q, k, v = (t.unflatten(0, (-1, length)).transpose(1, 2) for t in (q, k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return mixed.transpose(1, 2).reshape(-1, HEADS * HEAD_DIM)


def after_attention(
    x: Tensor, mixed: Tensor, o: Tensor, post_norm: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    x = x + F.linear(mixed, o)
    gate, up = F.linear(rms_norm(x, post_norm), gate_up).chunk(2, dim=-1)
    return x + F.linear(F.silu(gate) * up, down)


def head(x: Tensor, norm: Tensor, embed: Tensor) -> Tensor:
    """Logits, [n, vocab]."""
    return F.linear(rms_norm(x, norm), embed)


def summed_loss(x: Tensor, norm: Tensor, embed: Tensor, targets: Tensor) -> Tensor:
    logits = head(x, norm, embed).float()
    return F.cross_entropy(logits, targets.long(), ignore_index=NOT_LEARNED, reduction="sum")


@dataclass(frozen=True)
class Regions:
    """The functions that may be compiled."""

    before_attention: Callable[..., tuple[Tensor, Tensor, Tensor]] = before_attention
    after_attention: Callable[..., Tensor] = after_attention
    summed_loss: Callable[..., Tensor] = summed_loss


EAGER = Regions()


def compiled() -> Regions:
    # Weights come in as arguments, so that no layer differs from another in what is compiled.
    return Regions(
        torch.compile(before_attention, dynamic=False),
        torch.compile(after_attention, dynamic=False),
        torch.compile(summed_loss, dynamic=False),
    )


@dataclass(frozen=True)
class Layer:
    """One layer's weights as the forward pass wants them: rounded, joined where that saves work."""

    input_norm: Tensor
    qkv: Tensor
    q_norm: Tensor
    k_norm: Tensor
    o: Tensor
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor


class Model(nn.Module):
    """Weights in float32, computing in `dtype`.

    A kind of weight is one parameter, stacked over the layers: the optimizers then have a dozen
    large tensors to work on instead of ninety small ones.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        generator = torch.Generator().manual_seed(seed)

        def matrices(num_rows: int, num_columns: int) -> nn.Parameter:
            shape = (LAYERS, num_rows, num_columns)
            return nn.Parameter(torch.randn(shape, generator=generator) * num_columns**-0.5)

        self.embed = nn.Parameter(torch.randn(VOCAB, HIDDEN, generator=generator) * 0.02)
        self.q = matrices(HEADS * HEAD_DIM, HIDDEN)
        self.k = matrices(KV_HEADS * HEAD_DIM, HIDDEN)
        self.v = matrices(KV_HEADS * HEAD_DIM, HIDDEN)
        self.gate = matrices(INTERMEDIATE, HIDDEN)
        self.up = matrices(INTERMEDIATE, HIDDEN)
        # Zero: at the start each layer hands on what it got.
        self.o = nn.Parameter(torch.zeros(LAYERS, HIDDEN, HEADS * HEAD_DIM))
        self.down = nn.Parameter(torch.zeros(LAYERS, HIDDEN, INTERMEDIATE))
        self.input_norm = nn.Parameter(torch.ones(LAYERS, HIDDEN))
        self.post_norm = nn.Parameter(torch.ones(LAYERS, HIDDEN))
        self.q_norm = nn.Parameter(torch.ones(LAYERS, HEAD_DIM))
        self.k_norm = nn.Parameter(torch.ones(LAYERS, HEAD_DIM))
        self.norm = nn.Parameter(torch.ones(HIDDEN))

        frequencies = ROPE_THETA ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        angles = torch.arange(MAX_POSITIONS)[:, None] * frequencies
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def layers(self) -> list[Layer]:
        # unbind, since its gradient is one stack; that of indexing is a whole stack per layer.
        qkv = torch.cat((self.q, self.k, self.v), dim=1)
        gate_up = torch.cat((self.gate, self.up), dim=1)
        stacks = (
            self.input_norm, qkv, self.q_norm, self.k_norm, self.o, self.post_norm, gate_up,
            self.down,
        )  # fmt: skip
        kinds = [stack.to(self.dtype).unbind() for stack in stacks]
        return [Layer(*weights) for weights in zip(*kinds, strict=True)]

    def hidden(self, ids: Tensor, embed: Tensor, length: int, regions: Regions) -> Tensor:
        """[n, hidden] after the last layer; ids is [n], rows of `length` one after another."""
        num_rows = len(ids) // length
        cos, sin = self.cos[:length].repeat(num_rows, 1), self.sin[:length].repeat(num_rows, 1)
        x = F.embedding(ids.int(), embed)
        for layer in self.layers():
            q, k, v = regions.before_attention(
                x, layer.input_norm, layer.qkv, layer.q_norm, layer.k_norm, cos, sin
            )
            mixed = attention(q, k, v, length)
            x = regions.after_attention(
                x, mixed, layer.o, layer.post_norm, layer.gate_up, layer.down
            )
        return x

    def loss(self, ids: Tensor, targets: Tensor, length: int, regions: Regions) -> Tensor:
        """The summed loss of a batch."""
        embed = self.embed.to(self.dtype)
        x = self.hidden(ids, embed, length, regions)
        return regions.summed_loss(x, self.norm.to(self.dtype), embed, targets)

    @torch.no_grad()
    def logits(self, ids: Tensor) -> Tensor:
        """[rows, length, vocab] for ids [rows, length] of any size, so never compiled."""
        embed = self.embed.to(self.dtype)
        x = self.hidden(ids.flatten(), embed, ids.shape[1], EAGER)
        return head(x, self.norm.to(self.dtype), embed).unflatten(0, ids.shape)


# The optimizers.


def orthogonalized(stack: Tensor) -> Tensor:
    """Each wide matrix with its singular values brought near 1, by five Newton-Schulz steps."""
    x = stack.bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        polynomial = torch.baddbmm(square, square, square, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, polynomial, x, beta=3.4445)
    return x


class Muon:
    """Nesterov momentum, orthogonalized: Keller Jordan, 2024, https://kellerjordan.github.io/posts/muon/

    For stacks of matrices. Those of one shape, lying or standing, are done in one go.
    """

    def __init__(self, stacks: Sequence[nn.Parameter]) -> None:
        self.stacks = stacks
        self.momenta = [torch.zeros_like(stack) for stack in stacks]
        self.same_shape: dict[tuple[int, ...], list[int]] = {}
        for number, stack in enumerate(stacks):
            self.same_shape.setdefault(tuple(sorted(stack.shape[1:])), []).append(number)

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for numbers in self.same_shape.values():
            updates = orthogonalized(torch.cat([self.lying_update(n) for n in numbers]))
            for number, update in zip(numbers, updates.split(LAYERS), strict=True):
                stack = self.stacks[number]
                _, rows, columns = stack.shape
                stack.mul_(1 - rate * MUON_DECAY)
                stack.add_(
                    update.mT if rows > columns else update,
                    alpha=-rate * max(1.0, rows / columns) ** 0.5,
                )
                stack.grad = None

    def lying_update(self, number: int) -> Tensor:
        gradient, momentum = self.stacks[number].grad, self.momenta[number]
        assert gradient is not None
        momentum.lerp_(gradient, 1 - MUON_MOMENTUM)
        update = gradient.lerp(momentum, MUON_MOMENTUM)
        return update.mT if update.shape[1] > update.shape[2] else update


def rate_at(progress: float) -> float:
    """The share of the full learning rate, `progress` going from 0 to 1 over the run."""
    return min(1.0, progress / WARM_UP, (1.0 - progress) / COOL_DOWN)


# The run.


@dataclass(frozen=True)
class Settings:
    """What the weights depend on, besides the code. A checkpoint goes on only with the same."""

    seed: int
    shards: int
    shard_tokens: int
    batch_tokens: int
    shape: tuple[int, ...] = (VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE)


@dataclass
class Progress:
    next_shard: int = 0
    num_tokens: int = 0
    # spent on training, evaluation left out
    seconds: float = 0.0
    # the part of it in which there was no data
    waited_s: float = 0.0
    curve: list[dict[str, float]] = field(default_factory=list)


class Trainer:
    """The model, its two optimizers, and how far they are."""

    def __init__(self, settings: Settings, device: torch.device, regions: Regions) -> None:
        self.settings = settings
        self.device = device
        self.regions = regions
        self.progress = Progress()
        # bfloat16 is slow on most CPUs. The weights stay in float32 either way.
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.model = Model(settings.seed, dtype).to(device)
        self.muon = Muon([p for p in self.model.parameters() if p.ndim == 3])
        self.others = [p for p in self.model.parameters() if p.ndim < 3]
        self.adam = torch.optim.AdamW(
            self.others, lr=ADAM_RATE, betas=ADAM_BETAS, weight_decay=0.0, fused=True
        )

    def warm_up(self) -> None:
        """Compiles, on a batch of nothing, while the workers make the first shards."""
        nothing = torch.zeros(self.settings.batch_tokens, dtype=torch.int16, device=self.device)
        self.model.loss(nothing, nothing, MAX_POSITIONS, self.regions).backward()
        self.model.zero_grad()

    def train(self, shard: Shard) -> float:
        """All steps of a shard; the mean loss. The GPU is waited for only at the end."""
        ids, targets = self.upload(shard.ids), self.upload(shard.targets)
        total = torch.zeros((), device=self.device)
        num_batches = len(shard.lengths)
        for start in range(0, num_batches, BATCHES_PER_STEP):
            step = range(start, min(start + BATCHES_PER_STEP, num_batches))
            num_learned = max(1, sum(shard.num_learned[batch] for batch in step))
            for batch in step:
                loss = self.model.loss(
                    ids[batch], targets[batch], shard.lengths[batch], self.regions
                )
                (loss / num_learned).backward()
                total += loss.detach()
            # The middle of the step: neither the first nor the last one has a rate of zero.
            self.step((start + len(step) / 2) / num_batches)
        return total.item() / max(1, sum(shard.num_learned))

    def upload(self, array: npt.NDArray[np.int16]) -> Tensor:
        tensor = torch.from_numpy(array)
        if self.device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)

    def step(self, shard_progress: float) -> None:
        share = rate_at((self.progress.next_shard + shard_progress) / self.settings.shards)
        self.muon.step(MUON_RATE * share)
        nn.utils.clip_grad_norm_(self.others, 1.0)
        for group in self.adam.param_groups:
            group["lr"] = ADAM_RATE * share
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
        state: dict[str, Any] = torch.load(path, map_location=self.device, weights_only=True)
        if state["settings"] != asdict(self.settings):
            raise SystemExit(f"{path} is of another run: {state['settings']}")
        self.progress = Progress(**state["progress"])
        self.model.load_state_dict(state["model"])
        self.muon.momenta = state["muon"]
        self.adam.load_state_dict(state["adam"])


class Shards:
    """The shards in order, the workers being busy with the next ones from the start."""

    def __init__(
        self, pool: Pool, folder: Path, settings: Settings, first: int, num_ahead: int
    ) -> None:
        self.pool = pool
        self.folder = folder
        self.settings = settings
        self.ahead: deque[AsyncResult[Shard]] = deque()
        self.asked = first
        for _ in range(num_ahead):
            self.ask()

    def ask(self) -> None:
        settings = self.settings
        if self.asked < settings.shards:
            sizes = settings.shard_tokens, settings.batch_tokens
            arguments = (self.folder, settings.seed, self.asked, *sizes)
            self.ahead.append(self.pool.apply_async(make_batches, arguments))
            self.asked += 1

    def next(self) -> Shard:
        self.ask()
        return self.ahead.popleft().get(LATEST_SHARD_S)


class Reporter:
    """A line of progress every few shards."""

    def __init__(self, trainer: Trainer, started: float) -> None:
        self.trainer = trainer
        self.started = started
        self.num_tokens = trainer.progress.num_tokens
        self.seconds = trainer.progress.seconds
        self.waited_s = trainer.progress.waited_s

    def elapsed_s(self) -> float:
        return time.monotonic() - self.started

    def report(self) -> None:
        progress, settings = self.trainer.progress, self.trainer.settings
        seconds = progress.seconds - self.seconds
        print(
            f"shard {progress.next_shard:4d}/{settings.shards}"
            f"  {progress.num_tokens / 1e6:7.1f} M tokens"
            f"  loss {progress.curve[-1]['loss']:.4f}"
            f"  rate {MUON_RATE * rate_at(progress.next_shard / settings.shards):.4f}"
            f"  {(progress.num_tokens - self.num_tokens) / seconds / 1e6:6.3f} M tokens/s"
            f"  waited {(progress.waited_s - self.waited_s) / seconds:4.0%}"
            f"  {self.elapsed_s():5.0f} s",
            flush=True,
        )
        self.num_tokens, self.seconds = progress.num_tokens, progress.seconds
        self.waited_s = progress.waited_s


def run(
    trainer: Trainer,
    shards: Shards,
    reporter: Reporter,
    minutes: float,
    evaluate_every: int,
    evaluate_now: Callable[[], object],
) -> bool:
    """Trains until the last shard is done (True), or the time is up (False)."""
    progress, last = trainer.progress, trainer.settings.shards
    while progress.next_shard < last:
        started = time.monotonic()
        shard = shards.next()
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
        if done == 1 or done == last or done % REPORT_EVERY == 0:
            reporter.report()
        if evaluate_every and done % evaluate_every == 0 and done < last:
            evaluate_now()
        if reporter.elapsed_s() > 60 * minutes and done < last:
            return False
    return True


# The evaluation.


@dataclass(frozen=True)
class Scores:
    """How many cases of each (skill, split) there are, and how many are right."""

    num_cases: Counter[tuple[str, str]]
    num_right: Counter[tuple[str, str]]

    def accuracy(self, skill: str, split: str) -> float:
        return self.num_right[skill, split] / self.num_cases[skill, split]

    def print(self) -> None:
        skills = list(dict.fromkeys(skill for skill, _ in self.num_cases))
        splits = list(dict.fromkeys(split for _, split in self.num_cases))
        width = max(len(skill) for skill in [*skills, "all"])
        print(f"  {'':{width}}" + "".join(f"{split:>16}" for split in splits))
        for skill in skills:
            cells = "".join(self.cell([(skill, split)]) for split in splits)
            print(f"  {skill:{width}}{cells}")
        cells = "".join(self.cell([(skill, split) for skill in skills]) for split in splits)
        print(f"  {'all':{width}}{cells}", flush=True)

    def cell(self, parts: Sequence[tuple[str, str]]) -> str:
        num_cases = sum(self.num_cases[part] for part in parts)
        if not num_cases:
            return f"{'-':>16}"
        return f"{sum(self.num_right[part] for part in parts) / num_cases:10.1%}{num_cases:6d}"

    def as_json(self) -> list[dict[str, object]]:
        return [
            {
                "skill": skill,
                "split": split,
                "cases": self.num_cases[skill, split],
                "accuracy": round(self.accuracy(skill, split), 4),
            }
            for skill, split in self.num_cases
        ]


def predicted_answers(
    model: Model, cases: Sequence[TokenizedCase], batch_tokens: int
) -> list[npt.NDArray[np.int64]]:
    """The likeliest token at each place of each answer, given all that is right before it."""
    predicted: list[npt.NDArray[np.int64]] = [np.empty(0, np.int64)] * len(cases)
    for rows in plan_rows([len(case.ids) for case in cases], batch_tokens):
        ids = np.full((len(rows.members), rows.length), PAD_ID, np.int64)
        for row, member in zip(ids, rows.members, strict=True):
            row[: len(cases[member].ids)] = cases[member].ids
        likeliest = model.logits(torch.from_numpy(ids).to(model.embed.device)).argmax(-1)
        for row, member in zip(likeliest.cpu().numpy(), rows.members, strict=True):
            end = len(cases[member].ids) - 1
            predicted[member] = row[end - cases[member].num_answer : end].copy()
    return predicted


def evaluate(
    model: Model, cases: Sequence[TokenizedCase], batch_tokens: int, wrong_path: Path
) -> Scores:
    """Scores the held-out cases, prints the table, and writes the wrong ones.

    Nothing is generated: greedy decoding gives the right answer exactly if, at each place of it,
    the likeliest token after the right ones is the right one. One forward pass tells.
    """
    scores = Scores(Counter(), Counter())
    with wrong_path.open("w") as wrong_file:
        for case, predicted in zip(
            cases, predicted_answers(model, cases, batch_tokens), strict=True
        ):
            right = np.array_equal(predicted, case.ids[-case.num_answer :])
            scores.num_cases[case.skill, case.split] += 1
            scores.num_right[case.skill, case.split] += right
            if not right:
                wrong = {
                    "split": case.split,
                    "skill": case.skill,
                    "ids": case.ids.tolist(),
                    "predicted": predicted.tolist(),
                }
                wrong_file.write(json.dumps(wrong) + "\n")
    scores.print()
    return scores


# What is left behind.


@torch.no_grad()
def round_weights(model: Model) -> None:
    """To bfloat16, as they are saved; so the last evaluation is that of the saved model."""
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16())


def named_weights(model: Model) -> dict[str, Tensor]:
    """Under the Hugging Face names. The embedding is the head too, and is saved once."""
    weights = {
        f"model.{theirs}.weight": getattr(model, ours) for ours, theirs in MODEL_NAMES.items()
    }
    for ours, theirs in LAYER_NAMES.items():
        for number, weight in enumerate(getattr(model, ours)):
            weights[f"model.layers.{number}.{theirs}.weight"] = weight
    return {name: weight.detach().bfloat16().cpu().clone() for name, weight in weights.items()}


def config() -> dict[str, object]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "dtype": "bfloat16",
        "eos_token_id": END_ID,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": INTERMEDIATE,
        "layer_types": ["full_attention"] * LAYERS,
        "max_position_embeddings": MAX_POSITIONS,
        "max_window_layers": 28,
        "model_type": "qwen3",
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KV_HEADS,
        "pad_token_id": PAD_ID,
        "rms_norm_eps": RMS_EPS,
        "rope_parameters": {"rope_theta": ROPE_THETA, "rope_type": "default"},
        "sliding_window": None,
        "tie_word_embeddings": True,
        "transformers_version": "5.23.0",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": VOCAB,
    }


def write_model(folder: Path, trainer: Trainer, scores: Scores) -> None:
    def write(name: str, content: object, indent: int | None = None) -> None:
        (folder / name).write_text(json.dumps(content, indent=indent) + "\n", encoding="utf-8")
        (folder / name).chmod(0o644)

    weights = folder / "model.safetensors"
    save_file(named_weights(trainer.model), weights, metadata={"format": "pt"})
    weights.chmod(0o644)
    write("config.json", config(), indent=2)
    generation = {"do_sample": False, "eos_token_id": [END_ID, PAD_ID], "pad_token_id": PAD_ID}
    write("generation_config.json", generation, indent=2)
    described = {"evaluation": evaluation_hash(), "tables": tables()}
    write("minisgl.json", described, indent=1)
    progress = trainer.progress
    write(
        "training.json",
        {
            "settings": asdict(trainer.settings),
            "tokens": progress.num_tokens,
            "seconds": round(progress.seconds, 1),
            "waited_s": round(progress.waited_s, 1),
            "evaluation": evaluation_hash(),
            "scores": scores.as_json(),
            "curve": progress.curve,
        },
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains the bundled demo model.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shards", type=int, default=240)
    parser.add_argument("--shard-tokens", type=int, default=4_000_000)
    parser.add_argument("--batch-tokens", type=int, default=8 * BATCH_UNIT)
    parser.add_argument("--minutes", type=float, default=8.5, help="then leave a checkpoint")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--eval-every", type=int, default=50, help="shards; 0: only at the end")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--device", default="auto", help="auto, cuda or cpu")
    arguments = parser.parse_args()
    if arguments.batch_tokens <= 0 or arguments.batch_tokens % BATCH_UNIT:
        parser.error(f"--batch-tokens must be a multiple of {BATCH_UNIT}")
    return arguments


def main(arguments: argparse.Namespace, pool: Pool, started: float) -> None:
    folder: Path = arguments.folder
    settings = Settings(
        arguments.seed, arguments.shards, arguments.shard_tokens, arguments.batch_tokens
    )
    if arguments.device == "auto":
        arguments.device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.enable_cudnn_sdp(False)  # it would compile for each shape of batch
    regions = EAGER if arguments.no_compile else compiled()
    trainer = Trainer(settings, torch.device(arguments.device), regions)
    checkpoint = folder / "checkpoint.pt"
    if checkpoint.exists():
        trainer.load(checkpoint)
        print(f"going on from shard {trainer.progress.next_shard}")

    if evaluation_hash() != FROZEN_HASH:
        raise SystemExit("the evaluation has changed; freeze it first, in demo/evaluation.py")
    first, num_ahead = trainer.progress.next_shard, 2 * arguments.workers
    shards = Shards(pool, folder, settings, first, num_ahead)
    trainer.warm_up()
    cases = tokenized_cases(folder)
    reporter = Reporter(trainer, started)
    print(f"ready to train on {trainer.device} after {reporter.elapsed_s():.0f} s", flush=True)

    def evaluate_now() -> Scores:
        return evaluate(trainer.model, cases, settings.batch_tokens, folder / "wrong.jsonl")

    if not run(trainer, shards, reporter, arguments.minutes, arguments.eval_every, evaluate_now):
        trainer.save(checkpoint)
        print(f"{checkpoint}: run again to go on from shard {trainer.progress.next_shard}")
        return
    round_weights(trainer.model)
    write_model(folder, trainer, evaluate_now())
    num_parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    print(f"{folder}: {num_parameters / 1e6:.2f} M parameters")


if __name__ == "__main__":
    started = time.monotonic()
    arguments = parse_arguments()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    if not (arguments.folder / "tokenizer.json").exists():
        make_tokenizer(arguments.folder)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one worker a core is enough
    # Forked, so that no worker spends seconds on importing torch, and before CUDA is touched.
    with multiprocessing.get_context("fork").Pool(arguments.workers) as pool:
        main(arguments, pool, started)
