"""One cluster, two implementations: what a contract test may do with either."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from confluent_kafka import TopicPartition as ClientPartition
from confluent_kafka.admin import AdminClient

from sie_stream.edge.kafka_log import KafkaGroupReader, KafkaPlainWriter, KafkaReader, KafkaTransactionalWriter, fence
from sie_stream.ids import TopicPartition
from sie_stream.ports import GroupReader, LogReader, PlainWriter, TopicAdmin, TopicSpec, TransactionalWriter
from sie_stream.records import CommittedOffset, LogRecord, LogWrite
from sie_stream.sim.log import SimLog
from tests.waiting import PATIENCE_MS, wait_until
from topics.edge.admin import KafkaAdmin

T = TypeVar("T")
SESSION_TIMEOUT_MS = 6_000
TRANSACTION_TIMEOUT_MS = 60_000
RECORD_BYTES_MAX = 100_000


class Polled(Protocol):
    def poll(self, records_max: int, wait_ms: int) -> list[LogRecord]: ...


class Events:
    """GroupEvents that remembers, and can do something when partitions are revoked."""

    def __init__(self) -> None:
        self.owned: set[TopicPartition] = set()
        self.revoked: list[TopicPartition] = []
        self.on_revoked: Callable[[], None] = lambda: None

    def partitions_assigned(self, partitions: Sequence[TopicPartition]) -> None:
        self.owned.update(partitions)

    def partitions_revoked(self, partitions: Sequence[TopicPartition]) -> None:
        self.on_revoked()
        self.revoked.extend(partitions)
        self.owned.difference_update(partitions)


class World(ABC):
    """A cluster that other tests use as well: every name comes from name()."""

    numbers = itertools.count()

    def name(self, what: str) -> str:
        return f"contract-{what}-{next(self.numbers)}"

    def topic(self, partitions: int = 1, config: Mapping[str, str] | None = None) -> str:
        topic = self.name("topic")
        self.admin().ensure([TopicSpec(topic, partitions, config or {})])
        return topic

    @abstractmethod
    def admin(self) -> TopicAdmin: ...

    @abstractmethod
    def reader(self, group: str = "") -> LogReader: ...

    @abstractmethod
    def group_reader(self, group: str, instance: str = "", idle_ms: int = 30_000) -> GroupReader:
        """A member that is not polled for `idle_ms` may lose its partitions."""

    @abstractmethod
    def writer(self, transactional_id: str = "", timeout_ms: int = TRANSACTION_TIMEOUT_MS) -> TransactionalWriter:
        """Not yet initialised."""

    @abstractmethod
    def plain(self) -> PlainWriter: ...

    @abstractmethod
    def delete_before(self, place: TopicPartition, offset: int) -> None: ...

    @abstractmethod
    def fence(self, transactional_id: str) -> None:
        """What the scheduler does to a lost worker."""

    @abstractmethod
    def until(self, probe: Callable[[], T], what: str) -> T:
        """First truthy answer; time passes between the attempts."""

    @abstractmethod
    def now_ms(self) -> int: ...

    # ------------------------------------------------------------ in terms of the above

    def ready_writer(self, transactional_id: str = "", timeout_ms: int = TRANSACTION_TIMEOUT_MS) -> TransactionalWriter:
        writer = self.writer(transactional_id, timeout_ms)
        writer.init()
        return writer

    def write(self, topic: str, values: Sequence[bytes], partition: int = 0) -> None:
        """Outside transactions, delivered on return."""
        plain = self.plain()
        plain.write([LogWrite(topic, value, b"k", partition) for value in values])
        plain.flush(PATIENCE_MS)

    def collect(self, reader: Polled, count: int, records_max: int = 1_000) -> list[LogRecord]:
        """Poll until `count` records are there."""
        found: list[LogRecord] = []

        def enough() -> bool:
            found.extend(reader.poll(records_max, 50))
            return len(found) >= count

        self.until(enough, f"{count} records")
        return found

    def nothing(self, reader: Polled) -> list[LogRecord]:
        """What comes although nothing should: polls long enough for a fetch to come back."""
        return [record for _ in range(4) for record in reader.poll(1_000, 100)]

    def read_all(self, topic: str, count: int, partitions: int = 1) -> list[LogRecord]:
        """By a reader of its own, from the beginning."""
        reader = self.reader()
        reader.assign({TopicPartition(topic, partition): 0 for partition in range(partitions)})
        found = self.collect(reader, count)
        reader.close()
        return found


class SimWorld(World):
    def __init__(self) -> None:
        self.log = SimLog(session_timeout_ms=SESSION_TIMEOUT_MS)

    def admin(self) -> TopicAdmin:
        return self.log.admin()

    def reader(self, group: str = "") -> LogReader:
        return self.log.reader(group or self.name("group"))

    def group_reader(self, group: str, instance: str = "", idle_ms: int = 30_000) -> GroupReader:
        return self.log.group_reader(group, instance)

    def writer(self, transactional_id: str = "", timeout_ms: int = TRANSACTION_TIMEOUT_MS) -> TransactionalWriter:
        return self.log.transactional_writer(transactional_id or self.name("id"), timeout_ms, RECORD_BYTES_MAX)

    def plain(self) -> PlainWriter:
        return self.log.plain_writer(RECORD_BYTES_MAX)

    def delete_before(self, place: TopicPartition, offset: int) -> None:
        self.log.delete_before(place, offset)

    def fence(self, transactional_id: str) -> None:
        self.log.transactional_writer(transactional_id).init()

    def until(self, probe: Callable[[], T], what: str) -> T:
        answer = probe()
        for _ in range(2_000):
            if answer:
                return answer
            self.log.clock.advance(20)
            answer = probe()
        raise AssertionError(f"waited for {what}; last answer: {answer!r}")

    def now_ms(self) -> int:
        return self.log.clock.now_ms()


class KafkaWorld(World):
    def __init__(self, bootstrap: str, now_ms: Callable[[], int]) -> None:
        self.bootstrap = bootstrap
        self.now_ms_of_clock = now_ms
        self.closing: list[Callable[[], None]] = []

    def admin(self) -> TopicAdmin:
        return KafkaAdmin(self.bootstrap)

    def reader(self, group: str = "") -> LogReader:
        reader = KafkaReader(self.bootstrap, group or self.name("group"), call_timeout_ms=8_000)
        self.closing.append(reader.close)
        return reader

    def group_reader(self, group: str, instance: str = "", idle_ms: int = 30_000) -> GroupReader:
        reader = KafkaGroupReader(
            self.bootstrap,
            group,
            instance,
            session_timeout_ms=SESSION_TIMEOUT_MS,
            poll_interval_max_ms=idle_ms,
        )
        self.closing.append(reader.close)
        return reader

    def writer(self, transactional_id: str = "", timeout_ms: int = TRANSACTION_TIMEOUT_MS) -> TransactionalWriter:
        writer = KafkaTransactionalWriter(
            self.bootstrap, transactional_id or self.name("id"), timeout_ms, record_bytes_max=RECORD_BYTES_MAX
        )
        self.closing.append(writer.close)
        return writer

    def plain(self) -> PlainWriter:
        writer = KafkaPlainWriter(self.bootstrap, record_bytes_max=RECORD_BYTES_MAX)
        self.closing.append(writer.close)
        return writer

    def delete_before(self, place: TopicPartition, offset: int) -> None:
        client = AdminClient({"bootstrap.servers": self.bootstrap})
        for future in client.delete_records([ClientPartition(place.topic, place.partition, offset)]).values():
            future.result()

    def fence(self, transactional_id: str) -> None:
        fence(self.bootstrap, transactional_id, 10_000)

    def until(self, probe: Callable[[], T], what: str) -> T:
        return wait_until(probe, what)

    def now_ms(self) -> int:
        return self.now_ms_of_clock()

    def close(self) -> None:
        for close in reversed(self.closing):
            close()


def offset_at(offset: int, metadata: str = "") -> CommittedOffset:
    return CommittedOffset(offset, metadata)


def values(records: Sequence[LogRecord]) -> list[bytes | None]:
    return [record.value for record in records]
