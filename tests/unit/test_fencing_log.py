"""Being fenced is how another process takes over: librdkafka's words about it are no alarm."""

from __future__ import annotations

import pytest

from sie_stream.edge.kafka_errors import logger


@pytest.mark.parametrize(
    ("words", "level"),
    [
        ("FATAL [rdkafka#producer-1] Fatal error: Local: This instance has been fenced by a newer instance", "INFO"),
        ("FATAL [rdkafka#producer-1] Fatal error: Broker: Out of sequence", "CRITICAL"),
    ],
)
def test_fencing_is_told_quietly_and_other_fatal_errors_are_not(
    words: str, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    logger.critical(words)
    assert [record.levelname for record in caplog.records] == [level]
