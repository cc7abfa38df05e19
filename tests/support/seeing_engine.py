"""A ScriptedEngine that takes images: each becomes four tokens, whatever it shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
from support.scripted_engine import QWEN_TEMPLATE, ScriptedEngine, qwen

from minisgl.errors import InvalidRequestError
from minisgl.images.picture import Picture, with_pictures
from minisgl.images.prompt import Prompt
from minisgl.images.source import ImageSource, sources_of
from minisgl.request import EVERYONE, Tenant, cache_namespace

PAD = "<|image_pad|>"
NUM_ROWS = 4
PARTS = (
    "{%- macro shown(content) %}{% if content is string %}{{ content }}{% else %}"
    "{% for part in content %}{{ part.text if part.type == 'text' else '" + PAD + "' }}"
    "{% endfor %}{% endif %}{% endmacro %}"
)
SEEING_TEMPLATE = PARTS + QWEN_TEMPLATE.replace("message.content", "shown(message.content)")
# Leaves out what a tool has returned but its texts.
HALF_SEEING_TEMPLATE = SEEING_TEMPLATE.replace(
    "{{ shown(message.content) }}</tool_response>",
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in "
    "message.content %}{{ part.text }}{% endfor %}{% endif %}</tool_response>",
)


class SeeingEngine(ScriptedEngine):
    image_refusal = ""

    def __init__(self, template: str = SEEING_TEMPLATE, **options: Any) -> None:
        super().__init__(qwen(template, PAD), **options)
        self.pad: int = self.tokenizer.encode(PAD, add_special_tokens=False)[0]
        self.sources: list[list[ImageSource]] = []  # of each conversation
        self.namespaces: list[bytes] = []
        self.tenants: list[Tenant] = []  # the same
        self.prefix_namespaces: list[bytes] = []  # of each request
        self.submitted_by: list[Tenant] = []  # the same

    async def encode_conversation(
        self,
        messages: Sequence[Mapping[str, Any]],
        any_length: bool = False,
        cache_salt: str | None = None,
        tenant: Tenant = EVERYONE,
        /,
        **template_options: Any,
    ) -> Prompt:
        sources = sources_of(messages)
        self.sources.append(sources)
        self.namespaces.append(cache_namespace(tenant, cache_salt))
        self.tenants.append(tenant)
        rendered = await self.encode_chat(messages, any_length, **template_options)
        try:
            return Prompt(*with_pictures(rendered, self.pad, [*map(self._picture, sources)]))
        except ValueError as error:
            raise InvalidRequestError("messages", f"have {error}.") from error

    def submit(self, *arguments: Any, **options: Any) -> Any:
        tenant, salt = options["tenant"], options["cache_salt"]
        self.prefix_namespaces.append(cache_namespace(tenant, salt))
        self.submitted_by.append(tenant)
        return super().submit(*arguments, **options)

    def _picture(self, source: ImageSource) -> Picture:
        said = source.data or source.url.encode()
        ids, rows = (self.pad,) * NUM_ROWS, np.ones(NUM_ROWS, np.bool_)
        return Picture(blake2b(said).digest(), {}, ids, rows)


async def seeing_engine() -> SeeingEngine:
    return SeeingEngine()
