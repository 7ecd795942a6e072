"""The examples say how they are called; none answers a wrong call with a traceback."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

from schemas.codec import decode_request, encode_result
from sie_stream.records import Provenance, Result, Timings, Usage

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.parametrize("name", ["sdk.py", "plain_producer.py", "plain_consumer.py"])
def test_without_arguments_usage_is_shown(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", [name])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert left.value.code == 2
    assert f"usage: {name}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "arguments"), [("sdk.py", ["nosuch"]), ("plain_producer.py", ["127.0.0.1:1", "nosuch"])]
)
def test_an_unknown_model_is_told_with_those_that_are_there(
    name: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", [name, *arguments])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert left.value.code == 2
    said = capsys.readouterr().err
    assert "model 'nosuch' has no sample in " in said
    assert "allowed: " in said


class Sent:
    """Stands in for confluent_kafka.Producer."""

    values: list[bytes]

    def __init__(self, config: dict[str, object]) -> None:
        Sent.values = []

    def produce(self, topic: str, key: str, value: str | bytes) -> None:
        self.values.append(value.encode() if isinstance(value, str) else value)

    def flush(self, timeout_s: float) -> int:
        return 0


class Answers:
    """Stands in for confluent_kafka.Consumer."""

    value: bytes

    def __init__(self, config: dict[str, object]) -> None:
        self.closed = False

    def subscribe(self, topics: list[str]) -> None:
        assert topics == ["sie.results"]

    def poll(self, timeout_s: float) -> SimpleNamespace:
        return SimpleNamespace(error=lambda: None, value=lambda: self.value)

    def close(self) -> None:
        self.closed = True


def linked(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    """The example behind a link in a folder where nothing else is, which is the current one."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.argv", [name, *arguments])
    link = folder / name
    link.symlink_to(EXAMPLES / name)
    return str(link)


def test_the_producer_runs_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("confluent_kafka.Producer", Sent)
    script = linked("plain_producer.py", tmp_path, monkeypatch, "here:9092", "mine", '{"age": 41}')
    runpy.run_path(script, run_name="__main__")
    as_json, as_avro = Sent.values
    assert json.loads(as_json)["inputs"] == {"age": 41}
    request, _ = decode_request(as_avro)
    assert (request.request_id, request.model, bytes(request.inputs)) == ("plain-avro", "mine", b'{"age": 41}')
    assert "sent plain-json and plain-avro" in capsys.readouterr().out


def test_the_samples_are_found_by_the_setting_and_a_bad_row_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("confluent_kafka.Producer", Sent)
    (tmp_path / "made" / "mine").mkdir(parents=True)
    (tmp_path / "made" / "mine" / "samples.jsonl").write_text('{"age": 7}\n')
    monkeypatch.setenv("SIE_STREAM_MODELS_DIR", str(tmp_path / "made"))
    script = linked("plain_producer.py", tmp_path, monkeypatch, "here:9092", "mine")
    runpy.run_path(script, run_name="__main__")
    assert json.loads(Sent.values[0])["inputs"] == {"age": 7}
    for row, words in (("{", "row: not JSON"), ("[1]", "row: expected a JSON object")):
        monkeypatch.setattr("sys.argv", ["plain_producer.py", "here:9092", "mine", row])
        with pytest.raises(SystemExit) as left:
            runpy.run_path(script, run_name="__main__")
        assert left.value.code == 2
        assert words in capsys.readouterr().err


def test_the_consumer_runs_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    origin = Provenance("sie.requests", 0, 0)
    answer = Result("a", "ok", "mi-1", "m", "1", "stable", b"{}", None, Usage(), Timings(), origin, 10)
    Answers.value = encode_result(answer)
    monkeypatch.setattr("confluent_kafka.Consumer", Answers)
    runpy.run_path(linked("plain_consumer.py", tmp_path, monkeypatch, "here:9092", "a"), run_name="__main__")
    assert json.loads(capsys.readouterr().out)["request_id"] == "a"


@pytest.mark.parametrize("name", ["plain_producer.py", "plain_consumer.py"])
def test_without_the_package_the_schema_is_asked_for(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nowhere(package: str) -> Path:
        raise ModuleNotFoundError(package)

    monkeypatch.setattr("importlib.resources.files", nowhere)
    monkeypatch.setattr("confluent_kafka.Producer", Sent)
    script = linked(name, tmp_path, monkeypatch, "here:9092", "mine", *(['{"a": 1}'] if "producer" in name else []))
    with pytest.raises(SystemExit) as left:
        runpy.run_path(script, run_name="__main__")
    assert "avsc is not here: it comes with sie-stream" in str(left.value.code)
