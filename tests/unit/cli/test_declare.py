"""`sie-stream apply --wait`: what it waits for, and when waiting is of no use."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from msgspec import Raw

from scheduler.limits import RETRIES_MAX
from schemas.codec import encode_decision
from sie_stream.cli import declare as declare_module
from sie_stream.cli.declare import (
    awaited,
    declare,
    delete,
    is_given_up,
    is_ready,
    load_specs,
    rolls_out,
    specs_for,
    why_not,
)
from sie_stream.control import ApplyModel, DeleteModel, InstanceRow
from sie_stream.decisions import Decision
from sie_stream.edge.connection import Connection, NotRunning
from sie_stream.errors import ConfigError
from sie_stream.ports import TopicSpec
from sie_stream.records import LogWrite
from sie_stream.settings import Settings
from sie_stream.sim.log import SimLog
from sie_stream.spec import SpecError, parse_object
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


class Beside:
    """A connection to a log on which the scheduler's answers to others come first."""

    def __init__(self, *answers: Decision) -> None:
        self.settings = Settings()
        self._log = SimLog()
        topics = self.settings.topics
        self._log.admin().ensure([TopicSpec(topic, 1, {}) for topic in (topics.decisions, topics.cluster)])
        self.reader, self.plain_writer = lambda: self._log.reader("tools"), self._log.plain_writer
        self._answers = list(answers)

    def tick(self) -> None:
        """One answer for each look at the log."""
        for answer in self._answers[:1]:
            self.plain_writer().write([LogWrite(self.settings.topics.decisions, encode_decision(answer))])
        del self._answers[:1]


def test_apply_and_delete_of_one_model_take_no_answer_of_the_other() -> None:
    cluster = running()
    [accepted] = decisions(cluster.apply(spec_json(version="2.0.0")), "model_accepted")
    [deleting] = decisions(cluster.append(DeleteModel("churn")), "model_deleting")
    spec = parse_object(json.loads(spec_json(version="2.0.0")))
    beside = Beside(deleting, accepted)
    [answer] = declare(cast(Connection, beside), [(spec, Path())], 5, beside.tick)
    assert answer.kind == "model_accepted"
    beside = Beside(accepted, deleting)
    assert delete(cast(Connection, beside), "churn", 5, beside.tick).kind == "model_deleting"


OBJECT = {
    "apiVersion": "sie.lmsys.org/v1",
    "kind": "ModelServce",
    "metadata": {"name": "a"},
    "spec": {"version": "1", "source": "x", "minGpuMemoryMb": 1},
}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", json.dumps(OBJECT)),
        ("a.json", json.dumps(OBJECT, separators=(",", ":"))),
        ("a.yaml", "apiVersion: sie.lmsys.org/v1\nkind: ModelServce\nmetadata: {name: a}\nspec: {version: '1'}\n"),
        ("a.yml", "kind: ModelServce\nspec: {}\n"),
    ],
)
def test_a_kind_nobody_knows_is_refused_also_in_a_folder_of_other_files(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / "good.json").write_text(json.dumps(OBJECT | {"kind": "ModelService"}))
    (tmp_path / "config.json").write_text('{"kind": "tokenizer", "model_type": "llama"}')
    assert [spec.name for spec, _ in load_specs(tmp_path)] == ["a"]
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_specs(tmp_path)
    assert "'ModelServce' is not a known kind. Allowed: ModelService, List, ModelServiceList" in str(caught.value)
    assert "Did you mean 'ModelService'?" in str(caught.value)


def test_a_backend_beside_the_workers_may_be_declared_and_a_misspelt_one_may_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = SimpleNamespace(workers={"w0": SimpleNamespace(backends=("rules", "torch"))})
    monkeypatch.setattr(declare_module, "cluster_state", lambda _connection: state)
    connection = cast(Connection, object())
    file = tmp_path / "topics.yaml"
    declaration = "name: topics\nversion: 1.0.0\nsource: .\nservice_type: classification\nmin_gpu_memory_mb: 1\n"
    file.write_text(declaration + "backend: rules\n")
    [(spec, _)], _ = specs_for(lambda: connection, file)
    assert spec.backend.name == "rules"
    file.write_text(declaration + "backend: rulez\n")
    with pytest.raises(SpecError, match="rules"):
        specs_for(lambda: connection, file)

    def nobody() -> Connection:
        raise NotRunning("no broker")

    with pytest.raises(SpecError, match="rulez"):
        specs_for(nobody, file)
    file.write_text(declaration + "backend: torch\n")
    with pytest.raises(NotRunning):
        specs_for(nobody, file)
