"""Pages that go from GPU to GPU: between ranks of one process, and by CUDA IPC between two."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from support.device_page_cases import CASES, DeviceRank, check_between_processes, check_transfers

pytestmark = pytest.mark.gpu

NUM_GPUS = torch.cuda.device_count()
PART_PAGES = 11


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("gpus", [(0, 0), (1, 0)][:NUM_GPUS], ids=str)
def test_pages_travel_within_a_process(case: str, gpus: tuple[int, int], tmp_path: Path) -> None:
    sender, receiver = (
        DeviceRank(str(tmp_path / name), case, seed, torch.device("cuda", gpu), part_pages=part)
        for name, seed, gpu, part in zip("ab", (1, 2), gpus, (PART_PAGES, 7), strict=True)
    )
    with closing(sender), closing(receiver):
        check_transfers(sender, receiver, (1, 7, 8, 37))


@pytest.mark.parametrize("case", CASES)
def test_pages_travel_between_processes_until_the_sender_is_killed(
    case: str, tmp_path: Path
) -> None:
    """Each sees one GPU only, another one where there are two."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(NUM_GPUS)))
    gpus = visible.split(",")
    device = torch.device("cuda", 0)
    check_between_processes(tmp_path, case, PART_PAGES, device, (gpus[-1], gpus[0]))
