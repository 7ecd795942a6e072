"""Rollouts through the whole fold: each path from the declaration to its end, as a history of records."""

from __future__ import annotations

from typing import Literal

import msgspec
import pytest
from msgspec import Raw

from scheduler.state import from_bytes, to_bytes
from sie_stream.commands import RolloutOrder, StartRollout
from sie_stream.control import (
    ApplyModel,
    DeleteModel,
    ReplicaFailed,
)
from sie_stream.rollout_records import VariantStats, VariantWindow
from sie_stream.routing import SHARES, choose_variant
from tests.unit.scheduler.kit import decisions, kinds, spec_json
from tests.unit.scheduler.rolling import ALIVE, QUICK, UNIT, WINDOW_MS, Rolling, answered


def test_good_version_goes_through_all_steps() -> None:
    cluster = Rolling()
    assert "rollout_started" in cluster.roll()
    assert cluster.shares() == {"stable": SHARES}, "no traffic before it is ready"
    cluster.make_ready(UNIT)
    seen = [cluster.shares()]
    for _ in range(40):
        cluster.windows()
        if cluster.shares() != seen[-1]:
            seen.append(cluster.shares())
        cluster.make_ready(UNIT)
        if not cluster.model().rollouts or cluster.model().rollouts["canary"].phase == "adopting":
            break
    assert [found.get("canary") for found in seen] == [1_000, 2_000, 5_000, 10_000]
    assert [found["stable"] for found in seen] == [9_000, 8_000, 5_000, 0]
    cluster.make_ready()
    cluster.wait(500, ALIVE)
    assert cluster.shares() == {"canary": SHARES, "stable": 0}, "not to partitions that wait for their next owner"
    cluster.release()
    cluster.wait(500, ALIVE)
    assert cluster.shares() == {"stable": SHARES}
    assert cluster.route.variants[0].version == cluster.model().version == "2.0.0"
    assert cluster.model().rollout_history[-1].ending == "completed"
    assert cluster.rollout_decisions() == [
        "rollout_started", *["rollout_step"] * 4, "rollout_adopting", "rollout_completed",
    ]  # fmt: skip
    cluster.wait(6_000, ALIVE)
    cluster.drain_unit(UNIT)
    assert UNIT not in cluster.machine.state.models
    cluster.wait(500, ALIVE)
    assert cluster.machine.state.rolling == {}


def test_keys_move_once_and_only_to_the_new_version() -> None:
    cluster = Rolling()
    cluster.roll()
    cluster.make_ready(UNIT)
    keys = [b"key%d" % number for number in range(2_000)]
    before: dict[bytes, str] = dict.fromkeys(keys, "stable")
    for _ in range(30):
        now = {key: choose_variant(cluster.route.variants, key, b"churn").variant for key in keys}
        moved = [key for key in keys if now[key] != before[key]]
        assert all(now[key] == "canary" for key in moved)
        before = now
        if set(now.values()) == {"canary"}:
            return
        cluster.windows()
        cluster.make_ready(UNIT)
    raise AssertionError("it never got all keys")


@pytest.mark.parametrize(
    ("stats", "gate"),
    [
        (answered(80, failed=20), "error_rate"),
        (answered(200, score=0.7), "ks:score"),
        (answered(200, ms=80.0), "p99_vs_stable_ms"),
        (answered(199, failed=1, violations=1), "schema_violations"),
    ],
)
def test_a_breach_takes_the_weight_away_in_the_step_of_its_verdict(stats: VariantStats, gate: str) -> None:
    cluster = Rolling()
    cluster.roll()
    cluster.make_ready(UNIT)
    assert cluster.shares()["canary"] == 1_000
    if gate.startswith("p99"):  # two windows may be one stall of the machine
        cluster.append(RolloutOrder("churn", "pause"))
        assert "rollout_rolled_back" not in cluster.windows(2, new=stats)
    kinds_seen = cluster.windows(new=stats)
    assert "rollout_rolled_back" in kinds_seen
    assert cluster.shares() == {"stable": SHARES}
    assert cluster.route.variants[0].version == "1.0.0"
    decision = next(one for one in decisions(cluster.commands) if one.kind == "rollout_rolled_back")
    assert gate in decision.reason
    assert str(decision.chosen[f"gate {gate}"]).startswith("breach")
    assert decision.at_ms == cluster.now_ms, "nothing waits between the verdict and the rollback"
    assert cluster.model().version == "1.0.0"
    cluster.wait(6_000, ALIVE)
    cluster.drain_unit(UNIT)
    assert UNIT not in cluster.machine.state.models


