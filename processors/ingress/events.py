"""What happens to ingress, and what it answers."""

from __future__ import annotations

from msgspec import Struct

from sie_stream.control import RouteRow
from sie_stream.ids import TopicPartition
from sie_stream.records import CommittedOffset, LogRecord, LogWrite


class RoutesChanged(Struct, frozen=True):
    """Rows of the route table, oldest first; None: the row was deleted."""

    rows: tuple[tuple[str, RouteRow | None], ...]


class ShareChanged(Struct, frozen=True):
    """Part of all input partitions that this process holds, 0 to 1: its part of every quota."""

    share: float


class WindowRead(Struct, frozen=True):
    """(request id, time) of requests taken up earlier, read back from the log at assignment."""

    group: str
    topic: str
    entries: tuple[tuple[str, int], ...]


class GroupBatch(Struct, frozen=True, gc=False):
    """Records of one consumer group, in the order of each partition."""

    group: str
    records: list[LogRecord]


class RecordsPolled(Struct, frozen=True, gc=False):
    batches: tuple[GroupBatch, ...]
    now_ms: int


class BatchAborted(Struct, frozen=True):
    """The transaction of this command did not commit; its records will come again."""

    batch: CommitBatch


class BatchTooLarge(Struct, frozen=True):
    """As BatchAborted, because the broker takes smaller records than the settings allow."""

    batch: CommitBatch


IngressEvent = RoutesChanged | ShareChanged | WindowRead | RecordsPolled | BatchAborted | BatchTooLarge


class Subscribe(Struct, frozen=True):
    """Read exactly these topics in this group. `offset_reset`: where a partition starts that was never read."""

    group: str
    topics: tuple[str, ...]
    offset_reset: str


class Unsubscribe(Struct, frozen=True):
    group: str


class CommitBatch(Struct, frozen=True, gc=False):
    """One transaction: these records and these positions, or nothing. `remembered`: keys put into the dedupe window."""

    writes: list[LogWrite]
    offsets: tuple[tuple[str, dict[TopicPartition, CommittedOffset]], ...]
    """(group, next offset to read per partition)."""
    remembered: list[str]
    held: tuple[tuple[str, dict[TopicPartition, int]], ...] = ()
    """(group, offset to read again): these partitions wait for inputs that references name."""


IngressCommand = Subscribe | Unsubscribe | CommitBatch
