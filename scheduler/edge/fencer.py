"""Fencing on real Kafka: a throwaway producer takes the worker's transactional id."""

from __future__ import annotations

from collections.abc import Mapping

from sie_stream.edge.kafka_log import KafkaTransactionalWriter


class KafkaFencer:
    """Implements effects.Fencer. Takes 0.06 to 0.6 s per fence, also with a transaction of the fenced one open."""

    def __init__(self, bootstrap: str, overrides: Mapping[str, str], transaction_timeout_ms: int, wait_ms: int) -> None:
        self._bootstrap = bootstrap
        self._overrides = overrides
        self._transaction_timeout_ms = transaction_timeout_ms
        self._wait_ms = wait_ms

    def fence(self, transactional_id: str) -> None:
        """Raises LogError when the coordinator could not be reached within the wait."""
        writer = KafkaTransactionalWriter(
            self._bootstrap,
            transactional_id,
            transaction_timeout_ms=self._transaction_timeout_ms,
            overrides=self._overrides,
            init_budget_ms=self._wait_ms,
        )
        try:
            writer.init()
        finally:
            writer.close()
