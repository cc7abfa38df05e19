"""Names the fields of a request as the client does, whose request became another one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from minisgl.errors import ContextLengthError, InvalidRequestError


@contextlib.contextmanager
def fields_named(
    name: Callable[[str], str], *, prompt_field: str, limit_field: str
) -> Iterator[None]:
    """Errors about a field name it by `name` of its dotted path in the request it became.

    prompt_field, limit_field: the client's fields with the conversation, and with max_tokens.
    """
    try:
        yield
    except ContextLengthError as error:
        raise error.with_names(prompt_field=prompt_field, limit_field=limit_field) from None
    except InvalidRequestError as error:
        error.param = name(error.param)
        raise
