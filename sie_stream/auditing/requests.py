"""The proof that every request of a range has one terminal record, and that what the record says of itself holds. Pure.

A request is a record of a request topic. What is kept of each is a digest of its id, its time and whether it was
answered: 25 bytes, so that a million fit into 25 MB, whatever their payloads. Records are fed in this order: decisions
(as Deeds), requests, work items, raw outputs, results; then the commits of the groups, which were looked up before the
end of the results was, so that what they call finished must have its result.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import Literal, NamedTuple

from msgspec import Struct, field

from sie_stream.auditing.deeds import Deeds
from sie_stream.ids import TopicPartition, derived_request_id
from sie_stream.offsets import OffsetLedger
from sie_stream.records import CommittedOffset, Result
from sie_stream.rollout_records import answering_unit

VIOLATIONS_KEPT = 100
CLOCK_SLACK_MS = 1_000
"""A fence has the broker's time, a result its worker's: this much later it is believed to come from before."""

REPEAT, UNPROVABLE, LOST = "repeat", "unprovable", "lost"

ViolationKind = Literal[
    "two_results",
    "no_result",
    "request_missing",
    "request_is_another",
    "work_missing",
    "work_is_another",
    "placement_unresolved",
    "placed_elsewhere",
    "unknown_incarnation",
    "answered_after_fence",
    "unreadable_result",
]


class Stream(NamedTuple):
    """One partition of a request topic; of a topic bound to models once for each (`instance`), else instance ``."""

    place: TopicPartition
    instance: str = ""


class Stretch(NamedTuple):
    """Offsets that were read: `start` to below `end`. Only those from `audited` on are audited; the others are known,
    so that a repeat of an earlier request is recognised."""

    start: int
    audited: int
    end: int


class Violation(Struct, frozen=True):
    kind: ViolationKind
    where: str
    """topic/partition@offset of the record that shows it."""
    what: str
    request_id: str = ""


class RequestAudit(Struct):
    """What was found. Requests are those of the range."""

    requests: int = 0
    answered: int = 0
    by_status: dict[str, int] = field(default_factory=dict)
    repeats: int = 0
    """Dropped by ingress: their id was answered through another record."""
    open_: int = field(default=0, name="open")
    """Not ended yet, and known to be under way."""
    open_at: dict[str, int] = field(default_factory=dict)
    """The same by where they are: ingress, worker, stage 2."""
    unprovable: int = 0
    """Without a result, but results of that time are gone by retention."""
    results: int = 0
    """Read; `outside` of them belong to requests outside the range."""
    outside: int = 0
    shredded: int = 0
    """Results that hold encrypted values of subjects that were shredded: proven, and never to be read again."""
    unchecked_work: int = 0
    """Results whose work record is outside what was read, or gone."""
    unchecked_placements: int = 0
    """Results placed by decisions that are gone."""
    invisible: dict[str, int] = field(default_factory=dict)
    """Offsets that hold no visible record: markers, aborted transactions. By topic."""
    violations: int = 0
    by_kind: dict[str, int] = field(default_factory=dict)
    first: list[Violation] = field(default_factory=list)
    notes: tuple[str, ...] = ()

    @property
    def proven(self) -> bool:
        return not self.violations


class _Slots:
    """What is known of each offset of one stretch."""

    __slots__ = ("answers", "digests", "seen", "stretch", "times")

    def __init__(self, stretch: Stretch, *, timed: bool) -> None:
        size = max(0, stretch.end - stretch.start)
        self.stretch = stretch
        self.digests = array("Q", bytes(8 * size))
        self.times = array("q", bytes(8 * size if timed else 0))
        self.answers = bytearray(size if timed else 0)
        self.seen = 0

    def at(self, offset: int) -> int:
        """Index of an offset; -1 outside the stretch."""
        return offset - self.stretch.start if self.stretch.start <= offset < self.stretch.end else -1


def request_digest(request_id: str) -> int:
    """8-byte blake2b of the id, never 0."""
    return int.from_bytes(blake2b(request_id.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big") or 1


class Commits(Struct, frozen=True):
    """Committed offsets, looked up before the end of the results was."""

    ingress: dict[Stream, int]
    workers: dict[TopicPartition, CommittedOffset]


class RequestVerifier:
    """Feed in the order that the module says, then close. Offsets outside the stretches are passed over."""

    def __init__(
        self,
        streams: Mapping[Stream, Stretch],
        works: Mapping[TopicPartition, Stretch],
        deeds: Deeds,
        clock_slack_ms: int = CLOCK_SLACK_MS,
    ) -> None:
        self.report = RequestAudit()
        self._streams = {stream: _Slots(stretch, timed=True) for stream, stretch in streams.items()}
        self._works = {place: _Slots(stretch, timed=False) for place, stretch in works.items()}
        self._work_topics = frozenset(place.topic for place in works)
        self._deeds = deeds
        self._slack_ms = clock_slack_ms
        self._raw: set[int] = set()

    # ------------------------------------------------------------ feeding

    def request(self, stream: Stream, offset: int, timestamp_ms: int, request_id: str) -> None:
        slots = self._streams[stream]
        at = slots.at(offset)
        if at < 0:
            return
        slots.digests[at] = request_digest(request_id)
        slots.times[at] = timestamp_ms
        slots.seen += 1
        self.report.requests += offset >= slots.stretch.audited

    def work(self, place: TopicPartition, offset: int, request_id: str) -> None:
        slots = self._works[place]
        at = slots.at(offset)
        if at >= 0:
            slots.digests[at] = request_digest(request_id)
            slots.seen += 1

    def raw_output(self, request_id: str) -> None:
        """One that the shared Stage 2 has not finished yet."""
        self._raw.add(request_digest(request_id))

    def unreadable(self, where: str, why: str) -> None:
        self._violated("unreadable_result", where, why, "")

    def result(self, where: str, timestamp_ms: int, result: Result) -> None:
        """One terminal record; `timestamp_ms` is the record's own time."""
        report = self.report
        report.results += 1
        origin = result.provenance
        place = TopicPartition(origin.source_topic, origin.source_partition)
        if place.topic in self._work_topics:
            self._check_work(where, result, place, origin.source_offset)  # a work record that nobody could read
            report.outside += 1
            return
        slots = self._streams.get(Stream(place)) or self._streams.get(Stream(place, result.instance))
        at = -1 if slots is None else slots.at(origin.source_offset)
        if slots is None or at < 0:
            report.outside += 1
            return
        self._check_request(where, result, slots, at)
        if origin.source_offset < slots.stretch.audited:
            report.outside += 1
            return
        if origin.work_topic:
            self._check_work(
                where, result, TopicPartition(origin.work_topic, origin.work_partition), origin.work_offset
            )
        if origin.worker:
            self._check_placement(where, result)
            self._check_incarnation(where, timestamp_ms, result)

    # ------------------------------------------------------------ checks of one result

    def _check_request(self, where: str, result: Result, slots: _Slots, at: int) -> None:
        origin = result.provenance
        audited = origin.source_offset >= slots.stretch.audited
        source = f"{origin.source_topic}/{origin.source_partition}@{origin.source_offset}"
        if not slots.digests[at]:
            self._violated(
                "request_missing", where, f"answers {source}, which holds no visible record", result.request_id
            )
            return
        made = derived_request_id(origin.source_topic, origin.source_partition, origin.source_offset)
        if slots.digests[at] != request_digest(result.request_id) and not result.request_id.startswith(made):
            self._violated("request_is_another", where, f"answers {source}, which has another id", result.request_id)
            return
        if slots.answers[at]:
            if audited:
                self._violated("two_results", where, f"{source} has a terminal record already", result.request_id)
            return
        slots.answers[at] = 1
        if audited:
            self.report.answered += 1
            self.report.by_status[result.status] = self.report.by_status.get(result.status, 0) + 1

    def _check_work(self, where: str, result: Result, place: TopicPartition, offset: int) -> None:
        slots = self._works.get(place)
        at = -1 if slots is None else slots.at(offset)
        work = f"{place.topic}/{place.partition}@{offset}"
        if slots is None or at < 0:
            self.report.unchecked_work += 1
        elif not slots.digests[at]:
            self._violated("work_missing", where, f"names {work}, which holds no visible record", result.request_id)
        elif place.topic == result.provenance.work_topic and slots.digests[at] != request_digest(result.request_id):
            self._violated("work_is_another", where, f"names {work}, which is another request", result.request_id)

    def _check_placement(self, where: str, result: Result) -> None:
        origin = result.provenance
        unit = answering_unit(result.model, result.variant)
        workers = self._deeds.placed.get((origin.placement_epoch, unit))
        if workers is not None:
            if origin.worker not in workers:
                what = f"record {origin.placement_epoch} of sie.cluster placed it on {', '.join(sorted(workers))}"
                self._violated("placed_elsewhere", where, f"{origin.worker} answered, but {what}", result.request_id)
        elif self._gone(origin.placement_epoch):
            self.report.unchecked_placements += 1
        else:
            what = f"no decision about record {origin.placement_epoch} of sie.cluster placed {unit}"
            self._violated("placement_unresolved", where, what, result.request_id)

    def _gone(self, cause: int) -> bool:
        return self._deeds.first_cause < 0 or cause < self._deeds.first_cause

    def _check_incarnation(self, where: str, timestamp_ms: int, result: Result) -> None:
        """A pooled result is written by egress, long after: there the end of the engine's part counts."""
        origin, waited_ms = result.provenance, result.timings_ms.postprocess
        who = (origin.worker, origin.incarnation)
        ended_ms = self._deeds.ended_ms.get(who)
        written_ms = result.finished_at - waited_ms if waited_ms else timestamp_ms
        if ended_ms is not None and written_ms > ended_ms + self._slack_ms:
            what = f"{who[0]} ({who[1]}) had been fenced or had left {written_ms - ended_ms:.0f} ms before"
            self._violated("answered_after_fence", where, what, result.request_id)
        elif who not in self._deeds.joined and not self._gone(origin.placement_epoch):
            what = f"no decision says that {who[0]} ({who[1]}) joined"
            self._violated("unknown_incarnation", where, what, result.request_id)

    def _violated(self, kind: ViolationKind, where: str, what: str, request_id: str) -> None:
        report = self.report
        report.violations += 1
        report.by_kind[kind] = report.by_kind.get(kind, 0) + 1
        if len(report.first) < VIOLATIONS_KEPT:
            report.first.append(Violation(kind, where, what, request_id))

    # ------------------------------------------------------------ the unanswered

    @property
    def unanswered(self) -> int:
        return self.report.requests - self.report.answered

    def _silent(self) -> Iterator[tuple[Stream, int, int, int]]:
        """(stream, offset, digest, time) of audited requests without a result."""
        for stream, slots in self._streams.items():
            first = max(0, slots.stretch.audited - slots.stretch.start)
            at = slots.answers.find(0, first)
            while at >= 0:
                if slots.digests[at]:
                    yield stream, slots.stretch.start + at, slots.digests[at], slots.times[at]
                at = slots.answers.find(0, at + 1)

    def _judged(self, commits: Commits, results_from_ms: int) -> Iterator[tuple[str, Stream, int]]:
        """What became of each audited request without a result: repeat, unprovable, lost, or where it is open."""
        silent = list(self._silent())
        wanted = {digest for _, _, digest, _ in silent}
        answered = self._answered_elsewhere(wanted) if wanted else set[int]()
        working = self._in_work(wanted) if wanted else {}
        for stream, offset, digest, time_ms in silent:
            if digest in answered:
                yield REPEAT, stream, offset
            else:
                at = self._under_way(stream, offset, digest, commits, working)
                yield at or (UNPROVABLE if time_ms < results_from_ms else LOST), stream, offset

    def lost(self, commits: Commits, results_from_ms: int) -> int:
        """How many have no result so far although the commits say that they are done."""
        return sum(verdict == LOST for verdict, _, _ in self._judged(commits, results_from_ms))

    def close(self, commits: Commits, results_from_ms: int, notes: tuple[str, ...] = ()) -> RequestAudit:
        """Judge what has no result. `results_from_ms`: the oldest time of which all results are still there."""
        report = self.report
        for verdict, stream, offset in self._judged(commits, results_from_ms):
            if verdict == REPEAT:
                report.repeats += 1
            elif verdict == UNPROVABLE:
                report.unprovable += 1
            elif verdict == LOST:
                where = f"{stream.place.topic}/{stream.place.partition}@{offset}"
                self._violated(
                    "no_result", where, "the groups have committed it as done, but it has no terminal record", ""
                )
            else:
                report.open_ += 1
                report.open_at[verdict] = report.open_at.get(verdict, 0) + 1
        for place, slots in (*((stream.place, s) for stream, s in self._streams.items()), *self._works.items()):
            missing = len(slots.digests) - slots.seen
            report.invisible[place.topic] = report.invisible.get(place.topic, 0) + missing
        report.notes = notes
        return report

    def _answered_elsewhere(self, wanted: set[int]) -> set[int]:
        """Ids among `wanted` that another record of theirs was answered by."""
        return {
            digest
            for slots in self._streams.values()
            for at, digest in enumerate(slots.digests)
            if digest in wanted and slots.answers[at]
        }

    def _in_work(self, wanted: set[int]) -> dict[int, list[tuple[TopicPartition, int]]]:
        """Work records of the unanswered."""
        found: dict[int, list[tuple[TopicPartition, int]]] = {}
        for place, slots in self._works.items():
            for at, digest in enumerate(slots.digests):
                if digest and digest in wanted:
                    found.setdefault(digest, []).append((place, slots.stretch.start + at))
        return found

    def _under_way(
        self,
        stream: Stream,
        offset: int,
        digest: int,
        commits: Commits,
        working: Mapping[int, list[tuple[TopicPartition, int]]],
    ) -> str:
        """Where an open request is; empty: nowhere."""
        if offset >= commits.ingress.get(stream, 0):
            return "ingress"
        for place, at in working.get(digest, ()):
            committed = commits.workers.get(place)
            if committed is None or not is_finished(committed, at):
                return "worker"
        return "stage 2" if digest in self._raw else ""


def is_finished(committed: CommittedOffset, offset: int) -> bool:
    """Whether the ledger says so: below the committed offset, or finished above it according to its metadata."""
    return offset < committed.offset or OffsetLedger.resume(committed).is_done(offset)
