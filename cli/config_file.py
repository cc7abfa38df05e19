"""Options in a TOML file: a key is the name of an option, with - or _."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import Field, fields
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from minisgl.config import INSTEAD, TYPE_NAMES, option_names
from minisgl.config.keywords import FAMILIAR
from minisgl.errors import ConfigError, nearest
from minisgl.keys import warn_if_open

OPTION = "--config"
NAMES: Mapping[Any, str] = {**TYPE_NAMES, bool: "true or false", list: "a list", dict: "a table"}
ESCAPED = re.compile(r'[^ -~]|["\\]')


def read_options(path: str, configs: Iterable[Any]) -> list[tuple[Field[Any], Any]]:
    """The options in the file, each with its value; those of a repeatable one are a list.

    configs: the dataclasses whose fields are allowed. Raises ConfigError.
    """
    known = {
        _plain(name.removeprefix("--")): (spec, hints[spec.name])
        for config in configs
        for hints in [get_type_hints(config)]
        for spec in fields(config)
        for name in option_names(spec)
    }
    table, mode = _read(path)
    keys: dict[str, str] = {}
    found = []
    for key, value in table.items():
        if _plain(key) not in known:
            raise ConfigError(OPTION, path, f"there is no option {key}; {_hint(key, known)}")
        spec, hint = known[_plain(key)]
        if spec.name in keys:
            said = f"{keys[spec.name]} and {key} are the same option; allowed: one of them"
            raise ConfigError(OPTION, path, said)
        keys[spec.name] = key
        found.append((spec, _checked(path, key, value, hint)))
    if any(spec.metadata["secret"] for spec, _ in found):
        warn_if_open(mode, path, holds="the keys")
    return found


def kind_of(hint: Any) -> Any:
    """The type of a value of an option with this annotation; of each, if it is repeatable."""
    return next(part for part in (*get_args(hint), hint) if part is not NoneType)


def as_toml(value: Any) -> str:
    """The value of an option as TOML has it, in ASCII."""
    match value:
        case bool():
            return str(value).lower()
        case str():
            return '"' + ESCAPED.sub(_escape, value) + '"'
        case list() | tuple():
            return f"[{', '.join(map(as_toml, value))}]"
    return repr(value)


def _escape(found: re.Match[str]) -> str:
    char = found[0]
    return f"\\{char}" if char in '"\\' else f"\\U{ord(char):08x}"


def _plain(key: str) -> str:
    return key.replace("-", "_")


def _read(path: str) -> tuple[dict[str, Any], int]:
    """What is in the file, and the mode that says who may read it."""
    allowed = "allowed: a TOML file, with lines such as page-size = 16"
    try:
        with open(path, "rb") as file:
            return tomllib.load(file), os.fstat(file.fileno()).st_mode
    except OSError as error:
        raise ConfigError(OPTION, path, f"{error.strerror}; {allowed}") from None
    except UnicodeDecodeError:
        raise ConfigError(OPTION, path, f"not UTF-8; {allowed}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(OPTION, path, f"not TOML, {error}; {allowed}") from None


def _hint(key: str, known: Iterable[str]) -> str:
    """What to do in place of a key that does not exist."""
    if instead := INSTEAD.get(_plain(key)):
        return instead
    near = nearest(_plain(key), known, FAMILIAR)
    return f"did you mean {near.replace('_', '-')}?" if near else "--help lists those there are"


def _checked(path: str, key: str, value: Any, hint: Any) -> Any:
    """The value, if it has the type of the option; its range is the dataclass's to check."""
    kind, is_repeatable = kind_of(hint), get_origin(hint) is tuple
    values = value if is_repeatable and isinstance(value, list) else [value]
    for each in values:
        if type(each) is not kind and (type(each), kind) != (int, float):
            # The value is not shown: it may be a secret.
            said = NAMES.get(type(each), "a date or time")
            allowed = NAMES[kind] + (" or a list of texts" if is_repeatable else "")
            raise ConfigError(OPTION, path, f"{key} has {said}; allowed: {allowed}")
    return values if is_repeatable else value
