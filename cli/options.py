"""Turns dataclasses whose fields were made with `minisgl.config.option` into options of a command.

So every option is declared once, where its value is used, and every command that takes the
dataclass offers it alike.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import Field, fields
from types import GenericAlias, NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from minisgl.config import TYPE_NAMES, option_names
from minisgl.errors import ConfigError


def takes_options(command: Callable[..., int]) -> Callable[..., int]:
    """Decorates a command whose parameters are dataclasses, such as `serve(engine: EngineConfig)`.

    The result has one keyword parameter for each field, annotated for Typer; called with their
    values, it builds the dataclasses, which check them, and calls the command.
    """
    configs: dict[str, Any] = get_type_hints(command)
    del configs["return"]

    def run(**values: Any) -> int:
        return command(**{name: _build(config, values) for name, config in configs.items()})

    parameters = [parameter for config in configs.values() for parameter in _parameters(config)]
    # Typer reads the name, the help and the options of a command from these.
    run.__name__ = command.__name__
    run.__doc__ = command.__doc__
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    signature = inspect.Signature(parameters, return_annotation=int)
    run.__signature__ = signature  # type: ignore[attr-defined]
    return run


def _build(config: Any, values: dict[str, Any]) -> Any:
    given = {spec.name: values[spec.name] for spec in fields(config)}
    # Typer collects a repeatable option in a list; the dataclasses are immutable.
    return config(
        **{
            name: tuple(value) if isinstance(value, list) else value
            for name, value in given.items()
        }
    )


def _parameters(config: Any) -> list[inspect.Parameter]:
    types = get_type_hints(config)
    return [
        inspect.Parameter(
            spec.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=list(spec.default) if isinstance(spec.default, tuple) else spec.default,
            annotation=_annotation(spec, types[spec.name]),
        )
        for spec in fields(config)
    ]


def _annotation(spec: Field[Any], annotation: Any) -> Any:
    repeatable = get_origin(annotation) is tuple
    kind = next(part for part in (*get_args(annotation), annotation) if part is not NoneType)
    option = typer.Option(
        *option_names(spec),
        help=spec.metadata["help"].replace("[", r"\["),  # which rich would read as markup
        rich_help_panel=spec.metadata["group"],
        parser=_number_parser(spec, kind) if kind in (int, float) else None,
        metavar=None if kind is bool else f"<{kind.__name__}>",
        # A flag is off unless given, and the help says what an empty value means.
        show_default=spec.default is not False and spec.default not in ("", ()),
    )
    return Annotated[GenericAlias(list, (kind,)) if repeatable else annotation, option]


def _number_parser(spec: Field[Any], kind: Any) -> Callable[[str], Any]:
    """Typer's own parser would name the option and not the value."""

    def parse(value: str) -> Any:
        try:
            return kind(value)
        except ValueError:
            allowed = f"allowed: {TYPE_NAMES[kind]}"
            raise ConfigError(option_names(spec)[0], value, allowed) from None

    return parse
