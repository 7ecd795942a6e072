"""What a worker answers when it is asked for partitions that it gave back already."""

from __future__ import annotations

from sie_stream.control import PartitionPlacement, PartitionReleased, PlacementRow
from sie_stream.sim.log import SimLog
from tests.unit.gpu_worker.over_sim_log import NAMES, Worker, new_log, place, said


def releasing(epoch: int) -> PlacementRow:
    asked = PartitionPlacement(0, "w0", "i1", epoch, "releasing")
    return PlacementRow("m", NAMES.work("m"), (), (asked,))


def released(log: SimLog) -> list[int]:
    """Placement epochs of the releases that were reported."""
    return [fact.placement_epoch for fact in said(log) if isinstance(fact, PartitionReleased)]


def test_a_release_is_reported_again_when_it_is_asked_for_again() -> None:
    log = new_log()
    worker = Worker(log)
    place(log, releasing(57))
    worker.turns()
    assert released(log) == [57]


def test_the_report_carries_the_epoch_of_the_newest_row() -> None:
    """While the release of one assignment was looked up again, the partition was assigned anew and asked back."""
    log = new_log()
    worker = Worker(log)
    place(log, releasing(57))
    worker.turns(1)
    place(log, releasing(85))
    worker.turns()
    assert released(log)[-1] == 85
