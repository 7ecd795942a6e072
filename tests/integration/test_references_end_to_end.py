"""Inputs behind a reference, from the command line to the answer, its replay and its evidence; with a real engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from sie_stream.cli.replay import Asked, replayed
from sie_stream.cli.replaying.choosing import Question
from sie_stream.edge.connection import Connection
from sie_stream.edge.stop import StopFlag
from sie_stream.replay.report import Report
from sie_stream.settings import Settings
from tests.integration.test_replay import MODEL, MODELS, Shell

pytestmark = pytest.mark.integration

PADDING = " " * 5_000_000
"""Many times what a request may have."""


class Place:
    """A folder that ingress may read, with a large good object and one that the model's schema refuses."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.row = (MODELS / MODEL / "samples.jsonl").read_text().splitlines()[0]
        self.good, self.bad = folder / "good.json", folder / "bad.json"
        self.good.write_text(self.row.removesuffix("}") + PADDING + "}")
        self.bad.write_text('{"nonsense": 1}')


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory, place: Place) -> Iterator[Shell]:
    here = Shell(tmp_path_factory.mktemp("references"), MODELS)
    here.run("up", "--workers", "1", "--references", str(place.folder), "--detach")
    try:
        here.run("apply", "-f", str(MODELS / MODEL))
        yield here
    finally:
        here.run("down")


def replay(shell: Shell, place: Place | None, **question: Any) -> Report:
    prefixes = "" if place is None else str(place.folder)
    settings = Settings(bootstrap_servers=shell.bootstrap, reference_prefixes=prefixes)
    return replayed(Connection(settings), Asked(Question(**question), ""), StopFlag())


def test_the_answer_the_replay_and_the_evidence(shell: Shell, place: Place, tmp_path: Path) -> None:
    told = shell.json("produce", "-m", MODEL, "--inputs-ref", str(place.good), "--request-id", "large", "--wait")
    inline = shell.json("produce", "-m", MODEL, "-i", place.row, "--request-id", "inline", "--wait")
    assert (told[0]["status"], told[0]["outputs"]) == ("ok", inline[0]["outputs"])
    refused = ("produce", "-m", MODEL, "--inputs-ref", str(place.bad), "--request-id", "bad", "--wait")
    assert "unknown_field" in shell.run(*refused, code=1)

    assert f"its inputs at file://{place.good}" in shell.run("trace", "large")
    both = replay(shell, place, topic="sie.requests")
    assert (both.replayed, both.equal, both.causes) == (3, 3, {})
    elsewhere = replay(shell, None, request_ids=("bad",))
    assert (elsewhere.replayed, elsewhere.causes) == (0, {"retention": 1}), "this process may not read the place"

    place.good.unlink()
    place.bad.unlink()
    gone = replay(shell, place, topic="sie.requests")
    assert (gone.replayed, gone.equal, gone.causes) == (2, 2, {"retention": 1}), "what became work is on the log"

    shell.run("audit", "keygen", str(tmp_path / "audit.key"))
    made = shell.json("audit", "export", str(tmp_path / "bundle"), "--key", str(tmp_path / "audit.key"))
    assert made["proven"]
    assert [count for why, count in made["left_out"].items() if "named by a reference" in why] == [2]
    rows = {
        row["request_id"]: row for row in pyarrow.parquet.read_table(tmp_path / "bundle/requests.parquet").to_pylist()
    }
    assert rows["large"]["inputs_url"] == f"file://{place.good}"
    assert (rows["large"]["inputs"], len(rows["large"]["inputs_sha256"])) == (None, 64)
    assert (json.loads(rows["inline"]["inputs"]), rows["inline"]["inputs_url"]) == (json.loads(place.row), None)
