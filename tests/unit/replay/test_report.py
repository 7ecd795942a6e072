"""The tally: counts by cause, decisions that change, bounded lists; and the page made of it."""

from __future__ import annotations

from html.parser import HTMLParser

import msgspec

from sie_stream.cli.output import console
from sie_stream.cli.replaying.page import report_page
from sie_stream.cli.replaying.show import show_report
from sie_stream.replay.compare import Again, Original, verdict
from sie_stream.replay.report import EXAMPLES_MAX, Place, Report, Tally, what_is_exact


def filled(count: int) -> Report:
    """Every second answer changes its decision."""
    tally = Tally()
    for number in range(count):
        outputs = b'{"label":"a","score":%f}' % (number / count)
        changed = b'{"label":"<b>","score":0.25}' if number % 2 else outputs
        original = Original(f"r{number}", "ok", "m", "1", "w", "e", outputs, "", None, 8, 1.0, 2.0, 0)
        again = Again("ok", "2", "w2", "e", changed, inference_ms=2.0)
        tally.answered(original, again, Place("sie.work.m", 0, number), verdict(original, again))
    tally.absent(Place("sie.work.m", 0, count), "late", "m", "missing", "no terminal record")
    tally.more("retention", 5)
    tally.not_scored("expired")
    tally.note("3 offsets are deleted")
    return tally.finish("sie.work.m", what_is_exact(["sklearn"]), 2.0, partial=False)


def test_counts_add_up_and_lists_are_bounded() -> None:
    report = filled(1_000)
    assert (report.replayed, report.equal, report.different) == (1_000, 500, 500)
    assert report.causes == {"missing": 1, "retention": 5, "version": 500}
    assert report.per_second == 500
    assert len(report.differences) == EXAMPLES_MAX
    assert not report.same
    (model,) = report.models
    assert model.labels_changed == 500
    assert model.changes[0].count == 500
    assert (model.changes[0].before, model.changes[0].after) == ("a", "<b>")
    assert model.psi > 0.2
    assert 0.2 < model.ks < 0.5
    assert msgspec.json.decode(msgspec.json.encode(report), type=Report) == report


def test_nothing_different_is_the_same_unless_partial() -> None:
    tally = Tally()
    tally.same([Original("r1", "ok", "m", "1", "w", "e", b"{}", "", None, 8, 1.0, 2.0, 0)], "1", 1.0)
    assert tally.finish("x", "", 0.0, partial=False).same
    assert not tally.finish("x", "", 0.0, partial=True).same


def test_of_nothing_is_not_said_that_it_is_the_same() -> None:
    tally = Tally()
    tally.not_scored("expired")
    report = tally.finish("x", "", 0.0, partial=False)
    assert (report.same, report.empty) == (False, True)
    assert "Nothing compared." in report_page(report)
    with console.capture() as said:
        show_report(report)
    assert "nothing compared" in said.get()
    tally.absent(Place("sie.work.m", 0, 1), "late", "m", "missing", "no terminal record")
    assert not tally.finish("x", "", 0.0, partial=False).empty


class Outline(HTMLParser):
    """Tags that are open, and what is loaded from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loaded: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.loaded += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_loads_nothing() -> None:
    outline = Outline()
    page = report_page(filled(100))
    outline.feed(page)
    assert outline.open == []
    assert outline.loaded == []
    assert outline.seen.count("svg") == 2
    assert "script" not in outline.seen
    assert "&lt;b&gt;" in page
    assert "<b>" not in page


def test_answers_that_change_a_decision_are_listed_before_those_that_change_a_digit() -> None:
    tally, late = Tally(), 2 * EXAMPLES_MAX
    for number in range(late + 1):
        original = Original(f"r{number}", "ok", "m", "1", "w", "e", b'{"label":"a","score":0.9}', "", None, 8, 1, 2, 0)
        changed = b'{"label":"b","score":0.8}' if number == late else b'{"label":"a","score":0.8}'
        again = Again("ok", "2", "w2", "e", changed)
        tally.answered(original, again, Place("sie.work.m", 0, number), verdict(original, again))
    report = tally.finish("x", "", 1.0, partial=False)
    first, second, *_ = report.differences
    assert (first.request_id, first.decision) == (f"r{late}", "a -> b")
    assert (second.request_id, second.decision) == ("r0", "")
    assert len(report.differences) == EXAMPLES_MAX
    assert "a -&gt; b" in report_page(report)
    with console.capture() as said:
        show_report(report)
    assert "a -> b" in said.get()
