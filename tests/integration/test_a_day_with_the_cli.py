"""The commands of the README, in the order of the README, as a newcomer types them: real processes, real models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

from sie_stream import Client, Request, RequestFailed
from sie_stream.edge.broker_home import free_port
from sie_stream.edge.supervisor import RunState, process_alive
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.integration
MODELS = Path(".models").absolute()
MODEL = "wine-logreg"
ROOT = Path(__file__).parents[2]


PATIENT = {"SIE_STREAM_WORKER_LOST_AFTER_MS": "30000"}
"""A worker that gets no processor for two seconds is not lost. One that ends is: its supervisor sees it."""


class Shell:
    """Runs `sie-stream` with its state in a folder of its own."""

    def __init__(self, state_dir: Path) -> None:
        self.state_dir = state_dir
        self.metrics_port = free_port()
        self.env = {**os.environ, **PATIENT, "SIE_STREAM_STATE_DIR": str(state_dir), "COLUMNS": "200"}

    def run(self, *arguments: str, code: int = 0, text: str | None = None) -> str:
        command = [sys.executable, "-m", "sie_stream.cli.main", *arguments]
        done = subprocess.run(
            command, env=self.env, input=text, capture_output=True, text=True, timeout=2 * PATIENCE_S, check=False
        )
        assert done.returncode == code, f"{arguments}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr if code else done.stdout

    def json(self, *arguments: str) -> Any:
        return json.loads(self.run(*arguments, "-o", "json"))

    def script(self, name: str, *arguments: str) -> str:
        command = [sys.executable, str(ROOT / "examples" / name), *arguments]
        return subprocess.run(
            command, env=self.env, capture_output=True, text=True, timeout=2 * PATIENCE_S, check=True
        ).stdout

    @property
    def bootstrap(self) -> str:
        state = RunState.load(self.state_dir)
        assert state is not None
        return state.bootstrap_servers


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    here = Shell(tmp_path_factory.mktemp("day"))
    here.run("up", "--workers", "1", "--detach", "--metrics-port", str(here.metrics_port))
    state = RunState.load(here.state_dir)
    assert state is not None
    pids = [int(process["pid"]) for process in state.processes.values()]
    try:
        here.run("apply", "-f", str(MODELS / MODEL))
        yield here
    finally:
        here.run("down")
    wait_until(lambda: not any(process_alive(pid) for pid in pids), "every process to be gone")


def test_without_an_engine_commands_say_how_to_start_one(tmp_path: Path) -> None:
    said = Shell(tmp_path).run("get", "models", code=1)
    assert "sie-stream up" in said


def test_a_second_up_in_the_same_folder_is_refused(shell: Shell) -> None:
    assert "already running" in shell.run("up", code=1)
    assert "already running" in shell.run("up", "--detach", code=1)
    assert shell.json("get", "brokers") == [{"bootstrap_servers": shell.bootstrap}]


def test_what_runs_can_be_listed(shell: Shell) -> None:
    assert [row["model"] for row in shell.json("get", "models")] == [MODEL]
    assert shell.json("get", "instances")[0]["status"] == "ready"
    (worker,) = shell.json("get", "workers")
    assert {"worker", "incarnation", "pid", "state", "devices", "partitions"} <= worker.keys()
    assert worker["state"] == "live"
    assert shell.json("get", "placements")[0]["replicas"] == ["worker-0:cpu:0"]
    assert shell.json("get", "routes")[0]["topic"] == f"sie.work.{MODEL}"
    assert "sie.results" in [row["topic"] for row in shell.json("get", "topics")]
    assert "allowed" in shell.run("get", "modles", code=2)


def test_describe_shows_the_declaration_and_what_is_not_enforced(shell: Shell) -> None:
    assert MODEL in shell.run("describe", MODEL)
    found = shell.json("describe", MODEL)
    assert found["spec"]["name"] == MODEL
    assert found["not_enforced"] == []
    assert [cell["verdict"] for cell in found["capability"]["fits"]] == ["fits"]
    assert f"Did you mean '{MODEL}'" in shell.run("describe", "wine-logrex", code=1)


def test_rows_come_from_jsonl_csv_parquet_and_standard_input(shell: Shell, tmp_path: Path) -> None:
    samples = MODELS / MODEL / "samples.jsonl"
    lines = samples.read_text().splitlines()[:7]
    table = pa.Table.from_pylist([json.loads(line) for line in lines])
    pyarrow.csv.write_csv(table, tmp_path / "rows.csv")
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    for name in ("rows.jsonl", "rows.csv", "rows.parquet"):
        answers = shell.json("produce", "-m", MODEL, "-f", str(tmp_path / name), "--wait")
        assert [answer["status"] for answer in answers] == ["ok"] * 7, name
    said = shell.run("produce", "-m", MODEL, "--stdin", "--wait", "-o", "json", text="\n".join(lines))
    assert [answer["status"] for answer in json.loads(said)] == ["ok"] * 7


def test_bad_rows_are_refused_with_the_place(shell: Shell, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"alcohol": 1}\nnot json\n')
    assert "line 2" in shell.run("produce", "-m", MODEL, "-f", str(bad), code=1)
    assert "no such file" in shell.run("produce", "-m", MODEL, "-f", "nowhere.csv", code=1)


def test_a_result_is_found_by_its_request_id(shell: Shell) -> None:
    row = (MODELS / MODEL / "samples.jsonl").read_text().splitlines()[0]
    shell.run("produce", "-m", MODEL, "-i", row, "--request-id", "one-of-mine", "--wait")
    (found,) = shell.json("results", "--request-id", "one-of-mine")
    assert (found["request_id"], found["status"], found["model"]) == ("one-of-mine", "ok", MODEL)
    assert found["provenance"]["weights_digest"].startswith("sha256:")


def test_what_happened_can_be_watched_and_scraped(shell: Shell) -> None:
    shell.run("produce", "-m", MODEL, "-f", str(MODELS / MODEL / "samples.jsonl"), "--wait")
    seen = shell.json("top", "--once")
    [device] = seen["devices"]
    assert [engine["backend"] for engine in device["engines"]] == ["sklearn"]
    assert device["engines"][0]["memory_mb"] > 20
    [model] = [one for one in seen["models"] if one["model"] == MODEL]
    assert model["requests"] >= len((MODELS / MODEL / "samples.jsonl").read_text().splitlines())

    def answered() -> bool:
        with urlopen(f"http://127.0.0.1:{shell.metrics_port}/metrics", timeout=PATIENCE_S) as page:
            text = page.read().decode()
        return f'inference_latency_seconds_count{{model_id="{MODEL}"' in text and "sie_device_up{" in text

    wait_until(answered, "metrics to tell of the answers")


def test_topics_and_doctor_are_content(shell: Shell) -> None:
    assert "as declared" in shell.run("topics", "plan")
    assert "as declared" in shell.run("topics", "apply")
    states = {finding["check"]: finding["state"] for finding in shell.json("doctor")}
    assert set(states.values()) <= {"ok", "warning"}, states
    assert states["workers"] == states["schemas"] == "ok"


def test_a_held_topic_stays_held_through_an_apply_until_it_is_released(shell: Shell) -> None:
    assert shell.json("topics", "hold", "results", "--reason", "case 17")["kind"] == "topic_held"
    assert "nothing is removed" in shell.run("topics", "plan")
    shell.run("topics", "apply")
    (row,) = shell.json("topics", "holds")
    assert (row["topic"], row["in_force"], row["reason"]) == ("sie.results", "yes", "case 17")
    assert "Did you mean 'sie.results'" in shell.run("topics", "hold", "resluts", "--reason", "x", code=1)
    assert shell.json("topics", "release", "results")["kind"] == "topic_released"
    assert shell.json("topics", "holds") == []
    assert "as declared" in shell.run("topics", "plan")
    assert "not held" in shell.run("topics", "release", "results", code=1)


def test_nothing_failed_so_far(shell: Shell) -> None:
    assert shell.json("failures") == []


def test_decisions_are_told_and_a_refold_makes_the_same(shell: Shell) -> None:
    told = shell.json("decisions", "--model", MODEL, "--since", "1h")
    kinds = [decision["kind"] for decision in told]
    assert {"model_accepted", "replica_placed", "replica_ready", "partitions_assigned"} <= set(kinds)
    placed = told[kinds.index("replica_placed")]
    assert placed["moves"][0]["target"] == "worker-0/cpu:0"
    assert placed["memory"][0]["after_bytes"] > placed["memory"][0]["before_bytes"]
    assert placed["facts"][0]["topic"] == "sie.cluster"
    assert placed["decision"] in shell.run("decisions", "--model", MODEL)
    report = shell.json("audit", "decisions")
    assert report["same"]
    assert report["equal"] >= len(told)
    assert "the same" in shell.run("audit", "decisions")


def test_the_first_placement_cannot_be_undone_and_says_why(shell: Shell) -> None:
    placed = next(d for d in shell.json("decisions", "--model", MODEL) if d["kind"] == "replica_placed")
    assert "had 0 replicas before it" in shell.run("undo", placed["decision"], code=1)
    assert "ends before" in shell.run("undo", "d-99999999-0", code=1)
    assert "d-OFFSET-N" in shell.run("undo", "the last one", code=1)


def test_what_lives_where_and_why(shell: Shell) -> None:
    (server,) = shell.json("topology")
    assert server["name"].startswith("worker-0 on ")
    assert MODEL in shell.run("topology")
    (replica,) = shell.json("explain", "placement", MODEL)
    assert [device["verdict"] for device in replica["devices"]] == ["chosen"]


def test_a_lone_worker_cannot_be_drained_and_what_it_holds_is_said(shell: Shell) -> None:
    assert "cordoned" in shell.run("cordon", "worker-0")
    assert "Did you mean 'worker-0'" in shell.run("cordon", "worker-9", code=1)
    said = shell.run("drain", "worker-0", "--timeout", "3", code=1)
    assert f"still holds 1 model after 3 s: {MODEL}" in said
    assert shell.json("get", "workers")[0]["service"] == "draining"
    assert shell.json("uncordon", "worker-0")["kind"] == "worker_uncordoned"
    assert shell.json("get", "workers")[0]["service"] == "in service"
    assert shell.json("get", "instances")[0]["status"] == "ready"


def test_any_kafka_client_can_take_part(shell: Shell) -> None:
    shell.script("plain_producer.py", shell.bootstrap, MODEL)
    said = shell.script("plain_consumer.py", shell.bootstrap, "plain-json", "plain-avro")
    answers = [json.loads(line) for line in said.splitlines()]
    assert {answer["request_id"]: answer["status"] for answer in answers} == {"plain-json": "ok", "plain-avro": "ok"}


def test_the_sdk_example_runs(shell: Shell) -> None:
    assert "20 answers, 20 ok" in shell.script("sdk.py", MODEL)


def test_the_sdk_says_what_was_wrong_and_repeats_are_answered_once(shell: Shell) -> None:
    rows = [json.loads(line) for line in (MODELS / MODEL / "samples.jsonl").read_text().splitlines()[:5]]
    with Client(shell.bootstrap) as client:
        with pytest.raises(RequestFailed) as refused:
            client.score(MODEL, {**rows[0], "alcohol": "strong"})
        assert refused.value.code == "wrong_type"
        assert refused.value.result.error is not None
        assert refused.value.result.error.field.endswith("alcohol")
        again = [Request(model=MODEL, inputs=row, request_id=f"repeat-{n}") for n, row in enumerate(rows)]
        for submission in client.submit_many(again):
            assert submission.result(PATIENCE_S).ok
        client.submit_many(again)
        assert client.score(MODEL, rows[0], timeout_s=PATIENCE_S).ok
        seen = [result.request_id for result in client.results() if result.request_id.startswith("repeat-")]
    assert sorted(seen) == sorted(set(seen))


def test_a_broken_declaration_is_explained(shell: Shell, tmp_path: Path) -> None:
    spec = tmp_path / "model-spec.yaml"
    spec.write_text("model_id: Churn!\nversion: 1.0.0\nsource: {uri: x}\nservice_tipe: scoring\nmin_gpu_memory_mb: 1\n")
    said = shell.run("apply", "-f", str(spec), code=1)
    assert "service_type" in said
    assert "Churn!" in said


def test_delete_takes_the_route_away(shell: Shell) -> None:
    assert "delet" in shell.run("delete", MODEL)
    row = (MODELS / MODEL / "samples.jsonl").read_text().splitlines()[0]

    def refused() -> bool:
        with Client(shell.bootstrap) as client:
            return client.submit(MODEL, json.loads(row)).result(PATIENCE_S).error is not None

    wait_until(refused, "requests to be refused")
