"""All workers restarted one after another under load, as for an upgrade: nobody notices."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from sie_stream.cli.ask import ask, of_kind
from sie_stream.cli.cluster import Layout
from sie_stream.cli.workers import worker_rows
from sie_stream.control import DrainWorker, UncordonWorker
from tests.chaos.engine_room import EngineRoom, engine_room
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.chaos
MODELS_DIR = Path(".models")
WORKERS = ("worker-0", "worker-1", "worker-2")
STEP_S = PATIENCE_S


def live_incarnation(room: EngineRoom, name: str) -> str:
    """Empty while the worker is not live."""
    rows = worker_rows(room.cluster.connection)
    return next((row["incarnation"] for row in rows if row["worker"] == name and row["state"] == "live"), "")


def test_a_rolling_restart_of_all_workers_under_load_fails_no_request(tmp_path: Path) -> None:
    with engine_room(tmp_path, MODELS_DIR, "roll", Layout(workers=3), replicas=1) as room:
        room.await_progress(60, STEP_S)
        for name in WORKERS:
            before = live_incarnation(room, name)
            order = [DrainWorker(name, "test")]
            ask(room.cluster.connection, order, [name], of_kind({"worker_drained"}), STEP_S, room.cluster.watch)
            room.signal(name, signal.SIGTERM)
            room.watch_until(
                lambda name=name, before=before: live_incarnation(room, name) not in ("", before),
                f"a new incarnation of {name}",
                STEP_S,
            )
            back = [UncordonWorker(name, "test")]
            ask(room.cluster.connection, back, [name], of_kind({"worker_uncordoned"}), STEP_S, room.cluster.watch)
            room.await_progress(60, STEP_S)
        proof = room.prove_all(STEP_S)
        assert proof["statuses"] == {"ok": room.sent}
