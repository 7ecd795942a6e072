"""A record that breaks the fold is left out by everybody in the same way, and the rest goes on."""

from __future__ import annotations

import pytest

from scheduler.guard import COPY_EVERY_RECORDS, GuardedMachine
from scheduler.machine import SchedulerMachine
from scheduler.state import to_bytes
from sie_stream.control import ClusterRecord, ReplicaReady, SchedulerElected, Tick, WorkerHeartbeat
from sie_stream.errors import ConfigError, LogError
from sie_stream.settings import Settings
from tests.unit.scheduler.kit import decisions, joined

BROKEN = ReplicaReady("w0", "a", "churn", "1.0.0", 1, 1, "soon", 1)  # type: ignore[arg-type]  # a field of another type


def log(length: int) -> list[ClusterRecord]:
    """A worker that lives, and nothing else."""
    records: list[ClusterRecord] = [SchedulerElected("s"), joined("w0", "a")]
    while len(records) < length:
        records += [WorkerHeartbeat("w0", "a"), Tick("s")]
    return records[:length]


def broken_machine(monkeypatch: pytest.MonkeyPatch, defect: type[Exception] = TypeError) -> None:
    """A handler with a defect: it changes the state and then stumbles over what it did not expect."""
    healthy = SchedulerMachine.step

    def step(self: SchedulerMachine, offset: int, at_ms: int, record: ClusterRecord) -> object:
        if isinstance(record, ReplicaReady):
            self.state.workers.clear()
            raise defect(f"{object()} is no number")
        return healthy(self, offset, at_ms, record)

    monkeypatch.setattr(SchedulerMachine, "step", step)


@pytest.mark.parametrize("before", [2, 7, COPY_EVERY_RECORDS, COPY_EVERY_RECORDS + 3])
def test_a_record_that_breaks_the_fold_is_left_out_and_nothing_of_it_stays(
    before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = GuardedMachine(Settings())
    for offset, record in enumerate(log(before)):
        plain.step(offset, 250 * offset, record)
    broken_machine(monkeypatch)
    told = []
    processes = [GuardedMachine(Settings()), GuardedMachine(Settings())]
    for guarded in processes:
        for offset, record in enumerate(log(before)):
            guarded.step(offset, 250 * offset, record)
        commands = guarded.step(before, 250 * before, BROKEN)
        assert [decision.kind for decision in decisions(commands)] == ["record_refused"]
        told.append(decisions(commands)[0])
        guarded.step(before + 1, 250 * before + 100, WorkerHeartbeat("w0", "a"))
        assert guarded.state.workers["w0"].last_heard_ms == 250 * before + 100
    assert told[0] == told[1]
    assert "0x?" in told[0].reason
    plain.step(before + 1, 250 * before + 100, WorkerHeartbeat("w0", "a"))
    assert {to_bytes(guarded.state) for guarded in processes} == {to_bytes(plain.state)}


@pytest.mark.parametrize("defect", [ConfigError, LogError, RuntimeError, RecursionError, KeyError, OverflowError])
def test_it_does_not_matter_what_a_defect_raises(defect: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    broken_machine(monkeypatch, defect)
    guarded = GuardedMachine(Settings())
    for offset, record in enumerate(log(5)):
        guarded.step(offset, 250 * offset, record)
    assert [one.kind for one in decisions(guarded.step(5, 2_000, BROKEN))] == ["record_refused"]
