"""Training of the demo model: agreement with transformers, and resumed runs."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import train_demo
from demo_model.batches import BATCH_UNIT, DataShard, make_batches
from demo_model.evaluation import SPLITS, TokenizedCase, tokenized_cases
from demo_model.model import DemoModel, ModelSizes, named_weights
from demo_model.muon import WEIGHT_DECAY, Muon, orthogonalized
from minisgl.models.hub import DEMO_FOLDER as DEMO
from train_demo import Settings, Trainer, evaluate, predicted_answers, round_weights, write_model

# Tokenizer and positions are those of the demo model, so that it learns from real shards.
TINY = ModelSizes(hidden_size=32, intermediate_size=48, num_layers=3, head_dim=16)
SETTINGS = Settings(seed=3, shards=4, shard_tokens=8_000, batch_tokens=BATCH_UNIT, shape=TINY)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def shards() -> list[DataShard]:
    seed, sizes = SETTINGS.seed, (SETTINGS.shard_tokens, SETTINGS.batch_tokens)
    return [make_batches(DEMO, seed, index, *sizes) for index in range(SETTINGS.shards)]


@pytest.fixture(scope="module")
def whole_run(shards: list[DataShard]) -> tuple[DemoModel, list[float]]:
    """The trained model and the loss of each shard."""
    trainer = Trainer(SETTINGS, CPU)
    return trainer.model, train(trainer, shards)


@pytest.fixture(scope="module")
def cases() -> list[TokenizedCase]:
    return tokenized_cases(DEMO)


@pytest.fixture(scope="module")
def bundled() -> DemoModel:
    model = DemoModel(ModelSizes(), seed=0, dtype=torch.float32)
    saved = load_file(DEMO / "model.safetensors")
    weights = named_weights(model)
    assert weights.keys() == saved.keys()
    for name, weight in weights.items():
        assert weight.shape == saved[name].shape
        weight.copy_(saved[name])
    return model


def their_logits(folder: Path, ids: Tensor) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(ids).logits


def assert_same_logits(ours: Tensor, theirs: Tensor) -> None:
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() < 1e-4 * theirs.abs().max()


def train(trainer: Trainer, shards: list[DataShard]) -> list[float]:
    losses = []
    for shard in shards:
        losses.append(trainer.train(shard))
        trainer.progress.next_shard += 1
    return losses


def test_transformers_gives_the_bundled_weights_the_same_logits(
    bundled: DemoModel, cases: list[TokenizedCase]
) -> None:
    rows = [case.ids[:48] for case in cases if len(case.ids) >= 48][::100]
    assert len(rows) > 3
    ids = torch.from_numpy(np.stack(rows).astype(np.int64))
    assert_same_logits(bundled.logits(ids), their_logits(DEMO, ids))


def test_a_written_model_has_the_same_logits_in_transformers(tmp_path: Path) -> None:
    trainer = Trainer(SETTINGS, CPU)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in trainer.model.parameters():  # some start as zeros, others as ones
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    round_weights(trainer.model)
    (tmp_path / "checkpoint.pt").touch()
    write_model(tmp_path, trainer, {("copy", "instances"): 0.5})
    assert not (tmp_path / "checkpoint.pt").exists()
    ids = torch.randint(0, TINY.vocab_size, (4, 40), generator=generator)
    assert_same_logits(trainer.model.logits(ids), their_logits(tmp_path, ids))


def test_a_finished_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "drafter").mkdir()
    for folder in (tmp_path, tmp_path / "drafter"):
        write_model(folder, Trainer(SETTINGS, CPU), {})
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    monkeypatch.setattr(sys, "argv", ["train_demo.py", str(tmp_path)])
    with pytest.raises(SystemExit) as refusal:
        train_demo.main()
    assert refusal.value.code == (
        f"{tmp_path} holds a finished model: train in another folder, or remove it"
    )
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_the_loss_falls(whole_run: tuple[DemoModel, list[float]]) -> None:
    _, losses = whole_run
    assert losses[0] < np.log(TINY.vocab_size) + 0.1  # where nothing is known
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 0.3


def test_a_resumed_run_gives_the_same_weights_as_an_uninterrupted_one(
    shards: list[DataShard], whole_run: tuple[DemoModel, list[float]], tmp_path: Path
) -> None:
    first = Trainer(SETTINGS, CPU)
    train(first, shards[:2])
    first.save(tmp_path / "checkpoint.pt")
    second = Trainer(SETTINGS, CPU)
    second.load(tmp_path / "checkpoint.pt")
    assert second.progress == first.progress
    train(second, shards[2:])

    started = Trainer(SETTINGS, CPU).model.state_dict()
    pieces = second.model.state_dict()
    for name, weight in whole_run[0].state_dict().items():
        assert torch.equal(weight, pieces[name]), name
        assert not torch.equal(weight, started[name]), name


@pytest.mark.parametrize(
    "other", [replace(SETTINGS, seed=4), replace(SETTINGS, shape=replace(TINY, rope_theta=1e6))]
)
def test_a_training_checkpoint_of_other_settings_is_refused(
    other: Settings, tmp_path: Path
) -> None:
    path = tmp_path / "checkpoint.pt"
    Trainer(other, CPU).save(path)
    with pytest.raises(SystemExit) as refusal:
        Trainer(SETTINGS, CPU).load(path)
    message = str(refusal.value.code)
    assert message.startswith(f"{path} is of a run with other settings; ")
    assert "\n" not in message


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's own doing
def test_compiled_training_compiles_each_region_once(
    shards: list[DataShard], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over layers, batches and lengths; the evaluation, of any size, is not compiled at all."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    compile = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda *args, **options: compile(*args, **options, backend=backend)
    )
    compiled, eager = (Trainer(SETTINGS, CPU, compiles=compiles) for compiles in (True, False))
    compiled.warm_up()
    assert len(graphs) == 3
    assert len(set(shards[0].lengths)) > 2
    assert train(compiled, shards[:1]) == train(eager, shards[:1])
    ids = torch.arange(60).view(4, 15)
    assert torch.equal(compiled.model.logits(ids), eager.model.logits(ids))
    assert len(graphs) == 3


def test_orthogonalized_has_singular_values_near_1() -> None:
    stack = torch.randn(5, 24, 64, generator=torch.Generator().manual_seed(0)) * 1e-3
    values = torch.linalg.svdvals(orthogonalized(stack).float())
    assert values.min() > 0.5 and values.max() < 1.5


def test_muon_takes_a_step_along_the_gradients_singular_vectors() -> None:
    """Each stack by itself, tall ones and wide ones of the same sizes, and of other numbers."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 24, 64), (2, 64, 24), (3, 64, 24), (2, 24, 48)]
    stacks = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    before = [stack.detach().clone() for stack in stacks]
    gradients = [torch.randn(shape, generator=generator) for shape in shapes]
    for stack, gradient in zip(stacks, gradients, strict=True):
        stack.grad = gradient.clone()
    lr = 0.5
    Muon(stacks).step(lr)
    for stack, weight, gradient in zip(stacks, before, gradients, strict=True):
        _, rows, columns = stack.shape
        update = (weight * (1 - lr * WEIGHT_DECAY) - stack.detach()) / lr
        update /= max(1.0, rows / columns) ** 0.5
        u, _, vh = torch.linalg.svd(gradient, full_matrices=False)
        along = u.mT @ update @ vh.mT
        diagonal = along.diagonal(dim1=-2, dim2=-1)
        assert diagonal.min() > 0.5 and diagonal.max() < 1.5
        assert (along - diagonal.diag_embed()).abs().max() < 0.1
        assert stack.grad is None