def adopting() -> Rolling:
    """At 100 %, and the model itself loads the version."""
    cluster = Rolling()
    cluster.roll(rollout={**QUICK, "steps": [50, 100]})
    for _ in range(10):
        cluster.make_ready(UNIT)
        if cluster.model().rollouts["canary"].phase == "adopting":
            return cluster
        cluster.windows()
    raise AssertionError("it never got so far")


def test_a_breach_while_adopting_goes_back_to_the_replicas_that_still_serve() -> None:
    cluster = adopting()
    assert [one.version for one in cluster.model().launches.values()] == ["1.0.0", "2.0.0"]
    cluster.windows(new=answered(80, failed=20))
    last = cluster.model().rollout_history[-1]
    assert (last.ending, cluster.model().version) == ("rolled_back", "1.0.0")
    assert [one.share for one in last.steps] == [5_000, 10_000]
    assert cluster.shares() == {"stable": SHARES}, "at once, not when new replicas are ready"
    assert cluster.route.variants[0].version == "1.0.0"
    cluster.make_ready()
    cluster.wait(500, ALIVE)
    present = [cluster.model().launches[one.generation].version for one in cluster.model().present()]
    assert present == ["1.0.0"]
    assert not cluster.model().rollouts


def test_what_somebody_promoted_is_not_rolled_back() -> None:
    cluster = Rolling()
    cluster.roll()
    cluster.make_ready(UNIT)
    cluster.append(RolloutOrder("churn", "promote", actor="ada"))
    cluster.windows(new=answered(80, failed=20))
    assert cluster.model().rollouts["canary"].phase == "adopting"
    assert any(gate.verdict == "breach" for gate in cluster.model().rollouts["canary"].gates)
    cluster.append(RolloutOrder("churn", "abort", actor="ada"))
    assert cluster.model().version == "1.0.0"
    assert cluster.shares() == {"stable": SHARES}


def test_loss_of_statistics_holds_and_never_promotes() -> None:
    cluster = Rolling()
    cluster.roll()
    cluster.make_ready(UNIT)
    cluster.wait(120_000, ALIVE)
    assert cluster.shares()["canary"] == 1_000
    assert cluster.rollout_decisions() == ["rollout_started", "rollout_step", "rollout_held"], "said once"
    said = cluster.windows(1)
    assert "rollout_goes_on" in said
    assert cluster.shares()["canary"] == 1_000
    cluster.windows(1)
    assert cluster.shares()["canary"] == 2_000


@pytest.mark.parametrize("step", ["first", "last"])
def test_a_version_that_fell_silent_is_not_promoted_by_what_it_answered_before(step: str) -> None:
    """It hangs: it has no errors and no slow answers, and the stable version is heard of all the time."""
    cluster = Rolling()
    cluster.roll(rollout={**QUICK, "hold_ms": 20_000, "steps": [50, 100] if step == "first" else [100]})
    cluster.make_ready(UNIT)
    cluster.windows(1, new=answered(150))
    share = cluster.shares()["canary"]
    for _ in range(30):
        start_ms = cluster.now_ms
        cluster.wait(WINDOW_MS, ALIVE)
        cluster.append(VariantWindow("churn", "stable", "1.0.0", start_ms, cluster.now_ms, True, answered(400)))
    held = cluster.model().rollouts["canary"]
    assert (held.phase, cluster.shares()["canary"]) == ("serving", share)
    assert "no answer of it for 12 s" in held.holding
    assert cluster.rollout_decisions()[-1] == "rollout_held"
    assert cluster.rollout_decisions().count("rollout_held") == 1, "said once"
    cluster.windows(1, new=answered(10))
    assert cluster.rollout_decisions()[-1] == ("rollout_step" if step == "first" else "rollout_adopting")


def test_a_pause_of_the_traffic_takes_no_samples_away() -> None:
    cluster = Rolling()
    cluster.roll()
    cluster.make_ready(UNIT)
    cluster.windows(1, new=answered(60))
    cluster.wait(60_000, ALIVE)
    held = cluster.model().rollouts["canary"]
    assert (held.new.samples, held.share) == (60, 1_000)
    assert "what was counted stays" in held.holding
    cluster.windows(1, new=answered(60))
    assert cluster.model().rollouts["canary"].share == 1_000, "120 of 100 samples, but it is held anew"
    cluster.windows(1, new=answered(1))
    assert cluster.model().rollouts["canary"].share == 2_000
    cluster.windows(1, new=answered(60))
    cluster.wait(60_000, ALIVE)
    cluster.windows(1, new=answered(30))
    assert cluster.model().rollouts["canary"].new.samples == 90, "what ends the pause counts as well"


