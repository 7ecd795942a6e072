"""What the control plane did while a request was on its way: moves, fences, workers lost, new routes. Pure."""

from __future__ import annotations

import re

from sie_stream.control import (
    PartitionReleased,
    ReplicaFailed,
    ReplicaReady,
    WorkerExited,
    WorkerFenced,
    WorkerJoined,
    WorkerLeft,
)
from sie_stream.decisions import Decision
from sie_stream.tracing.evidence import ClusterFact, Evidence, Step

STEPS_MAX = 12
"""On one screen; the rest is counted."""
_NUMBER = re.compile(r"\d+", re.ASCII)


def placed_step(placed: Decision) -> Step:
    """The decision that put the replica there."""
    cost = ""
    if placed.solver is not None and placed.solver.do_nothing is not None:
        cost = f" ({placed.solver.solver}: cost {placed.solver.objective}, doing nothing {placed.solver.do_nothing})"
    target = next((move.target for move in placed.moves if move.what == "replica"), "")
    said = f"{placed.decision} {placed.kind}{' on ' + target if target else ''}: {placed.reason}{cost}"
    return Step("placement", placed.at_ms, said, where=f"sie.cluster@{placed.cause_offset}")


def control_steps(evidence: Evidence, started_ms: int) -> list[Step]:
    """Decisions and facts between the request and its end, oldest first; at most STEPS_MAX, then a count."""
    work = evidence.work
    partition = -1 if evidence.work_at is None else evidence.work_at.place.partition
    steps = [
        (decision.at_ms, 1, _decision_step(decision, partition, work is not None and decision.at_ms <= started_ms))
        for decision in evidence.decisions
    ]
    told = {(decision.at_ms, decision.subject, decision.kind) for decision in evidence.decisions}
    for fact in evidence.facts:
        said = _fact_words(fact)
        if said and not _repeats(fact, told):
            steps.append((fact.at_ms, 0, Step("control", fact.at_ms, said, where=f"sie.cluster@{fact.offset}")))
    ordered = [step for *_, step in sorted(steps, key=lambda entry: entry[:2])]
    left_out = len(ordered) - STEPS_MAX
    if left_out <= 0:
        return ordered
    last = ordered[STEPS_MAX - 1]
    more = Step(
        "control", last.at_ms, f"and {left_out} more: `sie-stream decisions --model {evidence.model or 'MODEL'}`"
    )
    return [*ordered[:STEPS_MAX], more]


def _decision_step(decision: Decision, partition: int, waiting: bool) -> Step:
    moved = "; ".join(
        f"{move.what} {move.source or 'nowhere'} -> {move.target or 'nowhere'}" for move in decision.moves[:3]
    )
    said = f"{decision.decision} {decision.kind} {decision.subject}: {decision.reason}"
    said += f" [{moved}]" if moved else ""
    if waiting and _gives(decision, partition):
        said += " <- its own partition"
    return Step("control", decision.at_ms, said, where=f"sie.cluster@{decision.cause_offset}")


def _gives(decision: Decision, partition: int) -> bool:
    return any(
        move.what.startswith("partitions") and str(partition) in _NUMBER.findall(move.what) for move in decision.moves
    )


def takeovers(evidence: Evidence, started_ms: int) -> int:
    """How often the partition was given to somebody after the request was in it and before its engine started."""
    if evidence.work is None or evidence.work_at is None:
        return 0
    partition = evidence.work_at.place.partition
    begin = evidence.work.routed_at_ms
    given = [
        decision
        for decision in evidence.decisions
        if decision.kind == "partitions_assigned"
        and decision.subject == evidence.unit
        and begin <= decision.at_ms <= started_ms
        and _gives(decision, partition)
    ]
    taken = [fact for fact in evidence.facts if _lets_go(fact, evidence) and begin <= fact.at_ms <= started_ms]
    return min(len(given), len(taken)) if taken else 0


def _lets_go(fact: ClusterFact, evidence: Evidence) -> bool:
    """Somebody who may have begun the request lost the partition; a first assignment takes over nothing."""
    assert evidence.work_at is not None
    match fact.record:
        case PartitionReleased():
            held = (fact.record.model, fact.record.partition)
            return held == (evidence.unit, evidence.work_at.place.partition)
        case WorkerFenced() | WorkerLeft():
            return True
        case _:
            return False


def _fact_words(fact: ClusterFact) -> str:
    match fact.record:
        case WorkerFenced():
            gone = f"{fact.record.worker} ({fact.record.incarnation})"
            return f"{gone} fenced after {fact.record.took_ms} ms: what it had not committed is done again"
        case WorkerExited():
            return f"{fact.record.worker} ({fact.record.incarnation}) exited with code {fact.record.exit_code}"
        case WorkerLeft():
            return f"{fact.record.worker} ({fact.record.incarnation}) left, everything committed"
        case WorkerJoined():
            return f"{fact.record.worker} ({fact.record.incarnation}) joined, pid {fact.record.pid}"
        case PartitionReleased():
            return f"{fact.record.worker} released partition {fact.record.partition} at offset {fact.record.offset}"
        case ReplicaReady():
            return (
                f"{fact.record.model}@{fact.record.version} ready on {fact.record.worker} in {fact.record.load_ms} ms"
            )
        case ReplicaFailed():
            return f"{fact.record.model} failed on {fact.record.worker}: {fact.record.message}"
        case _:
            return ""


_SAME = {WorkerJoined: "worker_joined", WorkerLeft: "worker_left", ReplicaReady: "replica_ready"}
"""Facts whose decision of the same moment says more."""


def _repeats(fact: ClusterFact, told: set[tuple[int, str, str]]) -> bool:
    kind = _SAME.get(type(fact.record), "")
    subject = getattr(fact.record, "model" if isinstance(fact.record, ReplicaReady) else "worker", "")
    return (fact.at_ms, subject, kind) in told
