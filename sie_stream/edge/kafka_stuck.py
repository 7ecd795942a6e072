"""Calls into librdkafka that may never return, whatever their timeout: run them where they can be left behind.

Seen with librdkafka 2.16: send_offsets_to_transaction after its group's coordinator was away (#5511), and close() of a
producer whose transaction was open when its broker went for good. A process that waits for one of them is neither dead
nor alive, and nobody replaces it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from confluent_kafka import KafkaException

from sie_stream.edge.kafka_errors import logger

CLOSE_S = 5.0
"""How long a client may take to say goodbye. Kafka notices those that left without it by their session."""


class NeverReturned(Exception):
    """The call is still running on its thread, which keeps its client alive until the process ends."""


def within(timeout_s: float, call: Callable[[], object]) -> None:
    """Run a call on a thread of its own (0.1 ms). Raises what the call raises, or NeverReturned after `timeout_s`."""
    outcome: list[KafkaException | RuntimeError | None] = []

    def run() -> None:
        try:
            call()
        except (KafkaException, RuntimeError) as raised:  # RuntimeError: the client is closed
            outcome.append(raised)
        else:
            outcome.append(None)

    thread = threading.Thread(target=run, name="librdkafka-call", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if not outcome:
        raise NeverReturned
    if outcome[0] is not None:
        raise outcome[0]


def close_client(close: Callable[[], object]) -> None:
    """Close a client, or leave it behind after CLOSE_S. A broken client complains about its past: told, not raised."""
    try:
        within(CLOSE_S, close)
    except KafkaException as raised:
        logger.info("close: %s", raised)
    except NeverReturned:
        logger.warning("close: no end within %.0f s; the client is left behind", CLOSE_S)
