"""Moments and durations as people write them: one grammar for both."""

from __future__ import annotations

import pytest

from sie_stream.cli.since import duration_ms, since_ms
from sie_stream.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "wanted"), [("90s", 90_000), ("10m", 600_000), (" 2h ", 7_200_000), ("7d", 604_800_000)]
)
def test_a_duration_is_milliseconds_and_a_moment_lies_so_long_ago(text: str, wanted: int) -> None:
    assert duration_ms(text, "--late") == wanted
    assert since_ms(text, 1_000_000_000_000) == 1_000_000_000_000 - wanted


@pytest.mark.parametrize("text", ["", "m", "10", "10x", "-1m", "1.5h", "٣m"])
def test_what_is_no_duration_is_told_with_its_option(text: str) -> None:
    with pytest.raises(ConfigError, match="--late") as refused:
        duration_ms(text, "--late")
    assert "90s, 10m, 2h, 7d" in str(refused.value)
