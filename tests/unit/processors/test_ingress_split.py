"""The split as ingress makes it: over partitions, processes, replicas and topics, and after a rollback."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

import pytest
from msgspec.structs import replace

from processors.ingress.events import RoutesChanged
from processors.ingress.machine import IngressMachine
from sie_stream.control import RouteRow, VariantRow
from sie_stream.partitioner import keyed_partition
from sie_stream.records import LogRecord, WorkItem
from sie_stream.rollout_records import VariantRule
from sie_stream.routing import SHARES, resized, rest_of
from tests.examples import rounds
from tests.unit.processors.kit import NAMES, NOW_MS, machine, route, take_up

KEYS = [b"customer-%d" % number for number in range(max(1_000, rounds(4_000)))]
CANARY_TOPIC = NAMES.work("wine.CANARY")
ORDERS = "orders"
SIGMAS = 4.5


def split(percent: int, width: int = 1, **changes: Any) -> RouteRow:
    own = resized((), percent * SHARES // 100, ())
    rest = rest_of(own)
    rows = (
        VariantRow("stable", "1.0.0", SHARES - percent * SHARES // 100, rest),
        VariantRow("canary", "2.0.0", percent * SHARES // 100, own, CANARY_TOPIC, width),
    )
    return route(variants=rows, width=width, **changes)


def requests(topic: str, partitions: int, first: int = 0) -> list[list[LogRecord]]:
    """One request for each key, by the partition that the producer's partitioner gives the key."""
    found: list[list[LogRecord]] = [[] for _ in range(partitions)]
    for number, key in enumerate(KEYS, first):
        body = {"x": 1} if topic == ORDERS else {"model": "wine", "inputs": {"x": 1}, "request_id": f"r{number}"}
        partition = found[keyed_partition(key, partitions)]
        value = json.dumps(body).encode()
        partition.append(LogRecord(topic, keyed_partition(key, partitions), first + len(partition), NOW_MS, key, value))
    return found


def routed(ingress: IngressMachine, records: list[LogRecord]) -> list[WorkItem]:
    return take_up(ingress, *records).work


def assert_share(hits: int, of: int, percent: int) -> None:
    share = percent / 100
    assert abs(hits - of * share) <= SIGMAS * math.sqrt(of * share * (1 - share)), f"{hits} of {of}"


@pytest.mark.parametrize("percent", [5, 10, 20, 50])
@pytest.mark.parametrize(("partitions", "processes", "width"), [(1, 1, 1), (7, 2, 3), (12, 5, 1), (24, 3, 8)])
@pytest.mark.parametrize("topic", [NAMES.requests, ORDERS])
def test_the_share_holds_in_every_process_partition_and_replica(
    percent: int, partitions: int, processes: int, width: int, topic: str
) -> None:
    row = split(percent, width, input_topic=ORDERS, input_deserializer="json")
    ingresses = [machine(row) for _ in range(processes)]
    by_process: list[list[WorkItem]] = [[] for _ in range(processes)]
    for number, records in enumerate(requests(topic, partitions)):
        work = routed(ingresses[number % processes], records)
        assert len(work) == len(records)
        assert_share(sum(item.variant == "canary" for item in work), len(work), percent)
        by_process[number % processes] += work
    for work in by_process:
        assert_share(sum(item.variant == "canary" for item in work), len(work), percent)
    everything = [item for work in by_process for item in work]
    assert_share(sum(item.variant == "canary" for item in everything), len(KEYS), percent)


@pytest.mark.parametrize("width", [2, 5])
def test_a_variant_uses_all_its_replicas_alike(width: int) -> None:
    """Range of a variant and bucket of a key come from two hashes, or a small share would lie on one replica."""
    ingress = machine(split(10, width))
    (records,) = requests(NAMES.requests, 1)
    writes = take_up(ingress, *records).work_writes
    counts = Counter(write.partition for write in writes if write.topic == CANARY_TOPIC)
    assert len(counts) == width
    for count in counts.values():
        assert_share(count, sum(counts.values()), 100 // width)


def test_a_key_goes_to_the_same_variant_whoever_routes_it() -> None:
    one, other = machine(split(20)), machine(split(20, 6))
    first = {item.key: item.variant for records in requests(NAMES.requests, 1) for item in routed(one, records)}
    for records in requests(NAMES.requests, 9, first=10_000):
        assert {item.key: item.variant for item in routed(other, records)}.items() <= first.items()


def test_after_weight_zero_no_record_of_a_later_epoch_goes_there() -> None:
    """Not by its key, not by a rule, not as a copy, not by name."""
    rule = VariantRule("field", "name", "eu", "canary")
    row = split(50, rules=(rule,))
    shadowed = replace(row, variants=(row.variants[0], replace(row.variants[1], shadow=SHARES)))
    ingress = machine(shadowed)
    asked = b'{"model": "wine", "inputs": {"x": 1, "name": "eu"}, "request_id": "%d"}'
    before = take_up(ingress, *(LogRecord(NAMES.requests, 0, n, NOW_MS, b"k%d" % n, asked % n) for n in range(50)))
    assert {(item.variant, item.route_epoch) for item in before.work} >= {("canary", 7)}
    ended = route(route_epoch=8, rules=(rule,))
    ingress.decide([RoutesChanged((("wine", ended),))])
    after = take_up(ingress, *(LogRecord(NAMES.requests, 0, n, NOW_MS, b"k%d" % n, asked % n) for n in range(50, 100)))
    assert {(item.variant, item.route_epoch) for item in after.work} == {("stable", 8)}
    assert {write.topic for write in after.work_writes} == {NAMES.work("wine")}
    named = LogRecord(NAMES.requests, 0, 100, NOW_MS, b"k", b'{"model": "wine@2.0.0", "inputs": {"x": 1}}')
    (refused,) = take_up(ingress, named).results
    assert refused.error is not None
    assert refused.error.code == "unknown_version"
