"""Pipelines of stages, real processes over gloo, give the tokens of one rank."""

from __future__ import annotations

from typing import Any

import pytest
from support.parity import FEW_PAGES, Case, case_of
from support.pipelines import Outcome, mixed_outcomes
from support.tensor_parallel import check_with_aborts, short_case_of


def test_greedy_tokens_of_uneven_stages_equal_those_of_transformers() -> None:
    """Four layers on three stages, some with experts. The head is the embedding, which is on the
    first stage, too."""
    check_with_aborts(short_case_of("moe-60"), pp=3)


@pytest.fixture(scope="module")
def case() -> Case:
    return case_of("llama-biased")


@pytest.fixture(scope="module")
def expected(case: Case) -> list[Outcome]:
    return mixed_outcomes(case)


@pytest.mark.parametrize(
    "options",
    [
        {"pp": 2, "max_prefill_length": 16},
        {"pp": 2, "overlap": False, **FEW_PAGES},
        # In the shapes that would be captured on a GPU.
        {"pp": 2, "tp": 2, "padded": 8},
    ],
    ids=str,
)
def test_mixed_rows_of_a_pipeline_get_the_outputs_of_one_rank(
    options: dict[str, Any], case: Case, expected: list[Outcome]
) -> None:
    assert mixed_outcomes(case, **options) == expected
