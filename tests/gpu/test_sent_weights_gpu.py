"""Weights that a trainer on one GPU sends over NCCL to an engine on another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.sent_weights import check_killed, check_sent

NUM_GPUS = torch.cuda.device_count()

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(NUM_GPUS < 2, reason="needs two GPUs"),
]

ON_GPU: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "cuda_graph_max_bs": 4}


@pytest.mark.parametrize("tp", range(1, min(2, NUM_GPUS - 1) + 1))
def test_an_engine_answers_with_the_weights_that_came_over_nccl(tp: int) -> None:
    options = ON_GPU if tp == 1 else ON_GPU | {"tp": tp}
    check_sent("nccl", f"cuda:{tp}", **options)


def test_a_trainer_that_is_killed_while_it_sends_leaves_an_engine_that_says_so() -> None:
    check_killed("nccl", "cuda:1", **ON_GPU)
