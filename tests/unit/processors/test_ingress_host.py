"""The ingress host over the log in memory: restarts, rebalances, aborts, bound topics."""

from __future__ import annotations

import json
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from processors.ingress.host import IngressHost
from schemas.registry_table import Registration, registration_write
from sie_stream.errors import FatalLogError, Fenced, LogError, TransactionAborted
from sie_stream.ids import TopicPartition
from sie_stream.ports import TopicSpec
from sie_stream.records import LogWrite
from sie_stream.sim.log import SimLog
from sie_stream.sim.writers import SimTransactionalWriter
from tests.examples import examples
from tests.unit.processors.kit import NAMES, Encoders, World, body, route

WINDOW_MS = 600_000


def ids(world: World) -> list[str]:
    return sorted(work.request_id for work in world.work())


def test_requests_are_routed_and_offsets_committed() -> None:
    world = World(route())
    host = world.ingress()
    world.send(body(request_id="a"), body(request_id="b"), b"{")
    world.run(host)
    assert ids(world) == ["a", "b"]
    assert [one.status for one in world.results()] == ["rejected"]
    committed = world.log.reader(NAMES.ingress_group).committed([TopicPartition(NAMES.requests, n) for n in range(2)])
    assert sum(one.offset for one in committed.values() if one is not None) == 3


def test_missing_topics_are_named() -> None:
    world = World()
    world.log.admin().delete([NAMES.routes])
    with pytest.raises(FatalLogError, match="topics apply"):
        world.ingress()


def test_the_window_survives_a_restart() -> None:
    world = World(route())
    world.send(body(request_id="a"), b"{", body(request_id="b"))
    world.run(world.ingress())
    again = world.ingress()
    world.send(body(request_id="a"), body(request_id="b"), body(request_id="c"))
    world.run(again)
    assert ids(world) == ["a", "b", "c"]
    assert again.machine.counts.duplicates == 2


def test_the_window_ends_where_the_work_goes_on() -> None:
    """After a long outage the requests still waiting are old, and so are the ones they repeat."""
    world = World(route(), dedupe_window_ms=10_000)
    first = world.ingress()
    world.send(body(request_id="a"))
    world.run(first)
    world.log.clock.advance(5_000)
    world.send(body(request_id="a"))
    world.log.clock.advance(3_600_000)
    second = world.ingress()
    world.run(second)
    assert ids(world) == ["a"]


def test_what_is_older_than_the_window_is_not_read_back() -> None:
    world = World(route(), dedupe_window_ms=10_000)
    world.send(body(request_id="a"))
    world.run(world.ingress())
    world.log.clock.advance(60_000)
    world.send(body(request_id="b"))
    again = world.ingress()
    world.run(again)
    assigned = [facts for name, facts in world.events if name == "partitions_assigned"]
    assert assigned[-1]["remembered"] == 0


def test_a_new_process_takes_over_and_the_old_one_is_fenced() -> None:
    world = World(route())
    old = world.ingress()
    world.send(body(request_id="a"))
    world.run(old)
    new = world.ingress()
    world.send(body(request_id="b"))
    with pytest.raises(Fenced):
        world.run(old)
    world.run(new)
    assert ids(world) == ["a", "b"]


def test_a_process_that_died_after_writing_leaves_nothing_twice() -> None:
    """It crashes before the commit: its transaction is aborted by the next incarnation, and done again."""
    world = World(route())
    dying = IngressHost(world.settings, world.ports("0"), Encoders(), world)
    dying.start()
    world.run(dying, turns=2)
    world.send(body(request_id="a"), body(request_id="b"))
    writer = dying._ports.writer
    assert isinstance(writer, SimTransactionalWriter)
    writer.begin()
    writer.write([LogWrite(NAMES.work("wine"), b"half done", partition=0)])
    world.run(world.ingress())
    assert ids(world) == ["a", "b"]


class RefusingWriter:
    """A transactional writer whose n-th operation is refused."""

    def __init__(self, inner: SimTransactionalWriter, refused: Iterable[int], refusal: LogError) -> None:
        self._inner = inner
        self._refused = dict.fromkeys(refused)
        self._refusal = refusal
        self._count = 0

    def __getattr__(self, name: str) -> object:
        inner = getattr(self._inner, name)
        if name not in ("write", "send_offsets", "commit"):
            return inner

        def counted(*arguments: object) -> object:
            self._count += 1
            if self._count in self._refused:
                raise self._refusal
            return inner(*arguments)

        return counted


