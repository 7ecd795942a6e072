"""Writing to Kafka: one transactional producer per process, and a plain one for what may be lost or repeated."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from confluent_kafka import KafkaError, KafkaException, Message, Producer
from confluent_kafka import TopicPartition as ClientPartition

from sie_stream.edge.kafka_config import writer_config
from sie_stream.edge.kafka_errors import classify, from_exception, kafka_error, logger, retry_until
from sie_stream.edge.kafka_group import KafkaGroupReader
from sie_stream.edge.kafka_pulse import Pulse
from sie_stream.edge.kafka_reader import GONE_CODES, KafkaReader, count_partitions
from sie_stream.edge.kafka_stuck import NeverReturned, close_client, within
from sie_stream.errors import FatalLogError, Fenced, LogError, RecordTooLarge, Retriable, TransactionAborted
from sie_stream.ids import TopicPartition
from sie_stream.ports import GroupReader, LogReader
from sie_stream.records import CommittedOffset, LogWrite

RECORD_BYTES_MAX = 1_000_000
STUCK_AFTER_S = 2.0
"""How long after its own timeout a call counts as lost."""
QUEUE_BUDGET_S = 10.0
"""How long a full local queue may hold write() up."""
UNKNOWN_BUDGET_S = 2.0
"""How long write() looks for a topic or partition the client has not heard of."""
SURE_SHARE = 0.9
"""Part of its shortest request timeout after which a transaction is not ended by its own client any more. Before it,
librdkafka has let no request time out, and abort_transaction() waits for those under way."""
ANSWER_MS = 100
"""librdkafka waits for an answer so much less than the transaction timeout, and for a delivery as long as that."""
TIMED_BY_US = frozenset(
    (
        "transaction.timeout.ms",
        "socket.timeout.ms",
        "message.timeout.ms",
        "delivery.timeout.ms",
        "retries",
        "message.send.max.retries",
    )
)
"""Overrides that a transactional producer does not follow: the rule above stands on their values."""


def check_sizes(writes: Sequence[LogWrite], record_bytes_max: int) -> None:
    """Raises RecordTooLarge if any record (key, value and headers) exceeds the limit."""
    for write in writes:
        size = len(write.value or b"") + len(write.key or b"")
        if write.headers:
            size += sum(len(name) + len(value) for name, value in write.headers)
        if size > record_bytes_max:
            raise RecordTooLarge(f"record of {size} bytes for {write.topic}: at most {record_bytes_max} bytes allowed")


class _Outbox:
    """The producer, and the first delivery error since somebody asked."""

    def __init__(
        self, config: Mapping[str, object], record_bytes_max: int, without_waiting: Collection[str] = ()
    ) -> None:
        self._without_waiting = without_waiting
        self.producer = Producer({**config, "on_delivery": self._delivered}, logger=logger)
        self.record_bytes_max = record_bytes_max
        self.offsets: list[int] = []
        """Where Kafka put what was delivered, by a client that is told of that too."""
        self._failed: LogError | None = None

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        if error is None:
            self.offsets.append(message.offset() or 0)
        elif self._failed is None:
            self._failed = classify(error, f"delivery to {message.topic()}[{message.partition()}]")

    def take_failure(self) -> LogError | None:
        failed, self._failed = self._failed, None
        return failed

    def flush(self, wait_ms: int) -> None:
        """Raises the first delivery error, or Retriable when records are still on their way."""
        left = self.producer.flush(wait_ms / 1000.0)
        failed = self.take_failure()
        if failed is not None:
            raise failed
        if left:
            raise Retriable(f"{left} records not delivered within {wait_ms} ms")

    def enqueue(self, writes: Iterable[LogWrite]) -> None:
        """Hand records to librdkafka (about 1 us each). Checks all sizes first, so an oversize one enqueues nothing.

        Raises Retriable (or what classify says) with some records enqueued: callers decide what that means.
        """
        batch = writes if isinstance(writes, (list, tuple)) else list(writes)
        check_sizes(batch, self.record_bytes_max)
        produce = self.producer.produce
        for write in batch:
            partition = -1 if write.partition is None else write.partition
            try:
                if write.headers:
                    produce(write.topic, write.value, write.key, partition, headers=list(write.headers))
                else:
                    produce(write.topic, write.value, write.key, partition)
            except (BufferError, KafkaException) as raised:
                self._enqueue_slowly(write, partition, raised)
        self.producer.poll(0)

    def _enqueue_slowly(self, write: LogWrite, partition: int, raised: BufferError | KafkaException) -> None:
        """Wait for room in the queue, or for the client to learn of a new partition; then try again."""
        started = time.monotonic()
        while True:
            doing = f"write to {write.topic}[{partition}]"
            budget_s = QUEUE_BUDGET_S
            if isinstance(raised, KafkaException):
                if kafka_error(raised).code() not in GONE_CODES:
                    raise from_exception(raised, doing) from raised
                if write.topic in self._without_waiting:
                    raise Retriable(f"{doing}: {raised}") from raised
                self._refresh_metadata(write.topic)
                budget_s = UNKNOWN_BUDGET_S
            if time.monotonic() - started >= budget_s:
                raise Retriable(f"{doing}: {raised}") from raised
            self.producer.poll(0.02)
            try:
                self.producer.produce(write.topic, write.value, write.key, partition, headers=list(write.headers))
                return
            except (BufferError, KafkaException) as again:
                raised = again

    def _refresh_metadata(self, topic: str) -> None:
        try:
            self.producer.list_topics(topic, timeout=2.0)
        except KafkaException as raised:
            error = from_exception(raised, f"metadata of {topic}")
            if not isinstance(error, Retriable):
                raise error from raised


class KafkaTransactionalWriter:
    """Implements ports.TransactionalWriter.

    A transaction is meant to open only to commit, so nothing lingers: commit() flushes at once. From begin() to the end
    of commit() or abort() it has SURE_SHARE of `transaction_timeout_ms`; init() may wait `init_budget_ms`.

    What is not ended by then is left to init() of a new incarnation, which takes a new epoch. librdkafka would abort
    under the old one and take the new epoch afterwards (KAFKA-14053, librdkafka #5423). A request that Kafka reads in
    between, from a connection that was given up, lands behind the abort marker, and the next commit makes it visible.
    """

    def __init__(
        self,
        bootstrap: str,
        transactional_id: str,
        transaction_timeout_ms: int = 10_000,
        overrides: Mapping[str, str] | None = None,
        record_bytes_max: int = RECORD_BYTES_MAX,
        init_budget_ms: int = 30_000,
    ) -> None:
        config = writer_config(bootstrap, None, record_bytes_max) | {
            "transactional.id": transactional_id,
            "transaction.timeout.ms": transaction_timeout_ms,
            "linger.ms": 1,
            # With rebootstrap, librdkafka 2.16 keeps a dropped broker as its group coordinator, and
            # send_offsets_to_transaction never returns, whatever its timeout (librdkafka #5511). A transaction that
            # loses its broker for good fails within its timeout instead, and the process is replaced.
            "metadata.recovery.strategy": "none",
        }
        config |= {name: value for name, value in (overrides or {}).items() if name not in TIMED_BY_US}
        self._outbox = _Outbox(config, record_bytes_max)
        self._producer = self._outbox.producer
        self._budget_ms = round(SURE_SHARE * (transaction_timeout_ms - ANSWER_MS))
        self._init_budget_ms = init_budget_ms
        self._deadline_s = 0.0
        """When (time.monotonic) the open transaction has used up its time."""
        self._fenced: Fenced | None = None
        self._open = False
        self._closed = False
        self._stuck = False
        self._readers: list[KafkaReader] = []
        """Readers whose group coordinator has answered."""
        self.transactional_id = transactional_id

    def init(self) -> None:
        deadline_s = time.monotonic() + self._init_budget_ms / 1000.0
        self._call("init_transactions", self._producer.init_transactions, deadline_s)

    def begin(self) -> None:
        self._refuse_when_fenced()
        self._outbox.take_failure()
        try:
            self._producer.begin_transaction()
        except KafkaException as raised:
            raise self._judge(from_exception(raised, "begin transaction")) from raised
        self._open = True
        self._deadline_s = time.monotonic() + self._budget_ms / 1000.0

    def write(self, writes: Iterable[LogWrite]) -> None:
        """Raises RecordTooLarge (nothing enqueued, the transaction goes on) or TransactionAborted or Fenced."""
        self._refuse_when_fenced()
        try:
            self._outbox.enqueue(writes)
        except Retriable as error:
            raise TransactionAborted(str(error)) from error
        except LogError as error:
            raise self._judge(error) from error

    def send_offsets(self, reader: LogReader | GroupReader, offsets: Mapping[TopicPartition, CommittedOffset]) -> None:
        assert isinstance(reader, (KafkaReader, KafkaGroupReader)), type(reader)
        self._refuse_when_fenced()
        if not offsets:
            return
        positions = [
            ClientPartition(topic, partition, committed.offset, committed.metadata)
            for (topic, partition), committed in offsets.items()
        ]
        self._await_coordinator(reader, offsets)
        membership = reader.membership()
        self._call(
            "send offsets",
            lambda timeout_s: self._watched(
                lambda: self._producer.send_offsets_to_transaction(positions, membership, timeout_s), timeout_s
            ),
            self._deadline_s,
        )

    def _await_coordinator(self, reader: LogReader | GroupReader, offsets: Iterable[TopicPartition]) -> None:
        """Before the first offsets of a group without members: make sure that its coordinator is up (see _watched)."""
        if isinstance(reader, KafkaReader) and not any(known is reader for known in self._readers):
            one = list(offsets)[:1]

            def ask() -> None:
                reader.committed(one)

            retry_until(self._budget_ms, ask)
            self._readers.append(reader)

    def _watched(self, call: Callable[[], None], timeout_s: float) -> None:
        """Raises FatalLogError when the call does not return.

        librdkafka 2.16 gives up on the group's coordinator after three FindCoordinator answers of "not available"
        (15 ms with our short backoff, seen while a broker starts), and then forgets whom it should have told: the
        call waits for ever, whatever its timeout. The client is lost; a new one settles the transaction.
        """
        try:
            within(timeout_s + STUCK_AFTER_S, call)
        except NeverReturned as lost:
            self._stuck = True
            message = f"send offsets of {self.transactional_id}: no answer long after {timeout_s:.0f} s"
            raise FatalLogError(message) from lost

    def commit(self) -> None:
        """Raises TransactionAborted (call abort()), RecordTooLarge (the topic's limit is lower than ours; call
        abort()), Fenced, or FatalLogError: the outcome is unknown; init() of a new writer settles it."""
        self._refuse_when_fenced()
        try:
            self._call("commit transaction", self._producer.commit_transaction, self._deadline_s)
        except TransactionAborted as error:
            failed = self._outbox.take_failure()
            if isinstance(failed, (Fenced, RecordTooLarge)):
                raise self._judge(failed) from error
            raise TransactionAborted(f"{error}; {failed}" if failed else str(error)) from error
        self._open = False

    def abort(self) -> None:
        """Nothing happens when no transaction is open. Raises Fenced, or FatalLogError: what was sent may still be on
        its way, and only init() of a new writer can keep it out."""
        self._refuse_when_fenced()
        if not self._open:
            return
        if self._closed or time.monotonic() >= self._deadline_s:
            raise FatalLogError(
                f"the transaction of {self.transactional_id} was not ended within {self._budget_ms} ms or before its"
                " writer was closed: records may still be on their way, and only a new incarnation can keep them out"
            )
        self._call("abort transaction", self._producer.abort_transaction, self._deadline_s)
        self._outbox.take_failure()
        self._open = False

    def close(self) -> None:
        """The client of a fenced writer is just dropped, and so is one with an open transaction: it would abort that
        without waiting for what is on its way. A successor's init() does it, or else Kafka after the timeout."""
        self._closed = True  # a commit thread that still waits must not abort any more
        if self._stuck or self._open:
            return  # closing would wait for the call that never returns, or purge what is on its way
        self._producer.purge()
        if self._fenced is None:
            close_client(self._producer.close)

    def _call(self, doing: str, call: Callable[[float], None], deadline_s: float) -> None:
        """One transactional call, repeated until `deadline_s` (time.monotonic) while the client says that it may be."""
        self._refuse_when_fenced()
        started_s = time.monotonic()

        def attempt() -> None:
            try:
                call(max(0.1, deadline_s - time.monotonic()))
            except KafkaException as raised:
                raise self._judge(from_exception(raised, f"{doing} of {self.transactional_id}")) from raised

        try:
            retry_until(round(max(0.0, deadline_s - started_s) * 1000.0), attempt)
        except Retriable as error:
            took_ms = round((time.monotonic() - started_s) * 1000.0)
            waiting = f"{len(self._producer)} records undelivered"  # none: Kafka has them, and did not answer the end
            raise FatalLogError(f"{error}; gave up after {took_ms} ms, {waiting}") from error

    def _judge(self, error: LogError) -> LogError:
        if isinstance(error, Fenced):
            self._fenced = error
        return error

    def _refuse_when_fenced(self) -> None:
        if self._fenced is not None:
            raise Fenced(str(self._fenced))


class KafkaPlainWriter:
    """Implements ports.PlainWriter: idempotent, outside transactions."""

    def __init__(
        self,
        bootstrap: str,
        overrides: Mapping[str, str] | None = None,
        record_bytes_max: int = RECORD_BYTES_MAX,
        delivery_timeout_ms: int = 30_000,
        without_waiting: Collection[str] = (),
    ) -> None:
        """without_waiting: topics that a write does not wait for when they are not there; the client looks for them by
        itself.
        """
        config = writer_config(bootstrap, None, record_bytes_max) | {
            "linger.ms": 2,
            "message.timeout.ms": delivery_timeout_ms,
        }
        self._config = config | dict(overrides or {})
        self._outbox = _Outbox(self._config, record_bytes_max, without_waiting)
        self._pulse = Pulse("nothing could be delivered")
        self._waiting = 0

    def write(self, writes: Iterable[LogWrite]) -> None:
        """Raises RecordTooLarge with nothing enqueued, or Retriable with the records before the failing one sent.

        FatalLogError when earlier records have been waiting for delivery for longer than any passing trouble lasts.
        """
        self._outbox.producer.poll(0)  # reports of what was delivered count as waiting until they are taken
        waiting = len(self._outbox.producer)
        if waiting == 0 or waiting < self._waiting:  # less than at the last call: something was delivered since
            self._pulse.alive()
        self._pulse.check()
        self._outbox.enqueue(writes)
        self._waiting = len(self._outbox.producer)

    def partitions_of(self, topic: str) -> int:
        """As ports.LogReader.partitions_of, at once: nothing waits on the connections of a producer."""
        return count_partitions(self._outbox.producer, topic)

    def flush(self, wait_ms: int) -> None:
        """Raises the first delivery error since the last flush, or Retriable when records are still on their way."""
        self._outbox.flush(wait_ms)

    def delivered(self, writes: Sequence[LogWrite], wait_ms: int) -> list[int]:
        """Write to a topic of one partition and wait: the offset of each. Raises what write() and flush() raise.

        A client of its own does it: telling of each delivery costs those that write much.
        """
        self.flush(wait_ms)
        outbox = _Outbox(self._config | {"delivery.report.only.error": False}, self._outbox.record_bytes_max)
        try:
            outbox.enqueue(writes)
            outbox.flush(wait_ms)
        finally:
            close_client(outbox.producer.close)
        return outbox.offsets

    def close(self) -> None:
        close_client(self._outbox.producer.close)
