"""`sie-stream apply` that leaves before a model serves says that the declaration stays, and how to take it back."""

from __future__ import annotations

from typing import cast

import pytest

from scheduler.limits import RETRIES_MAX
from schemas.codec import encode_row
from sie_stream.cli import declare, models
from sie_stream.cli.ask import NotReady, ask, of_kind
from sie_stream.cli.declare import stays_declared
from sie_stream.control import DeleteModel, InstanceRow
from sie_stream.edge.connection import Connection
from sie_stream.ids import TopicPartition
from sie_stream.ports import TopicSpec
from sie_stream.records import LogWrite
from sie_stream.settings import Settings
from sie_stream.sim.log import SimLog
from tests.unit.scheduler.kit import INSTANCE, Cluster, decisions, fail, running, spec_json

ALIVE = (("w0", "a"), ("w1", "b"))


class Rows:
    """A connection to a log that holds these rows of sie.instances."""

    def __init__(self, *rows: InstanceRow) -> None:
        self.settings = Settings()
        log = SimLog()
        topics = self.settings.topics
        names = (topics.instances, topics.cluster, topics.decisions)
        log.admin().ensure([TopicSpec(topic, 1, {}) for topic in names])
        log.plain_writer().write([LogWrite(topics.instances, encode_row(row), row.model.encode()) for row in rows])
        self.reader, self.plain_writer = lambda: log.reader("tools"), log.plain_writer

    @property
    def connection(self) -> Connection:
        return cast(Connection, self)


def given_up() -> tuple[Cluster, int]:
    """Version 2.0.0 was applied and cannot be loaded, 1.0.0 goes on. And what its row must have seen."""
    cluster = running()
    [accepted] = decisions(cluster.apply(spec_json(version="2.0.0")), "model_accepted")
    for attempt in range(RETRIES_MAX + 1):
        fail(cluster)
        cluster.wait(1_000 * 2**attempt, ALIVE)
    return cluster, accepted.cause_offset


def test_one_that_is_not_ready_in_time_stays_declared_and_the_error_says_so() -> None:
    with pytest.raises(NotReady) as caught:
        models._wait(Rows().connection, {"churn": 7}, 0)
    text = str(caught.value)
    assert "churn: unknown to the scheduler" in text
    assert "It stays declared: `sie-stream describe churn` shows why, `sie-stream delete churn` removes it" in text


def test_with_several_the_advice_is_for_each() -> None:
    with pytest.raises(NotReady, match="They stay declared: `sie-stream describe MODEL` shows why"):
        models._wait(Rows().connection, {"churn": 7, "other": 8}, 0)


def test_it_is_said_that_delete_removes_the_version_that_goes_on_serving_too() -> None:
    cluster, offset = given_up()
    with pytest.raises(NotReady) as caught:
        models._wait(Rows(cluster.row("instances", INSTANCE, InstanceRow)).connection, {"churn": offset}, 60)
    text = str(caught.value)
    assert "could not be loaded" in text
    assert "`sie-stream delete churn` removes it with the version that goes on serving" in text
    assert "to go back to that one, apply its declaration again" in text


def test_a_model_that_lacks_a_replica_is_told_as_one_that_serves() -> None:
    """Otherwise it reads as if nothing of it answered, and the advice to delete it as harmless."""
    cluster = running()
    cluster.apply(spec_json(replicas={"min": 3, "max": 3}))
    cluster.make_ready()
    found = declare._not_serving(["churn"], {"churn": cluster.row("instances", INSTANCE, InstanceRow)}, "not ready:")
    text = f"{found}\n{stays_declared(found.left, found.older, found.partly)}"
    assert "It serves with 2 of 3 replicas." in text
    assert "`sie-stream delete churn` removes it with the replicas that serve" in text
    assert "to take the change back, apply the declaration of before" in text


def test_whoever_presses_ctrl_c_is_told_what_stays_behind(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(models, "wait_ready", interrupted)
    monkeypatch.setattr(models, "tell", print)
    with pytest.raises(KeyboardInterrupt):
        models._wait(Rows().connection, {"churn": 7}, 60)
    told = capsys.readouterr().out
    assert "No longer waiting for churn. It stays declared" in told


def test_a_question_that_nobody_answered_is_done_all_the_same_and_the_error_says_so() -> None:
    rows = Rows()
    with pytest.raises(NotReady, match="it is done once a scheduler runs"):
        ask(rows.connection, [DeleteModel("churn", "ada")], ["churn"], of_kind({"model_deleting"}), 0)
    reader = rows.reader()
    reader.assign({TopicPartition(rows.settings.topics.cluster, 0): 0})
    assert len(reader.poll(10, 0)) == 1, "the command is on the log"
