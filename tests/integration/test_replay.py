"""`sie-stream replay` against a real engine: as it was, on another version, and what the log does not give any more."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from confluent_kafka import TopicPartition as ClientPartition
from confluent_kafka.admin import AdminClient

from sie_stream.cli.replay import Asked, replayed
from sie_stream.cli.replaying.choosing import Question
from sie_stream.edge.connection import Connection
from sie_stream.edge.kafka_log import KafkaTransactionalWriter
from sie_stream.edge.stop import StopFlag
from sie_stream.edge.supervisor import RunState, process_alive
from sie_stream.errors import ConfigError
from sie_stream.records import LogWrite
from sie_stream.replay.report import Report
from sie_stream.settings import Settings
from tests.integration.test_a_day_with_the_cli import PATIENT
from tests.waiting import PATIENCE_MS, PATIENCE_S, wait_until

pytestmark = pytest.mark.integration
MODELS = Path(".models").absolute()
MODEL, OTHER = "wine-logreg", "wine-rf"
WORK = f"sie.work.{MODEL}"
LANE = 1
"""Requests without a priority go to P1, and the model has one bucket."""


class Shell:
    """Runs `sie-stream` with its state in a folder of its own, and replays in this process."""

    def __init__(self, state_dir: Path, models: Path) -> None:
        self.state_dir = state_dir
        self.models = models
        self.env = {**os.environ, **PATIENT, "SIE_STREAM_STATE_DIR": str(state_dir), "COLUMNS": "200"}

    def run(self, *arguments: str, code: int = 0) -> str:
        command = [sys.executable, "-m", "sie_stream.cli.main", *arguments]
        done = subprocess.run(
            command, env=self.env, capture_output=True, text=True, timeout=2 * PATIENCE_S, check=False
        )
        assert done.returncode == code, f"{arguments}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def json(self, *arguments: str) -> Any:
        return json.loads(self.run(*arguments, "-o", "json"))

    @property
    def bootstrap(self) -> str:
        state = RunState.load(self.state_dir)
        assert state is not None
        return state.bootstrap_servers

    def replay(self, version: str = "", tolerance: float = 0.0, stop: bool = False, **question: Any) -> Report:
        connection = Connection(Settings(bootstrap_servers=self.bootstrap))
        flag = StopFlag()
        if stop:
            flag.set()
        return replayed(connection, Asked(Question(**question), version, tolerance), flag)


def declare(folder: Path, source: str, version: str) -> Path:
    """The model of `source` under the one name and another version, weights beside it."""
    made = folder / version
    shutil.copytree(MODELS / source, made)
    spec = made / "model-spec.yaml"
    lines = spec.read_text().splitlines()
    for number, line in enumerate(lines):
        for field, value in (("model_id:", MODEL), ("version:", version)):
            if line.startswith(field):
                lines[number] = f"{field} {value}"
    spec.write_text("\n".join(lines))
    return made


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """60 answers of version 1.0.0, a request that ingress rejects, then 20 answers of 2.0.0, another kind of model."""
    folder = tmp_path_factory.mktemp("models")
    here = Shell(tmp_path_factory.mktemp("replay"), folder)
    rows = (MODELS / MODEL / "samples.jsonl").read_text().splitlines()
    (folder / "rows.jsonl").write_text("\n".join((rows * 2)[:60]))
    (folder / "more.jsonl").write_text("\n".join(rows[:20]))
    here.run("up", "--workers", "1", "--detach")
    state = RunState.load(here.state_dir)
    assert state is not None
    pids = [int(process["pid"]) for process in state.processes.values()]
    try:
        here.run("apply", "-f", str(declare(folder, MODEL, "1.0.0")))
        here.run("produce", "-m", MODEL, "-f", str(folder / "rows.jsonl"), "--wait")
        here.run("produce", "-m", "nobody", "-i", "{}", "--request-id", "unknown", "--wait", code=1)
        here.run("apply", "-f", str(declare(folder, OTHER, "2.0.0")))
        here.run("produce", "-m", MODEL, "-f", str(folder / "more.jsonl"), "--wait")
        yield here
    finally:
        here.run("down")
    wait_until(lambda: not any(process_alive(pid) for pid in pids), "every process to be gone")


def test_as_it_was_every_answer_is_the_same_bits(shell: Shell, tmp_path: Path) -> None:
    table, page = tmp_path / "all.parquet", tmp_path / "report.html"
    said = shell.json("replay", "--model", MODEL, "--nice", "0", "--parquet", str(table), "--html", str(page))
    assert (said["replayed"], said["equal"], said["causes"], said["partial"]) == (80, 80, {}, False)
    (model,) = said["models"]
    assert model["before_versions"] == model["after_versions"] == ["1.0.0", "2.0.0"]
    assert (model["psi"], model["ks"], model["labels_changed"]) == (0, 0, 0)
    assert pyarrow.parquet.read_table(table).num_rows == 80
    assert "All the same" in page.read_text()


def test_on_another_version_it_says_what_would_change(shell: Shell) -> None:
    report = shell.replay("2.0.0", model=MODEL)
    assert (report.replayed, report.equal, report.causes) == (80, 20, {"version": 60})
    (model,) = report.models
    assert (model.before_versions, model.after_versions) == (("1.0.0", "2.0.0"), ("2.0.0",))
    assert model.psi > 0.2
    assert model.labels_changed == sum(change.count for change in model.changes) > 0
    tolerant = shell.replay("2.0.0", tolerance=1.0, model=MODEL)
    assert (tolerant.within, tolerant.different) == (60 - model.labels_changed, model.labels_changed)


def test_results_requests_ids_and_decisions_find_their_work(shell: Shell) -> None:
    # With the one that ingress rejected: its own decisions say the same again.
    report = shell.replay(topic="sie.requests")
    assert (report.replayed, report.equal, report.causes, report.unscored) == (81, 81, {}, {})
    part = shell.replay(model=MODEL, first="20", until="40", late_ms=1_000)
    assert 10 <= part.replayed == part.equal <= 20
    report = shell.replay(request_ids=("unknown", "never-sent"))
    assert (report.replayed, report.equal, report.causes) == (1, 1, {"missing": 1})
    told = shell.json("decisions", "--model", MODEL)
    (_, second) = [one["decision"] for one in told if one["kind"] == "replica_placed"]
    report = shell.replay(decision=second)
    assert (report.replayed, report.equal) == (20, 20)


def test_nothing_of_production_is_touched_and_wrong_names_are_told(shell: Shell) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'wine-logreg'"):
        shell.replay(model="wine-logrex")
    with pytest.raises(ConfigError, match=r"Declared: 1\.0\.0, 2\.0\.0"):
        shell.replay("3.0.0", model=MODEL)
    assert len(shell.json("results", "-n", "1000", "--model", MODEL)) == 80


def test_a_stopped_replay_is_partial_and_counts_no_absences(shell: Shell) -> None:
    report = shell.replay(stop=True, model=MODEL)
    assert report.partial
    assert not report.same
    assert report.causes == {}


def test_weights_that_are_not_those_any_more_are_refused_and_counted(shell: Shell) -> None:
    (weights,) = (shell.models / "1.0.0").glob("*.skops")
    weights.write_bytes(weights.read_bytes() + b"\0")
    report = shell.replay(model=MODEL)
    assert (report.replayed, report.equal, report.causes) == (20, 20, {"version": 60})
    assert "weights_digest_mismatch" in next(iter(report.reasons))


def test_a_deleted_head_and_an_open_transaction_are_told(shell: Shell) -> None:
    """Version 1.0.0 cannot be had any more by now, so the answers that can be given are those of 2.0.0."""
    writer = KafkaTransactionalWriter(shell.bootstrap, "test-replay", PATIENCE_MS)
    writer.init()
    writer.begin()
    writer.write([LogWrite(WORK, b"never committed", None, LANE)] * 3)
    admin = AdminClient({"bootstrap.servers": shell.bootstrap})
    for deleted in admin.delete_records([ClientPartition(WORK, LANE, 10)]).values():
        deleted.result(PATIENCE_S)

    def held_back() -> Report | None:
        found = shell.replay(model=MODEL)
        return found if any("open transaction" in note for note in found.notes) else None

    report = wait_until(held_back, "the open transaction to hold records back")
    assert report is not None
    assert (report.replayed, report.equal) == (20, 20)
    gone = report.causes["retention"]
    assert 5 <= gone <= 10
    assert report.causes == {"retention": gone, "version": 60 - gone}
    assert any("10 offsets below 10 are deleted" in note for note in report.notes)
    writer.abort()
    after = shell.replay(model=MODEL)
    assert after.causes == report.causes
    assert not any("open transaction" in note for note in after.notes)
