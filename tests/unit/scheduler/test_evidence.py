"""What a decision says besides: who asked, which records, what moved, memory before and after, how long it took."""

from __future__ import annotations

import msgspec
import pytest
from msgspec import Raw

from schemas.codec import decode_decision, encode_decision
from sie_stream.control import ApplyModel, DeleteModel, SchedulerElected, Tick, WorkerExited
from sie_stream.decisions import Decision, Fact, MemoryChange, Move, SolverRun, concerns, place_of
from tests.unit.scheduler.kit import MIB, TWO, Cluster, decisions, joined, running, spec_json


def one(cluster: Cluster, kind: str) -> Decision:
    return decisions(cluster.commands, kind)[-1]


def facts(decision: Decision) -> list[tuple[str, int]]:
    assert all((fact.topic, fact.partition) == ("sie.cluster", 0) for fact in decision.facts)
    return [(fact.kind, fact.offset) for fact in decision.facts]


def test_a_placement_says_what_it_rests_on_and_what_it_takes() -> None:
    cluster = running()
    offsets = {type(record).__name__: offset for offset, _, record in reversed(cluster.log)}
    placed = one(cluster, "replica_placed")
    assert facts(placed) == [
        ("TopicEnsured", offsets["TopicEnsured"]),
        ("ApplyModel", offsets["ApplyModel"]),
        ("WorkerJoined", offsets["WorkerJoined"]),
    ]
    assert placed.moves == (Move("churn", "replica", "", "w0/cpu0"),)
    assert placed.memory == (MemoryChange("w0", "cpu0", 1_000 * MIB, 0, 100 * MIB),)
    assert placed.solver is not None
    assert placed.solver.status == "optimal"
    assert placed.solver.do_nothing is not None
    assert placed.solver.objective == placed.solver.bound < placed.solver.do_nothing
    ready = one(cluster, "replica_ready")
    assert ready.asked_by == "w0/a"
    assert facts(ready)[1] == ("cause of its placement", placed.cause_offset)
    assert ready.took_ms == 0


def test_the_loss_of_a_worker_says_when_it_was_heard_last_and_what_went() -> None:
    cluster = running()
    cluster.wait(500, (("w0", "a"), ("w1", "b")))
    heard = max(offset for offset, _, record in cluster.log if getattr(record, "worker", "") == "w0")
    cluster.wait(2_500, (("w1", "b"),))
    lost = one(cluster, "worker_lost")
    assert lost.asked_by == "the passing of time"
    assert ("WorkerHeartbeat", heard) in facts(lost)
    assert lost.moves == (Move("churn", "replica", "w0/cpu0", ""),)
    assert lost.memory == (MemoryChange("w0", "cpu0", 1_000 * MIB, 100 * MIB, 0),)
    cluster.now_ms += 300
    cluster.fence(cluster.commands)
    fenced = one(cluster, "worker_fenced")
    assert fenced.moves == (Move("churn", "partitions 0, 1, 2, 3, 4, 5", "w0", ""),)
    assert fenced.took_ms == cluster.now_ms - lost.at_ms


def test_people_and_processes_are_named() -> None:
    cluster = Cluster()
    cluster.append(SchedulerElected("s9"))
    assert one(cluster, "scheduler_elected").asked_by == "scheduler s9"
    cluster.append(Tick("s9"))
    cluster.append(joined("w0", "a"))
    cluster.append(ApplyModel(Raw(spec_json(replicas=TWO)), actor="ann"))
    assert one(cluster, "model_accepted").asked_by == "ann"
    cluster.append(DeleteModel("churn"))
    assert one(cluster, "model_deleting").asked_by == "somebody unnamed"
    cluster.append(WorkerExited("w0", "a", 1, ""))
    assert one(cluster, "worker_lost").asked_by == "the supervisor of w0"


def test_a_record_of_an_older_release_stays_readable() -> None:
    old = {
        "decision": "d-3-0",
        "kind": "replica_ready",
        "subject": "churn",
        "reason": "Ready.",
        "cause_offset": 3,
        "at_ms": 7,
        "chosen": {"worker": "w0"},
        "rejected": [],
        "do_nothing": "",
    }
    read = msgspec.json.decode(msgspec.json.encode(old), type=Decision)
    assert (read.asked_by, read.facts, read.moves, read.took_ms, read.solver) == ("", (), (), None, None)


def test_every_field_survives_the_log() -> None:
    full = Decision(
        "d-7-1",
        "plan",
        "churn",
        "Better.",
        7,
        8,
        {"a": 1},
        ("no.",),
        "Worse.",
        "ann",
        (Fact("sie.cluster", 0, 7, "Tick"),),
        (Move("churn", "replica", "w0/gpu0", "w1/gpu1"),),
        (MemoryChange("w1", "gpu1", 10, 3, 5),),
        12,
        SolverRun("cp-sat 9", "optimal", 5, {"moves": 2, "sla": 3}, 5, 9, {"sla": 9}),
        "d-1-0",
    )
    assert decode_decision(encode_decision(full)) == full


@pytest.mark.parametrize(("text", "place"), [("d-12-3", (12, 3)), ("d-12", None), ("d-1-2-3", None), ("e-1-2", None)])
def test_ids_have_a_place(text: str, place: tuple[int, int] | None) -> None:
    assert place_of(text) == place


def test_a_decision_concerns_its_subject_and_what_it_moves() -> None:
    lost = Decision("d-1-0", "worker_lost", "w0", "", 1, 1, {}, moves=(Move("churn", "replica", "w0/cpu0", ""),))
    assert concerns(lost, "w0")
    assert concerns(lost, "churn")
    assert not concerns(lost, "risk")


def test_a_decision_about_a_variant_concerns_its_model() -> None:
    moved = Decision("d-1-0", "worker_lost", "w0", "", 1, 1, {}, moves=(Move("churn.CANARY", "replica", "w0/a", ""),))
    placed = Decision("d-2-0", "replica_placed", "churn.CANARY", "", 2, 1, {})
    for decision in (moved, placed):
        assert [concerns(decision, name) for name in ("churn", "churn.CANARY", "churn.B")] == [True, True, False]
