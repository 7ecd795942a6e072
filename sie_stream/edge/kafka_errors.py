"""What an error of the Kafka client means for its owner. The one place where error codes are judged."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from confluent_kafka import KafkaError, KafkaException

from sie_stream.errors import FatalLogError, Fenced, LogError, RecordTooLarge, Retriable, TransactionAborted

logger = logging.getLogger("sie_stream.kafka")
"""librdkafka's own messages and everything this adapter notices and survives."""


FENCED_CODES = frozenset(
    (
        KafkaError._FENCED,
        KafkaError.INVALID_PRODUCER_EPOCH,
        KafkaError.PRODUCER_FENCED,
        KafkaError.FENCED_INSTANCE_ID,
    )
)
FENCED_WORDS = tuple(sorted(KafkaError(code).str() for code in FENCED_CODES))
"""As librdkafka's messages tell of them."""


def _fencing_is_no_alarm(record: logging.LogRecord) -> bool:
    """librdkafka calls fencing fatal. It is how another one takes over: the process that was fenced says so itself."""
    if record.levelno > logging.INFO and any(word in record.getMessage() for word in FENCED_WORDS):
        record.levelno, record.levelname = logging.INFO, "INFO"
    return True


logger.addFilter(_fencing_is_no_alarm)
STATIC_MEMBER_FENCED = "fenced by other consumer"
"""A consumer's fatal error hides its cause in the text; this is FENCED_INSTANCE_ID."""
TOO_LARGE_CODES = frozenset(
    (KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE, KafkaError.INVALID_MSG_SIZE)
)
ABORT_CODES = frozenset(
    (
        KafkaError.OFFSET_METADATA_TOO_LARGE,
        KafkaError.ILLEGAL_GENERATION,
        KafkaError.UNKNOWN_MEMBER_ID,
        KafkaError.REBALANCE_IN_PROGRESS,
        KafkaError.TRANSACTION_ABORTABLE,
        KafkaError._PURGE_QUEUE,
        KafkaError._PURGE_INFLIGHT,
    )
)
RETRIABLE_CODES = frozenset(
    (
        KafkaError._TRANSPORT,
        KafkaError._RESOLVE,
        KafkaError._ALL_BROKERS_DOWN,
        KafkaError._TIMED_OUT,
        KafkaError._TIMED_OUT_QUEUE,
        KafkaError._MSG_TIMED_OUT,
        KafkaError._WAIT_COORD,
        KafkaError._WAIT_CACHE,
        KafkaError._IN_PROGRESS,
        KafkaError._QUEUE_FULL,
        KafkaError._RETRY,
        KafkaError._NODE_UPDATE,
        KafkaError._UNKNOWN_TOPIC,
        KafkaError._UNKNOWN_PARTITION,
        KafkaError._UNKNOWN_BROKER,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError.UNKNOWN_TOPIC_ID,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.FENCED_LEADER_EPOCH,
        KafkaError.UNKNOWN_LEADER_EPOCH,
        KafkaError.REPLICA_NOT_AVAILABLE,
        KafkaError.BROKER_NOT_AVAILABLE,
        KafkaError.REQUEST_TIMED_OUT,
        KafkaError.NETWORK_EXCEPTION,
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        KafkaError.NOT_COORDINATOR,
        KafkaError.NOT_CONTROLLER,
        KafkaError.NOT_ENOUGH_REPLICAS,
        KafkaError.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
        KafkaError.UNSTABLE_OFFSET_COMMIT,
        KafkaError.CONCURRENT_TRANSACTIONS,
        KafkaError.OFFSET_NOT_AVAILABLE,
        KafkaError.PREFERRED_LEADER_NOT_AVAILABLE,
        KafkaError.KAFKA_STORAGE_ERROR,
        KafkaError.THROTTLING_QUOTA_EXCEEDED,
        KafkaError.REASSIGNMENT_IN_PROGRESS,
    )
)


def classify(error: KafkaError, doing: str) -> LogError:
    """The exception for `error`, met while `doing` something (a few words for the message).

    Order matters: being fenced outranks everything, and only what is known to pass is Retriable.
    """
    code = error.code()
    text = f"{doing}: {error.name()} ({error.str()})"
    if code in FENCED_CODES or (code == KafkaError._FATAL and STATIC_MEMBER_FENCED in error.str()):
        return Fenced(text)
    if code in TOO_LARGE_CODES:
        return RecordTooLarge(text)
    if error.fatal():
        return FatalLogError(text)
    if error.txn_requires_abort() or code in ABORT_CODES:
        return TransactionAborted(text)
    if error.retriable() or code in RETRIABLE_CODES:
        return Retriable(text)
    return FatalLogError(text)


def kafka_error(raised: KafkaException) -> KafkaError:
    """The KafkaError inside an exception of the client."""
    inside = raised.args[0] if raised.args else None
    return inside if isinstance(inside, KafkaError) else KafkaError(KafkaError._FAIL, str(raised))


def from_exception(raised: KafkaException, doing: str) -> LogError:
    return classify(kafka_error(raised), doing)


class ClientErrorLog:
    """Global error callback: librdkafka reconnects by itself, so these are only told, each kind once in a while.

    Fatal ones surface in calls.
    """

    def __init__(self, again_after_s: float = 5.0) -> None:
        self._again_after_s = again_after_s
        self._told_at: dict[int, float] = {}

    def __call__(self, error: KafkaError) -> None:
        now_s = time.monotonic()
        if now_s - self._told_at.get(error.code(), -self._again_after_s) >= self._again_after_s:
            self._told_at[error.code()] = now_s
            logger.warning("kafka client: %s (%s)", error.name(), error.str())


def retry_until(budget_ms: int, attempt: Callable[[], None], pause_s: float = 0.01) -> None:
    """Repeat `attempt` while it raises Retriable, for at most `budget_ms`; then raise what it raised last."""
    deadline = time.monotonic() + budget_ms / 1000.0
    while True:
        try:
            return attempt()
        except Retriable:
            if time.monotonic() >= deadline:
                raise
            time.sleep(pause_s)
