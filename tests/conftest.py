"""Normalizes the environment of the tests and of the programs that they start.

Ctrl-C and SIGHUP work also where a shell that runs the tests in the background, or `nohup`, has
them ignored: the programs that tests start would inherit that. Programs ask their own terminal for
its size, since pytest-xdist exports the size of another one. Hypothesis has no deadline and draws
as slowly as it must: no test fails because its machine was busy.

torch has one thread unless told otherwise: with models this small a second one only waits, and
takes a core for it. HTTP clients know one certificate: they would load the world's, each anew, and
what they ask is here. They wait without a limit of their own, as all waits of tests do: a machine
may be as busy as it likes, and what never comes is ended by the limit of the test.

The garbage collector rests while modules are imported and tests collected, and does not look at
these afterwards, nor at what little garbage they leave: with ten thousand tests each look would
take a second, and benchmarks look before they measure. What they freeze for the rest of their
process would stay for the rest of the tests: it is not frozen.

The processes that work for engines are forked from one that has imported what they need.

The option --record writes which tests have run.
"""

import gc
import inspect
import logging
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import hypothesis
import pytest
from support.ports import free_port
from support.record import Record
from support.tls import CERTIFICATE

from minisgl import subprocesses

gc.disable()  # until the tests are collected

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

for name in ("COLUMNS", "LINES"):
    os.environ.pop(name, None)

os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch is imported later
os.environ["SSL_CERT_FILE"] = CERTIFICATE

HTTP_FUNCTIONS = ("request", "stream", "get", "options", "head", "post", "put", "patch", "delete")
for function in (
    *(httpx.Client.__init__, httpx.AsyncClient.__init__),
    *(getattr(httpx, name) for name in HTTP_FUNCTIONS),
):
    inspect.unwrap(function).__kwdefaults__["timeout"] = None


def forked_worker(*args: Any, **options: Any) -> object:
    from support.forked_workers import ForkedWorker  # imports torch

    return ForkedWorker(*args, **options)


forked = SimpleNamespace(Popen=forked_worker, PIPE=subprocess.PIPE)
subprocesses.subprocess = forked  # type: ignore[assignment]

hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", type=Path, metavar="FILE", help="write which tests have run")


def pytest_configure(config: pytest.Config) -> None:
    file: Path | None = config.getoption("record")
    if file is not None and not hasattr(config, "workerinput"):  # a process of pytest-xdist
        config.pluginmanager.register(Record(file))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    gc.freeze()
    gc.freeze = lambda: None
    gc.enable()


@pytest.fixture(scope="module")
def started_workers() -> Iterator[None]:
    """The processes that work for engines are started as those of users are."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(subprocesses, "subprocess", subprocess)
        yield


@pytest.fixture
def logging_as_before() -> Iterator[None]:
    """A command sets up the logging of its process, which other tests count on."""
    logger, root = logging.getLogger("minisgl"), logging.getLogger()
    handlers, level, propagate = logger.handlers, logger.level, logger.propagate
    of_root = root.handlers
    yield
    root.handlers = of_root
    logger.handlers, logger.propagate = handlers, propagate
    logger.setLevel(level)


@pytest.fixture
def port() -> Iterator[int]:
    """A port for a server of the test."""
    with free_port() as reserved:
        yield reserved
