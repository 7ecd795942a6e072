"""Running requests that move with their partition: nothing is computed twice, and whoever has no image computes."""

from __future__ import annotations

import msgspec
import pytest

from gpu_worker.engine_port import EngineEvent, SequenceExported
from gpu_worker.facts import DropImages, ExportSequences, FetchImages, Note, WorkerCommand
from gpu_worker.sequence_images import ImagesFetched
from gpu_worker.sim.engine import EngineScript
from schemas.codec import decode_result, decode_token_delta
from sie_stream.control import PartitionPlacement, PartitionReleased, PlacementRow
from sie_stream.ids import LANES, TopicPartition
from sie_stream.settings import Settings
from sie_stream.touches import Moved, touches_in
from tests.unit.worker.rig import INCARNATION, Rig, World, work_item

OTHER = "w1-1"
MS = 400.0
MOVING = Settings(sequence_images_mb=1)


class Seen:
    """Implements loop.Observer."""

    def __init__(self) -> None:
        self.commands: list[WorkerCommand] = []

    def saw(self, events: object, commands: object) -> None:
        self.commands += commands  # type: ignore[operator]

    def notes(self, event: str) -> list[dict[str, str | int | float]]:
        return [one.fields for one in self.commands if isinstance(one, Note) and one.event == event]

    def of(self, kind: type[WorkerCommand]) -> list[WorkerCommand]:
        return [one for one in self.commands if isinstance(one, kind)]


class Pair:
    """Two workers that serve model `m`; the first has all its partitions."""

    def __init__(self, settings: Settings = MOVING, movable: bool = True, other_version: str = "1") -> None:
        self.world = World(settings)
        self.seen = (Seen(), Seen())
        scripts = [EngineScript(continuous={"m": 3}, movable=movable, batch_ms=MS) for _ in range(2)]
        self.scripts = scripts
        self.old = Rig(self.world, INCARNATION, scripts[0], (self.seen[0],))
        self.new = Rig(self.world, OTHER, scripts[1], (self.seen[1],))
        launch = self.world.add_model("m")
        self.world.place(launch)
        self.world.place(msgspec.structs.replace(launch, version=other_version), OTHER)
        self.run(100)
        self.world.give("m", list(range(LANES)))
        self.run(20)

    def run(self, ms: int) -> None:
        for _ in range(ms):
            self.old.host.run_turn()
            self.new.host.run_turn()
            self.world.clock.advance(1)

    def release(self) -> list[PartitionReleased]:
        """Ask the first worker for all, and wait until it has let go."""
        self.world.ask_back("m", list(range(LANES)))
        self.old.run_until(lambda: len(self.world.reports(PartitionReleased)) == LANES)
        return [one for one in self.world.reports(PartitionReleased) if isinstance(one, PartitionReleased)]

    def hand_over(self, images_at: str | None = None) -> None:
        """What the scheduler does with the reports, or with `images_at` instead of what they say."""
        told = {one.partition: one.images_at for one in self.release()}
        row, epoch = self.world.rows["m"], self.world.next_epoch()
        places = tuple(
            PartitionPlacement(number, "w1", OTHER, epoch, "assigned", told[number] if images_at is None else images_at)
            for number in range(LANES)
        )
        self.world.publish(PlacementRow(row.model, row.topic, row.replicas, places))

    @property
    def computed_ms(self) -> float:
        return self.old.engines.computed_ms + self.new.engines.computed_ms


def begun(pair: Pair, *names: str, stream: bool = False) -> None:
    pair.world.send(*(work_item(name, stream=stream) for name in names))
    pair.run(150)
    assert pair.world.results() == {}


def moves(pair: Pair) -> dict[str, list[Moved]]:
    """What results tell of moves, by request id."""
    records = pair.world.log.visible(pair.world.names.results)
    told = {decode_result(record.value).request_id: touches_in(record.headers) for record in records}
    return {name: [one for one in touches if isinstance(one, Moved)] for name, touches in told.items() if touches}


