"""A real browser for the pages, and an engine whose answers it can hold.

The browser is the system's (`scripts/tools/browser.sh` installs it), driven by playwright.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import axe_playwright_python
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright
from support.scripted_engine import ScriptedEngine, ScriptedStream, qwen
from support.waiting import LIMIT_S

from minisgl.engine.stats import EngineStats
from minisgl.kvcache.snapshots import SnapshotStats
from minisgl.request import FinishReason
from minisgl.scheduler.runs import DraftCounters
from minisgl.scheduler.scheduler import SchedulerCounters

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
EXECUTABLE = next(filter(None, map(shutil.which, NAMES)), None)
AXE = Path(axe_playwright_python.__file__).with_name("axe.min.js")
# Of axe-core's rules, those that its makers call serious or critical.
GRAVE = ("serious", "critical")
# Violations of the policy are events of the document, whoever causes them.
WATCH_POLICY = """
window.violations = [];
document.addEventListener("securitypolicyviolation",
    event => window.violations.push(`${event.violatedDirective} ${event.blockedURI}`));
"""


LIMIT_MS = 1000 * LIMIT_S  # a busy machine is no failure
expect.set_options(timeout=LIMIT_MS)


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        # Without its sandbox, because tests may run as root.
        started = playwright.chromium.launch(executable_path=EXECUTABLE, args=["--no-sandbox"])
        yield started
        started.close()


@contextlib.contextmanager
def opened(browser: Browser, url: str, **options: Any) -> Iterator[Page]:
    """A page in a context of its own. At the end no script has failed, and no policy was broken."""
    context: BrowserContext = browser.new_context(**{"color_scheme": "light", **options})
    context.set_default_timeout(LIMIT_MS)
    context.add_init_script(WATCH_POLICY)
    page = context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(f"{error}"))
    page.goto(url)
    yield page
    assert errors == []
    assert page.evaluate("window.violations") == []
    context.close()


def grave_faults(page: Page, within: str = "html", rules: Sequence[str] = ()) -> list[str]:
    """What axe-core finds in the page as it is, in words; by all of its rules or by `rules`."""
    if not page.evaluate("'axe' in window"):
        page.evaluate(AXE.read_text())
    options = {"runOnly": list(rules)} if rules else {}
    found: Any = page.evaluate("([within, options]) => axe.run(within, options)", [within, options])
    return [
        f"{fault['id']}: {node['html'][:120]} {node['failureSummary']}"
        for fault in found["violations"]
        if fault["impact"] in GRAVE
        for node in fault["nodes"]
    ]


class PageEngine(ScriptedEngine):
    """A ScriptedEngine that stops each answer after `hold_after` tokens, until `let_go`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(qwen(), **options)
        self.hold_after: int | None = None
        self.num_tokens = self.num_running = 0
        self.snapshots: SnapshotStats | None = None
        self.drafts: DraftCounters | None = None
        self._let_go = asyncio.Event()

    def let_go(self) -> None:
        """Call it on the loop of the server."""
        self.hold_after = None
        self._let_go.set()

    async def pause(self, stream: ScriptedStream, num_tokens: int) -> None:
        self.num_tokens += self.run
        await asyncio.sleep(0)
        if self.hold_after is not None and num_tokens >= self.hold_after:
            self._let_go.clear()
            await self._let_go.wait()

    def stats(self) -> EngineStats:
        stats = super().stats()
        counters = SchedulerCounters()
        counters.num_prompt_tokens = sum(len(stream.prompt) for stream in self.streams)
        counters.num_cached_tokens = counters.num_prompt_tokens // 2
        stats.totals.num_output_tokens = self.num_tokens
        stats.totals.num_finished[FinishReason.STOP] = len(self.streams)
        stats.totals.ttft_s.observe(0.02, len(self.streams))
        return EngineStats(
            num_running=self.num_running,
            num_queued=0,
            num_pages=stats.num_pages,
            num_free_pages=stats.num_pages // 4,
            num_cached_pages=0,
            counters=counters,
            totals=stats.totals,
            snapshots=self.snapshots,
            drafts=self.drafts,
        )