def test_broken_and_repeated_windows_count_nothing() -> None:
    cluster = Rolling()
    cluster.roll()
    cluster.make_ready(UNIT)
    start_ms = cluster.now_ms
    cluster.wait(WINDOW_MS, ALIVE)
    bad = answered(10, failed=90)
    broken = VariantWindow("churn", "canary", "2.0.0", start_ms, cluster.now_ms, False, bad)
    cluster.append(broken)
    assert cluster.model().rollouts["canary"].broken_windows == 1
    assert cluster.shares()["canary"] == 1_000
    for start, end in ((-(10**30), 10**30), (start_ms, 10**15), (cluster.now_ms, start_ms), (-5, cluster.now_ms)):
        ahead = VariantWindow("churn", "canary", "2.0.0", start, end, True, answered(5))
        assert cluster.append(ahead) == []
    good = VariantWindow("churn", "canary", "2.0.0", start_ms, cluster.now_ms, True, answered(50))
    cluster.append(good)
    cluster.append(good)
    assert cluster.model().rollouts["canary"].new.samples == 50


def test_breaking_schema_is_refused_with_every_break() -> None:
    cluster = Rolling()
    schema = {"type": "object", "properties": {"age": {"type": "integer", "maximum": 5}, "x": {"type": "number"}}}
    said = cluster.roll(input_schema={**schema, "required": ["x"]})
    assert said == ["model_rejected"]
    decision = decisions(cluster.commands)[-1]
    assert decision.chosen["code"] == "schema_incompatible"
    assert len(decision.rejected) == 2
    assert "input.age: its range changed" in decision.rejected[0]
    assert UNIT not in cluster.machine.state.models


def test_wrong_golden_answer_refuses_before_any_traffic() -> None:
    cluster = Rolling()
    cluster.roll()
    [replica] = cluster.model(UNIT).replicas
    cluster.append(
        ReplicaFailed("w0" if replica.worker == "w0" else "w1", "i0", UNIT, "2.0.0", replica.placement_epoch,
                      "golden_mismatch", "golden[0]: score: 0.4 instead of 0.2")
    )  # fmt: skip
    assert cluster.rollout_decisions() == ["rollout_started", "rollout_refused"]
    assert cluster.model().rollout_history[-1].ending == "refused"
    assert "0.4 instead of 0.2" in cluster.model().rollout_history[-1].why
    cluster.wait(6_000, ALIVE)
    assert UNIT not in cluster.machine.state.models
    assert cluster.shares() == {"stable": SHARES}


def test_pause_resume_promote_and_undo() -> None:
    cluster = Rolling()
    cluster.roll()
    cluster.make_ready(UNIT)
    cluster.append(RolloutOrder("churn", "pause"))
    cluster.windows(5)
    assert cluster.shares()["canary"] == 1_000
    cluster.append(RolloutOrder("churn", "resume"))
    cluster.append(RolloutOrder("churn", "promote", actor="ada"))
    assert cluster.shares()["canary"] == SHARES
    cluster.make_ready()
    cluster.release()
    cluster.wait(500, ALIVE)
    assert cluster.model().version == "2.0.0"
    assert cluster.shares() == {"stable": SHARES}
    cluster.append(RolloutOrder("churn", "undo", actor="ada"))
    assert cluster.model().version == "1.0.0"
    cluster.append(RolloutOrder("churn", "undo"))
    assert cluster.rollout_decisions()[-2:] == ["rollout_undone", "rollout_ignored"]
    assert [one.ending for one in cluster.model().rollout_history] == ["completed", "undone"]


def test_an_undo_that_cannot_be_says_what_to_do_instead() -> None:
    cluster = Rolling()
    [said] = decisions(cluster.append(RolloutOrder("churn", "undo", actor="ada")))
    assert said.kind == "rollout_ignored"
    assert "apply its declaration: `sie-stream apply -f FILE`" in said.reason
    cluster.append(StartRollout(Raw(spec_json(version="2.0.0")), "b", 1_000, "ada"))
    said = decisions(cluster.append(RolloutOrder("churn", "undo", actor="ada")), "rollout_ignored")[0]
    assert "`sie-stream rollout abort churn --variant b`" in said.reason


