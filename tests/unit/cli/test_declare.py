"""`sie-stream apply --wait`: what it waits for, and when waiting is of no use."""

from __future__ import annotations

from msgspec import Raw

from scheduler.limits import RETRIES_MAX
from sie_stream.cli.declare import awaited, is_given_up, is_ready, rolls_out, why_not
from sie_stream.control import ApplyModel, InstanceRow
from sie_stream.decisions import Decision
from tests.unit.scheduler.kit import INSTANCE, Cluster, decisions, fail, running, spec_json
from tests.unit.scheduler.rolling import Rolling
from tests.unit.scheduler.test_sleep import asleep

ALIVE = (("w0", "a"), ("w1", "b"))


def applied(cluster: Cluster, version: str) -> tuple[list[Decision], int]:
    """Apply that version of a model that runs. Returns the answer, and what its row must have seen."""
    answers = decisions(cluster.apply(spec_json(version=version)), "model_accepted")
    return answers, awaited(answers)["churn"]


def row(cluster: Cluster) -> InstanceRow:
    return cluster.row("instances", INSTANCE, InstanceRow)


def test_the_row_of_before_and_the_old_version_that_serves_are_not_what_was_applied() -> None:
    cluster = running()
    before = row(cluster)
    _, offset = applied(cluster, "2.0.0")
    assert before.status == row(cluster).status == "ready", "it answers all the while"
    assert not is_ready(before, offset)
    assert not is_ready(row(cluster), offset), "2.0.0 is still loading"
    assert not is_ready(None, offset)
    cluster.make_ready()
    assert is_ready(row(cluster), offset)


def test_a_version_given_up_is_told_with_the_one_that_serves_instead() -> None:
    cluster = running()
    _, offset = applied(cluster, "2.0.0")
    for attempt in range(RETRIES_MAX + 1):
        assert not is_given_up(row(cluster), offset), "it is tried again"
        fail(cluster)
        cluster.wait(1_000 * 2**attempt, ALIVE)
    assert is_given_up(row(cluster), offset)
    assert not is_ready(row(cluster), offset)
    words = why_not(["churn"], {"churn": row(cluster)}, "could not be loaded:")
    assert "churn 2.0.0: degraded" in words
    assert "weights_missing" in words
    assert "Version 1.0.0 goes on serving." in words


def test_applying_again_what_was_given_up_waits_for_the_new_attempt() -> None:
    cluster = running()
    applied(cluster, "2.0.0")
    for attempt in range(RETRIES_MAX + 1):
        fail(cluster)
        cluster.wait(1_000 * 2**attempt, ALIVE)
    given_up = row(cluster)
    _, offset = applied(cluster, "2.0.0")
    assert not is_given_up(given_up, offset), "that was the attempt before"
    cluster.make_ready()
    assert is_ready(row(cluster), offset)


def test_what_did_not_change_is_ready_at_once() -> None:
    cluster = running()
    same = bytes(cluster.model().spec)
    answers = decisions(cluster.append(ApplyModel(Raw(same))), "model_unchanged")
    assert is_ready(row(cluster), awaited(answers)["churn"])


def test_one_that_sleeps_is_not_waited_for_until_somebody_wakes_it() -> None:
    cluster = asleep()
    same = bytes(cluster.model().spec)
    answers = decisions(cluster.append(ApplyModel(Raw(same))), "model_unchanged")
    assert row(cluster).status == "asleep"
    assert is_ready(row(cluster), awaited(answers)["churn"])


def test_a_rollout_is_not_waited_for_nor_told_as_ready() -> None:
    cluster = Rolling()
    cluster.roll()
    assert awaited(decisions(cluster.commands, "rollout_started")) == {}
    [rollout] = cluster.model().rollouts.values()
    again = decisions(cluster.append(ApplyModel(rollout.spec)), "model_unchanged")
    assert [rolls_out(answer) for answer in again] == [True]
    assert awaited(again) == {}
    before = decisions(cluster.append(ApplyModel(rollout.spec_before)), "model_unchanged")
    assert list(awaited(before)) == ["churn"], "what serves is as declared, whatever becomes of the rollout"
