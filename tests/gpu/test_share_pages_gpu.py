"""Engines on GPUs exchange KV pages, straight from device to device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.page_sharing import check_handover, sharing_engine

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("options", [{}, {"kv_cache_dtype": "fp8"}], ids=str)
async def test_a_prompt_of_one_engine_is_continued_by_another(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    settings: dict[str, Any] = {"device": "cuda", "cuda_graph_max_bs": 0, **options}
    async with (
        await sharing_engine(**settings) as prefill,
        await sharing_engine(**settings) as decode,
    ):
        address = await prefill.pages.share(str(tmp_path / "a"), always_load=False)
        await decode.pages.share(str(tmp_path / "b"), always_load=True)
        await check_handover(prefill, decode, address, is_direct=True)