@examples(60)
@given(refused=st.sets(st.integers(1, 30), max_size=12), batch=st.integers(1, 4))
def test_refused_transactions_lose_and_repeat_nothing(refused: set[int], batch: int) -> None:
    world = World(route(), ingress_batch_max=batch)
    ports = world.ports("0")
    inner = ports.writer
    assert isinstance(inner, SimTransactionalWriter)
    writer = RefusingWriter(inner, sorted(refused), TransactionAborted("the test says so"))
    host = IngressHost(world.settings, structs.replace(ports, writer=writer), Encoders(), world)
    host.start()
    for number in range(6):
        world.send(body(request_id=f"r{number}"), body(request_id=f"r{number}"), key=str(number).encode())
    world.run(host, turns=60)
    assert ids(world) == [f"r{number}" for number in range(6)]


def test_two_processes_share_the_partitions_and_one_takes_over() -> None:
    world = World(route(), partitions=4)
    hosts = [world.ingress("0"), world.ingress("1")]
    world.run(*hosts)
    for number in range(40):
        world.send(body(request_id=f"r{number}"), key=str(number).encode())
    world.run(*hosts)
    assert len(world.work()) == 40
    assert all(host.machine.counts.routed for host in hosts)
    hosts.pop(0)  # silent from now on
    for _ in range(8):
        world.log.clock.advance(1_000)
        world.run(*hosts)
    for number in range(40, 80):
        world.send(body(request_id=f"r{number - 20}"), body(request_id=f"r{number}"), key=str(number - 20).encode())
    world.run(*hosts, turns=10)
    assert sorted(ids(world)) == sorted(f"r{number}" for number in range(80))


def test_partitions_that_come_back_are_read_back_only_as_far_as_needed() -> None:
    world = World(route(), partitions=2)
    first = world.ingress("0")
    world.run(first)
    for number in range(10):
        world.send(body(request_id=f"r{number}"), key=str(number).encode())
    world.run(first)
    second = world.ingress("1")
    world.run(first, second)
    remembered = [facts["remembered"] for name, facts in world.events if name == "partitions_assigned"]
    assert remembered[0] == 0
    assert sum(int(str(one)) for one in remembered[1:]) <= 10


def test_bound_topics_are_read_when_they_appear() -> None:
    world = World(route(input_topic="orders", input_deserializer="json", input_group="mine"))
    host = world.ingress()
    world.run(host)
    world.log.admin().ensure([TopicSpec("orders", 1, {})])
    world.send(b'{"x": 3}', topic="orders")
    world.log.clock.advance(5_000)
    world.run(host)
    (work,) = world.work()
    assert json.loads(work.inputs) == {"x": 3}
    assert world.log.reader("mine").committed([TopicPartition("orders", 0)])[TopicPartition("orders", 0)] is not None


@pytest.mark.parametrize(("reset", "expected"), [("earliest", 2), ("latest", 1)])
def test_a_bound_topic_starts_where_it_was_told(reset: str, expected: int) -> None:
    row = route(input_topic="orders", input_deserializer="json", input_group="mine", input_offset_reset=reset)
    world = World(row, topics=["orders"])
    world.send(b'{"x": 1}', topic="orders")
    host = world.ingress()
    world.run(host)
    world.send(b'{"x": 2}', topic="orders")
    world.run(host)
    assert len(world.work()) == expected
    world.send(b'{"x": 3}', topic="orders")
    world.run(world.ingress())
    assert len(world.work()) == expected + 1


def test_a_model_that_goes_takes_its_subscription_along() -> None:
    world = World(route(input_topic="orders", input_deserializer="json", input_group="mine"), topics=["orders"])
    host = world.ingress()
    world.run(host)
    world.log.plain_writer().write([LogWrite(NAMES.routes, None, b"wine")])
    world.run(host)
    world.send(body(request_id="late"))
    world.run(host)
    assert [one.error.code for one in world.results() if one.error] == ["unknown_model"]


def test_registered_schemas_are_found_when_they_are_met() -> None:
    world = World(route(input_topic="orders", input_deserializer="avro"), topics=["orders"])
    world.log.admin().ensure([TopicSpec(NAMES.schemas, 1, {})])
    host = world.ingress()
    schema = json.dumps({"type": "record", "name": "Order", "fields": [{"name": "x", "type": "int"}]})
    world.log.plain_writer().write(
        [registration_write(NAMES.schemas, Registration("orders-value", 1, 100_000, schema))]
    )
    world.send(b"\x00" + (100_000).to_bytes(4, "big") + b"\x06", topic="orders")
    world.run(host)
    (work,) = world.work()
    assert (json.loads(work.inputs), work.schema_id) == ({"x": 3}, 100_000)


def test_the_same_input_gives_the_same_log() -> None:
    def digest() -> str:
        world = World(route(width=3), partitions=3)
        hosts = [world.ingress("0"), world.ingress("1")]
        for number in range(30):
            world.send(body(request_id=f"r{number % 20}"), b"{", key=str(number).encode())
            world.run(*hosts, turns=1)
        world.run(*hosts)
        log: SimLog = world.log
        return log.digest()

    assert digest() == digest()
