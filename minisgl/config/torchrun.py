"""What torchrun tells the processes that it starts, through environment variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from minisgl.config.engine import EngineConfig
from minisgl.config.options import refuse
from minisgl.errors import ConfigError

STARTED_BY_TORCHRUN = "TORCHELASTIC_RUN_ID"


def with_torchrun(config: EngineConfig, environ: Mapping[str, str]) -> EngineConfig | None:
    """`config` with the place among the nodes that torchrun gives this process; None if the process
    is not needed, because that of local rank 0 starts all ranks of its node.

    Options that were given win. torchrun itself listens on MASTER_PORT, so the next port is taken.
    Raises ConfigError if its number of processes is not that of the ranks.
    """
    if STARTED_BY_TORCHRUN not in environ:
        return config
    if _number(environ, "LOCAL_RANK"):
        return None
    num_ranks = _number(environ, "WORLD_SIZE")
    if num_ranks not in (config.tp * config.pp, _number(environ, "GROUP_WORLD_SIZE")):
        if config.pp == 1:
            refuse(config, "tp", f"torchrun starts {num_ranks} processes; allowed: {num_ranks}")
        reason = f"with --tp {config.tp} that is not the {num_ranks} processes that torchrun starts"
        refuse(config, "pp", f"{reason}; --tp times --pp must be")
    found: dict[str, Any] = {
        "nnodes": _number(environ, "GROUP_WORLD_SIZE"),
        "node_rank": _number(environ, "GROUP_RANK"),
        "master_addr": environ["MASTER_ADDR"],
        "master_port": _number(environ, "MASTER_PORT") + 1,
    }
    defaults = {spec.name: spec.default for spec in fields(config)}
    return replace(
        config,
        **{name: value for name, value in found.items() if getattr(config, name) == defaults[name]},
    )


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    if not text.isdecimal():
        raise ConfigError(name, text, "allowed: a number, as torchrun sets it")
    return int(text)
