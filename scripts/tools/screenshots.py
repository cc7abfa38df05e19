"""Makes the pictures of the page for the README: `python scripts/tools/screenshots.py`.

They show a real run: a server with the demo model on the CPU, a conversation with it, and the
second view after a minute of requests whose number rises and falls.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
from pathlib import Path

import httpx
from playwright.async_api import Browser, Page, async_playwright

from minisgl.server.config import ServerConfig
from minisgl.server.process import bind

IMAGES = Path(__file__).resolve().parents[2] / ".github" / "images"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SIZE = {"width": 1180, "height": 760}
QUESTIONS = (
    "I am Ada and I live in Turin.",
    "What does --page-size do?",
    "Where do I live?",
)
LOADS = (2, 5, 9, 14, 8, 3)  # requests at once, each for a sixth of the minute
LOAD_SECONDS = 10


async def opened(browser: Browser, url: str, scheme: str) -> Page:
    page = await browser.new_page(viewport=SIZE, device_scale_factor=1.5, color_scheme=scheme)  # type: ignore[arg-type]
    await page.goto(url)
    return page


async def converse(page: Page) -> None:
    for count, question in enumerate(QUESTIONS, 1):
        await page.get_by_label("Your message").fill(question)
        await page.keyboard.press("Enter")
        await page.locator(".answer[aria-busy=false]").nth(count - 1).wait_for()
    await page.mouse.move(600, 5)
    await page.screenshot(path=IMAGES / "conversation.png")


async def load(client: httpx.AsyncClient, number: int, until: float) -> None:
    """One client, which asks again and again."""
    while asyncio.get_running_loop().time() < until:
        prompt = f"What is {number} + 25? " * (1 + number % 4)
        body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 120}
        await client.post("/v1/chat/completions", json={**body, "ignore_eos": True})


async def show_server(page: Page, url: str) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        for count in LOADS:
            until = asyncio.get_running_loop().time() + LOAD_SECONDS
            await asyncio.gather(*(load(client, number, until) for number in range(count)))
    await page.get_by_label("Shown").select_option("5 minutes")
    await page.screenshot(path=IMAGES / "server.png")


async def main() -> None:
    with bind(ServerConfig(port=0)) as probe:
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = ("-m", "minisgl", "serve", "--device", "cpu", "--port", str(port))
    server = await asyncio.create_subprocess_exec(sys.executable, *command)
    executable = next(filter(None, map(shutil.which, BROWSERS)), None)
    IMAGES.mkdir(exist_ok=True)
    try:
        async with async_playwright() as playwright:
            browser = await playwright.chromium.launch(
                executable_path=executable, args=["--no-sandbox"]
            )
            while server.returncode is None:
                try:
                    page = await opened(browser, url, "light")
                    break
                except Exception:  # it does not listen yet
                    await asyncio.sleep(0.5)
            await page.locator("#model:not([hidden])").wait_for(timeout=60_000)
            await converse(page)
            board = await opened(browser, f"{url}/#/server", "dark")
            await show_server(board, url)
            await browser.close()
    finally:
        server.terminate()
        await server.wait()


if __name__ == "__main__":
    asyncio.run(main())
