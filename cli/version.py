"""`minisgl version`: what a bug report should name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Annotated

import typer

from minisgl.bench.environment import PACKAGES, Environment, versions
from minisgl.config import AttentionSpec

# Which backends run depends on the model a little; most have such heads.
LAYER = AttentionSpec(num_heads=32, num_kv_heads=8, head_dim=128, scale=128**-0.5)


def version(
    model: Annotated[
        str | None,
        typer.Option(help="Say whose code runs this model: a folder or a name, as in serve."),
    ] = None,
) -> int:
    """Print the versions of minisgl, Python and the packages that matter most.

    Then the hardware, the attention backends that run on it, and what computes with quantised
    weights and caches.
    """
    found = versions()
    for package in ("python", "minisgl", *PACKAGES):
        print(f"{package} {found.get(package, 'not installed')}")
    try:
        for line in _hardware():
            print(line, flush=True)
    except Exception as error:  # what is broken is what the report is about
        print(f"hardware unknown, {type(error).__name__}: {error}")
    if model is not None:
        for line in _code_of(model):
            print(line)
    return 0


def _code_of(model: str) -> Iterator[str]:
    from minisgl.models.config import NativeConfig
    from minisgl.models.hub import locate_model
    from minisgl.models.registry import read_model_config

    config = read_model_config(locate_model(model, load_format="dummy"))
    if isinstance(config, NativeConfig):
        yield f"model: {config.architecture} with minisgl's own code for this architecture"
    yield from config.notes


def _hardware() -> Iterator[str]:
    environment = Environment.found()
    if environment.commit is not None:
        yield f"commit {environment.commit}"
    yield f"platform {environment.platform}"
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    yield f"cpu {environment.cpu}, {environment.num_cpus} cores, {memory_bytes / 2**30:.1f} GiB"
    if environment.driver is not None:
        yield f"driver {environment.driver}"

    import torch

    from minisgl.attention.backends import available_backends
    from minisgl.kernels.hardware import describe_formats

    capability = None
    if torch.cuda.is_available():
        capability = torch.cuda.get_device_capability()
        yield f"cuda {environment.cuda}"
        for index in range(torch.cuda.device_count()):
            gpu = torch.cuda.get_device_properties(index)
            yield (
                f"gpu {index} {gpu.name}, {gpu.total_memory / 2**30:.1f} GiB, "
                f"compute capability {gpu.major}.{gpu.minor}"
            )
    else:
        yield "gpu none that PyTorch can use"
        for gpu_name in environment.gpus:
            yield f"gpu of the machine {gpu_name}"
    found = available_backends(capability, (LAYER,))
    prefill, decode = (", ".join(found.best_first(phase)) for phase in ("prefill", "decode"))
    yield f"attention prefill {prefill}; decode {decode}"
    for name, reason in found.missing.items():
        yield f"attention without {name}: {reason}"
    for name, computed in describe_formats(capability).items():
        yield f"{name} {computed}"
