"""Spans to a file and to a collector."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from sie_stream.cli.trace import ExportFailed, export_spans
from sie_stream.errors import ConfigError

SPANS = {"resourceSpans": [{"scopeSpans": []}]}


class Collector(BaseHTTPRequestHandler):
    """Takes spans where OTLP says, and nothing else."""

    received: ClassVar[list[tuple[str, str | None, bytes]]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.received.append((self.path, self.headers["Content-Type"], body))
        self.send_response(200 if self.path == "/v1/traces" else 404)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the name of the base class
        """Quiet."""


@pytest.fixture
def collector() -> Iterator[str]:
    Collector.received.clear()
    server = HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_collector_gets_them_where_otlp_says(collector: str) -> None:
    export_spans(SPANS, collector)
    export_spans(SPANS, f"{collector}/v1/traces")
    assert [path for path, _, _ in Collector.received] == ["/v1/traces"] * 2
    assert Collector.received[0][1] == "application/json"
    assert json.loads(Collector.received[0][2]) == SPANS


def test_a_refusal_and_a_silent_collector_are_errors(collector: str) -> None:
    with pytest.raises(ExportFailed, match="404"):
        export_spans(SPANS, f"{collector}/elsewhere")
    with pytest.raises(ExportFailed, match="did not take the spans"):
        export_spans(SPANS, "http://127.0.0.1:1")


def test_a_file_has_one_export_a_line(tmp_path: Path) -> None:
    path = tmp_path / "spans.json"
    export_spans(SPANS, str(path))
    export_spans(SPANS, str(path))
    assert [json.loads(line) for line in path.read_text().splitlines()] == [SPANS, SPANS]
    with pytest.raises(ConfigError, match="cannot be written"):
        export_spans(SPANS, str(tmp_path / "none" / "spans.json"))
