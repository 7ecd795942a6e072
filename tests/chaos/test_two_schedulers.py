"""Two schedulers, one leads: it is killed, and it is paused until the other leads. Decisions are those of one."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from sie_stream.cli.audit_decisions import audited
from sie_stream.cli.cluster import Layout
from sie_stream.cli.workers import cluster_state
from tests.chaos.engine_room import EngineRoom, engine_room
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.chaos
MODELS_DIR = Path(".models")
STEP_S = PATIENCE_S


def leader(room: EngineRoom) -> str:
    """Id of the scheduler that leads, as the log has it."""
    return cluster_state(room.cluster.connection).leader


def leading_process(room: EngineRoom) -> str:
    """Name of the process that leads: it logged so, under the leader's id, in its present life."""
    assert room.cluster.supervisor is not None
    for name, child in room.cluster.supervisor.children.items():
        if name.startswith("scheduler-"):
            with child.log_path.open("rb") as log:
                log.seek(child.log_offset)
                told = [line for line in log.read().splitlines() if b'"leading"' in line]
            if told and leader(room).encode() in told[-1]:
                return name
    raise AssertionError(f"no process leads as {leader(room)}")


def await_another(room: EngineRoom, before: str) -> None:
    room.watch_until(lambda: leader(room) != before, f"a leader after {before}", STEP_S)


def test_the_standby_takes_over_and_nothing_is_decided_twice(tmp_path: Path) -> None:
    with engine_room(tmp_path, MODELS_DIR, "two", Layout(workers=2, schedulers=2)) as room:
        room.await_progress(60, STEP_S)
        killed, first = leading_process(room), leader(room)
        room.signal(killed, signal.SIGKILL)
        await_another(room, first)
        paused, second = leading_process(room), leader(room)
        room.signal(paused, signal.SIGSTOP)
        try:
            await_another(room, second)
            room.signal("worker-0", signal.SIGKILL)  # somebody has to decide about this
            room.await_progress(60, STEP_S)
        finally:
            room.signal(paused, signal.SIGCONT)
        room.await_progress(60, STEP_S)
        proof = room.prove_all(STEP_S)
        assert proof["statuses"] == {"ok": room.sent}
        settings = room.cluster.settings
        reader = room.cluster.connection.reader(settings.topics.scheduler_group)
        try:
            audit = audited(reader, settings)
        finally:
            reader.close()
        assert (audit.differing, audit.missing, audit.extra) == (0, 0, 0)
        assert audit.equal > 0
