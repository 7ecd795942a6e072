"""What must always be true of a world. Looks at every transaction at the moment it commits; raises Violation.

Nothing here believes what a host says about itself: only records, committed offsets and what users sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from schemas.codec import (
    decode_cluster,
    decode_deadletter,
    decode_decision,
    decode_raw_output,
    decode_result,
    decode_row,
    decode_token_delta,
    decode_work,
)
from sie_stream.auditing.owners import owners_of
from sie_stream.control import ClusterRecord, PlacementRow, RouteRow
from sie_stream.ids import TopicNames, TopicPartition
from sie_stream.offset_metadata import METADATA_CHARS_MAX, decode
from sie_stream.records import CommittedOffset, LogRecord, Result, WorkItem
from sie_stream.rollout_records import SHADOW
from sie_stream.routing import choose_variant, sticky_key
from sie_stream.sim.cluster import SimTransaction
from sie_stream.sim.partition import SimPartition
from sie_stream.sim.stream_checker import StreamChecker
from sie_stream.sim.traffic import BOUND_GROUP, BOUND_TOPIC, COPIES_TOPIC, Traffic, right_answer
from sie_stream.sim.world import Violation, World

Refold = Callable[[Sequence[tuple[LogRecord, ClusterRecord]]], list[tuple[str, bytes]]]
"""A fresh scheduler folds these; returns (decision id, record value) in order."""


class Checkers:
    """Always on: `on_commit` for every transaction, `at_end` once everything has drained."""

    def __init__(self, world: World, traffic: Traffic, names: TopicNames) -> None:
        self.world = world
        self.traffic = traffic
        self.names = names
        self.terminal: dict[str, Result] = {}
        self.raw: dict[str, LogRecord] = {}
        self.routed: dict[str, LogRecord] = {}
        self.copies: dict[str, LogRecord] = {}
        self.compared: dict[str, LogRecord] = {}
        """What shadows answered, by variant and request: nobody is given it."""
        self.letters: dict[str, int] = {}
        self.decisions: dict[str, bytes] = {}
        self.marks: dict[str, int] = {}
        """What happened, and how often: kinds of decisions, and the rarer things that hosts do."""
        self.transactions = 0
        self._work_prefix = names.work("")
        self._committed: dict[tuple[str, TopicPartition], int] = {}
        self._placements: dict[str, dict[int, tuple[str, str]]] = {}
        """Work topic -> partition -> (worker, incarnation) as last published."""
        self._topics: dict[str, str] = {}
        self._routes: dict[tuple[str, int], RouteRow] = {}
        """Every route that was ever published."""
        self._ordered: dict[tuple[str, int, str], int] = {}
        world.log.cluster.on_commit = self.on_commit

    def on_commit(self, transaction: SimTransaction) -> None:
        self.transactions += 1
        client = self.world.calling
        records = 0
        for partition, offsets in transaction.touched.values():
            for offset in offsets:
                record = partition.entries[offset]
                assert record is not None
                records += 1
                self._saw(record, client)
        for group, sent in transaction.offsets.items():
            for place, committed in sent.items():
                self._moved(group, place, committed, client)
        self.world.note(f"commit {client}: {records} records, {_positions(transaction.offsets)}")

    def _mark(self, what: str) -> None:
        self.marks[what] = self.marks.get(what, 0) + 1

    # ------------------------------------------------------------ records

    def _saw(self, record: LogRecord, client: str) -> None:
        topic = record.topic
        if topic == self.names.results:
            self._ended(decode_result(record.value), record, client)
        elif topic == self.names.shadow:
            self._answered_as_shadow(decode_result(record.value), record)
        elif topic == self.names.outputs:
            self._once(self.raw, self._id(record), record, "raw output")
        elif topic.startswith(self._work_prefix):
            work = decode_work(record.value)
            self._once(self.routed, self._id(record), record, "work item")
            self._as_routed(work, record)
        elif topic == COPIES_TOPIC:
            self._copied(decode_result(record.value).request_id, record)
        elif topic == self.names.decisions:
            self._decided(record)
        elif topic == self.names.placements:
            self._placed(record)
        elif topic == self.names.routes and record.value is not None:
            row = decode_row(record.value, RouteRow)
            self._routes[row.model, row.route_epoch] = row
        elif topic == self.names.snapshots:
            self._mark("snapshot")
        elif topic == self.names.deadletter:
            self._mark("dead_letter")
            request_id = decode_deadletter(record.value).request_id
            self.letters[request_id] = self.letters.get(request_id, 0) + 1

    def _as_routed(self, work: WorkItem, record: LogRecord) -> None:
        """The variant is the one that owns the key in the route of that epoch, and the topic is the variant's."""
        row = self._routes[work.model, work.route_epoch]
        if work.variant[:1] == SHADOW:
            named = (work.variant[1:], work.version, record.topic)
            if named not in [(one.variant, one.version, one.topic) for one in row.variants if one.shadow]:
                raise Violation(
                    f"a copy of {work.request_id} for {named}, which is no shadow in epoch {row.route_epoch}"
                )
            self._mark("shadow")
            return
        sticky = sticky_key(work.session, work.key, work.request_id)
        owner = choose_variant(row.variants, sticky, row.instance.encode())
        if (owner.variant, owner.version) != (work.variant, work.version):
            raise Violation(
                f"{work.request_id} went to {work.variant}, epoch {work.route_epoch} gives it {owner.variant}"
            )
        if record.topic != (owner.topic or row.topic):
            raise Violation(f"{work.request_id} of {work.variant} lies in {record.topic}")
        if work.variant != "stable":
            self._mark("canary")

    def _once(self, seen: dict[str, LogRecord], request_id: str, record: LogRecord, what: str) -> None:
        before = seen.setdefault(request_id, record)
        if before is not record:
            raise Violation(f"{what} of {request_id} twice: {_at(before)} and {_at(record)}")
        if request_id in self.terminal:
            raise Violation(f"{what} of {request_id} at {_at(record)} after its terminal record")

    def _copied(self, request_id: str, record: LogRecord) -> None:
        """The user's own topic gets every result once, in the transaction of the terminal record."""
        self._mark("copy")
        before = self.copies.setdefault(request_id, record)
        if before is not record:
            raise Violation(f"copy of {request_id} twice: {_at(before)} and {_at(record)}")

    def _answered_as_shadow(self, result: Result, record: LogRecord) -> None:
        """Once for each copy, and the right answer."""
        self._once(self.compared, _compared_id(result.variant, result.request_id), record, "answer of a shadow")
        expected = self.traffic.by_id.get(result.request_id)
        inputs = None if expected is None else expected.inputs
        if result.status == "ok" and inputs is not None and result.outputs != right_answer(result.request_id, inputs):
            raise Violation(f"{result.variant} answered {result.request_id} with {result.outputs!r}")

    def _ended(self, result: Result, record: LogRecord, client: str) -> None:
        request_id = result.request_id
        if result.variant[:1] == SHADOW:
            raise Violation(f"{request_id} was answered by the shadow {result.variant} at {_at(record)}")
        if request_id in self.terminal:
            raise Violation(f"a second terminal record of {request_id} at {_at(record)}, by {client}")
        self.terminal[request_id] = result
        expected = self.traffic.by_id.get(request_id)
        source = result.provenance
        if expected is None:
            self._resolve(source.source_topic, source.source_partition, source.source_offset, request_id)
            expected = self.traffic.by_id[request_id]
        broken = ("failed",) if (result.model, result.version) in self.traffic.broken else ()
        if result.status not in (*expected.statuses, *broken):
            raise Violation(f"{request_id} ended as {result.status} ({result.error}), expected {expected.statuses}")
        if result.status == "ok":
            assert expected.inputs is not None
            if result.outputs != right_answer(request_id, expected.inputs):
                raise Violation(f"{request_id} has the wrong answer {result.outputs!r}")
            self._in_order(result, record)
        self._resolve(source.source_topic, source.source_partition, source.source_offset, request_id)
        if source.work_topic:
            self._resolve(source.work_topic, source.work_partition, source.work_offset, request_id)
            made_by = f"{source.worker}/{source.incarnation}"
            if client.startswith("worker") and source.worker and process_of(client) != made_by:
                raise Violation(f"{request_id}: {client} wrote a result of {made_by}")

    def _resolve(self, topic: str, partition: int, offset: int, request_id: str) -> None:
        """What provenance names must be a record of this request."""
        found = self.world.log.cluster.find(TopicPartition(topic, partition))
        record = found.entries[offset] if found is not None and 0 <= offset < found.end else None
        if record is None or self._id(record) != request_id:
            raise Violation(f"provenance of {request_id} names {topic}[{partition}]@{offset}, which is {record}")

    def _in_order(self, result: Result, record: LogRecord) -> None:
        """Models that keep the order of a key answer in the order of their work partition."""
        if not self.traffic.ordered(result.model) or record.key is None:
            return
        source = result.provenance
        stream = (source.work_topic, source.work_partition, record.key.hex())
        before = self._ordered.get(stream, -1)
        if source.work_offset <= before:
            raise Violation(f"{result.request_id} of work offset {source.work_offset} was answered after {before}")
        self._ordered[stream] = source.work_offset

    def _decided(self, record: LogRecord) -> None:
        decided = decode_decision(record.value)
        decision = decided.decision
        self._mark(decided.kind)
        if decided.kind == "replicas_scaled":
            self._mark(str(decided.chosen["rule"]))
        self.world.note(f"{decision} {decided.kind} {decided.subject} {decided.chosen}")
        if decided.kind == "record_refused":
            raise Violation(f"the fold raised: {decided.reason}")
        if decision in self.decisions:
            raise Violation(f"decision {decision} twice; the second at {_at(record)}")
        assert record.value is not None
        self.decisions[decision] = record.value

    def _placed(self, record: LogRecord) -> None:
        model = (record.key or b"").decode()
        if record.value is None:
            self._placements.pop(self._topics.get(model, ""), None)
            return
        row = decode_row(record.value, PlacementRow)
        self._topics[model] = row.topic
        self._placements[row.topic] = {one.partition: (one.worker, one.incarnation) for one in row.partitions}

    # ------------------------------------------------------------ offsets

    def _moved(self, group: str, place: TopicPartition, committed: CommittedOffset, client: str) -> None:
        partition = self.world.log.cluster.existing(place)
        before = self._committed.get((group, place), partition.start)
        self._committed[group, place] = committed.offset
        if committed.offset < before:
            raise Violation(f"{client} moved {group} on {_text(place)} back from {before} to {committed.offset}")
        if committed.offset > partition.lso and group != self.names.scheduler_group:
            raise Violation(f"{client} committed {_text(place)} at {committed.offset}, stable is {partition.lso}")
        if group == self.names.worker_group:
            self._only_owner(place, client)
            done = decode(committed.offset, committed.metadata)
            if done is None or len(committed.metadata) > METADATA_CHARS_MAX:
                raise Violation(f"{client} committed metadata of {_text(place)} that cannot be read")
            if done:
                self._mark("metadata")
            for first, end in done:
                self._all_handled(partition, first, min(end, partition.end), client)
        if group in (self.names.worker_group, self.names.ingress_group, self.names.egress_group, BOUND_GROUP):
            self._all_handled(partition, before, committed.offset, client)

    def _all_handled(self, partition: SimPartition, first: int, end: int, client: str) -> None:
        """No commit passes a record that has no outcome."""
        topic = partition.place.topic
        for record in partition.entries[first:end]:
            if record is None:
                continue
            request_id = self._id(record)
            handled = request_id in self.terminal or request_id in self.compared
            if topic in self.traffic.sources():
                handled = handled or request_id in self.routed
            elif topic != self.names.outputs:
                handled = handled or request_id in self.raw
            if not handled:
                raise Violation(f"{client} committed past {request_id} at {_at(record)}, which has no outcome")

    def _only_owner(self, place: TopicPartition, client: str) -> None:
        owner = self._placements.get(place.topic, {}).get(place.partition)
        if owner is not None and process_of(client) != "/".join(owner):
            raise Violation(f"{client} committed {_text(place)}, which belongs to {'/'.join(owner)}")

    def _id(self, record: LogRecord) -> str:
        if record.topic in self.traffic.sources():
            return self.traffic.id_of(record)
        found = decode_raw_output(record.value).result if record.topic == self.names.outputs else None
        found = decode_work(record.value) if found is None else found
        return _compared_id(found.variant, found.request_id) if found.variant[:1] == SHADOW else found.request_id

    # ------------------------------------------------------------ the end

    def undone(self) -> list[str]:
        """What has not drained yet, in words; empty when everything has."""
        missing = [one for one in self.traffic.everything_sent() if one not in self.terminal]
        if self.traffic.unsent or missing:
            names = ", ".join(missing[:8])
            return [f"{self.traffic.unsent} requests unsent, {len(missing)} without a terminal record: {names}"]
        return [line for group, topics in self._groups() for topic in topics for line in self._behind(group, topic)]

    def _groups(self) -> Iterable[tuple[str, list[str]]]:
        yield self.names.ingress_group, [self.names.requests]
        yield BOUND_GROUP, [BOUND_TOPIC]
        yield self.names.egress_group, [self.names.outputs]
        work = [topic for topic in self.world.log.cluster.topics if topic.startswith(self._work_prefix)]
        yield self.names.worker_group, work

    def _behind(self, group: str, topic: str) -> Iterable[str]:
        for partition in self.world.log.cluster.topics[topic]:
            at = self._committed.get((group, partition.place), partition.start)
            if any(record is not None for record in partition.entries[at:]):
                yield f"{group} stands at {at} of {partition.end} in {_text(partition.place)}"

    def at_end(self, refold: Refold) -> None:
        expected = self.traffic.everything_sent()
        strangers = [request_id for request_id in self.terminal if request_id not in expected]
        if strangers:
            raise Violation(f"terminal records of requests that nobody sent: {strangers[:8]}")
        for request_id, expectation in expected.items():
            letters = self.letters.get(request_id, 0)
            if expectation.dead_letter != bool(letters):
                raise Violation(f"{request_id} has {letters} dead letters, expected {expectation.dead_letter:d}")
        for request_id in self.copies:
            if request_id not in self.terminal:
                raise Violation(f"a copy of {request_id}, which has no terminal record")
        self._streamed()
        self._refolded(refold)
        self._owned_by_one()

    def _owned_by_one(self) -> None:
        """What the topics alone say about owners, as the chaos tests ask it of real ones."""
        visible = self.world.log.visible
        owners = owners_of(
            ((one.offset, one.timestamp_ms, decode_cluster(one.value)) for one in visible(self.names.cluster)),
            (decode_row(one.value, PlacementRow) for one in visible(self.names.placements) if one.value is not None),
            (decode_result(one.value) for one in visible(self.names.results)),
        )
        if owners.violations:
            raise Violation(f"owners: {owners.violations[:8]}")

    def _streamed(self) -> None:
        deltas = [decode_token_delta(record.value) for record in self.world.log.visible(self.names.tokens)]
        checker = StreamChecker(self.traffic.streaming)
        checker.take(deltas)
        found = {"delta": len(deltas), "restarted_stream": checker.restarts, "lost_delta": checker.gaps}
        self.marks.update({what: count for what, count in found.items() if count})

    def _refolded(self, refold: Refold) -> None:
        """A fresh scheduler that reads the whole control log says what was said, byte for byte."""
        scheduler = self._committed.get((self.names.scheduler_group, TopicPartition(self.names.cluster, 0)), 0)
        records = [one for one in self.world.log.visible(self.names.cluster) if one.offset < scheduler]
        again = refold([(record, decode_cluster(record.value)) for record in records])
        for decision, value in again:
            logged = self.decisions.get(decision)
            if logged != value:
                raise Violation(f"refolded, decision {decision} is {value!r}, logged is {logged!r}")
        if len(again) != len(self.decisions):
            strange = sorted(set(self.decisions) - {decision for decision, _ in again})
            raise Violation(f"decisions that the log does not lead to: {strange[:8]}")


def _compared_id(variant: str, request_id: str) -> str:
    """Of a copy. No id of a request begins like this."""
    return f"{variant} {request_id}"


def process_of(client: str) -> str:
    """NAME/INCARNATION of a client that may be one thread of it."""
    return client.partition(".")[0]


def _at(record: LogRecord) -> str:
    return f"{record.topic}[{record.partition}]@{record.offset}"


def _text(place: TopicPartition) -> str:
    return f"{place.topic}[{place.partition}]"


def _positions(offsets: Mapping[str, Mapping[TopicPartition, CommittedOffset]]) -> str:
    places = [(place, committed) for sent in offsets.values() for place, committed in sent.items()]
    return " ".join(f"{_text(place)}={one.offset}{':' + one.metadata if one.metadata else ''}" for place, one in places)
