"""One failure of each kind for real: what followed is on the log as a chain, in order, down to the first answer."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from schemas.codec import decode_row
from sie_stream.auditing.failures import Failure, failures_of
from sie_stream.cli.cluster import Layout
from sie_stream.cli.decisions import logged
from sie_stream.cli.failures import lines, with_answers
from sie_stream.control import InstanceRow
from sie_stream.edge.tables import latest_values
from tests.chaos.engine_room import EngineRoom, engine_room
from tests.chaos.test_two_schedulers import await_another, leader, leading_process
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.chaos
MODELS_DIR = Path(".models")
STEP_S = PATIENCE_S
SOME = 60


def engine_pids(worker_pid: int) -> list[int]:
    children = psutil.Process(worker_pid).children()
    return [child.pid for child in children if "gpu_worker.edge.engine_process" in child.cmdline()]


class EverySecond:
    """Reading whole topics as fast as possible would take the processor from what is waited for."""

    def __init__(self) -> None:
        self._next = 0.0

    def due(self) -> bool:
        if time.monotonic() < self._next:
            return False
        self._next = time.monotonic() + 1.0
        return True


def all_ready(room: EngineRoom) -> bool:
    """Every model has both replicas ready, as users are told."""
    reader = room.cluster.connection.reader()
    try:
        values = latest_values(reader, room.cluster.connection.settings.topics.instances).values()
    finally:
        reader.close()
    rows = [decode_row(value, InstanceRow) for value in values]
    return all([one.state for one in row.replicas] == ["ready", "ready"] for row in rows)


def await_all_ready(room: EngineRoom) -> None:
    looks = EverySecond()
    room.watch_until(lambda: looks.due() and all_ready(room), "both replicas of every model", STEP_S)


def found(room: EngineRoom) -> list[Failure]:
    topics = room.cluster.connection.settings.topics
    reader = room.cluster.connection.reader()
    try:
        decisions = [entry.decision for entry in logged(reader, topics.decisions, 0, follow=False)]
        return with_answers(reader, topics, failures_of(decisions))
    finally:
        reader.close()


def await_failure(room: EngineRoom, kind: str, subject: str, ended: Callable[[Failure], bool]) -> Failure:
    """The newest failure of that kind, once its chain has got so far."""
    newest: list[Failure] = []
    looks = EverySecond()

    def looked() -> bool:
        if not looks.due():
            return False
        newest[:] = [one for one in found(room) if one.root.kind == kind and one.root.subject.startswith(subject)][-1:]
        return bool(newest) and ended(newest[0])

    room.watch_until(looked, f"the chain of {kind} {subject}", STEP_S)
    sys.stdout.write("\n".join(lines(newest[0])) + "\n")
    return newest[0]


def test_each_failure_is_a_chain_from_its_cause_to_the_first_answer(tmp_path: Path) -> None:
    with engine_room(tmp_path, MODELS_DIR, "chain", Layout(workers=2, schedulers=2)) as room:
        await_all_ready(room)
        psutil.Process(engine_pids(room.pid("worker-0"))[0]).kill()
        engine = await_failure(room, "engine_lost", "worker-0", lambda one: one.after_ms("engine_back") is not None)
        assert "SIGKILL" in engine.root.reason
        assert engine.root.moves, "the engine served something"

        room.signal("worker-0", signal.SIGKILL)
        killed = await_failure(room, "worker_lost", "worker-0", lambda one: one.first_answer_ms is not None)
        assert "saw the process end" in killed.root.reason
        assert_in_order(killed)
        await_all_ready(room)

        room.signal("worker-1", signal.SIGSTOP)
        try:
            paused = await_failure(room, "worker_lost", "worker-1", lambda one: one.first_answer_ms is not None)
        finally:
            room.signal("worker-1", signal.SIGCONT)
        assert "No heartbeat" in paused.root.reason
        assert_in_order(paused)
        room.await_progress(SOME, STEP_S)

        for blow in (signal.SIGKILL, signal.SIGSTOP):
            name, before = leading_process(room), leader(room)
            room.signal(name, blow)
            try:
                await_another(room, before)
                elected = await_failure(room, "scheduler_elected", leader(room), lambda one: True)
            finally:
                if blow == signal.SIGSTOP:
                    room.signal(name, signal.SIGCONT)
            assert elected.root.chosen["before"] == before
            assert elected.root.took_ms is not None
        room.await_progress(SOME, STEP_S)
        proof = room.prove_all(STEP_S)
        assert proof["statuses"] == {"ok": room.sent}


def assert_in_order(failure: Failure) -> None:
    """Fenced, then given away, then answered there."""
    fenced = next(place for place, one in enumerate(failure.chain) if one.kind == "worker_fenced")
    given = next(place for place, one in enumerate(failure.chain) if one.kind == "partitions_assigned")
    assert fenced < given
    fenced_ms, first_ms = failure.after_ms("worker_fenced"), failure.first_answer_ms
    assert fenced_ms is not None
    assert first_ms is not None
    assert 0 <= fenced_ms <= first_ms
