"""The built site, served to this machine only, and a browser. Screenshots go to out/docs-check."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from browser import opened
from playwright.sync_api import Browser

ROOT = Path(__file__).parents[2]


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):  # a page that is closed hangs up
            super().handle_error(request, client_address)


@pytest.fixture(scope="session")
def built() -> Path:
    folder = ROOT / "out" / "docs"
    assert (folder / "index.html").is_file(), f"{folder} has no site; run: make docs"
    return folder


@pytest.fixture(scope="session")
def site(built: Path) -> Iterator[str]:
    """The address of the site, without a slash at its end."""
    with _Server(("127.0.0.1", 0), partial(_Quiet, directory=built)) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join(timeout=10)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with opened() as browser:
        yield browser


@pytest.fixture(scope="session")
def screenshots() -> Path:
    folder = ROOT / "out" / "docs-check"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
