"""Rows of files that cannot be read: one line with the file and what is wrong, no traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from sie_stream.cli import progress
from sie_stream.cli.rows import count_rows, read_rows
from sie_stream.edge.kafka_reader import KafkaReader
from sie_stream.errors import ConfigError
from sie_stream.ids import TopicPartition


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("rows.jsonl", b'{"a": "\xff"}\n', "cannot be read as .jsonl"),
        ("rows.csv", b"a,b\n1,2\n1\n", "cannot be read as .csv"),
        ("rows.parquet", b"no parquet", "cannot be read as .parquet"),
        ("rows.txt", b"a\n", "unknown kind '.txt', allowed .jsonl"),
        ("rows.jsonl", b"a\n", "line 1: not JSON"),
    ],
)
def test_what_cannot_be_read_is_told_with_the_file(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        list(read_rows(path))
    assert str(path) in str(caught.value)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_is_no_file_of_rows(tmp_path: Path) -> None:
    for read in (count_rows, lambda path: list(read_rows(path))):
        with pytest.raises(ConfigError, match="a folder; name one file of rows"):
            read(tmp_path)
        with pytest.raises(ConfigError, match="no such file"):
            read(tmp_path / "nothing.jsonl")


def test_a_parquet_file_that_is_none_is_told_when_its_rows_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"no parquet")
    with pytest.raises(ConfigError, match=r"cannot be read as \.parquet"):
        count_rows(path)


def test_a_pipe_gets_no_bars_and_no_empty_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert not progress.error_console.is_terminal
    with progress.progress_bars() as bars:
        bars.update(bars.add_task("ready", total=1), completed=1)
    assert capsys.readouterr().err == ""


def test_a_reader_that_is_closed_has_nothing_to_give_back() -> None:
    """`decisions | head -1` ends the output in the middle: the generator that reads ends after its reader."""
    reader = KafkaReader("127.0.0.1:1", "tools")
    place = TopicPartition("sie.decisions", 0)
    reader.assign({place: 0})
    reader.close()
    reader.unassign([place])
