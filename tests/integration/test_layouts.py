"""All ways in which up to four ranks may share a model: tokens equal those of transformers."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from support.tensor_parallel import check_with_aborts, short_case_of

# With one rank there is nothing to divide: tests/config/ shows that each option is refused there.
# Stages know nothing of what the ranks of each divide.
LAYOUTS: list[dict[str, Any]] = [
    {"tp": 2, "pp": 1, "ep": ep, "dp_attention": by_request}
    for ep, by_request in product([False, True], repeat=2)
] + [
    # More ranks than two divide experts that do not come out even, or requests.
    {"tp": 4, "pp": 1, "ep": True, "dp_attention": False},
    {"tp": 4, "pp": 1, "ep": True, "dp_attention": True},
    {"tp": 2, "pp": 2, "ep": False, "dp_attention": False},
    {"tp": 2, "pp": 2, "ep": True, "dp_attention": True},
]
# On each of four ranks that divide the requests: so few that some are retracted there, too.
PAGES_OF_FOUR = {"num_pages": 23, "max_seq_len_override": 88}


def check(name: str, layout: dict[str, Any]) -> None:
    """In chunks, with prefixes that are found again, retraction, aborts, and, by itself, a request
    that leaves ranks without one."""
    pages = PAGES_OF_FOUR if layout["dp_attention"] and layout["tp"] == 4 else {}
    check_with_aborts(short_case_of(name), **layout, **pages)


def said(layout: dict[str, Any]) -> str:
    numbers = f"--tp {layout['tp']} --pp {layout['pp']}"
    return numbers + " --ep" * layout["ep"] + " --dp-attention" * layout["dp_attention"]


@pytest.mark.parametrize("layout", LAYOUTS, ids=said)
def test_tokens_of_a_mixture_equal_those_of_transformers(layout: dict[str, Any]) -> None:
    """With 5 experts no rank has as many as another; the tensors of 60 are in several files."""
    has_five = layout["ep"] and not layout["dp_attention"]
    check("moe-5" if has_five else "moe-60", layout)


# The experts of these models are those of the mixture above, in groups.
LATENT = [
    pytest.param(name, layout, id=f"{name} {said(layout)}")
    for name, layout in [
        ("deepseek-v2", {"tp": 2, "pp": 1, "ep": False, "dp_attention": False}),
        ("deepseek-v2-groups", {"tp": 2, "pp": 1, "ep": False, "dp_attention": True}),
        ("glm-flash", {"tp": 2, "pp": 1, "ep": True, "dp_attention": False}),
        ("deepseek-v3", {"tp": 2, "pp": 2, "ep": True, "dp_attention": True}),
        ("deepseek-v2-groups", {"tp": 4, "pp": 1, "ep": False, "dp_attention": False}),
    ]
]


@pytest.mark.parametrize(("name", "layout"), LATENT)
def test_tokens_of_attention_over_latents_equal_those_of_transformers(
    name: str, layout: dict[str, Any]
) -> None:
    check(name, layout)
