"""Personal data from the request to the bundle: protected, rotated, shredded. Real processes, real Kafka."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from sie_stream.edge.connection import Connection
from sie_stream.edge.supervisor import RunState, process_alive
from sie_stream.edge.tables import read_to_end
from sie_stream.settings import Settings
from tests.integration.test_a_day_with_the_cli import Shell
from tests.waiting import wait_until

pytestmark = pytest.mark.integration
MODELS = Path(".models").absolute()
MODEL = "iris-logreg"
FLOWER = {"sepal_length_cm": 5.1, "sepal_width_cm": 2.5, "petal_length_cm": 3.0, "petal_width_cm": 1.1}
ADA, BOB = "ada@example.org", "bob@example.org"


def declared(folder: Path) -> Path:
    """The model, with a person in its inputs and fields about them in its outputs."""
    spec = yaml.safe_load((MODELS / MODEL / "model-spec.yaml").read_text())
    spec["source"]["uri"] = str(MODELS / MODEL)
    spec["input_schema"]["properties"]["customer"] = {"type": "string", "maxLength": 100, "pii": "encrypt"}
    spec["input_schema"]["required"].append("customer")
    spec["pre_warmup"] = [{**FLOWER, "customer": "nobody"}]
    spec["privacy"] = {"subject": "customer"}
    outputs = spec["output_schema"]["properties"]
    outputs["label"]["pii"], outputs["score"]["pii"], outputs["probabilities"]["pii"] = "encrypt", "hash", "encrypt"
    path = folder / "personal.yaml"
    path.write_text(yaml.safe_dump(spec))
    return path


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    here = Shell(tmp_path_factory.mktemp("personal"))
    here.env["SIE_STREAM_PII_KEYS"] = str(here.state_dir / "ring")
    made = here.json("keys", "create")
    assert made["current"] == "kek-0001"
    here.run("up", "--workers", "1", "--detach")
    state = RunState.load(here.state_dir)
    assert state is not None
    pids = [int(process["pid"]) for process in state.processes.values()]
    try:
        here.run("apply", "-f", str(declared(here.state_dir)))
        yield here
    finally:
        here.run("down")
    wait_until(lambda: not any(process_alive(pid) for pid in pids), "every process to be gone")


def asked(shell: Shell, customer: str, request_id: str) -> dict[str, Any]:
    inputs = json.dumps({**FLOWER, "customer": customer})
    (answer,) = shell.json("produce", "-m", MODEL, "-i", inputs, "--request-id", request_id, "--wait")
    return answer


def opened(shell: Shell, answers: list[dict[str, Any]], code: int = 0) -> str:
    return shell.run("keys", "open", code=code, text="".join(json.dumps(answer) + "\n" for answer in answers))


def test_a_persons_data_is_protected_until_it_is_shredded(shell: Shell, tmp_path: Path) -> None:
    answers = [asked(shell, ADA, "a1"), asked(shell, BOB, "b1"), asked(shell, ADA, "a2")]
    assert answers[0]["outputs"]["label"].startswith("aes-256-gcm:")
    assert answers[0]["outputs"]["score"] == answers[1]["outputs"]["score"]  # equal values, equal hashes
    _nobody_is_named(shell)
    plain = [json.loads(line)["outputs"] for line in opened(shell, answers).splitlines()]
    assert [one["label"] for one in plain] == ["versicolor"] * 3
    assert plain[0]["probabilities"].keys() == {"setosa", "versicolor", "virginica"}

    assert shell.json("keys", "rotate")["rewrapped"] == 2
    assert opened(shell, answers).count("versicolor") == 6
    shell.env["SIE_STREAM_PII_KEYS"] = ""
    without = shell.run("replay", "--model", MODEL, "--from", "1h", code=1)
    assert "no_key" in without
    shell.env["SIE_STREAM_PII_KEYS"] = str(shell.state_dir / "ring")
    report = shell.json("replay", "--model", MODEL, "--from", "1h")
    assert (report["replayed"], report["equal"], report["causes"]) == (3, 3, {})

    shell.run("topics", "hold", "keys", "--reason", "case 7")
    assert "under a legal hold" in shell.run("keys", "shred", ADA, code=1)
    shell.run("topics", "release", "keys")
    assert shell.json("keys", "shred", ADA, "--reason", "asked for")["removed"] == 1
    listed = shell.json("keys", "list")
    assert ([one["data_keys"] for one in listed["keks"]], listed["subjects"]) == ([0, 1], 1)
    assert [fact["reason"] for fact in listed["shredded"]] == ["asked for"]
    assert "was shredded" in opened(shell, answers, code=1)
    _everybody_says_shredded(shell, tmp_path)


def _everybody_says_shredded(shell: Shell, tmp_path: Path) -> None:
    report = shell.json("replay", "--model", MODEL, "--from", "1h")
    assert (report["replayed"], report["equal"], report["causes"]) == (1, 1, {"shredded": 2})
    proof = shell.json("audit", "verify", "--from", "1h")
    assert (proof["proven"], proof["answered"], proof["shredded"]) == (True, 3, 2)
    notes = " ".join(shell.json("trace", "a1")["notes"])
    assert "shredded" in notes
    assert "shredded" not in " ".join(shell.json("trace", "b1")["notes"])
    key, bundle = tmp_path / "audit.key", tmp_path / "bundle"
    shell.run("audit", "keygen", str(key))
    manifest = shell.json("audit", "export", str(bundle), "--key", str(key))
    assert (manifest["proven"], manifest["shredded"]) == (True, 2)
    checked = shell.json("audit", "check", str(bundle), "--public-key", f"{key}.pub")
    assert (checked["intact"], checked["shredded"]) == (True, 2)
    for path in bundle.rglob("*"):
        assert path.is_dir() or not any(name.encode() in path.read_bytes() for name in (ADA, BOB)), path


def _nobody_is_named(shell: Shell) -> None:
    """Only the request and its work item hold the plain values."""
    connection = Connection(Settings(bootstrap_servers=shell.bootstrap))
    reader = connection.reader()
    try:
        naming = {
            topic
            for topic in reader.topics()
            if topic.startswith("sie.")
            for record in read_to_end(reader, topic)
            if any(name.encode() in (record.value or b"") + (record.key or b"") for name in (ADA, BOB))
        }
    finally:
        reader.close()
    assert naming == {"sie.requests", f"sie.work.{MODEL}"}
