"""Long generations of the real language model move with a drain of their worker, on real Kafka. Needs `make models`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from schemas.codec import decode_token_delta
from sie_stream import Client
from sie_stream.cli.ask import ask, of_kind
from sie_stream.client.requests import InferenceResult, Request
from sie_stream.control import DrainWorker
from sie_stream.edge.connection import Connection
from sie_stream.edge.kafka_log import KafkaReader
from sie_stream.edge.tables import read_to_end
from sie_stream.records import TokenDelta
from tests.integration.test_a_day_with_the_cli import MODELS, Shell
from tests.waiting import wait_until

MODEL = "smollm2-135m-instruct"
TOKENS = 100
WAIT_S = 500.0
PROMPTS = ("Write a long story about a lighthouse.", "How do ships find their way?", "Describe the sea.", "A recipe:")

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.timeout(1_200),
    pytest.mark.skipif(not (MODELS / MODEL / "build.json").exists(), reason="make models has not built SmolLM2"),
]


def declaration(folder: Path) -> Path:
    """The model of the zoo with answers that depend on nothing but the request."""
    spec: dict[str, Any] = yaml.safe_load((MODELS / MODEL / "model-spec.yaml").read_text())
    spec["source"]["uri"] = str(MODELS / MODEL)
    spec["tokenizer"]["path"] = str(MODELS / MODEL / "tokenizer.json")
    spec["backend"]["config"]["repeatable"] = True
    path = folder / "model-spec.yaml"
    path.write_text(yaml.safe_dump(spec))
    return path


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    here = Shell(tmp_path_factory.mktemp("moving"))
    here.env["SIE_STREAM_SEQUENCE_IMAGES_MB"] = "512"
    here.env["SIE_STREAM_PRESTART_ENGINES"] = "torch"  # the second replica is there before the answers end
    here.run("up", "--workers", "2", "--detach")
    try:
        here.run("apply", "-f", str(declaration(here.state_dir)))
        yield here
    finally:
        here.run("down")


def requests(label: str) -> list[Request]:
    """Two by chance, two the likeliest; all as long as they may get."""
    return [
        Request(
            model=MODEL,
            inputs={"prompt": prompt},
            request_id=f"{label}-{number}",
            stream=True,
            parameters={
                "max_tokens": TOKENS,
                "min_tokens": TOKENS,
                "seed": number,
                "temperature": 0.8 * (number % 2),
            },
        )
        for number, prompt in enumerate(PROMPTS)
    ]


def deltas(shell: Shell, label: str) -> dict[str, list[TokenDelta]]:
    reader = KafkaReader(shell.bootstrap, "test")
    try:
        found = [decode_token_delta(record.value) for record in read_to_end(reader, "sie.tokens")]
    finally:
        reader.close()
    told: dict[str, list[TokenDelta]] = {}
    for delta in found:
        if delta.request_id.startswith(label):
            told.setdefault(delta.request_id, []).append(delta)
    return told


def notes(shell: Shell, event: str) -> list[dict[str, Any]]:
    """What workers said of it, with the name of their log."""
    found: list[dict[str, Any]] = []
    for path in sorted((shell.state_dir / "logs").glob("worker-*.log")):
        for line in path.read_text().splitlines():
            if f'"{event}"' in line and line.startswith("{"):
                said = json.loads(line)
                if said.get("event") == event:
                    found.append({**said, "log": path.stem})
    return found


def answered(submissions: Any) -> list[InferenceResult]:
    found = [one.result(WAIT_S) for one in submissions]
    assert [one.status for one in found] == ["ok"] * len(PROMPTS)
    return found


def drain(shell: Shell, worker: str) -> None:
    """Not by the command, which takes seconds to start: the answers would end meanwhile."""
    connection = Connection.open(shell.bootstrap)
    ask(connection, [DrainWorker(worker, "test")], [worker], of_kind({"worker_drained"}), WAIT_S)


def test_a_drain_moves_running_generations_and_nothing_is_computed_twice(shell: Shell) -> None:
    home = shell.json("get", "placements")[0]["replicas"][0].split(":")[0]
    with Client(shell.bootstrap) as client:
        moved = client.submit_many(requests("moved"))
        wait_until(lambda: len(deltas(shell, "moved")) == len(PROMPTS), "all of them to be under way", WAIT_S)
        drain(shell, home)
        results = answered(moved)
        plain = answered(client.submit_many(requests("plain")))
    for one, other in zip(results, plain, strict=True):
        assert one.outputs == other.outputs
        assert one.usage == other.usage
        assert one.usage.completion_tokens == TOKENS
        assert one.provenance.worker != home
    exported, resumed = notes(shell, "sequence_exported"), notes(shell, "sequence_resumed")
    wanted = {f"moved-{number}" for number in range(len(PROMPTS))}
    assert {one["request_id"] for one in exported} == wanted
    assert {one["request_id"] for one in resumed} == wanted, "each has gone on from its image: no prompt was computed"
    assert not notes(shell, "sequence_image_refused")
    _moves_are_traced(shell, home)
    for name, told in deltas(shell, "moved").items():
        assert [one.index for one in told] == list(range(len(told))), name
        assert {one.attempt for one in told} == {0}
        assert sum(len(one.token_ids) for one in told) == TOKENS


def _moves_are_traced(shell: Shell, home: str) -> None:
    """Who had it first, who went on with it, and how long it stood still; what did not move says nothing."""
    told = shell.json("trace", "moved-1")
    [moved] = told["touches"]
    assert (moved["type"], moved["worker"]) == ("moved", home)
    assert moved["at_ms"] > moved["stopped_ms"] > moved["begun_ms"]
    assert told["worker"] != home
    assert told["attempts"] == 1
    stages = [step["stage"] for step in told["steps"] if step["stage"] not in ("placement", "control")]
    assert stages == ["client", "ingress", "ingress", "moved", "queue", "moved", "engine", "egress", "result"]
    assert told["durations_ms"]["ran_elsewhere"] > 0
    assert "went on from its image" in shell.run("trace", "moved-2")
    assert shell.json("trace", "plain-1")["touches"] == []
