"""Which experts have copies (--redundant-experts): counts in a file, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.copied_experts import copied
from support.parity import case_of
from support.resolving import MODEL, resolved

from minisgl.config import EngineConfig, ExpertFacts
from minisgl.engine.expert_counts import MAX_BYTES, read_counts, with_copies
from minisgl.engine.startup import _prepare
from minisgl.errors import ConfigError
from minisgl.models.registry import read_model_config

EXPERTS = ExpertFacts(num_layers=2, num_experts=4, num_chosen=2, num_weights=1000, size=6)
MIXTURE = replace(MODEL, intermediate_size=0, experts=EXPERTS)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "it cannot be read: .*; allowed: what GET /expert_counts of a server with --ep"),
        ('{"layers": [[1, 2, 3, -4], [0, 0, 0, 0]]}', r"cannot be read: .*>= 0.*layers\[0\]\[3\]"),
        ('{"layers": [[1, 2, 3, 4.5], [0, 0, 0, 0]]}', "cannot be read: .*int"),
        ('{"layers": [[1, 2, 3, 4]]}', "--pp: this model has 2 layers with 4 experts each"),
        ('{"layers": [[1, 2, 3], [1, 2, 3, 4]]}', "another model"),
        ('{"layers": [[0, 0, 0, 0], [0, 0, 0, 0]]}', "no expert has taken a token yet"),
    ],
)
def test_a_file_that_says_nothing_of_the_experts_is_refused(
    content: str, reason: str, tmp_path: Path
) -> None:
    file = tmp_path / "counts.json"
    with pytest.raises(ConfigError, match=r"--expert-counts .*: there is no such file; allowed"):
        read_counts(str(file), EXPERTS)
    file.write_text(content)
    with pytest.raises(ConfigError, match=f"--expert-counts .*{reason}"):
        read_counts(str(file), EXPERTS)


def test_a_file_of_more_than_the_counts_of_any_model_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "counts.json"
    with file.open("wb") as written:
        written.truncate(MAX_BYTES + 1)
    with pytest.raises(ConfigError, match=r"--expert-counts .*: it has more than 16 MiB; allowed:"):
        read_counts(str(file), EXPERTS)


def test_counts_may_be_larger_than_floats(tmp_path: Path) -> None:
    folder, file = case_of("moe-5").folder, tmp_path / "counts.json"
    config = read_model_config(folder)
    experts = config.facts().experts
    assert experts is not None
    file.write_text(json.dumps({"layers": [[10**400, 10**400, 0, 0, 0]] * experts.num_layers}))
    options = EngineConfig(tp=2, ep=True, redundant_experts=2, expert_counts=str(file))
    _, [note] = with_copies(config, options)
    assert "has 75.0% of its tokens, 100.0% without copies" in note


def test_an_engine_is_prepared_with_copies(tmp_path: Path) -> None:
    folder = case_of("moe-5").folder
    options = copied(folder, tmp_path, tp=2, device="cpu", load_format="dummy")
    prepared = _prepare(EngineConfig(model=str(folder), **options))
    assert set(prepared.model_config.expert_copies) == {((2,), (0,))}
    assert any("copies of experts in" in note for note in prepared.resolved.notes)


def test_the_log_says_what_copies_bring(tmp_path: Path) -> None:
    folder = case_of("moe-5").folder
    config, file = read_model_config(folder), tmp_path / "counts.json"
    experts = config.facts().experts
    assert experts is not None
    layers = [[0, 0, 0, 0, 100]] + [[10, 10, 0, 0, 0]] * (experts.num_layers - 1)
    file.write_text(json.dumps({"layers": layers}))
    options = EngineConfig(tp=2, ep=True, redundant_experts=2, expert_counts=str(file))
    model, [note] = with_copies(config, options)
    assert model.expert_copies[0] == ((4,), ()) and model.expert_copies[1] == ((), (0,))
    after = 50 + 15 * (experts.num_layers - 1)
    total = 100 + 20 * (experts.num_layers - 1)
    assert f"of a layer has {after / total:.1%} of its tokens, 100.0% without copies" in note
    assert with_copies(config, EngineConfig(tp=2, ep=True)) == (config, ())


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"ep": False}, "--redundant-experts 2: copies are of whole experts; allowed: 0, or with"),
        ({"ep": False, "parallel": "auto"}, "no copies; .* with --ep and --parallel given"),
        ({"pp": 2}, "counted on one stage; allowed: 0, or with --pp 1"),
        ({"expert_counts": None}, "with --expert-counts FILE, which `curl ADDRESS/expert_counts`"),
        ({"page_size": 5}, "allowed: 0, or an even --page-size"),
        ({"redundant_experts": 5}, "this model has 4 experts; allowed: 0 to 4"),
        ({"redundant_experts": -1}, "--redundant-experts -1"),
        ({"redundant_experts": 0}, "--expert-counts counts.json: .* with --redundant-experts"),
    ],
)
def test_copies_are_refused_where_there_can_be_none(options: dict[str, Any], reason: str) -> None:
    given = {"tp": 2, "ep": True, "redundant_experts": 2, "expert_counts": "counts.json"}
    resolved(MIXTURE, **given)
    with pytest.raises(ConfigError, match=reason):
        resolved(MIXTURE, **(given | options))
