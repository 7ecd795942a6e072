"""A real HTTP server that answers as a test tells it, wrongly too."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

from tests.waiting import PATIENCE_S

Answer = object
"""A JSON body (200), an int (that status, with an error as body), bytes (sent as they are, 200), or one of Trouble."""


class Trouble:
    HANG = object()
    """No answer until the server ends."""
    CUT = object()
    """Promises more bytes than come."""
    CLOSE = object()
    """Closes the connection without an answer."""
    NOT_HTTP = object()


class WrongServer:
    """`routes`: path (without query) -> an answer, or a function of the decoded body that gives one."""

    def __init__(self, routes: dict[str, Any], port: int = 0) -> None:
        self.routes = routes
        self.calls: list[tuple[str, Any]] = []
        """Path and body of what was asked, health checks left out."""
        self.ended = threading.Event()
        handler = type("Handler", (_Handler,), {"owner": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", port), handler)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def asked(self, path: str) -> list[Any]:
        return [body for called, body in self.calls if called == path]

    def end(self) -> None:
        """From now on nobody listens."""
        self.ended.set()
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    owner: ClassVar[WrongServer]
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # its name in the library
        """Nobody reads it."""

    def _serve(self) -> None:
        raw = self.rfile.read(int(self.headers.get("content-length") or 0))
        body = json.loads(raw) if raw else None
        if "health" not in self.path:
            self.owner.calls.append((self.path, body))
        answer = self.owner.routes.get(self.path.partition("?")[0], 404)
        if callable(answer):
            answer = answer(body)
        self.close_connection = True
        if answer is Trouble.HANG:
            self.owner.ended.wait(PATIENCE_S)
        elif answer is Trouble.CUT:
            self._send(200, b'{"outputs": [', 5_000)
        elif answer is Trouble.NOT_HTTP:
            self.wfile.write(b"what?\r\n\r\n")
        elif answer is not Trouble.CLOSE:
            status = answer if isinstance(answer, int) else 200
            body = {"error": f"status {answer}"} if isinstance(answer, int) else answer
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            self._send(status, content, len(content))

    def _send(self, status: int, content: bytes, promised: int) -> None:
        self.send_response(status)
        self.send_header("content-length", str(promised))
        self.send_header("connection", "close")
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def serving(routes: dict[str, Any]) -> Iterator[WrongServer]:
    server = WrongServer(routes)
    try:
        yield server
    finally:
        if not server.ended.is_set():
            server.end()


Routes = dict[str, Any]
Respond = Callable[[Any], Any]
