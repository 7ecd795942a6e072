"""How a replay reads: many short stretches, so nothing waits for fetches that wait for news."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sie_stream.cli.replaying.reading import FETCH_WAIT_MS, Readers


def test_no_reader_of_a_replay_waits_for_news() -> None:
    waits: list[int] = []

    def made(group: str = "tools", fetch_wait_ms: int = 250) -> Any:
        waits.append(fetch_wait_ms)
        return SimpleNamespace(close=lambda: None)

    readers = Readers(SimpleNamespace(reader=made, latest_reader=made))  # type: ignore[arg-type]
    readers.schemas()
    readers.close()
    assert waits == [FETCH_WAIT_MS] * 3
