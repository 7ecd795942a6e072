"""A rollout on real Kafka with real processes: a good version goes all the way, a wrong one is taken back."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from sie_stream import Client, Request
from sie_stream.cli.rollout import followed
from sie_stream.cli.rollout_view import history_rows
from sie_stream.edge.connection import Connection
from sie_stream.edge.supervisor import RunState
from tests.integration.test_a_day_with_the_cli import MODELS, Shell
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.integration
MODEL = "wine-rf"
ROLLOUT = {"steps": [50, 100], "hold_ms": 500, "samples_min": 30, "gates": {"p99_ratio_max": 100.0}}
"""What is tested is the way of each version, on any machine: how slow may be is tests/unit/scheduler's business."""


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    here = Shell(tmp_path_factory.mktemp("rollout"))
    here.run("up", "--workers", "2", "--detach")
    assert RunState.load(here.state_dir) is not None
    try:
        here.run("apply", "-f", str(MODELS / MODEL))
        yield here
    finally:
        here.run("down")


class Traffic:
    """Requests with many keys, all the time, until it is told to stop."""

    def __init__(self, bootstrap: str) -> None:
        self.rows = [json.loads(line) for line in (MODELS / MODEL / "samples.jsonl").read_text().splitlines()]
        self.variants: dict[str, int] = {}
        self.statuses: dict[str, int] = {}
        self._bootstrap = bootstrap
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Traffic:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(PATIENCE_S)

    def _run(self) -> None:
        rows = itertools.cycle(self.rows)
        with Client(self._bootstrap) as client:
            while not self._stop.is_set():
                sent = client.submit_many([Request(model=MODEL, inputs=next(rows)) for _ in range(40)])
                for submission in sent:
                    result = submission.result(PATIENCE_S)
                    self.statuses[result.status] = self.statuses.get(result.status, 0) + 1
                    self.variants[result.variant] = self.variants.get(result.variant, 0) + 1


def declaration(folder: Path, version: str, source: str = MODEL, **fields: Any) -> Path:
    """The model's declaration with another version, perhaps with the weights of another model."""
    spec = yaml.safe_load((MODELS / MODEL / "model-spec.yaml").read_text())
    other = yaml.safe_load((MODELS / source / "model-spec.yaml").read_text())
    spec |= {"version": version, "rollout": ROLLOUT, "backend": other["backend"], **fields}
    spec["slas"] = {"p99_latency_ms": 30_000}
    spec["source"] = {**other["source"], "uri": str(MODELS / source)}
    path = folder / f"{version}.yaml"
    path.write_text(yaml.safe_dump(spec))
    return path


def ended(shell: Shell, version: str) -> dict[str, Any]:
    """The rollout of this version, once it ended."""
    deadline = time.monotonic() + PATIENCE_S
    for state in followed(Connection.open(shell.bootstrap)):
        for row in history_rows(state, MODEL):
            if row["version"] == version:
                return row
        assert time.monotonic() < deadline, f"the rollout of {version} did not end within {PATIENCE_S:g} s"
    raise AssertionError("the log ended")


def test_good_wrong_and_broken_versions(shell: Shell, tmp_path: Path) -> None:
    with Traffic(shell.bootstrap) as traffic:
        shell.run("apply", "-f", str(declaration(tmp_path, "2.0.0")))
        [row] = shell.json("rollout", "status", MODEL)
        assert row["version"] == "1.0.0 -> 2.0.0"
        good = ended(shell, "2.0.0")
        assert good["ending"] == "completed", good["why"]
        assert [one["share"] for one in good["steps"]] == ["50 %", "100 %"]
        assert shell.json("get", "models")[0]["version"] == "2.0.0"

        golden = json.loads((MODELS / MODEL / "golden.jsonl").read_text().splitlines()[0])
        golden["outputs"] = {"score": 0.123}
        shell.run("apply", "-f", str(declaration(tmp_path, "3.0.0", golden=[golden])))
        assert "0.123" in ended(shell, "3.0.0")["why"]

        narrower = shell.run(
            "apply", "-f", str(declaration(tmp_path, "4.0.0", output_schema={"type": "object"})), code=1
        )
        assert "schema_incompatible" in narrower

        shell.run("apply", "-f", str(declaration(tmp_path, "5.0.0", source="wine-knn")))
        wrong = ended(shell, "5.0.0")
        assert wrong["ending"] == "rolled_back"
        assert "score" in wrong["why"]
    assert set(traffic.statuses) == {"ok"}, traffic.statuses
    assert set(traffic.variants) == {"stable", "canary"}
    kinds = [one["kind"] for one in shell.json("decisions", "--model", MODEL)]
    assert kinds.count("route_held") >= 4
    shell.run("audit", "decisions")
    assert [
        one["kind"] for one in shell.json("decisions", "--model", "wine-rf.CANARY") if one["kind"] == "replica_placed"
    ]
    shell.run("audit", "verify", "--from", "24h")
