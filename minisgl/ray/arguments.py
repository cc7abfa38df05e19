"""Options as Ray Serve's tools pass them: a mapping of names to texts, or to values of YAML."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import Field, fields
from difflib import get_close_matches
from typing import Any, get_origin, get_type_hints

import msgspec

from minisgl.config import EngineConfig, option_names
from minisgl.errors import ConfigError, one_of
from minisgl.ray.config import RayConfig
from minisgl.router.config import RouterConfig
from minisgl.server.config import ServerConfig

CONFIGS = (EngineConfig, ServerConfig, RouterConfig, RayConfig)


def options_of(
    args: Mapping[str, Any],
) -> tuple[EngineConfig, ServerConfig, RouterConfig, RayConfig]:
    """The options of `minisgl serve` with these names; raises ConfigError.

    A name is spelled as on the command line, with or without dashes: `--tp`, `tp`, `max_seq_len`.
    """
    given: dict[Any, dict[str, Any]] = {config: {} for config in CONFIGS}
    given[RayConfig]["ray"] = True
    known = {
        spelling.removeprefix("--").replace("-", "_"): (config, spec)
        for config in CONFIGS
        for spec in fields(config)
        for spelling in option_names(spec)
    }
    for name, value in args.items():
        normal = name.removeprefix("--").replace("-", "_")
        if normal not in known:
            close = get_close_matches(normal, known, n=3) or ["model", "tp", "replicas"]
            raise ConfigError("option", name, f"unknown; {one_of(close)}, ...")
        config, spec = known[normal]
        given[config][spec.name] = _value(config, spec, value)
    return (
        EngineConfig(**given[EngineConfig]),
        ServerConfig(**given[ServerConfig]),
        RouterConfig(**given[RouterConfig]),
        RayConfig(**given[RayConfig]),
    )


def _value(config: type, spec: Field[Any], value: Any) -> Any:
    """`value` in the type of the option, if it has that meaning; the option refuses it if not."""
    hint = get_type_hints(config)[spec.name]
    if get_origin(hint) is tuple:
        value = value.split(",") if isinstance(value, str) else value
        return tuple(value) if isinstance(value, list) else value
    with suppress(msgspec.ValidationError):
        return msgspec.convert(value, hint, strict=False)
    return value
