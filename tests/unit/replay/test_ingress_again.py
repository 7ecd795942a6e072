"""Refusals of ingress, decided again with the routes of their time or with those of a pinned version."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import Raw

from schemas.reference import RELEASED_TABLE
from sie_stream.cli.replaying.ingress import IngressAgain, Refusals, count
from sie_stream.control import ModelLaunch, RouteRow, VariantRow
from sie_stream.provenance import source_result
from sie_stream.records import InputsRef, LogRecord, Result, ResultError
from sie_stream.replay.compare import Original, verdict
from sie_stream.replay.report import Place, Tally
from sie_stream.replay.versions import Declared, Withdrawn
from sie_stream.settings import Settings


def declared(at_ms: int, version: str, largest: int) -> Declared:
    schema = {"type": "object", "properties": {"age": {"type": "integer", "maximum": largest}}, "required": ["age"]}
    route = RouteRow(
        *("mi-1", "m", 1, "sie.work.m", 3, 1, (VariantRow("stable", version, 10_000),), "scoring", 1),
        *(Raw(json.dumps(schema).encode()), "", "", 0),
        quota_per_s=1e-9,
    )
    launch = ModelLaunch("m", version, "mi-1", "sim", "", "", {}, "scoring", 1, 0, 64)
    return Declared(at_ms, at_ms, launch, route)


HISTORY = (declared(100, "1", 50), Withdrawn(200, "m"), declared(300, "2", 150))


def request(offset: int, age: Any) -> LogRecord:
    value = msgspec.json.encode({"model": "m", "inputs": {"age": age}, "request_id": f"r{offset}"})
    return LogRecord("sie.requests", 0, offset, 1_000, None, value)


def refused(record: LogRecord, code: str, at_ms: int) -> Result:
    return source_result(record, f"r{record.offset}", "rejected", ResultError(code, ""), None, 0, at_ms)


def kept(record: LogRecord, code: str, at_ms: int) -> Original:
    refusals = Refusals()
    assert refusals.add(refused(record, code, at_ms))
    (where,) = refusals.stretches()
    assert where == (("sie.requests", 0), record.offset, record.offset + 1)
    found = refusals.take(record)
    assert found is not None
    assert refusals.take(record) is None
    return found


def again(pinned: Declared | None = None) -> IngressAgain:
    return IngressAgain(Settings(), HISTORY, pinned, RELEASED_TABLE)


def test_the_routes_of_then_refuse_again_in_any_order() -> None:
    asked = again()
    for at_ms, age, code in (
        (150, 60, "out_of_range"),
        (250, 20, "unknown_model"),
        (350, "old", "wrong_type"),
        (50, 20, "unknown_model"),
        (150, 60, "out_of_range"),
    ):
        record = request(7, age)
        original = kept(record, code, at_ms)
        found = asked.decide(record, original)
        assert found is not None
        assert (found.status, found.error_code) == ("rejected", code)
        assert verdict(original, found).outcome == "equal"


def test_a_pinned_version_says_what_it_would_take() -> None:
    record = request(7, 60)
    original = kept(record, "out_of_range", 150)
    found = again(HISTORY[2]).decide(record, original)
    assert found is not None
    assert found.status == "ok"
    assert verdict(original, found).cause == "schema"


def test_bytes_that_are_no_request_are_refused_again() -> None:
    record = LogRecord("sie.requests", 0, 3, 1_000, b"key", b"not a request")
    original = kept(record, "not_json", 150)
    found = again().decide(record, original)
    assert found is not None
    assert (found.status, found.error_code) == ("rejected", "not_json")


def test_a_variant_beside_what_serves_refuses_nothing() -> None:
    beside = msgspec.structs.replace(declared(120, "1.1", 1_000), beside=True)
    asked = IngressAgain(Settings(), (HISTORY[0], beside), None, RELEASED_TABLE)
    record = request(7, 60)
    found = asked.decide(record, kept(record, "out_of_range", 150))
    assert found is not None
    assert found.error_code == "out_of_range"


# ------------------------------------------------------------------------------------------------ inputs behind a URL

LARGE = b'{"age": 60}'


def referring(place: Path, offset: int) -> LogRecord:
    ref = InputsRef(f"file://{place}/a.json", sha256(LARGE).hexdigest())
    return LogRecord("sie.requests", 0, offset, 1_000, None, msgspec.json.encode({"model": "m", "inputs_ref": ref}))


def tallied(place: Path, code: str, prefixes: str) -> Tally:
    """What a replay counts of one refusal with that code, where it may read below `prefixes`."""
    record, tally = referring(place, 7), Tally()
    original = kept(record, code, 150)
    found = IngressAgain(Settings(reference_prefixes=prefixes), HISTORY, None, RELEASED_TABLE).decide(record, original)
    assert found is not None
    count(original, found, Place("sie.requests", 0, 7), tally)
    return tally


def test_what_a_refused_request_names_is_read_again(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(LARGE)
    same = tallied(tmp_path, "out_of_range", str(tmp_path))
    assert (same.answers, same.causes) == (1, {})


@pytest.mark.parametrize(
    ("content", "allowed", "said"),
    [
        (None, True, "reference_missing"),
        (b'{"age": 61}', True, "reference_mismatch"),
        (LARGE, False, "reference_not_allowed"),
    ],
)
def test_what_is_not_to_be_had_any_more_is_retention(
    tmp_path: Path, content: bytes | None, allowed: bool, said: str
) -> None:
    if content is not None:
        (tmp_path / "a.json").write_bytes(content)
    prefixes = str(tmp_path) if allowed else "/nowhere"
    gone = tallied(tmp_path, "out_of_range", prefixes)
    assert (gone.answers, gone.causes) == (0, {"retention": 1})
    same = tallied(tmp_path, said, prefixes)
    assert (same.answers, same.causes) == (1, {}), "it was so then"
