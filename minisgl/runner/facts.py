"""What this machine offers, as far as the options depend on it."""

from __future__ import annotations

import os

import torch

from minisgl.config import ATTENTION_BACKENDS, DeviceFacts


def device_facts() -> DeviceFacts:
    # Not every system says how much memory is free; all say how much there is.
    pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
    return DeviceFacts(
        has_cuda=torch.cuda.is_available(),
        free_cpu_bytes=os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE"),
        attention_backends=("torch",),
        missing_backends={
            backend: f"this version has no {backend} backend"
            for backend in ATTENTION_BACKENDS
            if backend != "torch"
        },
    )


def device_name(device: str) -> str:
    """What people call `device`, cpu or cuda."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"CPU, {torch.get_num_threads()} threads"
