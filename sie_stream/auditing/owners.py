"""No partition has two unfenced owners at any instant: held against what is on the topics afterwards. Pure.

The instants are those of sie.cluster, which has one order: an assignment's epoch is the offset of the record that
caused it, and releases and fences are records there. Whatever compaction left out of sie.placements only makes the
check weaker, never wrong.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from msgspec import Struct, field

from sie_stream.control import (
    ClusterRecord,
    PartitionReleased,
    PlacementRow,
    WorkerFenced,
    WorkerJoined,
    WorkerLeft,
)
from sie_stream.records import Result

Incarnation = tuple[str, str]
"""(worker, incarnation)."""


ROUNDING_MS = 1.0
"""Times are whole milliseconds."""


class Owner(NamedTuple):
    worker: str
    incarnation: str
    epoch: int

    @property
    def name(self) -> str:
        return f"{self.worker}/{self.incarnation} (epoch {self.epoch})"


class Partition(NamedTuple):
    model: str
    number: int


class End(NamedTuple):
    """From here on an incarnation commits nothing any more."""

    offset: int
    at_ms: int
    how: str


class Owners(Struct):
    """Feed it sie.cluster first, then sie.placements, then sie.results, each in its order; then read `violations`."""

    violations: list[str] = field(default_factory=list)
    assignments: int = 0
    results: int = 0
    _ends: dict[Incarnation, End] = field(default_factory=dict)
    _present: dict[str, str] = field(default_factory=dict)
    _released: dict[tuple[Partition, Owner], int] = field(default_factory=dict)
    _last: dict[Partition, Owner] = field(default_factory=dict)
    _ever: dict[Partition, set[Incarnation]] = field(default_factory=dict)
    _of_topic: dict[str, str] = field(default_factory=dict)
    """By work topic: the model, or the variant of one, that has its partitions."""
    _answered: dict[tuple[str, int, int], str] = field(default_factory=dict)

    def fact(self, offset: int, at_ms: int, record: ClusterRecord) -> None:
        """`at_ms`: the broker's time of the record."""
        match record:
            case WorkerFenced():
                self._end(record.worker, record.incarnation, End(offset, at_ms, "fenced"))
            case WorkerLeft():
                self._end(record.worker, record.incarnation, End(offset, at_ms, "left"))
            case WorkerJoined():
                before = self._present.get(record.worker)
                if before == record.incarnation or (record.worker, record.incarnation) in self._ends:
                    return  # said again
                if before is not None:
                    self._end(record.worker, before, End(offset, at_ms, "replaced"))
                self._present[record.worker] = record.incarnation
            case PartitionReleased():
                owner = Owner(record.worker, record.incarnation, record.placement_epoch)
                self._released.setdefault((Partition(record.model, record.partition), owner), offset)
            case _:
                pass

    def _end(self, worker: str, incarnation: str, end: End) -> None:
        self._ends.setdefault((worker, incarnation), end)

    def row(self, row: PlacementRow) -> None:
        """One published state of a model's placement."""
        seen: set[int] = set()
        self._of_topic[row.topic] = row.model
        for one in row.partitions:
            partition = Partition(row.model, one.partition)
            if one.partition in seen:
                self.violations.append(f"{_text(partition)} is listed twice in one row")
            seen.add(one.partition)
            self._owned(partition, Owner(one.worker, one.incarnation, one.placement_epoch))

    def _owned(self, partition: Partition, owner: Owner) -> None:
        before = self._last.get(partition)
        if before == owner:
            return
        self.assignments += 1
        self._last[partition] = owner
        self._ever.setdefault(partition, set()).add(owner[:2])
        if before is None:
            return
        freed = [self._released.get((partition, before)), *(end.offset for end in self._ended(before))]
        if not any(offset is not None and offset <= owner.epoch for offset in freed):
            self.violations.append(
                f"{_text(partition)} was given to {owner.name} while {before.name} had neither released it nor ended"
            )
        if owner.epoch <= before.epoch:
            self.violations.append(
                f"{_text(partition)} was given to {owner.name} after {before.name}: epochs must grow"
            )

    def _ended(self, owner: Owner) -> list[End]:
        end = self._ends.get((owner.worker, owner.incarnation))
        return [] if end is None else [end]

    def result(self, result: Result) -> None:
        """A committed terminal record; those that no worker made are passed over."""
        source = result.provenance
        if not source.worker or source.work_partition < 0:
            return
        self.results += 1
        maker = (source.worker, source.incarnation)
        partition = Partition(self._of_topic.get(source.work_topic, result.model), source.work_partition)
        if maker not in self._ever.get(partition, ()):
            self.violations.append(
                f"{result.request_id} was answered by {'/'.join(maker)}, which never owned {_text(partition)}"
            )
        end = self._ends.get(maker)
        # A pooled result is written by egress, later: there the worker's part counts.
        late_ms = 0.0 if end is None else result.finished_at - result.timings_ms.postprocess - end.at_ms
        if end is not None and late_ms > ROUNDING_MS:
            self.violations.append(
                f"{result.request_id} was finished by {'/'.join(maker)} {late_ms:.0f} ms after it was {end.how}"
            )
        place = (source.work_topic, source.work_partition, source.work_offset)
        if place in self._answered:
            said = f"answered as {self._answered[place]} and as {result.request_id}"
            self.violations.append(f"{_text(partition)}@{source.work_offset} was {said}")
        self._answered[place] = result.request_id


def _text(partition: Partition) -> str:
    return f"partition {partition.number} of {partition.model}"


def owners_of(
    facts: Iterable[tuple[int, int, ClusterRecord]], rows: Iterable[PlacementRow], results: Iterable[Result]
) -> Owners:
    """All three topics from their beginnings. facts: (offset, broker's time in ms, record)."""
    owners = Owners()
    for offset, at_ms, record in facts:
        owners.fact(offset, at_ms, record)
    for row in rows:
        owners.row(row)
    for result in results:
        owners.result(result)
    return owners
