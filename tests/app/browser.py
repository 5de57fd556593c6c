"""A real Chromium, found on this machine, and a server in a thread of this process."""

from __future__ import annotations

import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn

from headscope.app.launch import names
from headscope.app.server import create
from headscope.app.session import Session

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


@contextmanager
def chromium() -> Iterator[Any]:
    """A headless browser with a fresh profile; skips the test where there is none."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield browser
        browser.close()


@contextmanager
def running(session: Session) -> Iterator[str]:
    """The address of a server of this session."""
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    sock.listen()
    app = create(session, hosts=names(sock, "127.0.0.1"))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
        sock.close()


class Watched:
    """A page that remembers what went wrong in it, and whom it asked."""

    def __init__(self, context: Any, base: str, refusals: bool = False):
        self.page = context.new_page()
        self.base = base
        self.problems: list[str] = []
        self.page.on("console", lambda m: m.type in ("error", "warning") and self._note(m.text, refusals))
        self.page.on("pageerror", lambda e: self.problems.append(str(e)))
        self.page.on("dialog", lambda d: (self.problems.append(f"dialog: {d.message}"), d.dismiss()))
        # a data: URL is asked of nobody
        self.page.on("request", lambda r: r.url.startswith((base, "data:")) or self.problems.append(f"asked {r.url}"))

    def _note(self, text: str, refusals: bool) -> None:
        # the browser itself writes this for every answer that is an error; fine where a refusal is what is tested
        if not (refusals and text.startswith("Failed to load resource")):
            self.problems.append(text)

    def open(self, path: str) -> Any:
        """Go to an address and wait until nothing is loading any more."""
        self.page.goto(self.base + path)
        self.page.wait_for_load_state("networkidle")
        return self.page
