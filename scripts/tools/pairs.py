"""Writes the table of cli/README.md that says which options work with what a model caches.

python scripts/tools/pairs.py --write    # after a change of what is refused, or gives way
python scripts/tools/pairs.py --check    # exit code 1 if the table differs

Each cell is the answer of the code that resolves and refuses options, for twelve layers of
published sizes on a machine with eight GPUs. tests/integration/test_pairs.py runs every pair that
works.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

from dummy_config import MODELS, config_of
from pages import ROOT, as_table, write_or_check_table

from minisgl.attention.backends import BACKENDS
from minisgl.config import DeviceFacts, EngineConfig, ResolvedConfig
from minisgl.engine.page_moves import check_sharing
from minisgl.errors import MinisglError
from minisgl.router.process import with_pages_shared
from minisgl.runner import setup
from minisgl.runner.setup import read_setup

PAGE = ROOT / "cli" / "README.md"
MACHINE = DeviceFacts(
    has_cuda=True,
    free_cpu_bytes=1 << 40,
    gpu_bytes=140 << 30,
    num_gpus=8,
    compute_capability=(9, 0),
    backends=(BACKENDS["triton"].facts,),
)
NUM_LAYERS = {"num_hidden_layers": 12}  # of deep models the proof of adopted ones takes seconds
# What a model caches, and a model that does.
KINDS = {
    "full layers": "Qwen3-14B",
    "latents": "GLM-4.7-Flash",
    "full and windowed layers": "gemma-4-31B",
    "windowed layers alone": "Mistral-7B",
    "full layers and states": "Qwen3.8-27B",
}
HOST: dict[str, Any] = {"host_cache": 8.0}
DISK: dict[str, Any] = {**HOST, "disk_cache": "folder"}
DP: dict[str, Any] = {"tp": 2, "dp_attention": True}
ADOPTED = "`--model-impl adopted`"
# Names of drafters, which stand for folders.
HEAD, SMALL, SMALL_WINDOWED = "an EAGLE-3 head", "a small model", "a small model with windows"


@dataclass(frozen=True)
class Option:
    """What a user asks for. shares: engines that exchange pages; roles: those of --roles."""

    values: dict[str, Any]
    shares: bool = False
    roles: bool = False


OPTIONS = {
    "`--host-cache`": Option(HOST),
    "`--disk-cache`": Option(DISK),
    "pages of other engines": Option(HOST, shares=True),
    "`--roles`": Option(HOST, roles=True),
    "`--replicas`": Option({}),
    "`--tp`": Option({"tp": 2}),
    "`--tp --host-cache`": Option({"tp": 2, **HOST}),
    "`--tp --disk-cache`": Option({"tp": 2, **DISK}),
    "`--pp`": Option({"pp": 2}),
    "`--pp --host-cache`": Option({"pp": 2, **HOST}),
    "`--pp --disk-cache`": Option({"pp": 2, **DISK}),
    "`--pp --roles`": Option({"pp": 2, **HOST}, roles=True),
    "`--dp-attention`": Option(DP),
    "`--dp-attention --host-cache`": Option({**DP, **HOST}),
    "`--dp-attention --disk-cache`": Option({**DP, **DISK}),
    "`--dp-attention --roles`": Option({**DP, **HOST}, roles=True),
    "`--speculative ngram`": Option({"speculative": "ngram"}),
    "`--speculative mtp`": Option({"speculative": "mtp"}),
    **{
        f"`--speculative` with {name}": Option({"speculative": name})
        for name in (HEAD, SMALL, SMALL_WINDOWED)
    },
    "`--speculative ngram --host-cache`": Option({"speculative": "ngram", **HOST}),
    "`--speculative mtp --host-cache`": Option({"speculative": "mtp", **HOST}),
    f"`--speculative --host-cache` with {HEAD}": Option({"speculative": HEAD, **HOST}),
    "`--schedule-policy lpm`": Option({"schedule_policy": "lpm"}),
    "retraction": Option({"schedule_conservativeness": 0.02}),
    ADOPTED: Option({"model_impl": "adopted"}),
}


class Outcome(Enum):
    WORKS = "works"
    GIVES_WAY = "one page table"  # in which pages behind windows are kept
    REFUSED = "refused"


@dataclass(frozen=True)
class Cell:
    outcome: Outcome
    why: str = ""


@cache
def _folders() -> TemporaryDirectory[str]:
    return TemporaryDirectory()


def _save(name: str, config: dict[str, Any]) -> str:
    folder = Path(_folders().name) / name
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def _drafter(name: str, model: str) -> str:
    """What --speculative takes: the folder of a drafter for a model, or what is no folder."""
    vocab_size, hidden_size = (MODELS[model][each] for each in ("vocab_size", "hidden_size"))
    drafters = {
        HEAD: config_of("Llama-3.1-8B-eagle3") | {"hidden_size": hidden_size},
        SMALL: config_of("Llama-3.1-8B"),
        SMALL_WINDOWED: config_of("Mistral-7B"),
    }
    if name not in drafters:
        return name
    return _save(f"{name} for {model}", drafters[name] | {"vocab_size": vocab_size})


@cache
def _ask(model: str, name: str | None = None) -> ResolvedConfig:
    """The options as they are resolved, with those of OPTIONS. Raises MinisglError where they are
    refused."""
    option = Option({}) if name is None else OPTIONS[name]
    values = dict(option.values)
    if drafter := values.get("speculative"):
        values["speculative"] = _drafter(drafter, model)
    folder = _save(model, config_of(model) | NUM_LAYERS)
    config = EngineConfig(model=folder, load_format="dummy", device="cuda", **values)
    with mock.patch.object(setup, "device_facts", return_value=MACHINE):
        if option.roles:
            config = with_pages_shared(config, 2)
        if option.roles or option.shares:
            check_sharing(config)
        return read_setup(config).config


@cache
def cell(name: str, kind: str) -> Cell:
    """What the code says of an option for what a model caches."""
    model = KINDS[kind]
    try:
        config = _ask(model, name)
    except MinisglError as error:
        return Cell(Outcome.REFUSED, _sentence(str(error), model))
    if config.windows is None and _ask(model).windows is not None:
        [why] = [note for note in config.notes if "sliding windows" in note]
        return Cell(Outcome.GIVES_WAY, _sentence(f"{why[0].upper()}{why[1:]}", model))
    return Cell(Outcome.WORKS)


def _sentence(why: str, model: str) -> str:
    """The same for all models for which it is the same reason."""
    [architecture] = MODELS[model]["architectures"]
    why = why.replace(architecture, "This model").replace(f"{_folders().name}/", "")
    return f"{why.removesuffix('.')}."


def table() -> str:
    whys: dict[str, int] = {}

    def shown(name: str, kind: str) -> str:
        found = cell(name, kind)
        if not found.why:
            return found.outcome.value
        return f"{found.outcome.value} ({whys.setdefault(found.why, len(whys) + 1)})"

    rows = [[name, *(shown(name, kind) for kind in KINDS)] for name in OPTIONS]
    models = [f"{kind} ({model})" for kind, model in KINDS.items()]
    notes = (f"{number}. {why}\n" for why, number in whys.items())
    return f"{as_table(['', *models], rows)}\n{''.join(notes)}"


def main() -> int:
    return write_or_check_table(__doc__, PAGE, __file__, table)


if __name__ == "__main__":
    sys.exit(main())
