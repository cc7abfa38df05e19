"""A plugin of pytest: a run in Triton's interpreter fails if no test ran one of minisgl's Triton
functions. Load it with `-p support.kernels_reached`; tests/ must be in PYTHONPATH."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import pytest

import minisgl.kernels

# In inline PTX: they prefetch and compute nothing, or are tried by test_mxfp4_experts.py.
FOR_GPUS = {
    "minisgl.kernels.inlined.prefetch",
    "minisgl.kernels.linear.delta_parts._fetch",
    "minisgl.kernels.linear.gemm_parts.fetch",
    "minisgl.kernels.linear.weight_only.unpacking_e2m1._factors",
}


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Reached())


class Reached:
    """Gathers the functions that ran, here and in the processes of pytest-xdist."""

    def __init__(self) -> None:
        self._ran: set[str] = set()
        self._missed: list[str] = []

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        self._ran.update(getattr(node, "workeroutput", {}).get("kernels_ran", ()))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self._ran.update(functions_that_ran())
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["kernels_ran"] = sorted(self._ran)
            return
        self._missed = sorted(all_functions() - self._ran - FOR_GPUS)
        if self._missed and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for name in self._missed:
            terminalreporter.write_line(f"NOT RUN by any test: {name}", red=True)


def functions_that_ran() -> set[str]:
    """In this process. The interpreter rewrites a function when it runs for the first time."""
    from triton.runtime.interpreter import InterpretedFunction

    return {_name(each) for each in InterpretedFunction.rewritten_fn}


def all_functions() -> set[str]:
    """Of the package minisgl.kernels, launched or called by others."""
    from triton.runtime.interpreter import InterpretedFunction

    folders = minisgl.kernels.__path__
    found = [each.name for each in pkgutil.walk_packages(folders, "minisgl.kernels.")]
    objects = [value for name in found for value in vars(importlib.import_module(name)).values()]
    names = {_name(each.fn) for each in objects if isinstance(each, InterpretedFunction)}
    return {name for name in names if name.startswith("minisgl.")}


def _name(function: Any) -> str:
    return f"{function.__module__}.{function.__qualname__}"
