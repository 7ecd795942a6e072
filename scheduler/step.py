"""The frame of one step: which record is being folded, and what it has led to so far."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from scheduler.evidence import asked_by
from scheduler.rows import build_row, row_name
from scheduler.state import JOURNAL_MAX, ClusterState, ModelState, PlacementChange
from sie_stream.control import (
    ClusterRecord,
    EnsureTopic,
    FenceWorker,
    PublishState,
    RecordDecision,
    SchedulerCommand,
)
from sie_stream.decisions import Decision, Fact, MemoryChange, Move, SolverRun
from sie_stream.ids import base_of
from sie_stream.settings import Settings

TEXT_CHARS_MAX = 8_000
"""What others wrote (errors, names) is cut to this in a decision, or one of them could not be published."""
VALUE_CHARS_MAX = 1_000

Table = Literal["models", "instances", "routes", "placements"]


def shortened(text: str, chars_max: int) -> str:
    """The text, or its beginning and how much is missing."""
    return text if len(text) <= chars_max else f"{text[:chars_max]}... ({len(text) - chars_max} more characters)"


class Step:
    """Collects the commands of one record. Handlers change the state and call these; `commands` builds the list."""

    def __init__(self, state: ClusterState, settings: Settings, offset: int, record: ClusterRecord) -> None:
        self.state = state
        self.record = record
        self.settings = settings
        self.offset = offset
        self.now_ms = state.now_ms
        self.capacity_freed = False
        """Memory or a worker became available: models that lack replicas are looked at again."""
        self.dirty: dict[str, None] = {}
        """Models whose desired state may have changed."""
        self._decisions: list[RecordDecision] = []
        self._rows: dict[tuple[Table, str], None] = {}
        self._effects: list[FenceWorker | EnsureTopic] = []

    def decide(
        self,
        kind: str,
        subject: str,
        reason: str,
        chosen: Mapping[str, str | int] | None = None,
        rejected: tuple[str, ...] = (),
        do_nothing: str = "",
        facts: tuple[Fact | None, ...] = (),
        moves: tuple[Move, ...] = (),
        memory: tuple[MemoryChange, ...] = (),
        took_ms: int | None = None,
        solver: SolverRun | None = None,
        undoes: str = "",
    ) -> None:
        """Record one decision. `reason` says why in a sentence, `do_nothing` what would have happened without it.

        `facts`: records that it rests on besides the one being folded. The rest as in `Decision`.
        """
        decision = Decision(
            decision=self.next_decision,
            kind=kind,
            subject=shortened(subject, VALUE_CHARS_MAX),
            reason=shortened(reason, TEXT_CHARS_MAX),
            cause_offset=self.offset,
            at_ms=self.now_ms,
            chosen={
                name: shortened(value, VALUE_CHARS_MAX) if isinstance(value, str) else value
                for name, value in (chosen or {}).items()
            },
            rejected=rejected,
            do_nothing=do_nothing,
            asked_by=shortened(asked_by(self.record), VALUE_CHARS_MAX),
            facts=(self._fact(self.offset, type(self.record).__name__), *(fact for fact in facts if fact is not None)),
            moves=moves,
            memory=memory,
            took_ms=took_ms,
            solver=solver,
            undoes=shortened(undoes, VALUE_CHARS_MAX),
        )
        self._decisions.append(RecordDecision(decision))

    @property
    def next_decision(self) -> str:
        """Id of the decision that `decide` records next."""
        return f"d-{self.offset}-{len(self._decisions)}"

    def fact(self, offset: int, kind: str) -> Fact | None:
        """An earlier record of sie.cluster; None when its offset is not known or it is the one being folded."""
        return None if offset < 0 or offset == self.offset else self._fact(offset, kind)

    def _fact(self, offset: int, kind: str) -> Fact:
        return Fact(self.settings.topics.cluster, 0, offset, kind)

    def remember(self, model: ModelState) -> None:
        """The next decision changes where the model's replicas are: keep where they were, so that it can be undone."""
        before = tuple(replica.seat for replica in model.present())
        model.journal = (*model.journal, PlacementChange(self.next_decision, before))[-JOURNAL_MAX:]

    def touch(self, table: Table, model: str) -> None:
        """The row of `model` in this table changed: publish it as it is at the end of the step.

        A variant of a model has a placement of its own, and its replicas are in the instance row of its model.
        """
        base = base_of(model)
        if table != "placements" and base != model:
            if table != "instances" or base not in self.state.models:
                return
            model = base
        self._rows[table, model] = None

    def look_at(self, model: ModelState) -> None:
        """Bring this model towards what is wanted before the step ends."""
        self.dirty[model.model] = None

    def fence(self, worker: str, incarnation: str) -> None:
        self._effects.append(FenceWorker(worker, incarnation))

    def ensure_topic(self, model: ModelState) -> None:
        self._effects.append(EnsureTopic(model.model, model.route.topic, partitions=model.route.lanes * model.width))

    def ignore(self) -> None:
        """A fact of the past, or of somebody the scheduler does not know (any more)."""
        self.state.facts_ignored += 1

    def commands(self) -> list[SchedulerCommand]:
        """Decisions, then rows in the order they were touched, then side effects."""
        commands: list[SchedulerCommand] = [*self._decisions]
        for table, model in self._rows:
            row = build_row(self.state, table, model)
            body = None if row is None else msgspec.Raw(msgspec.json.encode(row))
            commands.append(PublishState(table, row_name(table, model), body))
        commands.extend(self._effects)
        return commands
