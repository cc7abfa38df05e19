"""Copies of experts on other ranks (--redundant-experts): tokens as of transformers, the tally, and
what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.adopted_cases import case_of as adopted_case
from support.adopted_cases import check as check_adopted
from support.parity import case_of, check
from support.resolving import MODEL, resolved
from support.tensor_parallel import check_with_aborts, short_case_of

from minisgl.config import EngineConfig, ExpertFacts
from minisgl.engine.expert_counts import read_counts, with_copies
from minisgl.errors import ConfigError
from minisgl.kernels.moe.reference import ELSEWHERE
from minisgl.layers import experts as layers_experts
from minisgl.models.registry import read_model_config


def copied(model: Path, folder: Path, **options: Any) -> dict[str, Any]:
    """Options by which the first experts of each layer are the busiest."""
    facts = read_model_config(model).facts().experts
    assert facts is not None
    counts = [1000 // (expert + 1) for expert in range(facts.num_experts)]
    file = folder / "counts.json"
    file.write_text(json.dumps({"layers": [counts] * facts.num_layers}))
    return {"ep": True, "redundant_experts": 3, "expert_counts": str(file), **options}


# -- whole engines --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("moe-5", {"tp": 2, "dp_attention": True}),
        ("moe-60", {"tp": 4}),
        ("glm-flash", {"tp": 2}),
    ],
    ids=str,
)
def test_tokens_equal_those_of_transformers(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    case = short_case_of(name)
    check_with_aborts(case, **copied(case.folder, tmp_path, **options))


def test_tokens_of_adopted_models_equal_those_of_transformers(tmp_path: Path) -> None:
    case = adopted_case("MixtralForCausalLM", tmp_path)
    options = copied(case.folder, tmp_path, tp=2, page_size=4, max_prefill_length=7)
    check_adopted(case, alone=False, **options)


def _twice(held: list[int], ranks: list[list[int]], rank: int) -> list[list[int]]:
    return [[held.index(each) if each in held else ELSEWHERE for each in range(5)]] * 2


@pytest.mark.parametrize("name", ["computed by both", "computed by none"])
def test_mistakes_of_one_rank_change_tokens(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = layers_experts.places_of

    def none(held: list[int], ranks: list[list[int]], rank: int) -> list[list[int]]:
        num_own = 2  # of the five, on rank 0
        places = right(held, ranks, rank)
        return [[ELSEWHERE if place >= num_own else place for place in each] for each in places]

    case = case_of("moe-5")
    options = copied(case.folder, tmp_path, tp=2)
    # Rank 0, which is of this process, has the copies of this file.
    file = Path(options["expert_counts"])
    file.write_text(json.dumps({"layers": [[1, 1, 9, 9, 9]] * case.spec.num_layers}))
    monkeypatch.setattr(layers_experts, "places_of", none if "none" in name else _twice)
    with pytest.raises(AssertionError):
        check(case, **options)


# -- which experts: the file ----------------------------------------------------------------------

EXPERTS = ExpertFacts(num_layers=2, num_experts=4, num_chosen=2, num_weights=1000, size=6)
MIXTURE = replace(MODEL, intermediate_size=0, experts=EXPERTS)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "it cannot be read: .*; allowed: what GET /expert_counts of a server with --ep"),
        ('{"layers": [[1, 2, 3, -4], [0, 0, 0, 0]]}', r"cannot be read: .*>= 0.*layers\[0\]\[3\]"),
        ('{"layers": [[1, 2, 3, 4.5], [0, 0, 0, 0]]}', "cannot be read: .*int"),
        ('{"layers": [[1, 2, 3, 4]]}', "another model: this one has 2 layers with 4 experts each"),
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
