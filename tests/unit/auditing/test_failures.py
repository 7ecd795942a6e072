"""Failures as chains: what follows from what is found by offsets, and the first answer by the results."""

from __future__ import annotations

from msgspec import Raw, structs

from sie_stream.auditing.failures import AnswerSearch, Failure, chain_of, failures_of
from sie_stream.cli.failures import FAILURES_SHOWN, STEPS_SHOWN, as_json, concerns, lines, shown
from sie_stream.control import ApplyModel, DeviceLost, ReplicaFailed, WorkerExited
from sie_stream.decisions import Decision, Move
from sie_stream.records import Provenance, Result, Timings, Usage
from tests.unit.scheduler.kit import Cluster, decisions, joined, running, spec_json
from tests.unit.scheduler.scenarios import SCENARIOS


def result_of(request_id: str, model: str, worker: str, partition: int, finished_at: int) -> Result:
    origin = Provenance("sie.requests", 0, 1, f"sie.work.{model}", partition, 7, worker=worker)
    return Result(*(request_id, "ok", "mi", model, "1", "stable", b"{}", None, Usage(), Timings(), origin, finished_at))


def made(name: str) -> list[Decision]:
    return decisions(SCENARIOS[name]().commands)


def lost_worker() -> tuple[Failure, ...]:
    found = failures_of(made("worker_killed"))
    return tuple(one for one in found if one.root.kind == "worker_lost")


def test_a_lost_worker_leads_to_the_fence_to_new_owners_and_to_what_was_loaded_elsewhere() -> None:
    (failure,) = lost_worker()
    kinds = [decision.kind for decision in failure.chain]
    assert kinds.index("worker_fenced") < len(kinds) - 1 - kinds[::-1].index("partitions_assigned")
    assert failure.after_ms("worker_fenced") == 100
    assert failure.after_ms("replica_ready") == 40
    assert failure.after_ms("device_back") is None


def test_partitions_that_wait_for_a_replica_placed_before_the_loss_belong_to_it() -> None:
    cluster = running()
    cluster.append(joined("w2", "c"))
    holder = cluster.model().replicas[0]
    cluster.append(ApplyModel(Raw(spec_json(replicas={"min": 2, "max": 2}))))
    offset = len(cluster.log)
    cluster.fence(cluster.append(WorkerExited(holder.worker, holder.incarnation, -9, "up")))
    assert cluster.owners() == {}
    cluster.make_ready()
    (failure,) = [one for one in failures_of(decisions(cluster.commands)) if one.root.kind == "worker_lost"]
    assert failure.root.cause_offset == offset
    assert "partitions_assigned" in [decision.kind for decision in failure.chain]


def test_what_has_nothing_to_do_with_it_is_not_in_the_chain() -> None:
    cluster = Cluster()
    cluster.lead()
    cluster.append(joined("w0", "a", devices=2))
    for name in ("churn", "risk"):
        cluster.apply(spec_json(name))
        cluster.make_ready(name)
    device = cluster.model().replicas[0].device
    assert cluster.model("risk").replicas[0].device != device
    cluster.append(DeviceLost("w0", "a", device, "XID 79"))
    cluster.apply(spec_json("fraud"))
    cluster.release()
    cluster.make_ready()
    failures = failures_of(decisions(cluster.commands))
    (failure,) = [one for one in failures if one.root.kind == "device_lost"]
    assert {decision.subject for decision in failure.chain} == {"churn"}
    assert [decision.kind for decision in failure.chain][-1] == "partitions_assigned"
    assert failure.chain == chain_of(decisions(cluster.commands), failure.root)


def test_models_that_fail_and_are_tried_again_at_the_same_time_are_failures_of_their_own() -> None:
    cluster = Cluster()
    cluster.lead()
    cluster.append(joined("w0", "a", devices=2))
    for name in ("churn", "risk"):
        cluster.apply(spec_json(name))
    for _ in range(3):
        for name in ("churn", "risk"):
            for replica in list(cluster.model(name).replicas):
                args = ("w0", "a", name, "1.0.0", replica.placement_epoch, "weights_missing", "no file.")
                cluster.append(ReplicaFailed(*args))
        cluster.wait(60_000, (("w0", "a"),))
    known = decisions(cluster.commands)
    causes = [one.cause_offset for one in known if one.kind == "replica_placed"]
    assert len(causes) > len(set(causes)), "one record brings replicas of both back"
    found = failures_of(known)
    assert [(one.root.kind, one.root.subject) for one in found] == [
        ("replica_failed", "churn"),
        ("replica_failed", "risk"),
    ]
    for failure in found:
        assert {decision.subject for decision in failure.chain} == {failure.root.subject}
        assert [one.kind for one in failure.chain].count("replica_failed") == 2


