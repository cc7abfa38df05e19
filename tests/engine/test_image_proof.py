"""The proof that a model sees here what it sees in transformers: mistakes fail it, and then only
the text part runs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.image_cases import (
    FOLDER,
    GEMMA_3,
    GEMMA_4,
    GLMS,
    LLAVA,
    QWEN,
    QWEN_3_VL,
    image_case,
    submitted,
)
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Model

from minisgl.config import EngineConfig
from minisgl.engine import AsyncEngine, startup
from minisgl.engine.image_proof import _with_tower, proven
from minisgl.errors import InvalidRequestError
from minisgl.models import qwen_vl
from minisgl.models.towers.both_ways import BothWaysModel
from minisgl.models.towers.largest import largest_inputs
from minisgl.models.towers.seeing import SeeingModel
from minisgl.models.towers.sight import BY_LINES, SEEING, Kind, Sight
from minisgl.models.towers.small import SmallModel
from minisgl.models.towers.tower import Tower, _joined, _skeleton
from minisgl.parts.images import host, positions
from minisgl.parts.images.device import DeviceImages, SeenEmbedding
from minisgl.parts.images.host import Images, Pictured
from minisgl.request import SamplingParams
from minisgl.runner import load
from minisgl.runner.load import load_runner
from minisgl.runner.setup import Setup, read_setup


@cache
def setup_of(architecture: str) -> Setup:
    folder = str(image_case(architecture).folder)
    return read_setup(EngineConfig(model=folder, device="cpu", dtype="float32", num_pages=99))


@pytest.mark.parametrize("architecture", [LLAVA, QWEN, *qwen_vl.READERS, *GLMS, GEMMA_3, GEMMA_4])
def test_models_that_see_are_shown_to(architecture: str) -> None:
    found = proven(setup_of(architecture), startup._small_engine)
    assert isinstance(found.sight, Sight)
    assert found.model.notes[-1].startswith("images: shown to be seen as in transformers in ")
    assert not any("left out" in note for note in found.model.notes)


def test_a_note_says_what_is_left_out_beside_the_tower() -> None:
    assert _with_tower("the text part of it; left out: vision, audio") == (
        "the text part of it; left out: audio"
    )
    assert _with_tower("layers that draft tokens, left out: 1") == (
        "layers that draft tokens, left out: 1"
    )


# One of each kind of inputs; ARCHITECTURES=all runs all of them.
PUBLISHED = (
    *("Idefics3ForConditionalGeneration", "Mistral3ForConditionalGeneration"),
    *("LlavaNextForConditionalGeneration", "Lfm2VlForConditionalGeneration"),
    *("Cohere2VisionForConditionalGeneration", "Gemma4ForConditionalGeneration"),
    "Glm46VForConditionalGeneration",
)
TESTED = sorted(SEEING) if os.environ.get("ARCHITECTURES") == "all" else PUBLISHED


@pytest.mark.parametrize("architecture", TESTED)
def test_models_of_published_sizes_are_shown_to_see(architecture: str) -> None:
    found = proven(published(architecture), startup._small_engine)
    assert isinstance(found.sight, Sight), found.sight


@cache
def published(architecture: str) -> Setup:
    """Of the sizes that transformers has by default."""
    folder = Path(FOLDER.name) / f"published-{architecture}"
    config = getattr(transformers, architecture).config_class()
    config.architectures = [architecture]
    if architecture == GEMMA_4:  # by default it has no tower
        config.vision_config = transformers.Gemma4VisionConfig()
    if "glm4v" in config.text_config.model_type:  # as all checkpoints have it
        config.text_config.rope_parameters["partial_rotary_factor"] = 0.5
    config.save_pretrained(folder)
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_pages": 99}
    options |= {"load_format": "dummy", "max_seq_len_override": 128}
    return read_setup(EngineConfig(model=str(folder), **options))


@pytest.mark.parametrize("architecture", [*TESTED, LLAVA, QWEN, QWEN_3_VL])
def test_the_largest_image_fits_into_the_buffer(architecture: str) -> None:
    """By which the memory of the tower is measured."""
    is_small = architecture in (LLAVA, QWEN, QWEN_3_VL)
    sight = (setup_of(architecture) if is_small else published(architecture)).sight
    assert isinstance(sight, Sight)
    model = SmallModel.of(sight).model
    for num_rows in (12, 30):
        tower = model.config.vision_config
        inputs = largest_inputs(sight, tower, num_rows)
        given = {name: torch.from_numpy(array) for name, array in inputs.items()}
        with torch.no_grad():
            found = model.get_image_features(**given, return_dict=True).pooler_output
        length = len(_joined(found))
        if SEEING[architecture] in (Kind.LINES, Kind.SIZED):
            assert length <= num_rows
            most = getattr(tower, "image_size", None)
            assert most or length > num_rows - num_rows**0.5


@pytest.mark.parametrize("architecture", sorted(BY_LINES))
def test_a_tower_asks_for_no_number_of_the_gpu(architecture: str) -> None:
    sight = published(architecture).sight
    assert isinstance(sight, Sight)
    nowhere = torch.device("meta")  # has no numbers, and so raises if one is asked for
    module, _ = _skeleton(sight, torch.bfloat16, nowhere)
    tower = Tower(module, torch.bfloat16, nowhere)
    assert len(tower.rows(largest_inputs(sight, tower.config, 64))) == 64


def test_what_the_tower_takes_leaves_less_for_the_kv_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU measures nothing: with and without what is measured on a GPU."""
    found: list[int] = []
    fit = load.fit_capacity

    def noting(*arguments: Any) -> Any:
        found.append(arguments[-1].activation_bytes)
        return fit(*arguments)

    monkeypatch.setattr(load, "fit_capacity", noting)
    setup = setup_of(LLAVA)
    load_runner(setup).close()
    monkeypatch.setattr(DeviceImages, "peak_bytes", lambda self, sight: 12345)
    load_runner(setup).close()
    load_runner(replace(setup, sight="it reads text only")).close()
    assert found[1] == found[0] + 12345
    assert found[2] <= found[0]


