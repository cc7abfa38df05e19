"""`minisgl config`: the options of `minisgl serve` as a file for its --config."""

from __future__ import annotations

from dataclasses import Field, fields
from typing import Any

import typer

from minisgl.config import EngineConfig, option_names
from minisgl.ray.config import RayConfig
from minisgl.router.config import RouterConfig
from minisgl.server.config import ServerConfig

from .config_file import as_toml
from .options import ModelArgument, of_model, source_of, takes_options


@takes_options
def config(
    context: typer.Context,
    engine: EngineConfig,
    server: ServerConfig,
    router: RouterConfig,
    ray: RayConfig,
    named: ModelArgument = "",
) -> int:
    """Print the options of `minisgl serve` as a TOML file for --config.

    It says of each value where it comes from. Defaults are comments, and so are secrets, whose
    values are not printed.

    \b
      minisgl config --tp 2 > serve.toml
      minisgl serve --config serve.toml
    """
    groups: dict[str, list[str]] = {}
    for each in (of_model(engine, named), server, router, ray):
        for spec in fields(each):
            line = _line(spec, getattr(each, spec.name), source_of(context, spec))
            groups.setdefault(spec.metadata["group"], []).append(line)
    print("# Options of minisgl serve. Those in comments have their defaults.")
    for heading, lines in groups.items():
        print("", f"# {heading}", *lines, sep="\n")
    return 0


def _line(spec: Field[Any], value: Any, source: str) -> str:
    key = option_names(spec)[0].removeprefix("--")
    if source and spec.metadata["secret"]:
        return f"# {key} is not shown  # {source}"
    if source:
        return f"{key} = {as_toml(value)}  # {source}"
    return f"# {key} = {'(not set)' if value is None else as_toml(value)}"
