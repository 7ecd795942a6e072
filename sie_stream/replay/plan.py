"""Which offsets are read, and which of those that were asked for cannot be read any more or not yet."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from sie_stream.ids import TopicPartition

GAP_MAX = 2_000
"""Offsets that are read and thrown away rather than jumped over: a jump costs a fetch."""


class Bounds(Struct, frozen=True):
    """What the log says of one partition. beginning <= stable <= high."""

    beginning: int
    """First offset that retention has left."""
    stable: int
    """Last stable offset: below it everything is decided; a read_committed reader stops there."""
    high: int
    """High watermark: what was written, also inside transactions that are still open."""


class Span(Struct, frozen=True):
    """Offsets of one partition from `start` to below `end`, and the part of the asked range that is out of reach."""

    topic: str
    partition: int
    start: int
    end: int
    gone: int = 0
    """Offsets that were asked for and are deleted from the head of the partition."""
    held_back: int = 0
    """Offsets that were asked for and lie behind an open transaction, committed ones among them."""

    @property
    def place(self) -> TopicPartition:
        return TopicPartition(self.topic, self.partition)

    @property
    def size(self) -> int:
        """Offsets in it: an upper bound of its records, since markers and compacted records have offsets too."""
        return self.end - self.start


def span_of(place: TopicPartition, first: int | None, until: int | None, bounds: Bounds) -> Span:
    """What can be read of [first, until) of one partition; None: from the beginning, to the end as it is now."""
    wanted_from = 0 if first is None else first
    wanted_until = bounds.high if until is None else min(until, bounds.high)
    start = max(wanted_from, bounds.beginning)
    end = max(start, min(wanted_until, bounds.stable))
    return Span(
        place.topic,
        place.partition,
        start,
        end,
        gone=max(0, min(bounds.beginning, wanted_until) - wanted_from),
        held_back=max(0, wanted_until - max(bounds.stable, wanted_from)),
    )


def segments(offsets: Iterable[int], gap_max: int = GAP_MAX) -> list[tuple[int, int]]:
    """Ranges [start, end) that cover rising `offsets`; neighbours closer than `gap_max` share one."""
    found: list[tuple[int, int]] = []
    for offset in offsets:
        if found and offset - found[-1][1] < gap_max:
            found[-1] = (found[-1][0], offset + 1)
        else:
            found.append((offset, offset + 1))
    return found


def out_of_reach(spans: Iterable[Span]) -> list[str]:
    """Sentences about what the range asked for and the log does not give."""
    notes = []
    for span in spans:
        where = f"{span.topic}[{span.partition}]"
        if span.gone:
            notes.append(f"{where}: {span.gone} offsets below {span.start} are deleted (retention): not replayed.")
        if span.held_back:
            notes.append(
                f"{where}: {span.held_back} offsets from {span.end} on are behind an open transaction: not readable "
                "yet, committed records among them included."
            )
    return notes
