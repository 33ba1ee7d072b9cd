"""The page of a store that is still being filled, for browsers of this machine alone.

`serve` listens on the loopback address. The page asks every two seconds whether the store has
changed, and loads itself again when it has. Standard library only.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

HOST = "127.0.0.1"
NAMES = ("127.0.0.1", "localhost")  # that a browser may have asked for


class Followed:
    """A page that is made again when the state of what it shows is another."""

    def __init__(self, state: Callable[[], str], made: Callable[[str], str]) -> None:
        self.state, self.made = state, made
        self.lock = threading.Lock()
        self.seen, self.page = "", b""

    def current(self) -> bytes:
        """The page of now. One request at a time makes it; others wait for the same."""
        with self.lock:
            state = self.state()
            if state != self.seen or not self.page:
                self.page, self.seen = self.made(state).encode(), state
            return self.page


def server(page: Followed, port: int) -> ThreadingHTTPServer:
    """A server that listens on the loopback address; `serve_forever` answers. Port 0 is a free
    one."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            # Another site's name may lead here too; its pages must not read this one.
            asked = urlsplit(f"//{self.headers.get('Host', '')}").hostname
            if asked not in NAMES:
                self._answer(HTTPStatus.FORBIDDEN, "text/plain", b"this page is for this machine\n")
            elif self.path in ("/", "/report.html"):
                self._answer(HTTPStatus.OK, "text/html", page.current())
            elif self.path == "/state":
                self._answer(HTTPStatus.OK, "text/plain", page.state().encode())
            else:
                self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"there is one page, at /\n")

        def _answer(self, status: HTTPStatus, kind: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """A line per request would bury what the command says."""

    ThreadingHTTPServer.daemon_threads = True
    return ThreadingHTTPServer((HOST, port), Handler)


def server_near(page: Followed, port: int) -> ThreadingHTTPServer:
    """The same at this port, or at a free one where somebody listens already."""
    try:
        return server(page, port)
    except OSError as e:
        if e.errno != errno.EADDRINUSE:
            raise
        return server(page, 0)
