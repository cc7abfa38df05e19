"""Dataclass fields as options: their declaration, and the checks of their values."""

from __future__ import annotations

from dataclasses import Field, field, fields
from types import NoneType
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

from minisgl.errors import ConfigError

TYPE_NAMES: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "a text",
    tuple: "a tuple of texts",
    NoneType: "None",
}

HIDDEN = "(not shown)"  # in place of a secret


def option(
    default: Any,
    help: str,
    *,
    names: tuple[str, ...] = (),
    group: str = "Engine",
    secret: bool = False,
) -> Any:
    """A dataclass field that the command line offers as an option.

    The option is spelled after the field (`page_size` → `--page-size`) unless `names` says
    otherwise; the first name is the one that messages use. A secret's value is in no message.
    """
    metadata = {"help": help, "names": names, "group": group, "secret": secret}
    return field(default=default, repr=not secret, metadata=metadata)


def option_names(spec: Field[Any]) -> tuple[str, ...]:
    return tuple(spec.metadata["names"]) or ("--" + spec.name.replace("_", "-"),)


def refuse(config: Any, name: str, allowed: str) -> NoReturn:
    """Raise ConfigError for field `name`, made with `option`, of the dataclass `config`."""
    spec = next(spec for spec in fields(config) if spec.name == name)
    shown = HIDDEN if spec.metadata["secret"] else getattr(config, name)
    raise ConfigError(option_names(spec)[0], shown, allowed)


def check_types(config: Any) -> None:
    """Refuse a field whose value is not of the type that it is declared with."""
    for name, hint in get_type_hints(type(config)).items():
        kinds = {get_origin(kind) or kind for kind in get_args(hint) or (hint,)}
        if get_origin(hint) is tuple:
            kinds = {tuple}
        value = getattr(config, name)
        if float in kinds:
            kinds.add(int)
        # A bool is an int to Python, and to nobody else.
        if type(value) not in kinds:
            names = " or ".join(sorted(TYPE_NAMES[kind] for kind in kinds))
            refuse(config, name, f"allowed: {names}")


def check_at_least(config: Any, name: str, low: int) -> None:
    """Refuse a field that is given and below `low`."""
    value = getattr(config, name)
    if value is not None and value < low:
        refuse(config, name, f"allowed: {low} or more")
