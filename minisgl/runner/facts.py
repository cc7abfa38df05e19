"""Detects the properties of this machine that option resolution depends on."""

from __future__ import annotations

import os

import torch

from minisgl.attention.backends import available_backends
from minisgl.config import DeviceFacts, ModelFacts, memory_bytes
from minisgl.kernels.dispatch import runs_triton


def device_facts(model: ModelFacts) -> DeviceFacts:
    """Detect the devices, free memory and attention backends for a model.

    model: the facts for one rank. Imports the attention packages that are installed, which may take
    seconds.
    """
    # Not every system reports how much memory is free; all report the total.
    pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
    free_cpu_bytes = os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
    has_cuda = torch.cuda.is_available()
    capability = torch.cuda.get_device_capability() if has_cuda else None
    found = available_backends(capability, model.attention)
    missing = dict(found.missing)
    if has_cuda and "triton" not in missing and not runs_triton(torch.device("cuda")):
        missing["triton"] = "Triton does not run here; the log says why"
    return DeviceFacts(
        has_cuda=has_cuda,
        num_gpus=torch.cuda.device_count() if has_cuda else 0,
        gpu_bytes=torch.cuda.get_device_properties(0).total_memory if has_cuda else 0,
        compute_capability=capability,
        free_cpu_bytes=free_cpu_bytes,
        cpu_bytes=memory_bytes(),
        backends=found.backends,
        missing_backends=missing,
    )


def device_name(device: str) -> str:
    """The product name of `device`, cpu or cuda, for display."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    num_threads = torch.get_num_threads()
    return f"CPU, {num_threads} thread{'s' * (num_threads != 1)}"
