"""What a client writes of inputs that are too large, and of inputs that it names."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from sie_stream.cli import main, stream
from sie_stream.cli.referring import as_urls
from sie_stream.client import InputsRef, Request
from sie_stream.client.large import written
from sie_stream.edge.reference_store import StoreUnavailable
from sie_stream.errors import ConfigError
from sie_stream.records import InferenceRequest, request_decoder

TEXT = {"text": "a" * 2_000}
JSON = msgspec.json.encode(TEXT)


def record(request: Request, store: str = "", bytes_max: int = 1_024) -> InferenceRequest:
    value = written(request, "r1", "sie.requests", bytes_max, store).value
    assert value is not None
    return request_decoder.decode(value)


def test_large_inputs_go_to_the_store_and_small_ones_stay(tmp_path: Path) -> None:
    large = record(Request(model="m", inputs=TEXT, tenant="t"), str(tmp_path))
    digest = sha256(JSON).hexdigest()
    assert large.inputs_ref == InputsRef(f"file://{tmp_path}/{digest}.json", digest, len(JSON))
    assert (bytes(large.inputs), large.tenant) == (b"{}", "t")
    assert (tmp_path / f"{digest}.json").read_bytes() == JSON
    assert record(Request(model="m", inputs=TEXT), str(tmp_path)) == msgspec.structs.replace(large, tenant=None)
    small = record(Request(model="m", inputs=TEXT), str(tmp_path), bytes_max=10_000)
    assert (small.inputs_ref, bytes(small.inputs)) == (None, JSON)


def test_without_a_store_large_inputs_are_sent_as_they_are() -> None:
    assert bytes(record(Request(model="m", inputs=TEXT)).inputs) == JSON


def test_a_named_reference_is_sent_as_it_is(tmp_path: Path) -> None:
    ref = InputsRef("s3://bucket/a", "0" * 64)
    found = record(Request(model="m", inputs_ref=ref), str(tmp_path))
    assert found.inputs_ref == ref
    with pytest.raises(ConfigError, match="give one of them"):
        record(Request(model="m", inputs={"x": 1}, inputs_ref=ref))


def test_a_store_that_takes_nothing_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreUnavailable, match="file"):
        record(Request(model="m", inputs=TEXT), str(tmp_path / "file" / "below"))


class FakeClient:
    """Keeps what it was asked for."""

    asked: list[Request]
    options: dict[str, Any]

    def __init__(self, _servers: str | None, **options: Any) -> None:
        FakeClient.options = options

    def __enter__(self) -> FakeClient:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def submit_many(self, requests: Any) -> list[Any]:
        FakeClient.asked = list(requests)
        return []


def produce(*arguments: str) -> str:
    shown = CliRunner().invoke(main.app, ["produce", "-m", "m", *arguments])
    return "" if shown.exit_code == 0 else f"{shown.exception} {shown.output}"


def test_the_command_line_names_inputs_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "Client", FakeClient)
    monkeypatch.chdir(tmp_path)
    Path("a.json").write_bytes(JSON)
    digest = sha256(JSON).hexdigest()
    assert produce("--inputs-ref", "a.json", "--store", "large") == ""
    (request,) = FakeClient.asked
    assert request.inputs_ref == InputsRef(f"file://{tmp_path}/a.json", digest, len(JSON))
    assert FakeClient.options == {"reference_store": f"file://{tmp_path}/large"}
    assert produce("--inputs-ref", "s3://bucket/a.json", "--sha256", digest) == ""
    assert FakeClient.asked[0].inputs_ref == InputsRef("s3://bucket/a.json", digest)
    assert "exactly one" in produce("--inputs-ref", "a.json", "-i", "{}")
    assert "give both" in produce("-i", "{}", "--sha256", digest)
    assert "does not exist" in produce("--inputs-ref", "b.json")


def test_places_may_be_paths_and_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert as_urls("in, s3://bucket/in,") == f"file://{tmp_path}/in,s3://bucket/in"
    assert as_urls("") == ""