def test_teacher_forcing_predicts_the_greedy_answers(
    bundled: DemoModel, cases: list[TokenizedCase]
) -> None:
    short = [case for case in cases if len(case.ids) < 64][::3]
    predictions = predicted_answers(bundled, short, BATCH_UNIT)
    is_right = [
        predicted.tolist() == case.ids[-case.num_answer :].tolist()
        for case, predicted in zip(short, predictions, strict=True)
    ]
    chosen = [
        *[number for number, right in enumerate(is_right) if right][:4],
        *[number for number, right in enumerate(is_right) if not right][:4],
    ]
    assert len(chosen) == 8

    theirs = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    for number in chosen:
        case = short[number]
        ids = torch.from_numpy(case.ids.astype(np.int64))[None]
        prompt = ids[:, : -case.num_answer]
        generated = theirs.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=case.num_answer,
            do_sample=False,
        )
        assert (generated[0].tolist() == case.ids.tolist()) == is_right[number]

    scores = evaluate(bundled, short, BATCH_UNIT)
    for skill in ("copy", "spell"):
        for split in SPLITS:
            group = [
                right
                for case, right in zip(short, is_right, strict=True)
                if (case.skill, case.split) == (skill, split)
            ]
            assert scores[skill, split] == sum(group) / len(group)
    ours = [right for case, right in zip(short, is_right, strict=True) if case.split == SPLITS[1]]
    assert scores["all", SPLITS[1]] == sum(ours) / len(ours) < 1
