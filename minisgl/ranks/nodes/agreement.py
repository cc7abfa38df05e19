"""What all nodes of an engine must have in common: versions, options, the model and its weights.

Each node is started with options of its own and reads its own copy of the model, so node 0 compares
what came of them before anything is loaded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

import torch

import minisgl
from minisgl.models.config_reader import CONFIG_FILE
from minisgl.models.hub import safetensors_files
from minisgl.runner.setup import Setup

# What each node may have for itself, what the ranks agree on later, and what only node 0 uses.
OWN_OPTIONS = frozenset(
    (
        *("model", "node_rank", "master_addr", "master_port", "cluster_token_file", "notes"),
        *("memory_ratio", "num_pages", "num_snapshots"),
        *("cache_type", "max_queued_requests", "schedule_policy", "schedule_conservativeness"),
        *("key_share", "step_timeout", "overlap", "image_hosts"),
    )
)
LONGEST_VALUE = 48  # longer ones are compared by their hashes
# The end of a file of weights tells a fine-tuned model from its base, whose shapes are the same.
TAIL_BYTES = 4096


def facts_of(setup: Setup) -> dict[str, str]:
    """What must agree, by a name for people. Raises CheckpointError if weights are missing."""
    config, model, drafter = setup.config, setup.model, setup.network
    facts = {
        "the version of minisgl": minisgl.__version__,
        "that of PyTorch": str(torch.__version__),
        "what the model takes": "text" if isinstance(setup.sight, str) else "text and images",
    }
    for spec in fields(config):
        if spec.name not in OWN_OPTIONS:
            facts[spec.name] = _short(getattr(config, spec.name))
    for spec in fields(model):
        if spec.name != "notes":
            facts[f"the model's {spec.name}"] = _short(getattr(model, spec.name))
    has_weights = config.load_format != "dummy"
    if has_weights:
        facts["the weights"] = _digest(_tails(setup.folder))
    if drafter is not None and drafter.folder != setup.folder:
        facts["speculative"] = drafter.kind  # like the model, it may have another place on each
        tails = _tails(drafter.folder) if has_weights else b""
        facts["the drafter"] = _digest((drafter.folder / CONFIG_FILE).read_bytes() + tails)
    return facts


def difference(theirs: Mapping[str, str], ours: Mapping[str, str]) -> str | None:
    """What differs between another node and node 0, whose facts are `ours`; None: nothing."""
    found = [
        f"{name} ({theirs.get(name, 'none')[: 2 * LONGEST_VALUE]}, on node 0 {ours[name]})"
        for name in ours
        if theirs.get(name) != ours[name]
    ]
    return ", ".join(found) or None


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= LONGEST_VALUE else _digest(text.encode())


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()[:12]}"


def _tails(folder: Path) -> bytes:
    """The names, sizes and ends of the files with weights."""
    parts: list[bytes] = []
    for path in safetensors_files(folder):
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            parts += path.name.encode(), str(size).encode(), file.read()
    return b"\0".join(parts)
