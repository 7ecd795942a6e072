"""A device too small for two models, on real Kafka: `trace` says which requests waited for their model to come in."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration.test_a_day_with_the_cli import MODELS, Shell

SOURCE = "minilm-l6-v2"
MODEL_NAMES = ("mini-a", "mini-b")
DEVICE_MB = 128

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not (MODELS / SOURCE / "build.json").exists(), reason="make models has not built MiniLM"),
]


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """Two models of 87 MiB each, one device of 128."""
    here = Shell(tmp_path_factory.mktemp("switches"))
    here.env["SIE_STREAM_DEVICE_MEMORY_MB"] = str(DEVICE_MB)
    here.run("up", "--workers", "1", "--detach")
    try:
        for name in MODEL_NAMES:
            here.run("apply", "-f", str(declaration(here.state_dir, name)))
        yield here
    finally:
        here.run("down")


def declaration(folder: Path, name: str) -> Path:
    spec: dict[str, Any] = yaml.safe_load((MODELS / SOURCE / "model-spec.yaml").read_text())
    spec["model_id"] = name
    spec["source"]["uri"] = str(MODELS / SOURCE)
    spec["tokenizer"]["path"] = str(MODELS / SOURCE / "tokenizer.json")
    spec["slas"] = {"p99_latency_ms": 60_000, "max_queue_time_ms": 60_000}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(spec))
    return path


def ask(shell: Shell, model: str, request_id: str) -> None:
    answers = shell.json("produce", "-m", model, "-i", '{"text": "A lamp."}', "--request-id", request_id, "--wait")
    assert [answer["status"] for answer in answers] == ["ok"]


def test_a_request_tells_who_gave_way_for_its_model(shell: Shell, tmp_path: Path) -> None:
    first, second = MODEL_NAMES
    for turn in range(3):
        for model in MODEL_NAMES:
            ask(shell, model, f"{model}-{turn}")
            ask(shell, model, f"{model}-{turn}-again")
    spans = tmp_path / "spans.json"
    told = shell.json("trace", f"{first}-2", "--otel", str(spans))
    [came] = told["touches"]
    assert (came["type"], came["device"], came["came_from"]) == ("came_in", "cpu:0", "host")
    assert came["gave_way"] == [f"{second}@1.0.0"] == [came["left_for"]]
    assert came["size_bytes"] > 80_000_000
    assert 0 < came["took_ms"] < told["durations_ms"]["queue"] + 1_000
    stages = [step["stage"] for step in told["steps"] if step["stage"] not in ("placement", "control")]
    assert stages == ["client", "ingress", "ingress", "device", "queue", "engine", "result"]
    (resource,) = json.loads(spans.read_text())["resourceSpans"]
    assert "device" in [span["name"] for span in resource["scopeSpans"][0]["spans"]]
    words = shell.run("trace", f"{first}-2")
    assert f"{first}@1.0.0 came to cpu:0 from host memory" in words
    assert f"{second}@1.0.0 gave way" in words
    assert shell.json("trace", f"{first}-2-again")["touches"] == [], "it was there already"
    slow = shell.json("trace", "--slow", "--model", first, "--since", "1h")
    assert slow["requests"] == 6