def test_what_people_order_is_answered_with_what_follows() -> None:
    cluster = Rolling()
    cluster.roll()
    cluster.make_ready(UNIT)
    answers: tuple[tuple[Literal["pause", "resume", "abort"], str], ...] = (
        ("pause", "Paused by ada: 2.0.0 stays at 10 % of the keys; a breach still takes it back."),
        ("resume", "Resumed by ada: 2.0.0 goes on from 10 % of the keys, held anew."),
        ("abort", "Aborted by ada: no key goes to 2.0.0 any more."),
    )
    for order, said in answers:
        [answer] = decisions(cluster.append(RolloutOrder("churn", order, actor="ada")))[:1]
        assert answer.reason == said


def test_abort_and_delete_end_it() -> None:
    cluster = Rolling()
    cluster.roll()
    cluster.make_ready(UNIT)
    cluster.append(RolloutOrder("churn", "abort", actor="ada"))
    assert cluster.shares() == {"stable": SHARES}
    cluster.roll("3.0.0")
    cluster.append(DeleteModel("churn"))
    assert cluster.model().rollouts == {}
    cluster.append(DeleteModel(UNIT))
    assert kinds(cluster.commands)[-1] == "delete_ignored"


def test_a_second_version_waits_for_the_first() -> None:
    cluster = Rolling()
    cluster.roll()
    assert cluster.roll("3.0.0") == ["model_rejected"]
    assert cluster.roll("2.0.0") == ["model_unchanged"]


def test_given_up_replicas_roll_back_and_the_stable_version_answers_what_waits() -> None:
    cluster = Rolling()
    cluster.roll()
    cluster.make_ready(UNIT)
    for _ in range(5):
        for replica in list(cluster.model(UNIT).replicas):
            cluster.append(
                ReplicaFailed(replica.worker, "i0", UNIT, "2.0.0", replica.placement_epoch, "engine_died", "SIGSEGV")
            )
        cluster.wait(10_000, ALIVE)
    assert cluster.model().rollout_history[-1].ending == "rolled_back"
    assert cluster.shares() == {"stable": SHARES}
    unit = cluster.model(UNIT)
    assert unit.version == "1.0.0"
    cluster.make_ready(UNIT)
    cluster.wait(6_000, ALIVE)
    cluster.drain_unit(UNIT)
    assert UNIT not in cluster.machine.state.models


def test_without_a_declared_rollout_a_version_replaces_the_other_at_once() -> None:
    cluster = Rolling()
    commands = cluster.append(ApplyModel(Raw(spec_json(version="2.0.0"))))
    assert "model_accepted" in kinds(commands)
    assert not cluster.model().rollouts


def test_the_state_of_a_rollout_goes_through_a_snapshot() -> None:
    cluster = Rolling()
    cluster.roll()
    cluster.make_ready(UNIT)
    cluster.append(VariantWindow("churn", "canary", "2.0.0", 0, cluster.now_ms, True, answered(100)))
    data = to_bytes(cluster.machine.state)
    again = from_bytes(data)
    assert again is not None
    assert to_bytes(again) == data
    assert msgspec.json.decode(data)["models"]["churn"]["rollouts"]["canary"]["share"] == 1_000


def test_a_version_applied_while_the_only_replica_is_lost_is_rolled_out_all_the_same() -> None:
    cluster = Rolling()
    [replica] = cluster.model().replicas
    (left,) = [one for one in ALIVE if one[0] != replica.worker]
    cluster.wait(4_000, (left,))
    assert not any(one.state == "ready" for one in cluster.model().replicas), "its worker is lost"
    assert "rollout_started" in cluster.roll()
    assert cluster.model().version == "1.0.0"


def test_a_version_applied_before_anything_has_served_is_not_rolled_out() -> None:
    cluster = Rolling()
    cluster.apply(spec_json("fresh", rollout=QUICK))
    commands = cluster.apply(spec_json("fresh", version="2.0.0", rollout=QUICK))
    assert kinds(commands)[0] == "model_accepted"


def test_whoever_starts_one_reads_what_comes_first_and_what_ends_it_early() -> None:
    said: dict[bool, str] = {}
    for shadow in (False, True):
        cluster = Rolling()
        commands = cluster.apply(spec_json(version="2.0.0", rollout={**QUICK, "shadow": shadow}))
        [said[shadow]] = [one.reason for one in decisions(commands) if one.kind == "rollout_started"]
    for reason in said.values():
        assert "takes 10 -> 20 -> 50 -> 100 % of the keys" in reason
        assert "A breach takes it back at once, also before 100 answers" in reason
    copies = "First it gets copies of all requests: what it answers is compared and nobody gets it"
    assert (copies in said[False], copies in said[True]) == (False, True)
