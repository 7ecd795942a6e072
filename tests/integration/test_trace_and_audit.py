"""What happened can be told and proven afterwards: `trace` and `audit`, on real processes, with a worker killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from sie_stream.cli.audit_bundle import problems_of
from sie_stream.edge.supervisor import RunState, process_alive
from tests.integration.test_a_day_with_the_cli import Shell
from tests.waiting import wait_until

pytestmark = pytest.mark.integration
MODELS = Path(".models").absolute()
MODEL = "wine-logreg"


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    here = Shell(tmp_path_factory.mktemp("evidence"))
    here.run("up", "--workers", "1", "--detach")
    state = RunState.load(here.state_dir)
    assert state is not None
    pids = [int(process["pid"]) for process in state.processes.values()]
    try:
        here.run("apply", "-f", str(MODELS / MODEL))
        yield here
    finally:
        here.run("down")
    wait_until(lambda: not any(process_alive(pid) for pid in pids), "every process to be gone")


def stages(told: dict[str, Any]) -> list[str]:
    return [step["stage"] for step in told["steps"] if step["stage"] not in ("placement", "control")]


def test_requests_are_traced_and_the_range_is_proven_and_exported(shell: Shell, tmp_path: Path) -> None:
    samples = MODELS / MODEL / "samples.jsonl"
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(samples.read_text().splitlines()[:40]))
    row = samples.read_text().splitlines()[0]
    answers = shell.json("produce", "-m", MODEL, "-f", str(rows), "--wait")
    shell.run("produce", "-m", MODEL, "-i", '{"alcohol": "strong"}', "--request-id", "bad", "--wait", code=1)
    _an_answer_is_traced(shell, max(answers, key=lambda answer: answer["provenance"]["batch_size"]), tmp_path)
    refused = shell.json("trace", "bad")
    assert (refused["state"], stages(refused), refused["attempts"]) == ("rejected", ["client", "result"], 0)
    _a_worker_is_killed(shell, row)
    shell.run("produce", "-m", MODEL, "-i", row, "--request-id", "orphan")
    assert "no topic knows it" in shell.run("trace", "nobody", code=1)
    _the_range_is_proven(shell, tmp_path)


def _an_answer_is_traced(shell: Shell, answer: dict[str, Any], tmp_path: Path) -> None:
    spans = tmp_path / "spans.json"
    told = shell.json("trace", answer["request_id"], "--otel", str(spans))
    assert told["steps"][0]["stage"] == "placement"
    assert "replica_placed on worker-0/cpu:0" in told["steps"][0]["what"]
    assert stages(told) == ["client", "ingress", "ingress", "queue", "engine", "result"]
    assert (told["worker"], told["attempts"], told["batch_size"]) == ("worker-0", 1, answer["provenance"]["batch_size"])
    assert len(told["neighbours"]) == told["batch_size"] - 1
    assert told["durations_ms"]["total"] == answer["timings_ms"]["total"]
    (resource,) = json.loads(spans.read_text())["resourceSpans"]
    assert [span["name"] for span in resource["scopeSpans"][0]["spans"]][1:] == [
        "ingress",
        "ingress",
        "queue",
        "engine",
    ]
    by_time = shell.json("trace", answer["request_id"], "--since", "1h", "--key", answer["request_id"])
    assert by_time["steps"] == told["steps"]
    slow = shell.json("trace", "--slow", "--model", MODEL, "--since", "1h")
    assert (slow["requests"], len(slow["slow"])) == (40, 1)


def _a_worker_is_killed(shell: Shell, row: str) -> None:
    """A request that waits while its worker is gone is open, and says afterwards who was lost."""
    (worker,) = shell.json("get", "workers")
    os.kill(worker["pid"], signal.SIGKILL)
    shell.run("produce", "-m", MODEL, "-i", row, "--request-id", "orphan", "--deadline-ms", "120000")
    seen = shell.json("trace", "orphan")
    assert seen["state"] in ("open", "ok")
    told = wait_until(lambda: _ended(shell, "orphan"), "the orphan to be answered")
    assert told is not None
    assert told["state"] == "ok"
    assert told["incarnation"] != worker["incarnation"]
    assert 0 < told["deadline_left_ms"] < 120_000
    if seen["state"] == "open":
        control = " ".join(step["what"] for step in told["steps"] if step["stage"] == "control")
        assert "replica_placed" in control or "partitions_assigned" in control


def _ended(shell: Shell, request_id: str) -> dict[str, Any] | None:
    told = shell.json("trace", request_id)
    return None if told["state"] == "open" else told


def _the_range_is_proven(shell: Shell, tmp_path: Path) -> None:
    report = shell.json("audit", "verify", "--from", "1h")
    assert report["proven"]
    assert (report["requests"], report["answered"], report["repeats"], report["open"]) == (43, 42, 1, 0)
    assert report["by_status"] == {"ok": 41, "rejected": 1}
    key, bundle = tmp_path / "audit.key", tmp_path / "bundle"
    shell.run("audit", "keygen", str(key))
    assert "never written over" in shell.run("audit", "keygen", str(key), code=1)
    manifest = shell.json("audit", "export", str(bundle), "--key", str(key))
    assert manifest["files"]["results.parquet"]["rows"] == 42
    table = pyarrow.parquet.read_table(bundle / "results.parquet")
    assert table.num_rows == 42
    assert set(table["worker"].to_pylist()) == {"worker-0", ""}
    assert shell.json("audit", "check", str(bundle), "--public-key", f"{key}.pub")["intact"]
    _tampering_is_found(bundle, key.with_name("audit.key.pub"), tmp_path)


def _tampering_is_found(bundle: Path, public_key: Path, tmp_path: Path) -> None:
    files = sorted(path.relative_to(bundle).as_posix() for path in bundle.rglob("*") if path.is_file())
    assert {"manifest.json", "requests.parquet", "schemas/Result.avsc", f"models/{MODEL}.json"} <= set(files)
    for name in files:
        copy = tmp_path / "copy"
        shutil.copytree(bundle, copy)
        content = bytearray((copy / name).read_bytes())
        content[len(content) // 2] ^= 0x20
        (copy / name).write_bytes(content)
        problems, _ = problems_of(copy, public_key)
        assert any(name in problem for problem in problems), name
        shutil.rmtree(copy)
