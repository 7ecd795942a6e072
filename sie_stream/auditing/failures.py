"""Failures as chains of decisions: what broke, what the scheduler did about it, and who answered first there. Pure.

A decision follows from another when it has the same cause, or names the other's cause as a fact. One record causes
decisions about many models, a tick those of all whose time has come: so what is about a model leads only to what
names the same model, while what befalls a worker, a device, an engine or a scheduler leads to all that it caused. One
pass over sie.decisions finds a chain.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from msgspec import Struct, structs

from sie_stream.decisions import Decision, about
from sie_stream.records import Result
from sie_stream.rollout_records import answering_unit

ROOTS = (
    "worker_lost",
    "worker_replaced",
    "device_lost",
    "engine_lost",
    "replica_failed",
    "scheduler_elected",
    "record_refused",
)
"""Kinds of decisions with which a failure begins."""
CONTEXT = frozenset({"ApplyModel", "WorkerJoined", "WorkerHeartbeat"})
"""Kinds of facts that only say what something is about; they link nothing."""
WIDE = frozenset({"worker", "device", "engine", "scheduler"})
"""First words of kinds of decisions about what many models share."""
CHAIN_MAX = 1_000
_NUMBER = re.compile(r"[0-9]{1,9}")


class Taken(Struct, frozen=True):
    """Partitions of one model, or of a variant of one, that a worker was given because of a failure."""

    model: str
    worker: str
    partitions: frozenset[int]
    decision: str
    at_ms: int


class Answer(Struct, frozen=True):
    """The first result of such partitions by their new owner."""

    taken: Taken
    request_id: str
    finished_at_ms: int
    record: str
    """TOPIC/PARTITION@OFFSET."""


class Failure(Struct, frozen=True):
    root: Decision
    chain: tuple[Decision, ...]
    """What followed from it, oldest first, without the root."""
    answers: tuple[Answer, ...] = ()

    def after_ms(self, kind: str) -> int | None:
        """From the root to the first decision of that kind; None: there is none."""
        found = next((one for one in self.chain if one.kind == kind), None)
        return None if found is None else found.at_ms - self.root.at_ms

    @property
    def first_answer_ms(self) -> int | None:
        if not self.answers:
            return None
        return max(0, min(answer.finished_at_ms for answer in self.answers) - self.root.at_ms)


class _Reached:
    """Records that caused what is in a chain, and whom each of them is followed for."""

    def __init__(self) -> None:
        self._whole: set[int] = set()
        self._names: dict[int, set[str]] = {}

    def add(self, decision: Decision) -> None:
        if decision.kind.partition("_")[0] in WIDE:
            self._whole.add(decision.cause_offset)
        self._names.setdefault(decision.cause_offset, set()).update(about(decision))

    def leads_to(self, decision: Decision) -> bool:
        causes = (fact.offset for fact in decision.facts[1:] if fact.kind not in CONTEXT)
        names = about(decision)
        return any(
            offset in self._whole or not names.isdisjoint(self._names.get(offset, ()))
            for offset in (decision.cause_offset, *causes)
        )


def chain_of(decisions: Sequence[Decision], root: Decision) -> tuple[Decision, ...]:
    """What followed from `root`, in the order of the log. At most CHAIN_MAX."""
    reached = _Reached()
    reached.add(root)
    chain: list[Decision] = []
    for decision in decisions:
        if decision.cause_offset < root.cause_offset or decision.decision == root.decision:
            continue
        if reached.leads_to(decision):
            reached.add(decision)
            chain.append(decision)
            if len(chain) == CHAIN_MAX:
                break
    return tuple(chain)


def failures_of(decisions: Sequence[Decision]) -> list[Failure]:
    """One for each failure that does not follow from an earlier one, oldest first."""
    ordered = sorted(decisions, key=lambda one: one.cause_offset)
    told: set[str] = set()
    found: list[Failure] = []
    for root in ordered:
        if root.kind in ROOTS and root.decision not in told and not _is_first_leader(root):
            chain = chain_of(ordered, root)
            told.update(decision.decision for decision in chain)
            found.append(Failure(root, chain))
    return found


def _is_first_leader(root: Decision) -> bool:
    """The election that begins an installation follows no failure."""
    return root.kind == "scheduler_elected" and root.chosen.get("before") == "nobody"


def taken_by(failure: Failure) -> list[Taken]:
    """Which partitions went to whom because of it."""
    return [
        Taken(
            move.model,
            move.target,
            frozenset(int(number) for number in _NUMBER.findall(move.what)),
            decision.decision,
            decision.at_ms,
        )
        for decision in failure.chain
        if decision.kind == "partitions_assigned"
        for move in decision.moves
        if move.target
    ]


class AnswerSearch:
    """Looks through results for the first one of each `Taken`."""

    def __init__(self, failures: Iterable[Failure]) -> None:
        self._open: dict[tuple[str, str], list[Taken]] = {}
        self._found: dict[Taken, Answer] = {}
        for failure in failures:
            for taken in taken_by(failure):
                self._open.setdefault((taken.model, taken.worker), []).append(taken)

    @property
    def since_ms(self) -> int | None:
        """No earlier result is looked for; None: nothing is."""
        return min((taken.at_ms for wanted in self._open.values() for taken in wanted), default=None)

    def saw(self, result: Result, place: str) -> None:
        """Results of one partition in their order; partitions in any."""
        source = result.provenance
        unit = answering_unit(result.model, result.variant)
        for taken in self._open.get((unit, source.worker), ()):
            if source.work_partition not in taken.partitions or result.finished_at < taken.at_ms:
                continue
            before = self._found.get(taken)
            if before is None or result.finished_at < before.finished_at_ms:
                self._found[taken] = Answer(taken, result.request_id, result.finished_at, place)

    def added_to(self, failure: Failure) -> Failure:
        answers = tuple(self._found[taken] for taken in taken_by(failure) if taken in self._found)
        return structs.replace(failure, answers=answers)
