"""Declares options as dataclass fields, and checks their values."""

from __future__ import annotations

from dataclasses import Field, field, fields
from types import NoneType
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

from minisgl.errors import ConfigError, one_of
from minisgl.request import PARAMETERS

TYPE_NAMES: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "a text",
    tuple: "a list of texts",
    NoneType: "None",
}

HIDDEN = "(not shown)"  # printed in place of a secret


def option(
    default: Any,
    help: str,
    *,
    names: tuple[str, ...] = (),
    group: str = "Engine",
    secret: bool = False,
    choices: tuple[str, ...] = (),
    variable: str = "",
) -> Any:
    """Declare a dataclass field as a command-line option.

    names: its spellings, by default derived from the field (`page_size` → `--page-size`); messages
    use the first. group: heading in --help. secret: messages do not show the value. choices: the
    only values, if there are few; the shell completes them. variable: of the environment, which
    gives the value if the command line does not.
    """
    metadata = {
        "help": help,
        "names": names,
        "group": group,
        "secret": secret,
        "choices": choices,
        "variable": variable,
    }
    return field(default=default, repr=not secret, metadata=metadata)


def option_names(spec: Field[Any]) -> tuple[str, ...]:
    """The spellings of an option on the command line."""
    return tuple(spec.metadata["names"]) or ("--" + spec.name.replace("_", "-"),)


def refuse(config: Any, name: str, allowed: str) -> NoReturn:
    """Raise ConfigError for the value of the option `name` of `config`.

    allowed: the allowed values, or why this one is refused.
    """
    spec = next(spec for spec in fields(config) if spec.name == name)
    value = getattr(config, name)
    if spec.metadata["secret"]:
        value = HIDDEN
    elif get_type_hints(type(config))[name] is not bool:
        value = str(value)  # True is refused for a number, too
    raise ConfigError(option_names(spec)[0], value, allowed)


def check_types(config: Any) -> None:
    """Raise ConfigError for a field whose value does not have its declared type, or is none of its
    choices."""
    hints = get_type_hints(type(config))
    for spec in fields(config):
        name, hint = spec.name, hints[spec.name]
        kinds = {get_origin(kind) or kind for kind in get_args(hint) or (hint,)}
        if get_origin(hint) is tuple:
            kinds = {tuple}
        value = getattr(config, name)
        if float in kinds:
            kinds.add(int)
        # A bool is an int in Python, but not as an option.
        if type(value) not in kinds:
            names = " or ".join(sorted(TYPE_NAMES[kind] for kind in kinds))
            refuse(config, name, f"allowed: {names}")
        choices = spec.metadata["choices"]
        if choices and value is not None and value not in choices:
            refuse(config, name, one_of(choices))


def check_parameter(config: Any, name: str) -> None:
    """Raise ConfigError if the option for the sampling parameter `name` is set and out of range."""
    value, bounds = getattr(config, name), PARAMETERS[name]
    if value is not None and not bounds.low <= value <= bounds.high:
        refuse(config, name, f"allowed: {bounds.low:g} to {bounds.high:g}")


def check_at_least(config: Any, name: str, low: int) -> None:
    """Raise ConfigError if field `name` is set to a value below `low`."""
    value = getattr(config, name)
    if value is not None and value < low:
        refuse(config, name, f"allowed: {low} or more")