def test_an_engine_that_dies_again_is_one_failure_up_to_where_its_replica_went() -> None:
    found = [one for one in failures_of(made("engine_killed")) if one.root.kind == "engine_lost"]
    assert len(found) == 1
    kinds = [decision.kind for decision in found[0].chain]
    assert kinds.count("engine_lost") == 2
    assert kinds[-1] == "partitions_assigned"
    assert {"engine_back", "engine_unstable", "replica_failed", "replica_placed"} <= set(kinds)


def test_a_change_of_leader_tells_how_long_nobody_led() -> None:
    cluster = Cluster()
    cluster.lead()
    cluster.now_ms += 1_700
    cluster.lead("s1")
    (failure,) = failures_of(decisions(cluster.commands))
    assert (failure.root.kind, failure.root.took_ms) == ("scheduler_elected", 1_700)


def test_the_first_answer_is_of_the_new_owner_after_it_was_given_the_partitions() -> None:
    (failure,) = lost_worker()
    given = next(one for one in failure.chain if one.kind == "partitions_assigned")
    move = given.moves[0]
    partition = int(move.what.removeprefix("partitions ").split(",")[0])
    search = AnswerSearch([failure])
    right = result_of("r-2", move.model, move.target, partition, given.at_ms + 70)
    search.saw(structs.replace(right, request_id="r-3", finished_at=given.at_ms + 90), "sie.results/0@3")
    search.saw(right, "sie.results/1@9")
    for other in (
        result_of("late", move.model, move.target, partition, given.at_ms - 1),
        result_of("elsewhere", move.model, "w9", partition, given.at_ms + 1),
        result_of("other", "other", move.target, partition, given.at_ms + 1),
        result_of("far", move.model, move.target, partition + 100, given.at_ms + 1),
    ):
        search.saw(other, "sie.results/0@1")
    answered = search.added_to(failure)
    assert [(one.request_id, one.record) for one in answered.answers] == [("r-2", "sie.results/1@9")]
    assert answered.first_answer_ms == given.at_ms + 70 - failure.root.at_ms
    text = "\n".join(lines(answered))
    assert "worker_lost  w0" in text
    assert "first answer" in text
    assert as_json(answered)["fenced_after_ms"] == 100


def test_the_first_answer_of_a_variant_is_one_of_that_variant() -> None:
    moves = (Move("m.CANARY", "partitions 0", "", "w1"),)
    root = Decision("d-1-0", "worker_lost", "w0", "", 1, 100, {}, moves=(Move("m.CANARY", "replica", "w0/a", ""),))
    given = Decision("d-1-1", "partitions_assigned", "m.CANARY", "", 1, 100, {}, moves=moves)
    (failure,) = failures_of([root, given])
    search = AnswerSearch([failure])
    search.saw(result_of("of-stable", "m", "w1", 0, 110), "sie.results/0@1")
    search.saw(structs.replace(result_of("of-canary", "m", "w1", 0, 120), variant="canary"), "sie.results/0@2")
    assert [one.request_id for one in search.added_to(failure).answers] == ["of-canary"]
    assert concerns(failure, "m")


def test_a_failure_is_found_by_worker_device_or_model() -> None:
    (failure,) = lost_worker()
    model = failure.root.moves[0].model
    assert [concerns(failure, name) for name in ("w0", model, "w1")] == [True, True, False]


def test_nothing_failed() -> None:
    assert failures_of([]) == []
    assert AnswerSearch([]).since_ms is None


def test_the_exit_of_a_worker_is_named_as_its_cause() -> None:
    cluster = SCENARIOS["worker_killed"]()
    offset = next(offset for offset, _, record in cluster.log if isinstance(record, WorkerExited))
    (failure,) = lost_worker()
    assert failure.root.cause_offset == offset
    fenced = next(one for one in failure.chain if one.kind == "worker_fenced")
    assert offset in [fact.offset for fact in fenced.facts]


def test_of_many_failures_the_newest_are_shown_with_their_first_steps_and_how_to_see_the_rest() -> None:
    (one,) = lost_worker()
    long = structs.replace(one, chain=one.chain * 10)
    whole = len([*lines(long)])
    texts = [*shown([long] * (FAILURES_SHOWN + 3), show_all=False)]
    assert len(texts) == FAILURES_SHOWN + 1
    assert len(texts[0].splitlines()) == 2 + STEPS_SHOWN + 1
    assert texts[0].endswith(f"... and {whole - 2 - STEPS_SHOWN} more steps")
    assert texts[-1].startswith("3 earlier failures are not shown. `sie-stream failures --all` shows everything")
    everything = [*shown([long] * (FAILURES_SHOWN + 3), show_all=True)]
    assert [len(text.splitlines()) for text in everything] == [whole] * (FAILURES_SHOWN + 3)
    assert [*shown([one], show_all=False)][-1].startswith(next(lines(one))), "nothing is left out, so nothing is said"
