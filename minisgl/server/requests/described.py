"""What is said of the fields of requests: in the OpenAPI description, and in errors.

A field is described by the string behind its declaration: `What it does. Default: this. Example:
`{"as": "JSON"}``. Fields without one mean what those of the same name in a chat mean.
"""

from __future__ import annotations

import ast
import functools
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Annotated, Any, TypeVar, cast

import msgspec
from msgspec import Meta, Raw, Struct

T = TypeVar("T", bound=type[Struct])
NOT_GIVEN: Any = None  # the default of a Raw, which is null where null was sent
TEXT = re.compile(r"(.*?)(?: Example: `(.*)`)?")


def unsupported(instead: str) -> Meta:
    """Of a field that takes null: any other value gets a 400 that says what to do instead."""
    return Meta(description=f"Not supported: {instead}.", extra={"instead": instead})


def only(value: Any) -> Meta:
    """Of a field that is accepted at the value that asks for nothing."""
    return Meta(description=f"Only {json.dumps(value)}.", examples=[value])


Unsupported = Annotated[None, unsupported("leave it out")]
# A value that is not decoded: a client could send many numbers that take long to read.
Ignored = Annotated[Raw, Meta(description="Accepted, and without effect.")]


def takes(kind: Any, *names: str) -> Callable[[T], T]:
    """Decorates a request with fields of this kind, of which there is nothing else to say."""

    def with_fields(request: T) -> T:
        made = msgspec.defstruct(
            request.__name__,
            [(name, kind, None) for name in names],
            bases=(request,),
            kw_only=True,
            module=request.__module__,
            namespace={"__doc__": request.__doc__},
        )
        return cast(T, made)

    return with_fields


def descriptions(kind: type) -> dict[str, dict[str, Any]]:
    """What a JSON schema says of each field of `kind` that is described where it is declared."""
    found: dict[str, dict[str, Any]] = {}
    for each in reversed(kind.__mro__):
        found |= _of_classes(each.__module__).get(each.__name__, {})
    return found


@functools.cache
def _of_classes(module: str) -> dict[str, dict[str, dict[str, Any]]]:
    """What is said of the fields of each class of a module. Reading it takes tens of
    milliseconds."""
    try:
        source = inspect.getsource(sys.modules[module])
    except (OSError, TypeError):  # not written in Python
        return {}
    return {
        declared.name: {name: _parsed(said) for name, said in _described(declared)}
        for declared in ast.parse(source).body
        if isinstance(declared, ast.ClassDef)
    }


def _described(declared: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for field, text in pairwise(declared.body):
        match field, text:
            case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(said))):
                yield name, said


def _parsed(said: str) -> dict[str, Any]:
    match = TEXT.fullmatch(" ".join(said.split()))
    assert match is not None
    about, example = match.groups()
    return {"description": about} | ({} if example is None else {"examples": [json.loads(example)]})