def test_running_requests_go_on_where_they_stood() -> None:
    pair = Pair()
    begun(pair, "a", "b", "c", "waits")
    at = pair.world.clock.monotonic_ms()
    pair.hand_over()
    assert pair.world.clock.monotonic_ms() - at < 30, "nobody waited for them"
    pair.new.run_until(lambda: len(pair.world.results()) == 4)
    assert {(one.status, one.provenance.worker) for one in pair.world.results().values()} == {("ok", "w1")}
    assert pair.computed_ms == pytest.approx(4 * MS)
    resumed = pair.seen[1].notes("sequence_resumed")
    assert sorted(str(one["request_id"]) for one in resumed) == ["a", "b", "c"]
    assert all(0 < float(one["pause_ms"]) < 100 for one in resumed)
    assert pair.world.committed("m", 1) == 4
    told = moves(pair)
    assert sorted(told) == ["a", "b", "c"], "what had not begun was not moved"
    for [moved] in told.values():
        assert (moved.worker, moved.incarnation, moved.refused) == ("w0", INCARNATION, "")
        assert moved.ran_ms >= 140
        assert 0 < moved.pause_ms < 100
        assert moved.size_bytes > 0
    pair.old.run(5)
    assert not pair.world.images[INCARNATION].kept
    assert not pair.old.machine.state.handover.kept, "taken: there is room again"


def test_only_partitions_with_images_say_where_they_are() -> None:
    pair = Pair()
    begun(pair, "a")
    assert {one.partition: one.images_at for one in pair.release()} == {0: "", 1: INCARNATION, 2: ""}


def test_an_answer_that_streams_goes_on_with_the_next_number_of_the_same_run() -> None:
    pair = Pair()
    begun(pair, "r", stream=True)
    pair.hand_over()
    pair.new.run_until(lambda: len(pair.world.results()) == 1)
    told = [decode_token_delta(record.value) for record in pair.world.log.visible(pair.world.names.tokens)]
    assert [(one.index, one.worker, one.incarnation, one.attempt) for one in told] == [
        (number, "w0", INCARNATION, 0) for number in range(3)
    ]


@pytest.mark.parametrize("images_at", ["", "w9-gone"])
def test_without_its_image_a_request_is_computed_from_its_beginning(images_at: str) -> None:
    pair = Pair()
    begun(pair, "a", "b", stream=True)
    pair.hand_over(images_at)
    pair.new.run_until(lambda: len(pair.world.results()) == 2)
    assert {one.status for one in pair.world.results().values()} == {"ok"}
    assert pair.computed_ms > 2 * MS + 250
    told = [decode_token_delta(record.value) for record in pair.world.log.visible(pair.world.names.tokens)]
    again = [one.index for one in told if one.incarnation == OTHER and one.request_id == "a"]
    assert again == [0, 1, 2], "from the beginning, as another run"


def test_an_owner_that_does_not_answer_is_not_waited_for_long() -> None:
    pair = Pair()
    begun(pair, "a")
    pair.world.images[INCARNATION].standing = lambda: "silent"
    pair.hand_over()
    at = pair.world.clock.monotonic_ms()
    pair.new.run_until(lambda: len(pair.world.results()) == 1)
    assert 4_000 <= pair.world.clock.monotonic_ms() - at < 5_000
    assert pair.seen[1].notes("images_not_fetched")


def test_images_are_fetched_for_one_partition_after_the_other_into_the_room_that_is_left() -> None:
    """All at once would each be given all of the room."""
    pair = Pair()
    begun(pair, "a", "b")
    images = pair.world.images[INCARNATION]
    images.standing = lambda: "silent"
    pair.hand_over(INCARNATION)
    pair.new.run(50)
    (first,) = pair.seen[1].of(FetchImages)
    assert isinstance(first, FetchImages)
    assert first.bytes_max == 1024 * 1024
    images.standing = lambda: "there"
    sizes = [len(one.content) for one in images.kept[TopicPartition("sie.work.m", 1)]]
    pair.world.images[OTHER].come(ImagesFetched(first.partition, first.placement_epoch, images.give(first.partition)))
    pair.new.run_until(lambda: len(pair.world.results()) == 2)
    orders = pair.seen[1].of(FetchImages)
    assert len(orders) == LANES
    assert isinstance(orders[-1], FetchImages)
    assert sum(sizes) > 0
    assert pair.computed_ms < 2 * MS + 5, "nothing was computed again"


def test_partitions_that_wait_for_a_silent_owner_all_start_in_time() -> None:
    pair = Pair()
    begun(pair, "a")
    pair.world.images[INCARNATION].standing = lambda: "silent"
    pair.hand_over(INCARNATION)
    at = pair.world.clock.monotonic_ms()
    pair.new.run_until(lambda: len(pair.world.results()) == 1)
    assert pair.world.clock.monotonic_ms() - at < 5_000, "not 4 s for each of them"
    assert len(pair.seen[1].notes("images_not_fetched")) == LANES


