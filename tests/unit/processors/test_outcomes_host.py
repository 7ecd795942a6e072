"""The statistics of results over the log in memory: nothing is read without need, and a restart breaks no window."""

from __future__ import annotations

import msgspec
import pytest

from processors.outcomes.host import HIDDEN_MS, WINDOWS_BACK_AT_START, OutcomesHost
from processors.outcomes.windows import GRACE_MS, WINDOW_MS
from processors.turns import Ports
from schemas import codec
from sie_stream.control import VariantRow
from sie_stream.ports import TopicSpec
from sie_stream.records import LogWrite
from sie_stream.rollout_records import VariantWindow
from sie_stream.settings import Settings
from sie_stream.sim.log import SimLog
from tests.unit.processors.kit import NAMES, route
from tests.unit.processors.test_outcome_windows import result

SPLIT = (
    VariantRow("stable", "1", 9_000, ((0, 9_000),)),
    VariantRow("canary", "2", 1_000, ((9_000, 10_000),), NAMES.work("churn.CANARY"), 1),
)


class World:
    def __init__(self) -> None:
        self.log = SimLog()
        topics = (NAMES.results, NAMES.shadow, NAMES.routes, NAMES.cluster)
        self.log.admin().ensure([TopicSpec(topic, 1, {}) for topic in topics])
        self.writer = self.log.plain_writer()

    def host(self, name: str = "outcomes-0") -> OutcomesHost:
        ports = Ports(
            make_reader=self.log.reader,
            make_latest_reader=self.log.latest_reader,
            make_group_reader=lambda group: self.log.group_reader(group, name),
            writer=self.log.transactional_writer(f"sie.{name}"),
            clock=self.log.clock,
            make_plain_writer=self.log.plain_writer,
        )
        host = OutcomesHost(Settings(), ports, name)
        host.start()
        return host

    def publish(self, *variants: VariantRow, model: str = "churn") -> None:
        row = route(model, variants=variants)
        self.writer.write([LogWrite(NAMES.routes, codec.encode_row(row), model.encode())])

    def answer(self, count: int, score: float = 0.5, model: str = "churn") -> None:
        value = codec.encode_result(msgspec.structs.replace(result(outputs={"score": score}), model=model))
        self.writer.write([LogWrite(NAMES.results, value, b"k")] * count)

    def run(self, host: OutcomesHost, ms: int) -> None:
        for _ in range(ms // 100):
            host.turn()
            self.log.clock.advance(100)

    def windows(self) -> list[VariantWindow]:
        return [
            fact
            for one in self.log.visible(NAMES.cluster)
            if isinstance(fact := codec.decode_cluster(one.value), VariantWindow)
        ]


def test_nothing_is_counted_while_there_is_one_variant() -> None:
    world = World()
    world.publish(SPLIT[0])
    host = world.host()
    world.answer(5)
    world.run(host, 2 * WINDOW_MS + GRACE_MS)
    assert world.windows() == []


def test_windows_are_reported_while_a_version_is_rolled_out_and_not_after() -> None:
    world = World()
    host = world.host()
    world.publish(*SPLIT)
    world.run(host, 200)
    world.answer(7)
    world.run(host, WINDOW_MS + GRACE_MS + 200)
    [window] = world.windows()
    assert (window.model, window.variant, window.version, window.stats.ok) == ("churn", "canary", "2", 7)
    assert window.complete
    world.publish(SPLIT[0])
    world.answer(7)
    world.run(host, 2 * WINDOW_MS + GRACE_MS)
    assert len(world.windows()) == 1


def test_a_restart_in_the_middle_of_a_window_repeats_it_whole() -> None:
    world = World()
    world.publish(*SPLIT)
    first = world.host()
    world.run(first, 100)
    world.answer(3)
    world.run(first, 500)
    second = world.host("outcomes-1")
    world.answer(4)
    world.run(second, WINDOW_MS + GRACE_MS + 200)
    world.run(first, 200)
    told = world.windows()
    assert [window.stats.ok for window in told] == [7, 7]
    assert all(window.complete for window in told)
    plain = [msgspec.structs.replace(window, reporter="") for window in told]
    assert plain[0] == plain[1], "the scheduler counts a window once, by its end"


@pytest.mark.parametrize("ending", ["commit", "abort"])
def test_a_window_waits_for_what_an_open_transaction_hides(ending: str) -> None:
    """A worker that died holds back what all others commit behind it, and a window without that is broken."""
    world = World()
    host = world.host()
    world.publish(*SPLIT)
    world.run(host, 200)
    world.answer(2)
    dying = world.log.transactional_writer("sie.worker.w0")
    dying.init()
    dying.begin()
    failed = codec.encode_result(result(status="failed", code="engine_error"))
    dying.write([LogWrite(NAMES.results, failed, b"k")] * 3)
    world.answer(5)
    world.run(host, 2 * WINDOW_MS + GRACE_MS)
    assert world.windows() == []
    world.answer(1)
    getattr(dying, ending)()
    world.run(host, 200)
    [window] = world.windows()
    assert (window.stats.ok, window.stats.failed) == (7, 3 if ending == "commit" else 0)
    assert window.complete
    world.run(host, 2 * WINDOW_MS)
    assert [one.stats.ok for one in world.windows()] == [7, 1], "each answer once"


def test_what_is_written_after_a_window_closed_does_not_hold_it_up() -> None:
    world = World()
    host = world.host()
    world.publish(*SPLIT)
    world.run(host, 200)
    world.answer(7)
    world.run(host, WINDOW_MS + GRACE_MS - 400)
    writer = world.log.transactional_writer("sie.worker.w0")
    writer.init()
    for _ in range(8):  # always one open, none for long
        writer.begin()
        writer.write([LogWrite(NAMES.results, codec.encode_result(result()), b"k")])
        world.run(host, 200)
        writer.commit()
    [window] = world.windows()
    assert window.stats.ok == 7


def test_a_transaction_that_never_ends_breaks_windows_and_does_not_keep_them_for_ever() -> None:
    world = World()
    host = world.host()
    world.publish(*SPLIT)
    world.run(host, 200)
    world.answer(2)
    foreign = world.log.transactional_writer("not.ours", transaction_timeout_ms=10 * HIDDEN_MS)
    foreign.init()
    foreign.begin()
    foreign.write([LogWrite(NAMES.results, codec.encode_result(result()), b"k")])
    world.run(host, HIDDEN_MS)
    assert world.windows() == []
    world.run(host, WINDOW_MS + GRACE_MS + 1_000)
    [window] = world.windows()
    assert (window.stats.ok, window.complete) == (2, False)


@pytest.mark.parametrize("down_ms", [3_000, 11_000, 50_000])
def test_windows_of_the_time_in_which_nobody_counted_are_counted_by_the_next_process(down_ms: int) -> None:
    """What failed meanwhile is evidence, too: a rollout that goes on after a gap of 11 s must not be spared it."""
    world = World()
    world.publish(*SPLIT)
    first = world.host()
    world.run(first, WINDOW_MS)
    first.close()
    world.answer(5)
    world.log.clock.advance(down_ms)
    world.run(world.host("outcomes-1"), 500)
    [window] = world.windows()
    assert (window.stats.ok, window.complete) == (5, True)


def test_windows_of_an_outage_of_hours_are_not_judged_in_part() -> None:
    """The first window that is read is whole, the one before it is not there at all."""
    world = World()
    world.publish(*SPLIT)
    for _ in range(40):
        world.answer(1)
        world.log.clock.advance(WINDOW_MS)
    world.run(world.host(), WINDOW_MS + GRACE_MS)
    told = world.windows()
    assert {(window.stats.ok, window.complete) for window in told} == {(1, True)}
    assert len(told) <= WINDOWS_BACK_AT_START + 1


def test_a_model_that_is_split_while_another_is_read_is_not_judged_by_half_a_window() -> None:
    world = World()
    host = world.host()
    world.publish(*SPLIT, model="first")
    world.run(host, WINDOW_MS)
    world.answer(4)
    world.run(host, 400)
    assert world.log.clock.now_ms() % WINDOW_MS, "in the middle of a window, of which four answers are passed over"
    world.publish(*SPLIT)
    world.run(host, 200)
    world.answer(3)
    world.run(host, WINDOW_MS)
    world.answer(2)
    world.run(host, 2 * WINDOW_MS + GRACE_MS)
    told = [(window.stats.ok, window.complete) for window in world.windows() if window.model == "churn"]
    assert told == [(3, False), (2, True)]
