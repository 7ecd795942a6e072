"""A fold that no record can stop: one that makes the machine raise is left out, and a decision says so.

Every process that folds sie.cluster (leader, standby that takes over, audit, `get workers`) would meet the same record
again after each restart and raise again, for ever. So the machine is put back to where it was before the record: to a
copy of the state that is taken now and then, and the records since. All of that is a function of the log, so every
process leaves out the same record, and the decision `record_refused` is the same bytes.

It is the last line. Records are checked where they are read and by their handlers; what ends here is a defect of ours.
"""

from __future__ import annotations

import re

from scheduler.machine import SchedulerMachine
from scheduler.state import ClusterState, from_bytes, to_bytes
from scheduler.step import Step
from sie_stream.control import ClusterRecord, SchedulerCommand
from sie_stream.errors import SieError
from sie_stream.settings import Settings

COPY_EVERY_RECORDS = 1_000
"""How many records are folded again at most, and kept for that."""
DEFECTS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError, SieError)
"""What broken reasoning raises. The rest (no memory, interruption) is of this process, not of the record."""
ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
"""In an object's text: the only part of an error that differs between processes."""


class GuardedMachine:
    """`SchedulerMachine`, and what it takes to go back before a record. `state` is for reading."""

    def __init__(self, settings: Settings, state: ClusterState | None = None) -> None:
        self._settings = settings
        self._machine = SchedulerMachine(settings, state)
        self._copy = to_bytes(self._machine.state)
        self._since: list[tuple[int, int, ClusterRecord]] = []

    @property
    def state(self) -> ClusterState:
        return self._machine.state

    def step(self, record_offset: int, timestamp_ms: int, record: ClusterRecord) -> list[SchedulerCommand]:
        """As `SchedulerMachine.step`; for a record it cannot fold, the decision that says so and nothing else."""
        if len(self._since) >= COPY_EVERY_RECORDS:
            self._copy = to_bytes(self._machine.state)
            self._since.clear()
        assert record_offset >= self.state.next_offset, f"offset {record_offset} was folded already"
        try:
            commands = self._machine.step(record_offset, timestamp_ms, record)
        except DEFECTS as defect:
            self._go_back()
            return self._refuse(record_offset, timestamp_ms, record, defect)
        self._since.append((record_offset, timestamp_ms, record))
        return commands

    def _go_back(self) -> None:
        state = from_bytes(self._copy)
        assert state is not None, "a copy is of the format it was written in"
        self._machine = SchedulerMachine(self._settings, state)
        for folded in self._since:
            self._machine.step(*folded)

    def _refuse(
        self, offset: int, timestamp_ms: int, record: ClusterRecord, defect: Exception
    ) -> list[SchedulerCommand]:
        """Afterwards the copy is renewed: the refused record is not among those that are folded again."""
        state = self._machine.state
        state.next_offset = offset + 1
        state.now_ms = max(state.now_ms, timestamp_ms)
        kind = type(record).__name__
        step = Step(state, self._machine.settings_in_force, offset, record)
        step.decide(
            "record_refused",
            kind,
            f"Folding it failed, which is a defect of the scheduler: {type(defect).__name__}: "
            f"{ADDRESS.sub('0x?', str(defect))}. It is left out, as if it had not been written; please report it.",
            do_nothing="Every scheduler would stop at this record, again and again.",
        )
        self._copy = to_bytes(state)
        self._since.clear()
        return step.commands()