def test_a_pause_between_two_clocks_that_disagree_is_not_told_as_none() -> None:
    pair = Pair()
    begun(pair, "a")
    pair.release()
    kept = pair.world.images[INCARNATION].kept
    for place, images in kept.items():
        kept[place] = [msgspec.structs.replace(one, frozen_ms=one.frozen_ms + 60_000) for one in images]
    pair.hand_over()
    pair.new.run_until(lambda: len(pair.world.results()) == 1)
    [resumed] = pair.seen[1].notes("sequence_resumed")
    assert "pause_ms" not in resumed
    assert 59_000 < float(resumed["clock_behind_ms"]) <= 60_000


def test_a_damaged_image_is_refused_and_the_request_computed() -> None:
    pair = Pair()
    begun(pair, "a", "b", stream=True)
    told = pair.release()
    for place, images in pair.world.images[INCARNATION].kept.items():
        damaged = [msgspec.structs.replace(one, content=b"?") for one in images if one.offset == 0]
        pair.world.images[INCARNATION].kept[place] = [*damaged, *(one for one in images if one.offset)]
    assert len(told) == LANES
    pair.hand_over()
    pair.new.run_until(lambda: len(pair.world.results()) == 2)
    assert {one.status for one in pair.world.results().values()} == {"ok"}
    assert [one["request_id"] for one in pair.seen[1].notes("sequence_image_refused")] == ["a"]
    assert [one["request_id"] for one in pair.seen[1].notes("sequence_resumed")] == ["b"]
    assert {name: bool(moved.refused) for name, [moved] in moves(pair).items()} == {"a": True, "b": False}
    deltas = [decode_token_delta(record.value) for record in pair.world.log.visible(pair.world.names.tokens)]
    assert [one.index for one in deltas if one.request_id == "a" and one.incarnation == OTHER] == [0, 1, 2]


def test_an_engine_that_dies_with_a_moved_request_computes_it_again() -> None:
    pair = Pair()
    begun(pair, "a", stream=True)
    pair.hand_over()
    pair.new.run_until(lambda: pair.seen[1].notes("sequence_resumed"))
    for engine in list(pair.new.machine.state.engines):
        pair.new.engines.kill(engine)
    pair.new.run_until(lambda: len(pair.world.results()) == 1)
    deltas = [decode_token_delta(record.value) for record in pair.world.log.visible(pair.world.names.tokens)]
    assert [(one.attempt, one.index) for one in deltas if one.incarnation == OTHER] == [(1, 0), (1, 1), (1, 2)]


def test_what_does_not_fit_runs_to_its_end() -> None:
    pair = Pair()
    begun(pair, "a", "b")
    room = len(b'{"request_id":"a","done":0.3725,"told":0}') + 5
    at = pair.world.clock.monotonic_ms()
    original = pair.old.engines.export
    pair.old.engines.export = lambda engine, batch_ids, bytes_max: original(engine, batch_ids, room)
    pair.hand_over()
    assert pair.world.clock.monotonic_ms() - at > 200, "the other was waited for"
    assert list(pair.world.results()) == ["b"]
    pair.new.run_until(lambda: len(pair.world.results()) == 2)
    assert pair.computed_ms == pytest.approx(2 * MS)


@pytest.mark.parametrize("case", ["off", "not movable", "another version"])
def test_where_nobody_could_go_on_with_them_they_are_waited_for(case: str) -> None:
    settings = Settings() if case == "off" else MOVING
    pair = Pair(settings, movable=case != "not movable", other_version="2" if case == "another version" else "1")
    begun(pair, "a", "b")
    told = pair.release()
    assert len(pair.world.results()) == 2
    assert {one.images_at for one in told} == {""}
    assert not pair.seen[0].of(ExportSequences)


def test_a_worker_that_stops_waits_for_what_runs() -> None:
    """Its images would end with it."""
    pair = Pair()
    begun(pair, "a")
    pair.old.host.request_stop()
    pair.old.run(5)
    pair.world.ask_back("m", list(range(LANES)))
    pair.old.run_until(lambda: pair.old.host.finished)
    assert list(pair.world.results()) == ["a"]
    assert not pair.seen[0].of(ExportSequences)


