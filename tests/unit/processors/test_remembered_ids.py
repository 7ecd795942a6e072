"""The id by which a record read back from the log is remembered: headers are whatever a client put there."""

from __future__ import annotations

import pytest

from processors.ingress.decode import remembered_id
from sie_stream.records import LogRecord


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (b"abc", "abc"),
        (None, "in-the-body"),  # Kafka allows headers without a value
        (b"", "in-the-body"),
        (b"\xff", "in-the-body"),
    ],
)
def test_a_header_that_is_no_id_leaves_the_body_to_say(given: bytes | None, found: str) -> None:
    headers = (("sie-request-id", given),)
    body = b'{"request_id": "in-the-body", "model": "m", "inputs": {}}'
    record = LogRecord("sie.requests", 0, 7, 0, None, body, headers)  # type: ignore[arg-type]
    assert remembered_id(record, None) == found
