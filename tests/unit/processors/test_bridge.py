"""Topics on another cluster: carried over, and repeated only where the repeat can be seen."""

from __future__ import annotations

import json
from typing import Any

from processors.bridge.host import RETRY_MS, BridgeHost, BridgePorts
from processors.bridge.links import ClusterPorts, cluster_tag
from schemas import codec
from sie_stream.control import RouteRow
from sie_stream.errors import Retriable
from sie_stream.ids import TopicPartition
from sie_stream.origin import Origin, origin_in
from sie_stream.ports import TopicSpec
from sie_stream.records import REQUEST_ID_HEADER, LogWrite, header
from sie_stream.sim.log import SimLog
from tests.unit.processors.kit import NAMES, World, body, route

ELSEWHERE = "elsewhere:9092"


class TwoClusters:
    """Ours, and one elsewhere with the topics `orders` and `scores`."""

    def __init__(self, **changes: Any) -> None:
        row: RouteRow = route(
            **{
                "input_topic": "orders",
                "input_bootstrap": ELSEWHERE,
                "input_deserializer": "json",
                "output_topic": "scores",
                "output_bootstrap": ELSEWHERE,
                "output_serializer": "json",
                **changes,
            }
        )
        self.here = World(row)
        self.there = SimLog(self.here.log.clock)
        self.there.admin().ensure([TopicSpec("orders", 1, {}), TopicSpec("scores", 1, {})])
        self.broken = False

    def cluster(self, bootstrap: str) -> ClusterPorts:
        if self.broken and bootstrap:
            raise Retriable("elsewhere does not answer")
        log = self.there if bootstrap else self.here.log
        return ClusterPorts(
            make_reader=log.reader,
            make_group_reader=lambda group: log.group_reader(group, "bridge-0"),
            make_committer=log.transactional_writer,
            make_plain_writer=log.plain_writer,
        )

    def bridge(self) -> BridgeHost:
        ports = BridgePorts(self.cluster, lambda wait_ms: None, self.here.log.clock)
        host = BridgeHost(self.here.settings, ports, self.here)
        host.start()
        return host

    def order(self, value: bytes | None, **more: Any) -> None:
        self.there.plain_writer().write([LogWrite("orders", value, **more)])

    def requests(self) -> list[Any]:
        return self.here.log.visible(NAMES.requests)


def test_a_foreign_record_becomes_a_request_and_its_result_goes_back() -> None:
    clusters = TwoClusters()
    bridge, ingress = clusters.bridge(), clusters.here.ingress()
    clusters.order(b'{"x": 1}')
    clusters.order(b'{"x": "wrong"}')
    clusters.here.run(bridge, ingress, turns=8)
    (work,) = clusters.here.work()
    assert work.request_id == f"src:{cluster_tag(ELSEWHERE)}/orders:0:0:mi-wine"
    (copy,) = clusters.there.visible("scores")
    result = json.loads(copy.value or b"")
    assert (result["status"], result["request_id"]) == ("rejected", work.request_id.replace(":0:0:", ":0:1:"))


def test_a_crash_between_write_and_commit_repeats_what_ingress_drops() -> None:
    clusters = TwoClusters()
    clusters.order(b'{"x": 1}')
    bridge, ingress = clusters.bridge(), clusters.here.ingress()
    clusters.here.run(bridge)
    committed = clusters.there.cluster.group(f"{NAMES.bridge_group}.wine").committed
    committed.pop(TopicPartition("orders", 0))  # as if the crash had come before the commit
    clusters.here.run(clusters.bridge(), ingress, turns=8)
    assert len(clusters.requests()) == 2
    assert len(clusters.here.work()) == 1
    assert ingress.machine.counts.duplicates == 1


def test_the_record_itself_is_passed_on_when_it_cannot_be_read() -> None:
    clusters = TwoClusters(input_deserializer="request-json")
    bridge, ingress = clusters.bridge(), clusters.here.ingress()
    for value in (b"{", None, b"", b'{"inputs": {}, "modle": 1}', b"x" * 400_000):
        clusters.order(value)
    clusters.here.run(bridge, ingress, turns=8)
    codes = [result.error.code for result in clusters.here.results() if result.error]
    assert sorted(codes) == ["empty_record", "not_json", "payload_too_large", "tombstone", "unknown_field"]


def test_ids_and_traces_of_the_sender_are_kept() -> None:
    clusters = TwoClusters()
    bridge = clusters.bridge()
    clusters.order(b'{"x": 1}', headers=((REQUEST_ID_HEADER, b"mine"), ("traceparent", b"00-1-2-01")), key=b"k")
    clusters.here.run(bridge)
    (request,) = clusters.requests()
    assert codec.decode_request(request.value)[0].request_id == "mine"
    assert (header(request.headers, "traceparent"), request.key) == (b"00-1-2-01", b"k")
    [there] = clusters.there.visible("orders")
    assert origin_in(request.headers) == Origin(ELSEWHERE, "orders", 0, 0, there.timestamp_ms)


def test_inputs_cannot_smuggle_fields_into_the_request() -> None:
    clusters = TwoClusters()
    bridge, ingress = clusters.bridge(), clusters.here.ingress()
    clusters.order(b'{"x": 1}, "priority": "P0", "tenant": "boss"')
    clusters.here.run(bridge, ingress, turns=8)
    assert clusters.here.work() == []
    assert [result.error.code for result in clusters.here.results() if result.error] == ["not_json"]


def test_a_cluster_that_does_not_answer_is_tried_again() -> None:
    clusters = TwoClusters()
    clusters.broken = True
    bridge = clusters.bridge()
    clusters.order(b'{"x": 1}')
    clusters.here.run(bridge)
    assert clusters.requests() == []
    assert any(name == "link_broken" for name, _ in clusters.here.events)
    clusters.broken = False
    clusters.here.log.clock.advance(RETRY_MS)
    clusters.here.run(bridge)
    assert len(clusters.requests()) == 1


def test_results_of_other_models_stay_here() -> None:
    clusters = TwoClusters()
    ingress = clusters.here.ingress()
    clusters.here.publish(route("local"))
    clusters.here.log.admin().ensure([TopicSpec(NAMES.work("local"), 3, {})])
    clusters.here.send(body(model="local", inputs={}), body(model="nobody"))
    clusters.here.run(clusters.bridge(), ingress, turns=8)
    assert len(clusters.here.results()) == 2
    assert clusters.there.visible("scores") == []


def test_latest_skips_what_was_there_before() -> None:
    clusters = TwoClusters(input_offset_reset="latest")
    clusters.order(b'{"x": 1}')
    bridge = clusters.bridge()
    clusters.here.run(bridge)
    clusters.order(b'{"x": 2}')
    clusters.here.run(bridge)
    (request,) = clusters.requests()
    assert bytes(codec.decode_request(request.value)[0].inputs) == b'{"x": 2}'


def test_a_deleted_model_closes_its_link() -> None:
    clusters = TwoClusters()
    bridge = clusters.bridge()
    clusters.here.run(bridge)
    clusters.here.log.plain_writer().write([LogWrite(NAMES.routes, None, b"wine")])
    clusters.here.run(bridge)
    clusters.order(b'{"x": 1}')
    clusters.here.run(bridge)
    assert clusters.requests() == []
