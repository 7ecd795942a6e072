"""Files of a replay that was stopped, or that failed, do not look like those of a whole one."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from sie_stream.cli.output import OutputFormat, console
from sie_stream.cli.replay import _hand_over
from sie_stream.cli.replaying.page import report_page
from sie_stream.cli.replaying.parquet import ParquetFile
from sie_stream.replay.compare import Again, Original, verdict
from sie_stream.replay.report import Place, Report, Tally

OUTPUTS = b'{"score":0.5}'


def answered(number: int) -> tuple[Original, Again, Place]:
    original = Original(f"r{number}", "ok", "m", "1.0.0", "sha256:1", "", OUTPUTS, "", None, 1, 1.0, 2.0, 1)
    again = Again("ok", "1.0.0", "sha256:1", "", OUTPUTS)
    return original, again, Place("sie.work.m", 0, number)


def filled(path: Path) -> ParquetFile:
    file = ParquetFile(path)
    for number in range(3):
        original, again, place = answered(number)
        file.add(original, again, place, verdict(original, again, 0.0))
    return file


def metadata(path: Path) -> tuple[str, str]:
    found = pq.read_metadata(path).metadata
    return found[b"sie.replay.partial"].decode(), found[b"sie.replay.title"].decode()


def test_one_that_came_to_its_end_has_the_name_that_was_asked_for(tmp_path: Path) -> None:
    file = filled(tmp_path / "day.parquet")
    assert not (tmp_path / "day.parquet").exists(), "not before its end"
    file.ends("sie.work.m", partial=False)
    file.close()
    assert [path.name for path in tmp_path.iterdir()] == ["day.parquet"]
    assert pq.read_table(tmp_path / "day.parquet").num_rows == 3
    assert metadata(tmp_path / "day.parquet") == ("false", "sie.work.m")


@pytest.mark.parametrize("how", ["stopped", "failed"])
def test_one_that_did_not_says_so_and_leaves_an_older_report_alone(tmp_path: Path, how: str) -> None:
    asked = tmp_path / "day.parquet"
    asked.write_bytes(b"of yesterday")
    file = filled(asked)
    if how == "stopped":
        file.ends("sie.work.m", partial=True)
    file.close()
    assert asked.read_bytes() == b"of yesterday"
    written = tmp_path / "day.partial.parquet"
    assert metadata(written)[0] == "true"
    assert pq.read_table(written).num_rows == 3


def report(partial: bool, count: int = 3) -> Report:
    tally = Tally()
    tally.same([answered(number)[0] for number in range(count)], "1.0.0", 1.0)
    return tally.finish("sie.work.m", "", 1.0, partial=partial)


def test_page_and_terminal_say_so(tmp_path: Path) -> None:
    with console.capture() as captured:
        _hand_over(report(partial=True), OutputFormat.TABLE, tmp_path / "day.html", tmp_path / "day.parquet")
    said = captured.get()
    assert said.startswith("PARTIAL")
    assert "all the same so far" in said
    assert "day.partial.parquet" in said.replace("\n", "")
    assert [path.name for path in tmp_path.iterdir()] == ["day.partial.html"]
    page = (tmp_path / "day.partial.html").read_text()
    assert "<title>Replay of sie.work.m (partial)</title>" in page
    assert "All the same so far." in page
    assert "Not all the same" not in page


def test_a_whole_one_says_nothing_of_it(tmp_path: Path) -> None:
    with console.capture() as captured:
        _hand_over(report(partial=False), OutputFormat.TABLE, tmp_path / "day.html", None)
    assert "partial" not in captured.get().lower()
    assert [path.name for path in tmp_path.iterdir()] == ["day.html"]


def test_a_whole_page_takes_the_place_of_that_of_a_replay_that_was_stopped(tmp_path: Path) -> None:
    page = tmp_path / "day.html"
    with console.capture():
        _hand_over(report(partial=True), OutputFormat.JSON, page, None)
        _hand_over(report(partial=True), OutputFormat.JSON, tmp_path / "night.html", None)
        _hand_over(report(partial=False), OutputFormat.JSON, page, None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["day.html", "night.partial.html"]


def test_one_that_was_stopped_before_its_first_answer_compared_nothing() -> None:
    assert "Nothing compared." in report_page(report(partial=True, count=0))
