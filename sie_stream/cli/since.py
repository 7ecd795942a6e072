"""A moment or a duration as people name it: `10m` (ago), or an ISO time."""

from __future__ import annotations

import re
from datetime import datetime

from sie_stream.errors import ConfigError

UNIT_MS = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_AGO = re.compile(r"(\d+)([smhd])", re.ASCII)


def duration_ms(text: str, option: str) -> int:
    """Milliseconds. Raises ConfigError naming the value and what is allowed."""
    found = _AGO.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"{option} {text!r}: allowed is a time such as 90s, 10m, 2h, 7d")
    return int(found[1]) * UNIT_MS[found[2]]


def since_ms(text: str, now_ms: int, option: str = "--since") -> int:
    """Milliseconds since the epoch. An ISO time without a zone is in the zone of this machine.

    Raises ConfigError naming the value and what is allowed.
    """
    if _AGO.fullmatch(text.strip()) is not None:
        return now_ms - duration_ms(text, option)
    try:
        return round(datetime.fromisoformat(text.strip()).timestamp() * 1_000)
    except (ValueError, OverflowError) as error:
        raise ConfigError(
            f"{option} {text!r}: allowed is how long ago (90s, 10m, 2h, 7d) or an ISO time (2026-03-01T12:00:00+01:00)"
        ) from error


def shown_time(at_ms: int) -> str:
    """Local time with its zone, to the millisecond."""
    return datetime.fromtimestamp(at_ms / 1_000).astimezone().isoformat(sep=" ", timespec="milliseconds")
