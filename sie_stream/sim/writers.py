"""Writers of the simulated log: transactional and plain."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from sie_stream.errors import FatalLogError, Fenced, LogError, RecordTooLarge, Retriable, TransactionAborted
from sie_stream.ids import TopicPartition
from sie_stream.ports import GroupReader, LogReader
from sie_stream.records import CommittedOffset, LogWrite
from sie_stream.sim.cluster import METADATA_CHARS_MAX, SimCluster, SimTransaction
from sie_stream.sim.partition import SimPartition
from sie_stream.sim.readers import SimGroupReader, SimReader

RECORD_BYTES_MAX = 1_000_000


def record_bytes(write: LogWrite) -> int:
    """Key, value and headers."""
    size = len(write.value or b"") + len(write.key or b"")
    if write.headers:
        size += sum(len(name) + len(value) for name, value in write.headers)
    return size


def check_sizes(writes: list[LogWrite], record_bytes_max: int) -> None:
    for write in writes:
        size = record_bytes(write)
        if size > record_bytes_max:
            raise RecordTooLarge(f"record of {size} bytes for {write.topic}: at most {record_bytes_max} bytes allowed")


def target(cluster: SimCluster, write: LogWrite) -> SimPartition:
    """Partition of a record. Raises Retriable when there is none, RecordTooLarge above the topic's limit."""
    partitions = cluster.topics.get(write.topic)
    number = write.partition
    if not partitions or (number is not None and number >= len(partitions)):
        raise Retriable(f"{write.topic}[{number}] does not exist")
    if record_bytes(write) > cluster.record_bytes_max(write.topic):
        raise RecordTooLarge(f"{write.topic}: the broker refuses a record of {record_bytes(write)} bytes")
    return partitions[cluster.choose_partition(write.topic, write.key) if number is None else number]


