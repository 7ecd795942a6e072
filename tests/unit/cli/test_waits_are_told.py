"""Who waits for another process, or for long, says so: also in a pipe."""

from __future__ import annotations

import os
import subprocess
import threading
from collections import Counter
from pathlib import Path

import pytest

from sie_stream.cli import demo
from sie_stream.edge.file_lock import locked
from sie_stream.edge.supervisor import RunState
from sie_stream.errors import ConfigError
from tests.waiting import PATIENCE_S
from zoo.build import EVERY, News

ROOT = Path(__file__).parents[3]


def test_a_free_lock_is_taken_without_a_word(tmp_path: Path) -> None:
    told: list[str] = []
    for _ in range(2):
        with locked(tmp_path / "deep" / ".lock", "building", told.append):
            assert (tmp_path / "deep" / ".lock").read_text() == str(os.getpid())
    assert told == []


def test_a_lock_that_another_has_is_waited_for_and_told_with_its_holder(tmp_path: Path) -> None:
    path, told, waits, had = tmp_path / ".lock", list[str](), threading.Event(), threading.Event()

    def say(text: str) -> None:
        told.append(text)
        waits.set()

    def second() -> None:
        with locked(path, "building models into .models", say):
            had.set()

    thread = threading.Thread(target=second)
    with locked(path, "building models into .models", say):
        thread.start()
        assert waits.wait(PATIENCE_S)
        assert not had.is_set()
    thread.join(PATIENCE_S)
    assert had.is_set()
    [line] = told
    assert f"waiting: another process (pid {os.getpid()}) is building models into .models" in line
    assert str(path) in line


def test_a_build_without_bars_tells_each_group_and_every_tenth_model() -> None:
    news = News({"wine": 12, "iris": 13, "pretrained": 1})
    groups = ["wine"] * 11 + ["pretrained"] + ["iris"] * 13 + ["wine"]
    told = [line for line in map(news.of, groups) if line]
    assert told == [
        "10 of 26 models",
        "12 of 26 models: pretrained is done",
        "20 of 26 models",
        "25 of 26 models: iris is done",
        "26 of 26 models: wine is done",
    ]
    assert EVERY == 10
    assert Counter(groups) == {"wine": 12, "iris": 13, "pretrained": 1}


def test_steps_of_an_installation_are_lines_in_a_pipe_and_a_failure_stays_one(tmp_path: Path) -> None:
    shell = 'set -euo pipefail; . .ci/environment.sh; with_steps bash -c "$1"'
    script = (
        "echo 'Resolved 3 packages' >&2; echo 'Downloading torch (180.0MiB)' >&2; echo ' + torch==2.13.0' >&2; exit 3"
    )
    done = subprocess.run(["bash", "-c", shell, "-", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("Resolved 3 packages\nDownloading torch (180.0MiB)\n", 3)


def test_a_demo_does_not_remove_the_folder_of_one_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SIE_STREAM_STATE_DIR", str(tmp_path / ".sie"))
    monkeypatch.setattr(demo, "load_models", lambda _folder: [object()] * demo.MODELS_MIN)
    folder = tmp_path / ".sie" / "demo"
    folder.mkdir(parents=True)
    (folder / "log").write_text("of the one that runs")
    RunState(os.getpid(), "127.0.0.1:1", None, {}, {}, True).save(folder)
    with pytest.raises(ConfigError, match="already running here"):
        demo.demo(keep=True)
    assert (folder / "log").exists()
