"""What this machine offers, as far as the options depend on it."""

from __future__ import annotations

import os

import torch

from minisgl.attention.backends import available_backends, flash_page_multiple
from minisgl.config import DeviceFacts, ModelFacts


def device_facts(model: ModelFacts) -> DeviceFacts:
    """Imports the attention packages that are installed, which may take seconds."""
    # Not every system says how much memory is free; all say how much there is.
    pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
    free_cpu_bytes = os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
    if not torch.cuda.is_available():
        return DeviceFacts(has_cuda=False, free_cpu_bytes=free_cpu_bytes)
    found = available_backends(
        torch.cuda.get_device_capability(), model.head_dim, model.num_heads // model.num_kv_heads
    )
    return DeviceFacts(
        has_cuda=True,
        free_cpu_bytes=free_cpu_bytes,
        prefill_backends=found.prefill,
        decode_backends=found.decode,
        missing_backends=found.missing,
        flash_page_multiple=flash_page_multiple(),
    )


def device_name(device: str) -> str:
    """What people call `device`, cpu or cuda."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"CPU, {torch.get_num_threads()} threads"
