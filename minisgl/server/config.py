"""The options of the server. Imports nothing heavy, so that --help is fast."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields
from functools import partial

from minisgl.config import check_at_least, check_types, option, refuse
from minisgl.errors import ConfigError
from minisgl.keys import check_key, check_named_key
from minisgl.text.parsing.names import AUTO, REASONING_PARSERS, TOOL_PARSERS

server_option = partial(option, group="Server")
REASONING_FIELDS = ("reasoning_content", "reasoning")
BOTH = "both"
ADMIN_VARIABLE = "MINISGL_ADMIN_KEY"
IMAGES = ("see", "refuse", "placeholder")
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
TEXT, JSON = "text", "json"
# A name, or an IPv6 address with or without brackets.
HOST = re.compile(r"[^/:\[\]]+|\[[^/\[\]]+\]|[^/\[\]]*:[^/\[\]]*:[^/\[\]]*")
PATH = re.compile(r"(/[\w.~-]+)*", re.ASCII)


def check_utf8(option: str, name: str, hint: str = "") -> None:
    """Refuse a model name that is not UTF-8: the shell passes any bytes, JSON does not."""
    if not name.isascii():
        try:
            name.encode()
        except UnicodeEncodeError:
            raise ConfigError(option, ascii(name), f"the name is not UTF-8{hint}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The options as the user gave them; raises ConfigError for an invalid value."""

    host: str = server_option("127.0.0.1", "Address to listen on.")
    port: int = server_option(1919, "Port to listen on; 0 takes a free one.")
    uds: str = server_option(
        "", "Path of a Unix socket to listen on, instead of an address and a port."
    )
    ssl_certfile: str = server_option("", "Certificate (PEM, with its chain); turns on HTTPS.")
    ssl_keyfile: str = server_option(
        "", "Private key of the certificate (PEM), if it is not in the same file."
    )
    root_path: str = server_option(
        "", "Path prefix under which a proxy serves this server, such as /llm."
    )
    allowed_host: tuple[str, ...] = server_option(
        (), "Additional host name that requests may be addressed to, *.NAME or *; repeatable."
    )
    api_key: tuple[str, ...] = server_option(
        (),
        "Key that requests must send as bearer token, or 'NAME: KEY' to see its name in logs and "
        "metrics; repeat for several clients.",
        secret=True,
    )
    api_key_file: str | None = server_option(
        None,
        "File with more keys, each a line KEY or NAME: KEY; lines that begin with # are comments.",
    )
    admin_key: str = server_option(
        "",
        "Key of who may load adapters and replace weights; where requests need a key, it is one, "
        "too. Also read from MINISGL_ADMIN_KEY.",
        secret=True,
        variable=ADMIN_VARIABLE,
    )
    trainer: bool = server_option(
        False,
        "Let a trainer with the admin key replace the weights, pause and resume, by the endpoints "
        "of SGLang and vLLM.",
    )
    lora_root: str = server_option(
        "",
        "Folder below which there are adapters that may be loaded while the server runs, by "
        "requests with the admin key.",
    )
    served_model_name: tuple[str, ...] = server_option(
        (), "Name of the model in requests and answers; repeat for aliases."
    )
    max_queue_seconds: float | None = server_option(
        None,
        "Seconds that a request may wait for its first step before it is refused (503); any time "
        "if not given.",
    )
    drain_timeout: float = server_option(
        30.0, "Seconds that running requests have to finish when the server stops."
    )
    cors_origin: tuple[str, ...] = server_option(
        (), "Origin whose web pages may call the server (CORS), or *; repeatable."
    )
    clamp_max_tokens: bool = server_option(
        False, "Shorten max_tokens to the room left instead of rejecting the request."
    )
    strict_fields: bool = server_option(False, "Reject unknown request fields.")
    control_tokens_in_text: bool = server_option(
        False, "Read control tokens that users and results of tools spell; otherwise they are text."
    )
    images: str = server_option(
        "see",
        "What becomes of images: see (if the model does), refuse (a request with one is a 400, and "
        "the model's tower is not loaded) or placeholder (a text says so).",
        choices=IMAGES,
    )
    tool_parser: str = server_option(
        AUTO,
        "Format of the model's tool calls: auto (by its chat template), "
        f"{', '.join(TOOL_PARSERS[1:-1])} or none.",
        choices=TOOL_PARSERS,
    )
    reasoning_parser: str = server_option(
        AUTO,
        "Format of the model's reasoning: auto (by its chat template), think or none.",
        choices=REASONING_PARSERS,
    )
    reasoning_field: str = server_option(
        "reasoning_content",
        "Member of messages that has the reasoning: reasoning_content, reasoning or both.",
        choices=(*REASONING_FIELDS, BOTH),
    )
    response_store: int = server_option(
        64,
        "Megabytes for answers of the Responses API that clients go on from by their ids, for a "
        "day; 0 keeps none.",
    )
    log_format: str = server_option(
        TEXT, "Lines of the log: text, or json (an object a line).", choices=(TEXT, JSON)
    )
    log_level: str | None = server_option(
        None,
        "Least level of what is logged: DEBUG, INFO, WARNING or ERROR; LOG_LEVEL or INFO if not "
        "given.",
        choices=LOG_LEVELS,
    )
    no_ui: bool = server_option(False, "Serve the API only: no page at / and none at /docs.")
    open: bool = server_option(False, "Open the page in a browser, which shows the loading.")

    def __post_init__(self) -> None:
        check_types(self)
        if not self.host:
            refuse(self, "host", "allowed: a host name or an address")
        if not 0 <= self.port <= 65535:
            refuse(self, "port", "allowed: 0 to 65535")
        self._check_socket()
        if not PATH.fullmatch(self.root_path):
            refuse(self, "root_path", "allowed: a path that begins with / and does not end with it")
        for name in self.allowed_host:
            if not HOST.fullmatch(name):
                raise ConfigError(
                    "--allowed-host", name, "allowed: a host name without scheme and port"
                )
        for key in self.api_key:
            check_named_key("--api-key", key)
        if self.admin_key:
            check_key("--admin-key", self.admin_key)
        if any(not name for name in self.served_model_name):
            refuse(self, "served_model_name", "allowed: names that are not empty")
        for name in self.served_model_name:
            check_utf8("--served-model-name", name)
        if not 0 <= self.drain_timeout < math.inf:
            refuse(self, "drain_timeout", "allowed: 0 or more seconds")
        if self.max_queue_seconds is not None and not 0 < self.max_queue_seconds < math.inf:
            refuse(self, "max_queue_seconds", "allowed: more than 0 seconds")
        check_at_least(self, "response_store", 0)
        for origin in self.cors_origin:
            if origin != "*" and "://" not in origin:
                raise ConfigError(
                    "--cors-origin", origin, "allowed: * or an origin such as https://example.org"
                )

        if self.open and self.no_ui:
            refuse(self, "open", "cannot be combined with --no-ui")

    @property
    def reasoning_fields(self) -> tuple[str, ...]:
        """The members that have the reasoning."""
        return REASONING_FIELDS if self.reasoning_field == BOTH else (self.reasoning_field,)

    def _check_socket(self) -> None:
        """Refuse options of the listening socket that exclude each other."""
        if self.ssl_keyfile and not self.ssl_certfile:
            refuse(self, "ssl_keyfile", "requires --ssl-certfile")
        if self.uds:
            for spec in fields(self):
                value = getattr(self, spec.name)
                if spec.name in ("host", "port", "ssl_certfile") and value != spec.default:
                    refuse(self, spec.name, "cannot be combined with --uds")
            if self.open:
                refuse(self, "open", "cannot be combined with --uds: no browser can open a socket")
