"""Windows of results: counted once, by variant, and never judged when something may be missing."""

from __future__ import annotations

import msgspec

from processors.outcomes.windows import GRACE_MS, WINDOW_MS, WindowBook
from sie_stream.records import Provenance, Result, ResultError, Timings, Usage
from sie_stream.rollout_records import PINNED, VariantWindow

START_MS = 1_700_000_000_000


def result(variant: str = "canary", status: str = "ok", outputs: object = None, code: str = "") -> Result:
    return msgspec.convert(
        {
            "request_id": "r",
            "status": status,
            "instance": "mi-1",
            "model": "churn",
            "version": "2",
            "variant": variant,
            "outputs": msgspec.json.encode(outputs) if outputs is not None else None,
            "error": ResultError(code, "wrong") if code else None,
            "usage": Usage(),
            "timings_ms": Timings(inference=8.0, total=20.0),
            "provenance": Provenance("sie.requests", 0, 0, batch_size=4),
            "finished_at": START_MS,
        },
        Result,
    )


def closed(book: WindowBook, at_ms: int = START_MS + WINDOW_MS + GRACE_MS) -> list[VariantWindow]:
    return list(book.close(at_ms))


def test_counts_by_variant() -> None:
    book = WindowBook(START_MS, "o")
    book.add(result(outputs={"score": 0.5, "label": "yes", "ok": True, "list": [1]}), START_MS + 1, 0, 7)
    book.add(result(status="failed", code="output_schema_mismatch"), START_MS + 2, 0, 9)
    book.add(result(status="failed", code="engine_error"), START_MS + 2, 1, 3)
    book.add(result(status="expired"), START_MS + 3, 0, 10)
    book.add(result("stable", outputs={"score": 0.5}), START_MS + 3, 0, 11)
    book.add(result("", status="rejected", code="unknown_model"), START_MS + 3, 0, 12)
    stable, canary = closed(book)
    assert (stable.variant, canary.variant) == ("stable", "canary")
    stats = canary.stats
    assert (stats.ok, stats.failed, stats.schema_violations, stats.expired, stats.samples) == (1, 2, 1, 1, 4)
    assert stats.busy_us == 2_000
    assert list(stats.scores) == ["score"]
    assert stats.labels == {"label": {"yes": 1}, "ok": {"true": 1}}
    assert canary.complete
    assert canary.offsets == ((0, 7, 12), (1, 3, 4))


def test_what_was_pinned_counts_as_answered_and_in_no_score() -> None:
    book = WindowBook(START_MS, "o")
    book.add(result(outputs={"score": 0.5, "label": "yes"}), START_MS + 1, 0, 1)
    book.add(result(outputs={"score": 0.9, "label": "no"}), START_MS + 2, 0, 2, PINNED)
    book.add(result(status="failed", code="engine_error"), START_MS + 3, 0, 3, PINNED)
    book.add(result(status="shed", code="quota_exceeded"), START_MS + 4, 0, 4, PINNED)
    [window] = closed(book)
    stats = window.stats
    assert (stats.ok, stats.failed, stats.pinned, stats.samples, stats.by_key) == (2, 1, 2, 3, 1)
    assert sum(stats.latency.values()) == 2
    assert sum(stats.scores["score"].values()) == 1
    assert stats.labels == {"label": {"yes": 1}}


def test_a_window_that_was_joined_in_the_middle_is_broken() -> None:
    book = WindowBook(START_MS + 500, "o")
    book.add(result(outputs={}), START_MS + 600, 0, 1)
    book.add(result(outputs={}), START_MS + WINDOW_MS, 0, 2)
    first, second = closed(book, START_MS + 2 * WINDOW_MS + GRACE_MS)
    assert not first.complete
    assert second.complete


def test_a_lost_place_breaks_what_is_open() -> None:
    book = WindowBook(START_MS, "o")
    book.add(result(outputs={}), START_MS + 600, 0, 1)
    book.lost(START_MS + 700)
    book.add(result(outputs={}), START_MS + 800, 0, 9)
    assert [window.complete for window in closed(book)] == [False]


def test_a_window_stays_open_for_late_commits_and_closes_once() -> None:
    book = WindowBook(START_MS, "o")
    book.add(result(outputs={}), START_MS + 10, 0, 1)
    assert closed(book, START_MS + WINDOW_MS + GRACE_MS - 1) == []
    assert len(closed(book)) == 1
    book.add(result(outputs={}), START_MS + 20, 0, 2)
    assert book.late == 1
    assert closed(book, START_MS + 5 * WINDOW_MS) == []


def test_shadows_count_for_their_variant() -> None:
    book = WindowBook(START_MS, "o")
    book.add(result("~canary", outputs={"score": 1.0}), START_MS + 10, 0, 1)
    [window] = closed(book)
    assert (window.variant, window.stats.ok, window.offsets) == ("canary", 1, ())


def test_equal_results_in_any_order_give_equal_bytes() -> None:
    found = [result(outputs={"score": number / 7, "label": f"l{number % 3}"}) for number in range(40)]
    books = [WindowBook(START_MS, "o"), WindowBook(START_MS, "o")]
    for book, order in zip(books, (found, list(reversed(found))), strict=True):
        for one in order:
            book.add(one, START_MS + 10, 0, 5)
    assert msgspec.json.encode(closed(books[0])) == msgspec.json.encode(closed(books[1]))
