"""Turns dataclasses whose fields were made with `minisgl.config.option` into options of a command.

So every option is declared once, where its value is used, and every command that takes the
dataclass offers it alike.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import Field, fields, is_dataclass, replace
from types import GenericAlias
from typing import Annotated, Any, get_origin, get_type_hints

import typer

from minisgl.config import TYPE_NAMES, EngineConfig, option_names
from minisgl.errors import ConfigError

from .config_file import OPTION, kind_of, read_options

ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="The same as --model.", show_default=False)
]
ConfigFile = Annotated[
    str,
    typer.Option(
        OPTION,
        metavar="<file>",
        help="TOML file with options; the command line and the environment come first.",
        show_default=False,
    ),
]
# Parameters of every command with options.
OF_EVERY = (
    inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context),
    inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, default="", annotation=ConfigFile),
)
# Where values come from, by the names in the enumeration of click.
SOURCES = {"COMMANDLINE": "command line", "ENVIRONMENT": "environment", "DEFAULT_MAP": "file"}
# Headings of --help, from everyday options to those for several GPUs; others stand before these.
LAST_GROUPS = ("Memory", "Scheduling", "Kernels", "Parallelism", "Replicas", "Ray")


def takes_options(command: Callable[..., int]) -> Callable[..., int]:
    """Decorates a command whose parameters are dataclasses, such as `serve(engine: EngineConfig)`.

    The result has one keyword parameter for each field, annotated for Typer; called with their
    values, it builds the dataclasses, which check them, and calls the command. What a file of
    --config says is there for options that are not given otherwise. Other parameters of the command
    are Typer's own, and come first.
    """
    hints: dict[str, Any] = get_type_hints(command, include_extras=True)
    own = [
        parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in inspect.signature(command).parameters.items()
        if not is_dataclass(hints[name])
    ]
    configs = {name: kind for name, kind in hints.items() if is_dataclass(kind)}

    def run(**values: Any) -> int:
        _add_file(values, configs.values())
        built = {name: _build(config, values) for name, config in configs.items()}
        return command(**built, **{parameter.name: values[parameter.name] for parameter in own})

    options = [
        (spec.metadata["group"], parameter)
        for config in configs.values()
        for spec, parameter in zip(fields(config), _parameters(config), strict=True)
    ]
    options.sort(key=lambda option: _rank(option[0]))
    first = {parameter.name: parameter for parameter in (*OF_EVERY, *own)}
    parameters = [*first.values(), *(parameter for _, parameter in options)]
    # Typer reads the name, the help and the options of a command from these.
    run.__name__ = command.__name__
    run.__doc__ = command.__doc__
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    signature = inspect.Signature(parameters, return_annotation=int)
    run.__signature__ = signature  # type: ignore[attr-defined]
    return run


def of_model(engine: EngineConfig, named: str) -> EngineConfig:
    """The options with the model that a ModelArgument names, if it names one. Raises ConfigError
    where --model names another."""
    if named and engine.model not in ("", named):
        raise ConfigError(
            "--model", engine.model, f"without it the model is {named}; allowed: one of both"
        )
    return replace(engine, model=named or engine.model)


def source_of(context: Any, spec: Field[Any]) -> str:
    """Where the value of an option comes from: one of SOURCES, or "" for a default.

    context: of click, or of Typer's own copy of click, by version.
    """
    source = SOURCES.get(context.get_parameter_source(spec.name).name, "")
    if source != SOURCES["COMMANDLINE"] and os.environ.get(spec.metadata["variable"]):
        return SOURCES["ENVIRONMENT"]
    return source


def _add_file(values: dict[str, Any], configs: Iterable[Any]) -> None:
    """Take from the file of --config what is given nowhere else. Raises ConfigError."""
    context = values["context"]
    sources = type(context.get_parameter_source("config"))
    for spec, value in read_options(values["config"], configs) if values["config"] else ():
        if not source_of(context, spec):
            values[spec.name] = value
            context.set_parameter_source(spec.name, sources.DEFAULT_MAP)
    # A model as an argument is from the command line, too.
    if values.get("named") and context.get_parameter_source("model") != sources.COMMANDLINE:
        values["model"] = ""
        context.set_parameter_source("model", sources.COMMANDLINE)


def _rank(group: str) -> int:
    """The place of a heading in --help; those with the same rank stay in order."""
    return LAST_GROUPS.index(group) + 1 if group in LAST_GROUPS else 0


def _build(config: Any, values: dict[str, Any]) -> Any:
    given = {spec.name: values[spec.name] for spec in fields(config)}
    # Typer collects a repeatable option in a list; the dataclasses are immutable.
    lists = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    return config(**given | lists)


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
    kind = kind_of(annotation)
    option = typer.Option(
        *option_names(spec),
        help=spec.metadata["help"].replace("[", r"\["),  # which rich would read as markup
        rich_help_panel=spec.metadata["group"],
        parser=_number_parser(spec, kind) if kind in (int, float) else None,
        autocompletion=_completer(spec.metadata["choices"]),
        metavar=None if kind is bool else f"<{kind.__name__}>",
        show_envvar=False,
        # A flag is off unless given, and the help says what an empty value means.
        show_default=spec.default is not False and spec.default not in ("", ()),
    )
    return Annotated[GenericAlias(list, (kind,)) if repeatable else annotation, option]


def _completer(choices: Sequence[str]) -> Callable[[str], list[str]] | None:
    """What the shell offers as the value of an option, of which a part is typed."""
    if not choices:
        return None

    # The name and the type of the parameter tell Typer what to pass.
    def complete(incomplete: str) -> list[str]:
        return [choice for choice in choices if choice.startswith(incomplete)]

    return complete


def _number_parser(spec: Field[Any], kind: Any) -> Callable[[str], Any]:
    """Typer's own parser would name the option and not the value."""

    def parse(value: str) -> Any:
        try:
            return kind(value)
        except ValueError:
            allowed = f"allowed: {TYPE_NAMES[kind]}"
            raise ConfigError(option_names(spec)[0], value, allowed) from None

    return parse
