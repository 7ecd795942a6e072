"""Real processes, killed, paused and cut off under load: nothing lost, nothing doubled, nobody has to step in."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from sie_stream.cli.workers import worker_rows
from sie_stream.deadline import Deadline
from sie_stream.edge.clock import SystemClock
from tests.chaos.engine_room import EngineRoom, engine_room
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.chaos
MODELS_DIR = Path(".models")
RECOVERY_S = PATIENCE_S
BROKER_SLEEP_MS = 12_000
SOME = 60
"""Answers that show that things flow again."""


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineRoom]:
    with engine_room(tmp_path_factory.mktemp("chaos"), MODELS_DIR, "chaos") as running:
        running.await_progress(SOME, RECOVERY_S)
        yield running


@pytest.mark.parametrize("name", ["worker-0", "ingress-0", "scheduler-0", "egress-0"])
def test_a_killed_process_is_replaced_and_the_stream_goes_on(room: EngineRoom, name: str) -> None:
    before = room.pid(name)
    room.signal(name, signal.SIGKILL)
    room.watch_until(lambda: room.pid(name) != before, f"a new {name}", RECOVERY_S)
    room.await_progress(SOME, RECOVERY_S)


def test_a_paused_worker_that_wakes_is_fenced_and_its_models_went_on_elsewhere(room: EngineRoom) -> None:
    before = room.pid("worker-1")
    room.signal("worker-1", signal.SIGSTOP)
    try:
        room.watch_until(lambda: worker_state(room, "worker-1") == "fenced", "worker-1 to be fenced", RECOVERY_S)
        room.await_progress(SOME, RECOVERY_S)
    finally:
        room.signal("worker-1", signal.SIGCONT)
    room.watch_until(lambda: room.pid("worker-1") != before, "the fenced worker to give way", RECOVERY_S)
    room.watch_until(lambda: worker_state(room, "worker-1") == "live", "a new incarnation to join", RECOVERY_S)


def worker_state(room: EngineRoom, name: str) -> str:
    return next(row["state"] for row in worker_rows(room.cluster.connection) if row["worker"] == name)


def test_a_paused_ingress_loses_its_partitions_and_commits_nothing_when_it_wakes(room: EngineRoom) -> None:
    room.signal("ingress-1", signal.SIGSTOP)
    try:
        # Its session ends, the other ingress takes over, and enough is answered that none of it waits for this one.
        room.await_progress(20 * SOME, 2 * RECOVERY_S)
    finally:
        room.signal("ingress-1", signal.SIGCONT)
    room.await_progress(SOME, RECOVERY_S)


def test_a_paused_scheduler_does_no_harm(room: EngineRoom) -> None:
    room.signal("scheduler-0", signal.SIGSTOP)
    try:
        room.await_progress(5 * SOME, RECOVERY_S)
    finally:
        room.signal("scheduler-0", signal.SIGCONT)
    room.await_progress(SOME, RECOVERY_S)


@pytest.mark.parametrize("time", range(3))
def test_the_broker_is_killed_and_comes_back(room: EngineRoom, time: int) -> None:
    """Three times: what a kill leaves behind depends on the step its transactions were in."""
    assert room.cluster.broker is not None
    room.cluster.broker.kill()
    room.cluster.broker.restart()
    room.await_progress(SOME, 2 * RECOVERY_S)


def test_a_broker_that_stood_still_longer_than_its_session_is_found_again(room: EngineRoom) -> None:
    """It fences itself when it wakes, and is missing from its own metadata for a moment."""
    assert room.cluster.broker is not None
    pid = room.cluster.broker.pid
    asleep = Deadline.after(monotonic_ms(), BROKER_SLEEP_MS)
    os.kill(pid, signal.SIGSTOP)
    try:
        room.watch_until(lambda: asleep.passed(monotonic_ms()), "the pause to pass", RECOVERY_S)
    finally:
        os.kill(pid, signal.SIGCONT)
    room.await_progress(5 * SOME, 2 * RECOVERY_S)


def monotonic_ms() -> int:
    return int(SystemClock().monotonic_ms())


def test_after_all_of_it_every_request_has_exactly_one_terminal_record(room: EngineRoom) -> None:
    proof = room.prove_all(3 * RECOVERY_S)
    assert proof["statuses"] == {"ok": room.sent}
