"""What this machine offers, as far as the options depend on it."""

from __future__ import annotations

import os

import torch

from minisgl.config import ATTENTION_BACKENDS, DeviceFacts


def device_facts() -> DeviceFacts:
    has_cuda = torch.cuda.is_available()
    if has_cuda:
        free_bytes = torch.cuda.mem_get_info()[0]
    else:
        free_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return DeviceFacts(
        has_cuda=has_cuda,
        name=device_name("cuda" if has_cuda else "cpu"),
        num_gpus=torch.cuda.device_count() if has_cuda else 0,
        free_bytes=free_bytes,
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
