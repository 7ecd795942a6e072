"""`sie-stream replay` against a real engine: as it was, on another version, with weights that are gone, partial."""

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

from sie_stream.edge.supervisor import RunState, process_alive
from tests.waiting import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]
MODELS = Path(".models").absolute()
MODEL, OTHER = "wine-logreg", "wine-rf"


class Shell:
    """Runs `sie-stream` with its state in a folder of its own."""

    def __init__(self, state_dir: Path) -> None:
        self.state_dir = state_dir
        self.env = {**os.environ, "SIE_STREAM_STATE_DIR": str(state_dir), "COLUMNS": "200"}

    def run(self, *arguments: str, code: int = 0) -> str:
        command = [sys.executable, "-m", "sie_stream.cli.main", *arguments]
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == code, f"{arguments}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr if code else done.stdout

    def replay(self, *arguments: str, code: int = 0) -> Any:
        said = self.run("replay", *arguments, "-o", "json", code=code)
        return json.JSONDecoder().raw_decode(said)[0]


def declare(folder: Path, source: str, version: str) -> Path:
    """The model of `source` under one name and another version, weights beside it."""
    made = folder / version
    shutil.copytree(MODELS / source, made)
    spec = made / "model-spec.yaml"
    lines = spec.read_text().splitlines()
    for number, line in enumerate(lines):
        for field, value in (("model_id:", MODEL), ("name:", MODEL), ("version:", version)):
            if line.startswith(field):
                lines[number] = f"{field} {value}"
    spec.write_text("\n".join(lines))
    return made


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """60 answers of version 1.0.0, then 20 of version 2.0.0, which is another kind of model."""
    folder = tmp_path_factory.mktemp("models")
    here = Shell(tmp_path_factory.mktemp("replay"))
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
    wait_until(lambda: not any(process_alive(pid) for pid in pids), "every process to be gone", 20)


def test_as_it_was_every_answer_is_the_same_bits(shell: Shell, tmp_path: Path) -> None:
    report = shell.replay("--model", MODEL, "--parquet", str(tmp_path / "all.parquet"))
    assert (report["replayed"], report["equal"], report["causes"], report["partial"]) == (80, 80, {}, False)
    (model,) = report["models"]
    assert model["before_versions"] == model["after_versions"] == ["1.0.0", "2.0.0"]
    assert (model["psi"], model["ks"], model["labels_changed"]) == (0, 0, 0)
    assert pyarrow.parquet.read_table(tmp_path / "all.parquet").num_rows == 80


def test_on_another_version_it_says_what_would_change(shell: Shell, tmp_path: Path) -> None:
    page = tmp_path / "what-if.html"
    report = shell.replay("--model", f"{MODEL}@2.0.0", "--html", str(page), code=1)
    assert (report["replayed"], report["equal"]) == (80, 20)
    assert report["causes"] == {"version": 60}
    (model,) = report["models"]
    assert model["after_versions"] == ["2.0.0"]
    assert model["ks"] > 0.1
    assert "<svg" in page.read_text()
    assert "src=" not in page.read_text()
    close = shell.replay("--model", f"{MODEL}@2.0.0", "--tolerance", "1e9", "--no-fail")
    assert close["within"] + close["equal"] + model["labels_changed"] == 80


def test_results_topic_and_ids_find_their_work(shell: Shell) -> None:
    report = shell.replay("--topic", "sie.results", "--no-fail")
    assert (report["replayed"], report["equal"]) == (80, 80)
    assert report["unscored"] == {"rejected at ingress": 1}
    (one,) = json.loads(shell.run("results", "-n", "1", "--model", MODEL, "-o", "json"))
    report = shell.replay("--request-id", one["request_id"], "--request-id", "never-sent", code=1)
    assert (report["replayed"], report["equal"], report["causes"]) == (1, 1, {"missing": 1})
    requests = shell.replay("--topic", "sie.requests", "--no-fail")
    assert requests["replayed"] == 80


def test_a_decision_names_the_answers_it_is_behind(shell: Shell) -> None:
    told = json.loads(shell.run("decisions", "--model", MODEL, "-o", "json"))
    placed = [one for one in told if one["kind"] == "replica_placed"]
    counts = [shell.replay("--decision", one["decision"])["replayed"] for one in placed]
    assert counts == [60, 20]


def test_nothing_of_production_is_touched(shell: Shell) -> None:
    said = shell.run("replay", "--model", MODEL, "--to-topic", "sie.results", code=1)
    assert "not for replays" in said
    assert "Did you mean" in shell.run("replay", "--model", "wine-logrex", code=1)
    assert "Declared: 1.0.0, 2.0.0" in shell.run("replay", "--model", f"{MODEL}@3.0.0", code=1)
    found = json.loads(shell.run("results", "-n", "1000", "--model", MODEL, "-o", "json"))
    assert len(found) == 80


def test_weights_that_are_not_those_any_more_are_refused_and_counted(shell: Shell) -> None:
    told = json.loads(shell.run("describe", MODEL, "-o", "json"))
    weights = next(Path(told["spec"]["source"]["uri"]).parent.glob("1.0.0/*.skops"))
    weights.write_bytes(weights.read_bytes() + b"\0")
    report = shell.replay("--model", MODEL, code=1)
    assert (report["replayed"], report["equal"], report["causes"]) == (20, 20, {"version": 60})
    assert "weights_digest_mismatch" in next(iter(report["reasons"]))