def test_images_nobody_comes_for_are_dropped_after_a_minute() -> None:
    pair = Pair()
    begun(pair, "a")
    pair.release()
    pair.run(59_000)
    assert pair.world.images[INCARNATION].kept
    pair.run(1_500)
    assert not pair.world.images[INCARNATION].kept
    assert len(pair.seen[0].of(DropImages)) == 1


def test_what_was_answered_before_the_engine_heard_of_it_is_not_moved() -> None:
    pair = Pair()
    begun(pair, "a")
    pair.run(int(MS) - 151)
    pair.hand_over()
    pair.new.run_until(lambda: len(pair.world.results()) == 1)
    assert len(pair.world.results()) == 1


def test_an_assignment_that_ends_before_its_images_came_asks_again_for_the_next_one() -> None:
    pair = Pair()
    begun(pair, "a")
    pair.world.images[INCARNATION].standing = lambda: "silent"
    pair.hand_over()
    pair.new.run(50)
    row, epoch = pair.world.rows["m"], pair.world.next_epoch()
    pair.world.images[INCARNATION].standing = lambda: "there"
    places = tuple(msgspec.structs.replace(one, placement_epoch=epoch) for one in row.partitions)
    pair.world.publish(PlacementRow(row.model, row.topic, row.replicas, places))
    pair.new.run_until(lambda: len(pair.world.results()) == 1)
    assert len(pair.seen[1].of(FetchImages)) == 2
    assert pair.computed_ms == pytest.approx(MS)


def test_images_of_an_earlier_assignment_are_not_told_as_those_of_the_next() -> None:
    pair = Pair()
    begun(pair, "a")
    assert sorted(one.images_at for one in pair.release()) == ["", "", INCARNATION]
    pair.world.give("m", list(range(LANES)))
    pair.old.run_until(lambda: len(pair.world.results()) == 1)
    pair.world.ask_back("m", list(range(LANES)))
    pair.old.run_until(lambda: len(pair.world.reports(PartitionReleased)) == 2 * LANES)
    later = pair.world.reports(PartitionReleased)[LANES:]
    assert [one.images_at for one in later if isinstance(one, PartitionReleased)] == [""] * LANES


def test_images_that_come_for_an_assignment_that_is_over_are_not_those_of_the_present_one() -> None:
    pair = Pair()
    begun(pair, "a")
    pair.world.images[INCARNATION].standing = lambda: "silent"
    pair.hand_over()
    pair.new.run_until(lambda: pair.seen[1].of(FetchImages))
    row, epoch = pair.world.rows["m"], pair.world.next_epoch()
    over = row.partitions[1].placement_epoch
    places = tuple(msgspec.structs.replace(one, placement_epoch=epoch) for one in row.partitions)
    pair.world.publish(PlacementRow(row.model, row.topic, row.replicas, places))
    pair.new.run_until(lambda: len(pair.seen[1].of(FetchImages)) == 2)
    place = TopicPartition(row.topic, 1)
    pair.new.images.come(ImagesFetched(place, over, ()))
    pair.new.run(50)
    assert pair.new.machine.state.handover.fetching, "it still waits for its own"
    pair.new.images.come(ImagesFetched(place, epoch, pair.world.images[INCARNATION].give(place)))
    pair.new.run_until(lambda: len(pair.world.results()) == 1)
    assert len(pair.seen[1].of(FetchImages)) == 2
    assert pair.computed_ms == pytest.approx(MS)


def test_events_for_what_is_over_are_ignored() -> None:
    """A partition that was taken away while its requests were being stopped."""
    pair = Pair()
    begun(pair, "a")
    pair.world.ask_back("m", list(range(LANES)))
    held: list[EngineEvent] = []
    original = pair.old.engines.poll

    def holding(wait_ms: float) -> list[EngineEvent]:
        held.extend(original(wait_ms))
        return []

    def late(wait_ms: float) -> list[EngineEvent]:
        return [held.pop(0)] if held else original(wait_ms)

    pair.old.run_until(lambda: pair.seen[0].of(ExportSequences))
    pair.old.engines.poll = holding
    pair.world.take_away("m")
    pair.old.run(20)
    assert any(isinstance(event, SequenceExported) for event in held)
    pair.old.engines.poll = late
    pair.old.run(1_000)
    assert not pair.world.images[INCARNATION].kept
    assert pair.old.machine.state.open_total == 0
