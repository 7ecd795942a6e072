"""What is read for one request: of a variant the records of that variant."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import msgspec

from schemas.codec import decode_work, encode_cluster, encode_decision, encode_result, encode_row, encode_work
from sie_stream.cli.trace_lookup import Routes, work_id
from sie_stream.cli.trace_reading import Collector
from sie_stream.control import PartitionPlacement, PlacementRow, RouteRow, Tick
from sie_stream.decisions import Decision, Move
from sie_stream.edge.connection import Connection
from sie_stream.ids import TopicPartition, variant_unit
from sie_stream.origin import Origin, origin_header
from sie_stream.ports import TopicSpec
from sie_stream.records import CommittedOffset, InferenceRequest, LogWrite, Provenance, Result, Timings, Usage, WorkItem
from sie_stream.settings import Settings
from sie_stream.sim.log import SimLog
from sie_stream.touches import CameIn, touch_headers
from sie_stream.tracing.evidence import Evidence
from sie_stream.tracing.story import tell
from topics.catalog import system_topics

UNIT = variant_unit("m", "canary")
WORK = f"sie.work.{UNIT}"
ROUTE = RouteRow("mi-1", "m", 5, "sie.work.m", 3, 1, (), "scoring", 1, msgspec.Raw(b"{}"), "", "", 0)
REQUEST = (TopicPartition("sie.requests", 0), 0)


def canary_request() -> SimLog:
    """One request that the canary of m works off; replicas of both were placed because of the same record."""
    log = SimLog()
    settings = Settings()
    log.admin().ensure([*system_topics(settings), *(TopicSpec(name, 1, {}) for name in ("sie.work.m", WORK))])
    now_ms = log.clock.now_ms()
    work = WorkItem(
        *("r1", "mi-1", "m", "2", "canary", 5, 1, b"{}", b"r1", "sie.requests", 0, 0), *(now_ms, now_ms, now_ms)
    )
    placed = [
        Decision(f"d-0-{number}", "replica_placed", unit, "", 0, now_ms, {}, moves=(Move(unit, "replica", "", "w0/a"),))
        for number, unit in enumerate(("m", UNIT))
    ]
    asked = msgspec.json.encode(InferenceRequest("m", request_id="r1"))
    rows = [
        PlacementRow(unit, f"sie.work.{unit}", (), (PartitionPlacement(0, who, f"{who}-1", 0, "assigned"),))
        for unit, who in (("m", "w9"), (UNIT, "w0"))
    ]
    log.plain_writer().write(
        [
            LogWrite("sie.routes", encode_row(ROUTE), key=b"m"),
            LogWrite("sie.cluster", encode_cluster(Tick("s0"))),
            *(LogWrite("sie.decisions", encode_decision(one), key=b"m") for one in placed),
            *(LogWrite("sie.placements", encode_row(row), key=row.model.encode()) for row in rows),
            LogWrite("sie.requests", asked, partition=0),
            LogWrite(WORK, encode_work(work), partition=0),
        ]
    )
    return log


def collected(log: SimLog, place: tuple[TopicPartition, int]) -> Evidence:
    reader = log.reader("tools")
    settings = Settings()
    connection = cast(Connection, SimpleNamespace(settings=settings, reader=log.reader))
    return Collector(connection, reader, Routes(reader, settings.topics), log.clock.now_ms() + 1).collect("r1", [place])


def test_an_open_request_of_a_variant_is_found_on_the_topic_of_the_variant() -> None:
    found = collected(canary_request(), REQUEST)
    assert found.work_at is not None
    assert found.work_at.place.topic == WORK
    assert found.owner is not None
    assert found.owner.worker == "w0", "w9 has the partition of the stable version"


def test_the_placement_behind_an_answer_of_a_variant_is_that_of_the_variant() -> None:
    log = canary_request()
    origin = Provenance("sie.requests", 0, 0, WORK, 0, 0, 5, 0, "w0", "w0-1", "a", "d", "e", None, 1, 0)
    answer = Result(
        *("r1", "ok", "mi-1", "m", "2", "canary", b"{}", None, Usage()), *(Timings(), origin, log.clock.now_ms())
    )
    log.plain_writer().write([LogWrite("sie.results", encode_result(answer), partition=0)])
    found = collected(log, (TopicPartition("sie.results", 0), 0))
    assert found.placed is not None
    assert found.placed.subject == UNIT
    told = tell(found)
    assert not [note for note in told.notes if "not on sie.decisions" in note]
    assert told.model == "m"


def test_the_copy_for_a_shadow_is_not_the_request() -> None:
    log = canary_request()
    [work] = log.visible(WORK)
    copy = msgspec.structs.replace(decode_work(work.value), variant="~canary", version="3")
    log.admin().ensure([TopicSpec(f"sie.work.{variant_unit('m', 'a')}", 1, {})])
    row = PlacementRow(variant_unit("m", "a"), f"sie.work.{variant_unit('m', 'a')}", (), ())
    log.plain_writer().write(
        [
            LogWrite("sie.placements", encode_row(row), key=row.model.encode()),
            LogWrite(row.topic, encode_work(copy), partition=0),
            LogWrite("sie.work.m", encode_work(copy), partition=0),
        ]
    )
    found = collected(log, REQUEST)
    assert found.work is not None
    assert (found.work.variant, found.work.version) == ("canary", "2")
    assert [work_id(record) for topic in ("sie.work.m", WORK) for record in log.visible(topic)] == ["~r1", "r1"]


def test_a_request_of_a_bound_topic_waits_for_the_group_that_reads_it() -> None:
    log = SimLog()
    settings = Settings()
    log.admin().ensure([*system_topics(settings), TopicSpec("orders", 1, {})])
    route = msgspec.structs.replace(ROUTE, input_topic="orders", input_group="own", input_deserializer="json")
    log.plain_writer().write(
        [LogWrite("sie.routes", encode_row(route), key=b"m"), LogWrite("orders", b'{"x": 1}', partition=0)]
    )
    place = TopicPartition("orders", 0)
    reader = log.reader("tools")
    connection = cast(Connection, SimpleNamespace(settings=settings, reader=log.reader))
    routes = Routes(reader, settings.topics)

    evidence = Collector(connection, reader, routes, 1).collect("src:orders:0:0:mi-1", [(place, 0)])
    assert [(source.bound, source.origin) for source in evidence.sources] == [(True, None)]

    def told() -> str:
        now_ms = log.clock.now_ms() + 1
        found = Collector(connection, reader, routes, now_ms).collect("src:orders:0:0:mi-1", [(place, 0)])
        return tell(found).state

    assert told() == "open"
    writer = log.transactional_writer("ingress")
    writer.init()
    writer.begin()
    writer.send_offsets(log.reader("own"), {place: CommittedOffset(1, "")})
    writer.commit()
    assert told() == "repeat", "the group of the installation never reads this topic"
    assert routes.groups_of("orders", "src:orders:0:0:mi-1") == routes.groups_of("orders", "r1") == ["own"]


def test_what_stands_beside_request_and_result_is_read() -> None:
    log = canary_request()
    origin = Origin("elsewhere:9092", "orders", 0, 4, 1)
    came = CameIn(5, "w0", "a", "m@2", "host", 1, 1.0)
    asked = msgspec.json.encode(InferenceRequest("m", request_id="r1"))
    at = Provenance("sie.requests", 0, 1, WORK, 0, 0, 5, 0, "w0", "w0-1", "a", "d", "e", None, 1, 0)
    answer = Result(
        *("r1", "ok", "mi-1", "m", "2", "canary", b"{}", None, Usage()), *(Timings(), at, log.clock.now_ms())
    )
    log.plain_writer().write(
        [
            LogWrite("sie.requests", asked, partition=0, headers=origin_header(origin)),
            LogWrite("sie.results", encode_result(answer), partition=0, headers=touch_headers([came])),
        ]
    )
    found = collected(log, (TopicPartition("sie.results", 0), 0))
    assert found.touches == (came,)
    assert [(source.bound, source.origin) for source in found.sources] == [(False, origin)]