def test_the_tower_and_its_rows_are_there_when_memory_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is left then is divided."""
    happened: list[str] = []

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **given: Any) -> Any:
            happened.append(name)
            return function(*args, **given)

        return call

    monkeypatch.setattr(load, "load_images", noted("tower", load.load_images))
    measured = noted("weights", load.WeightMemory.measured)
    monkeypatch.setattr(load.WeightMemory, "measured", staticmethod(measured))
    monkeypatch.setattr(load, "fit_capacity", noted("division", load.fit_capacity))
    monkeypatch.setattr(DeviceImages, "peak_bytes", noted("image", lambda self, sight: 0))
    load_runner(setup_of(LLAVA)).close()
    assert happened == ["tower", "weights", "image", "division"]


def _one_direction(self: Pictured, start: int, end: int) -> Any:
    return np.broadcast_to(np.arange(start, end, dtype=np.int32), (3, end - start))


def _by_column(spans: Any) -> Any:
    found, offset = _rope_positions(spans)
    return found[[0, 2, 1]], offset


def _next_row(self: SeenEmbedding, token_ids: torch.Tensor) -> torch.Tensor:
    seen = self._rows[(-token_ids).clamp(min=0)]
    return torch.where((token_ids < 0)[:, None], seen, self._base(token_ids.clamp(min=0)))


def _as_text(self: SeenEmbedding, token_ids: torch.Tensor) -> torch.Tensor:
    return self._base(token_ids.clamp(min=0))


_rope_positions = positions.rope_positions
_init, _add = SeeingModel.__init__, SeeingModel._add
_init_both = BothWaysModel.__init__

MISTAKES: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "positions in one direction": (Pictured, "rope", _one_direction),
    "lines for columns": (host, "rope_positions", _by_column),
    "axes in turn": (
        SeeingModel,
        "__init__",
        lambda self, model, axes, *others: _init(self, model, sorted(axes), *others),
    ),
    "decoding at the length": (Images, "_changed_offsets", lambda self, work: ()),
}
OF_DEEP: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "nothing behind layers": (SeeingModel, "_add", lambda self, number, layer, args: args),
    "behind the wrong layers": (
        SeeingModel,
        "_add",
        lambda self, number, *others: _add(self, 1 - number, *others),
    ),
}
OF_BOTH_WAYS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "no later rows": (BothWaysModel, "_told", lambda self, attention, last_seen: attention),
    "cut by chunks": (Pictured, "chunk_end", lambda self, end: end),
}
OF_WINDOWS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "in all layers": (
        BothWaysModel,
        "__init__",
        lambda self, *args, **_: _init_both(self, *args, only_windowed=False),
    ),
}
OF_ALL: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "another row": (SeenEmbedding, "forward", _next_row),
    "no row": (SeenEmbedding, "forward", _as_text),
}


@pytest.mark.parametrize(
    ("architecture", "mistake"),
    [
        *((QWEN, mistake) for mistake in MISTAKES | OF_ALL),
        *((LLAVA, mistake) for mistake in OF_ALL),
        *((QWEN_3_VL, mistake) for mistake in OF_DEEP | MISTAKES),
        *((each, "positions in one direction") for each in GLMS),
        *((GEMMA_3, mistake) for mistake in OF_BOTH_WAYS),
        *((GEMMA_4, mistake) for mistake in OF_BOTH_WAYS | OF_WINDOWS),
    ],
)
def test_a_mistake_fails_the_proof(
    architecture: str, mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = setup_of(architecture)
    monkeypatch.setattr(*(MISTAKES | OF_ALL | OF_DEEP | OF_BOTH_WAYS | OF_WINDOWS)[mistake])
    found = proven(setup, startup._small_engine)
    assert isinstance(found.sight, str), "the proof finds nothing"
    assert found.sight.startswith(f"{architecture} does not see here as it does in transformers")


def test_the_text_part_runs_where_the_proof_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*OF_ALL["no row"])
    monkeypatch.setattr(Tower, "rows", None)  # it is not made either
    options = EngineConfig(
        model=str(image_case(QWEN).folder),
        device="cpu",
        dtype="float32",
        num_pages=99,
        load_format="dummy",
    )

    async def run() -> None:
        async with await AsyncEngine.start(options) as engine:
            params = SamplingParams(max_tokens=3, temperature=0)
            with pytest.raises(InvalidRequestError, match=r"takes no images: .* does not"):
                await submitted(engine, image_case(QWEN).asked[0])
            async for _ in engine.submit([1, 2, 3], params):
                pass

    asyncio.run(run())


def test_files_without_the_tower_run_as_text(tmp_path: Path) -> None:
    folder = image_case(QWEN).folder
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    tensors = load_file(folder / "model.safetensors")
    text = {name: tensor for name, tensor in tensors.items() if ".visual." not in name}
    assert len(text) < len(tensors)
    save_file(text, tmp_path / "model.safetensors", metadata={"format": "pt"})
    options = EngineConfig(model=str(tmp_path), device="cpu", dtype="float32", num_pages=99)
    found = proven(read_setup(options), startup._small_engine)
    assert isinstance(found.sight, str) and "its files lack visual." in found.sight
    assert found.model.notes[-1].startswith("images: none, since")
    load_runner(found).close()


def test_positions_are_those_of_transformers() -> None:
    """Of three images, of which two follow each other."""
    asked = image_case(QWEN).asked[2]
    ids = np.array(asked.prompt)
    spans = asked.spans
    config = Qwen3_5Model.config_class(vision_config={"spatial_merge_size": 2})
    model = Qwen3_5Model.__new__(Qwen3_5Model)
    torch.nn.Module.__init__(model)
    model.config = config
    grids = np.concatenate([span.picture.inputs["image_grid_thw"] for span in spans])
    wanted, offset = model.get_rope_index(
        torch.from_numpy(ids)[None],
        mm_token_type_ids=torch.from_numpy(ids < 0).int()[None],
        image_grid_thw=torch.from_numpy(grids),
    )
    pictured = Pictured(spans)
    assert (pictured.rope(0, len(ids)) == wanted[:, 0].numpy()).all()
    assert pictured.offset == int(offset)
    for start in range(len(ids)):
        part = pictured.rope(start, len(ids) + 2)
        assert (part[:, : len(ids) - start] == wanted[:, 0, start:].numpy()).all()
        assert (part[:, len(ids) - start :] == np.arange(2) + len(ids) + pictured.offset).all()
