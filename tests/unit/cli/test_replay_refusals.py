"""What a replay that is refused leaves behind: nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sie_stream.cli import replay
from sie_stream.cli.replaying.choosing import Question
from sie_stream.edge.stop import StopFlag
from sie_stream.errors import ConfigError


class Nothing:
    """Stands for what is not asked anything before the refusal."""

    def __getattr__(self, _name: str) -> Any:
        return Nothing()

    def __call__(self, *_: object) -> Any:
        return Nothing()


def test_a_topic_that_is_refused_leaves_an_older_report_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> str:
        raise ConfigError("there is no such topic")

    monkeypatch.setattr(replay, "Readers", Nothing())
    monkeypatch.setattr(replay, "declarations", lambda *_: [])
    monkeypatch.setattr(replay, "checked_topic", refused)
    report = tmp_path / "older.parquet"
    report.write_bytes(b"of yesterday")
    connection: Any = Nothing()
    asked = replay.Asked(Question("", "", "", (), (), "", "", None), "", to_topic="away", parquet=report)
    with pytest.raises(ConfigError, match="no such topic"):
        replay.replayed(connection, asked, StopFlag())
    assert report.read_bytes() == b"of yesterday"
