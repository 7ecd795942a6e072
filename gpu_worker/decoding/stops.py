"""Stop texts in a growing answer: where it ends, and how much of it may be shown already."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What byte-level tokenizers show for a character whose last bytes are still to come."""


class Look(NamedTuple):
    """shown: how many characters are final, whatever comes; stopped: the answer ends there."""

    shown: int
    stopped: bool


def look_for_stops(text: str, stops: Sequence[str], searched: int = 0) -> Look:
    """The first stop text in `text`, or how much of `text` no stop text can reach back into.

    text:     the answer so far
    stops:    none of them empty
    searched: characters that were shown before: no stop text begins in them

    Among stop texts that begin at different places the first place counts, so the result does not depend on how the
    text was cut into tokens.
    """
    found = [place for place in (text.find(stop, searched) for stop in stops) if place >= 0]
    if found:
        first = min(found)
        # A longer stop text that began earlier may still be incomplete: the one that is complete ends the answer.
        return Look(first, True)
    end = len(text)
    while end > searched and text[end - 1] == UNFINISHED:
        end -= 1
    held = max((_overlap(text[searched:end], stop) for stop in stops), default=0)
    return Look(end - held, False)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
