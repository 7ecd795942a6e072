"""What the pure parts ask of the world. edge/ implements these over Kafka, sim/ over an in-memory log.

Both implementations pass the same contract tests (tests/contract).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from sie_stream.errors import InvalidRequest
from sie_stream.ids import TopicPartition
from sie_stream.records import CommittedOffset, InputsRef, LogRecord, LogWrite


class GroupPosition(Protocol):
    """Opaque proof of membership that send_offsets needs (KIP-447)."""


class LogReader(Protocol):
    """Reads partitions it was told to read, read_committed. It joins no group; its offsets live under `group`."""

    def assign(self, positions: Mapping[TopicPartition, int]) -> None:
        """Start reading more partitions at the given offsets, without disturbing the others."""
        ...

    def unassign(self, partitions: Iterable[TopicPartition]) -> None: ...

    def pause(self, partitions: Iterable[TopicPartition]) -> None: ...

    def resume(self, partitions: Iterable[TopicPartition]) -> None: ...

    def poll(self, records_max: int, wait_ms: int) -> list[LogRecord]:
        """Records that are there; waits at most `wait_ms` for the first, never for more.

        Raises Retriable for passing trouble, FatalLogError otherwise. A position that retention has removed continues
        at the earliest offset and is reported through `lost_positions`.
        """
        ...

    def position(self, partition: TopicPartition) -> int:
        """One past everything poll() has returned or skipped: at the end of the partition it equals the end offset,
        also when the last offsets are transaction markers or aborted records (which a reader never sees).
        """
        ...

    def committed(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, CommittedOffset | None]:
        """Committed positions of this reader's group. Waits while an open transaction makes them unstable."""
        ...

    def beginning_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]: ...

    def end_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """Last stable offset: one past the last record a read_committed reader can see."""
        ...

    def offsets_at(self, partitions: Iterable[TopicPartition], timestamp_ms: int) -> dict[TopicPartition, int]:
        """First offset whose timestamp is at or after `timestamp_ms`; the end offset when there is none."""
        ...

    def partitions_of(self, topic: str) -> int:
        """Number of partitions; 0 when the topic does not exist."""
        ...

    def lost_positions(self) -> dict[TopicPartition, tuple[int, int]]:
        """Partitions that had to skip since the last call: {partition: (wanted, continued at)}."""
        ...

    def close(self) -> None: ...


class GroupEvents(Protocol):
    """What a group reader tells its owner from inside poll()."""

    def partitions_assigned(self, partitions: Sequence[TopicPartition]) -> None: ...

    def partitions_revoked(self, partitions: Sequence[TopicPartition]) -> None: ...


class GroupReader(Protocol):
    """A member of a consumer group, read_committed, never auto-committing."""

    def subscribe(self, topics: Sequence[str], events: GroupEvents) -> None:
        """Join, or change the subscription."""
        ...

    def poll(self, records_max: int, wait_ms: int) -> list[LogRecord]: ...

    def rewind(self) -> None:
        """Seek every assigned partition back to its committed offset (after an aborted transaction)."""
        ...

    def seek(self, positions: Mapping[TopicPartition, int]) -> None:
        """Read some assigned partitions from these offsets on; the others are not disturbed."""
        ...

    def close(self) -> None: ...


TRANSACTION_REST_MS = 3.0
"""From the end of one transaction to the begin of the next, where latency matters. The markers of a transaction are
written after its commit was answered; a producer that begins before they are is refused, and librdkafka tries again
20 ms later (fixed in its code). Seen on two busy cores at 500 requests/s: a third of those that begin within 1 ms, of
those after 3 ms one in fifty."""


class TransactionalWriter(Protocol):
    """One transactional producer. All methods raise Fenced once a newer incarnation took the id."""

    def init(self) -> None:
        """Take the transactional id: aborts what its last owner left open and fences that owner."""
        ...

    def begin(self) -> None: ...

    def write(self, writes: Iterable[LogWrite]) -> None:
        """Enqueue records. Raises RecordTooLarge before enqueueing an oversize one."""
        ...

    def send_offsets(self, reader: LogReader | GroupReader, offsets: Mapping[TopicPartition, CommittedOffset]) -> None:
        """Raises TransactionAborted (e.g. metadata too large, generation gone) or Fenced."""
        ...

    def commit(self) -> None:
        """Flush and commit. Returning means every record and offset is durable and visible."""
        ...

    def abort(self) -> None:
        """FatalLogError: the transaction has lasted so long that only init() of a new incarnation may end it."""
        ...

    def close(self) -> None: ...


class PlainWriter(Protocol):
    """Idempotent producer outside transactions: heartbeats, telemetry, token deltas, commands."""

    def write(self, writes: Iterable[LogWrite]) -> None: ...

    def flush(self, wait_ms: int) -> None:
        """Raises LogError when something could not be delivered within the wait."""
        ...

    def delivered(self, writes: Sequence[LogWrite], wait_ms: int) -> list[int]:
        """Write to a topic of one partition and wait: the offset of each record. Raises LogError."""
        ...

    def close(self) -> None: ...


class Contents(Protocol):
    """Reads what references name, beside the caller, who never waits for it longer than he says."""

    def prepare(self, ref: InputsRef) -> None:
        """Begin to read, if there is room: it will be asked for."""
        ...

    def ask(self, ref: InputsRef) -> bytes | InvalidRequest | None:
        """Its bytes, which are those that were meant; or why there are none; None: not there yet, ask again."""
        ...

    def wait(self, wait_ms: int) -> None:
        """Until something that was not asked for since is there, and no longer than that."""
        ...

    def settled(self) -> None:
        """What was answered by ask() is not needed any more."""
        ...


class Clock(Protocol):
    def now_ms(self) -> int:
        """Milliseconds since the epoch (wall clock)."""
        ...

    def monotonic_ms(self) -> float:
        """Milliseconds on a clock that never steps; only differences mean anything."""
        ...


class TopicSpec(NamedTuple):
    """A topic as it should be: at least `partitions`, and these configuration values."""

    topic: str
    partitions: int
    config: Mapping[str, str]


class TopicAdmin(Protocol):
    def ensure(self, topics: Sequence[TopicSpec]) -> None:
        """Create what is missing and add partitions where there are too few. Raises Retriable or FatalLogError."""
        ...
