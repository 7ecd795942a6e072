"""Recorded logs still lead to the recorded decisions. To record again: `python -m tests.unit.scheduler.scenarios`."""

from __future__ import annotations

import msgspec
import pytest

from scheduler.machine import SchedulerMachine
from sie_stream.control import RecordDecision
from sie_stream.settings import Settings
from tests.unit.scheduler.scenarios import FOLDER, SCENARIOS, History

NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))


def test_every_scenario_is_recorded() -> None:
    assert sorted(SCENARIOS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_log_leads_to_the_recorded_decisions(name: str) -> None:
    history = msgspec.json.decode((FOLDER / f"{name}.json").read_bytes(), type=History)
    machine = SchedulerMachine(Settings())
    made = [
        command.decision
        for entry in history.log
        for command in machine.step(entry.offset, entry.at_ms, entry.record)
        if isinstance(command, RecordDecision)
    ]
    assert len(made) == len(history.decisions)
    for now, recorded in zip(made, history.decisions, strict=True):
        assert now == recorded
