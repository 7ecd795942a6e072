"""Whatever happens: one owner per partition, no device above its memory, the same log gives the same bytes, and when
the faults stop everything serves. The checks after each record are in chaos.World.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import msgspec
import pytest

from scheduler.machine import SchedulerMachine
from scheduler.state import STATE_FORMAT, from_bytes, to_bytes
from sie_stream.control import ClusterRecord, SchedulerCommand
from sie_stream.settings import Settings
from tests.examples import rounds
from tests.unit.scheduler.chaos import World
from tests.waiting import PATIENCE_S

SEEDS = rounds(60)
TURNS = 120


def world(seed: int, turns: int = TURNS) -> World:
    made = World(seed)
    for _ in range(turns):
        made.turn()
    return made


def replay(log: list[tuple[int, int, ClusterRecord]], machine: SchedulerMachine) -> list[SchedulerCommand]:
    return [command for offset, at_ms, record in log for command in machine.step(offset, at_ms, record)]


@pytest.mark.parametrize("start", range(0, SEEDS, 5))
def test_nothing_moves_without_a_release_or_a_fence_and_all_serves_in_the_end(start: int) -> None:
    for seed in range(start, min(start + 5, SEEDS)):
        made = world(seed)
        made.heal()
        state = made.cluster.machine.state
        for model in state.models.values():
            serving = {replica.key for replica in model.replicas if replica.state == "ready"}
            assert model.status == "accepted"
            assert len(model.replicas) == len(model.present()) == model.replicas_wanted, (seed, model.model)
            assert all(p.state == "assigned" and p.owner in serving for p in model.partitions), (seed, model.model)
            assert model.routed_generation == model.generation, (seed, model.model)
            counts = [sum(p.owner == key for p in model.partitions) for key in serving]
            assert max(counts) - min(counts) <= 3, (seed, model.model, counts)
            assert list(model.launches) == [model.generation]
        assert all(worker.status == "live" for worker in state.workers.values())


def digest(seed: int) -> str:
    made = world(seed)
    return hashlib.sha256(msgspec.json.encode(made.cluster.commands) + to_bytes(made.cluster.machine.state)).hexdigest()


@pytest.mark.parametrize("seed", range(1_000, 1_000 + rounds(10)))
def test_the_same_log_gives_the_same_commands_also_from_a_snapshot_in_the_middle(seed: int) -> None:
    made = world(seed)
    log = made.cluster.log
    commands = msgspec.json.encode(made.cluster.commands)
    again = SchedulerMachine(Settings())
    assert msgspec.json.encode(replay(log, again)) == commands
    assert to_bytes(again.state) == to_bytes(made.cluster.machine.state)

    half = len(log) // 2
    first = SchedulerMachine(Settings())
    before = replay(log[:half], first)
    restored = from_bytes(to_bytes(first.state))
    second = SchedulerMachine(Settings(), restored)
    assert msgspec.json.encode(before + replay(log[half:], second)) == commands
    assert to_bytes(second.state) == to_bytes(made.cluster.machine.state)


def test_the_hash_seed_of_the_process_changes_nothing() -> None:
    seeds = rounds(12)
    module = "tests.unit.scheduler.test_histories_at_random"
    code = f"from {module} import digest; print([digest(s) for s in range({seeds})])"
    answers = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=PATIENCE_S,
        ).stdout
        for hash_seed in ("1", "4242")
    ]
    assert answers[0] == answers[1]
    assert len(answers[0]) > 64 * seeds


def test_a_snapshot_of_another_format_is_not_read() -> None:
    made = world(1, turns=20)
    data = to_bytes(made.cluster.machine.state).replace(b'"format":%d' % STATE_FORMAT, b'"format":999', 1)
    assert from_bytes(data) is None
