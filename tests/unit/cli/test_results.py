"""`sie-stream results`: the newest ones, in the order in which they ended."""

from __future__ import annotations

from sie_stream.cli.stream import newest
from sie_stream.client.requests import InferenceResult, from_record
from sie_stream.records import Provenance, Result, Timings, Usage


def result(name: str, finished_at: int) -> InferenceResult:
    origin = Provenance("sie.requests", 0, 0)
    return from_record(
        Result(name, "ok", "mi-1", "m", "1", "stable", b"{}", None, Usage(), Timings(), origin, finished_at)
    )


def test_the_newest_come_last_whatever_the_order_of_partitions() -> None:
    found = [result("a", 10), result("b", 40), result("c", 20), result("d", 20), result("e", 5)]
    assert [one.request_id for one in newest(found, 3)] == ["c", "d", "b"]
    assert [one.request_id for one in newest(found, 100)] == ["e", "a", "c", "d", "b"]
    assert newest([], 3) == []