class SimTransactionalWriter:
    """Implements ports.TransactionalWriter. An owner that dies leaves its transaction open, as in Kafka."""

    def __init__(
        self,
        cluster: SimCluster,
        transactional_id: str,
        transaction_timeout_ms: int,
        record_bytes_max: int,
        client: str,
    ) -> None:
        self._cluster = cluster
        self.transactional_id = transactional_id
        self._timeout_ms = transaction_timeout_ms
        self._record_bytes_max = record_bytes_max
        self.client = client
        self._epoch = -1
        self._open = False
        self._failure: LogError | None = None
        """Why the open transaction cannot commit."""
        self._fenced = False

    def init(self) -> None:
        now_ms = self._cluster.enter("init", self.client)
        self._refuse_when_fenced()
        self._epoch = self._cluster.take(self.transactional_id, self._timeout_ms, now_ms)
        self._cluster.leave("init", self.client)

    def begin(self) -> None:
        self._refuse_when_fenced()
        if self._open or self._epoch < 0:
            raise FatalLogError(f"begin of {self.transactional_id}: {'already open' if self._open else 'init() first'}")
        self._open = True
        self._failure = None

    def write(self, writes: Iterable[LogWrite]) -> None:
        now_ms = self._cluster.enter("write", self.client)
        transaction = self._mine()
        batch = list(writes)
        check_sizes(batch, self._record_bytes_max)
        touched = transaction.touched
        for write in batch:
            try:
                partition = target(self._cluster, write)
            except Retriable as error:
                raise self._spoil(TransactionAborted(str(error))) from error
            except RecordTooLarge as error:
                # As in Kafka, where the broker's refusal comes back after the record was enqueued.
                self._spoil(error)
                continue
            offset = partition.append(write, now_ms)
            seen = touched.get(partition.place)
            if seen is None:
                touched[partition.place] = (partition, [offset])
                partition.open(self.transactional_id, offset)
            else:
                seen[1].append(offset)
        if batch:
            self._cluster.touch(transaction, now_ms)

    def send_offsets(self, reader: LogReader | GroupReader, offsets: Mapping[TopicPartition, CommittedOffset]) -> None:
        assert isinstance(reader, (SimReader, SimGroupReader)), type(reader)
        now_ms = self._cluster.enter("send_offsets", self.client)
        transaction = self._mine()
        if not offsets:
            return
        self._cluster.touch(transaction, now_ms)
        if isinstance(reader, SimGroupReader):
            self._check_membership(reader)
        group = self._cluster.group(reader.group)
        for place, committed in offsets.items():
            if len(committed.metadata) > METADATA_CHARS_MAX:
                raise self._spoil(TransactionAborted(f"offset metadata of {place} too large"))
        for place, committed in offsets.items():
            transaction.offsets.setdefault(reader.group, {})[place] = committed
            group.hold_offset(place, self.transactional_id)
        self._cluster.leave("send_offsets", self.client)

    def _check_membership(self, reader: SimGroupReader) -> None:
        """KIP-447. As in Kafka, offsets that claim no membership are taken even when the group has members."""
        refusal = reader.refusal()
        if isinstance(refusal, Fenced):
            self._fenced = True
            raise refusal
        if refusal is not None:
            raise self._spoil(TransactionAborted(f"send offsets of {self.transactional_id}: {refusal}"))

    def commit(self) -> None:
        now_ms = self._cluster.enter("commit", self.client)
        transaction = self._mine()
        self._cluster.commit(transaction, now_ms)
        self._open = False
        self._cluster.leave("commit", self.client)

    def abort(self) -> None:
        """Nothing happens when no transaction is open."""
        now_ms = self._cluster.enter("abort", self.client)
        self._refuse_when_fenced()
        if not self._open:
            return
        self._cluster.abort(self._cluster.transactions[self.transactional_id], now_ms)
        self._open = False
        self._failure = None
        self._cluster.leave("abort", self.client)

    def close(self) -> None:
        """Does not abort: an open transaction ends when the id is taken again, or by its timeout."""

    def _mine(self) -> SimTransaction:
        """The open transaction. Raises Fenced, or why it cannot go on."""
        self._refuse_when_fenced()
        if not self._open:
            raise FatalLogError(f"{self.transactional_id}: no transaction is open")
        if self._failure is not None:
            raise self._failure
        return self._cluster.transactions[self.transactional_id]

    def _spoil(self, error: LogError) -> LogError:
        self._failure = error
        return error

    def _refuse_when_fenced(self) -> None:
        """Raises Fenced once the coordinator knows a newer epoch: another owner, or our transaction timed out."""
        if not self._fenced and self._epoch >= 0:
            self._fenced = self._cluster.transactions[self.transactional_id].epoch != self._epoch
        if self._fenced:
            raise Fenced(f"{self.transactional_id}: a newer incarnation took this id, or the transaction timed out")


class SimPlainWriter:
    """Implements ports.PlainWriter; records are there at once."""

    def __init__(self, cluster: SimCluster, record_bytes_max: int, client: str) -> None:
        self._cluster = cluster
        self._record_bytes_max = record_bytes_max
        self.client = client
        self._failure: LogError | None = None

    def write(self, writes: Iterable[LogWrite]) -> None:
        self._write(writes)

    def _write(self, writes: Iterable[LogWrite]) -> list[int]:
        """Returns the offsets of those that have a place."""
        now_ms = self._cluster.enter("plain_write", self.client)
        offsets: list[int] = []
        batch = list(writes)
        check_sizes(batch, self._record_bytes_max)
        for write in batch:
            try:
                partition = target(self._cluster, write)
            except LogError as error:
                self._failure = self._failure or error
                continue
            offsets.append(partition.append(write, now_ms))
            partition.settle()
        return offsets

    def delivered(self, writes: Sequence[LogWrite], wait_ms: int) -> list[int]:
        self.flush(wait_ms)
        offsets = self._write(writes)
        self.flush(wait_ms)
        return offsets

    def flush(self, wait_ms: int) -> None:
        self._cluster.enter("flush", self.client)
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        pass
