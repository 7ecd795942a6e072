"""Work of a model that sleeps is found and told, whoever put it there and whoever dies."""

from __future__ import annotations

from msgspec import structs

from processors.ingress.sleepers import REPEAT_MS
from schemas.codec import decode_cluster
from sie_stream.control import WorkWaiting
from sie_stream.ids import TopicPartition
from sie_stream.ports import TopicSpec
from sie_stream.records import CommittedOffset
from tests.unit.processors.kit import NAMES, World, body, route

ASLEEP = structs.replace(route(), asleep=True, route_epoch=7)


def sleeping() -> World:
    world = World(ASLEEP)
    world.log.admin().ensure([TopicSpec(NAMES.cluster, 1, {})])
    return world


def told(world: World) -> list[WorkWaiting]:
    found = [decode_cluster(one.value) for one in world.log.visible(NAMES.cluster)]
    return [one for one in found if isinstance(one, WorkWaiting)]


def worked_off(world: World) -> None:
    """The workers commit everything that is in the topic."""
    reader = world.log.reader(NAMES.worker_group)
    places = [TopicPartition(ASLEEP.topic, number) for number in range(ASLEEP.lanes * ASLEEP.width)]
    writer = world.log.transactional_writer("a worker")
    writer.init()
    writer.begin()
    writer.send_offsets(reader, {place: CommittedOffset(end) for place, end in reader.end_offsets(places).items()})
    writer.commit()


def test_nothing_is_told_of_a_sleeping_model_without_work_nor_of_one_that_is_awake() -> None:
    world = sleeping()
    world.run(world.ingress(), turns=50)
    assert not told(world)
    awake = World(route())
    awake.log.admin().ensure([TopicSpec(NAMES.cluster, 1, {})])
    awake.send(body(request_id="a"))
    awake.run(awake.ingress(), turns=50)
    assert awake.work()
    assert not told(awake)


def test_work_is_told_at_once_and_again_every_second_until_the_model_is_awake() -> None:
    world = sleeping()
    host = world.ingress()
    world.run(host)
    world.send(body(request_id="a"), body(request_id="b"))
    world.run(host)
    assert told(world) == [WorkWaiting("wine", 7, 2)]
    world.run(host, turns=3 * REPEAT_MS // 10)
    assert len(told(world)) == 4
    world.publish(structs.replace(ASLEEP, asleep=False, route_epoch=8))
    world.run(host, turns=3 * REPEAT_MS // 10)
    assert len(told(world)) == 4


def test_work_that_another_process_routed_before_the_model_slept_is_found_by_the_next() -> None:
    world = World(route())
    world.log.admin().ensure([TopicSpec(NAMES.cluster, 1, {})])
    world.send(body(request_id="a"))
    world.run(world.ingress("0"))
    assert world.work()
    world.publish(ASLEEP)
    world.run(world.ingress("1"))
    assert [one.route_epoch for one in told(world)] == [7]


def test_what_the_workers_committed_is_no_work() -> None:
    world = World(route())
    world.log.admin().ensure([TopicSpec(NAMES.cluster, 1, {})])
    host = world.ingress()
    world.send(body(request_id="a"), body(request_id="b"))
    world.run(host)
    worked_off(world)
    world.publish(ASLEEP)
    world.run(host, turns=50)
    assert not told(world)
    world.send(body(request_id="c"))
    world.run(host)
    assert [one.waiting for one in told(world)] == [1]


def test_a_deleted_model_is_forgotten() -> None:
    world = sleeping()
    host = world.ingress()
    world.send(body(request_id="a"))
    world.run(host)
    assert len(told(world)) == 1
    world.unpublish("wine")
    world.run(host, turns=3 * REPEAT_MS // 10)
    assert len(told(world)) == 1
