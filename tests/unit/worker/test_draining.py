"""Partitions of a deleted model: worked off to their ends, and only then given back."""

from __future__ import annotations

from gpu_worker.sim.engine import EngineScript
from sie_stream.control import PartitionReleased
from sie_stream.errors import Retriable
from sie_stream.ids import LANES
from sie_stream.settings import Settings
from tests.unit.worker.rig import Rig, World, serving, work_item


def drained(world: World) -> list[tuple[int, int, int]]:
    """(partition, epoch, offset) of everything reported as worked off; fails when something else was released."""
    found = world.reports(PartitionReleased)
    assert all(isinstance(one, PartitionReleased) and one.drained for one in found)
    return [(one.partition, one.placement_epoch, one.offset) for one in found if isinstance(one, PartitionReleased)]


def test_a_draining_partition_is_worked_off_to_its_end() -> None:
    settings = Settings(worker_poll_max=4, worker_queue_max=8, partition_open_max=8)
    world, rig = serving(EngineScript(batch_ms=40.0), settings, batch_max=2)
    world.send(*[work_item(f"r{n}") for n in range(60)])
    rig.run(10)
    world.drain("m", list(range(LANES)))
    rig.run(100)
    assert [number for number, _, _ in drained(world)] == [0, 2], "the empty ones are over at once"
    rig.run_until(lambda: len(drained(world)) == LANES)
    assert drained(world)[-1] == (1, 12, world.committed("m", 1))
    assert len(world.results()) == 60
    assert rig.reader.assigned() == []
    assert rig.machine.state.open_total == 0


def test_the_next_owner_drains_what_a_lost_one_left() -> None:
    world, rig = serving(EngineScript(batch_ms=40.0), batch_max=2)
    world.send(*[work_item(f"r{n}") for n in range(20)])
    rig.run(10)
    world.drain("m", [1])
    rig.run(60)
    second = Rig(world, "w0-2")
    world.place(world.add_model("m"), "w0-2")
    second.run(100)
    world.give("m", [1], "w0-2")
    world.drain("m", [1])
    second.run_until(lambda: drained(world))
    assert len(world.results()) == 20


def test_a_worker_that_stops_does_not_claim_to_have_drained() -> None:
    world, rig = serving(EngineScript(batch_ms=40.0), batch_max=2)
    world.send(*[work_item(f"r{n}") for n in range(20)])
    rig.run(10)
    world.drain("m", [1])
    rig.run(10)
    rig.host.request_stop()
    rig.run_until(lambda: rig.host.finished)
    (released,) = [
        one for one in world.reports(PartitionReleased) if isinstance(one, PartitionReleased) and one.partition == 1
    ]
    assert not released.drained
    assert len(world.results()) < 20


def test_a_deletion_that_is_taken_back_ends_the_draining() -> None:
    world, rig = serving(EngineScript(batch_ms=40.0), batch_max=2)
    world.send(*[work_item(f"r{n}") for n in range(10)])
    rig.run(10)
    world.drain("m", [1])
    rig.run(20)
    row = world.rows["m"]
    world._partitions("m", [1], "w0-1", row.partitions[1].placement_epoch, "assigned")
    rig.run(1_000)
    world.send(work_item("late"))
    rig.run(200)
    assert len(world.results()) == 11
    assert drained(world) == []


def test_a_drained_assignment_is_over_whatever_rows_still_say() -> None:
    """The deletion was taken back while the report was on its way: the scheduler is going to assign it anew."""
    world, rig = serving()
    world.drain("m", [1])
    rig.run_until(lambda: drained(world))
    epoch = world.rows["m"].partitions[1].placement_epoch
    world._partitions("m", [1], "w0-1", epoch, "assigned")
    world.send(work_item("late"))
    rig.run(100)
    assert drained(world) == [(1, epoch, 0)] * 2, "said again, since the first report may be lost"
    assert world.results() == {}
    world.give("m", [1])
    rig.run(100)
    assert list(world.results()) == ["late"]


def test_what_came_before_the_newest_row_is_drained_too() -> None:
    """Taken back and deleted again between two looks at the rows: the end is looked up anew."""
    world, rig = serving(EngineScript(batch_ms=40.0), batch_max=2)
    world.send(*[work_item(f"r{n}") for n in range(6)])
    rig.run(10)
    world.drain("m", [1])
    rig.run(20)
    world.send(*[work_item(f"s{n}") for n in range(6)])
    world.drain("m", [1])
    rig.run_until(lambda: drained(world))
    assert len(world.results()) == 12


def test_an_end_that_cannot_be_looked_up_now_is_looked_up_again() -> None:
    world, rig = serving()
    world.send(work_item("r0"))
    failures = [Retriable("no leader"), Retriable("no leader")]

    def trouble(operation: str, client: str) -> None:
        if operation == "offsets" and client == rig.reader.client and failures:
            raise failures.pop()

    world.log.cluster.before = trouble
    world.drain("m", [1])
    rig.run(100)
    assert drained(world) == []
    rig.run_until(lambda: drained(world))
    assert failures == []
