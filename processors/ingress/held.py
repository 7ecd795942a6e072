"""Tells the scheduler which routes this process routes by, so that the moment from which one holds everywhere is known.

A turn is synchronous, so when routes change nothing is open: from then on no record is written by an older epoch. The
report is a plain record; a lost one comes again with the next beat.
"""

from __future__ import annotations

from collections.abc import Sequence

from schemas.codec import encode_cluster
from sie_stream.control import RouteRow, RoutesHeld
from sie_stream.errors import LogError
from sie_stream.ports import Clock, PlainWriter
from sie_stream.records import LogWrite

BEAT_MS = 5_000
EPOCHS_MAX = 500
"""In one record."""
LEAVE_MS = 1_000


class RoutesReporter:
    def __init__(self, name: str, topic: str, writer: PlainWriter, clock: Clock) -> None:
        self._name = name
        self._topic = topic
        self._writer = writer
        self._clock = clock
        self._untold: dict[str, int] = {}
        self._beat_at = 0.0

    def routes_changed(self, changes: Sequence[tuple[str, RouteRow | None]]) -> None:
        self._untold.update({name: 0 if row is None else row.route_epoch for name, row in changes})
        self._tell()

    def beat(self) -> None:
        """Call often; says something every BEAT_MS."""
        if self._clock.monotonic_ms() >= self._beat_at:
            self._tell()

    def leave(self) -> None:
        try:
            self._write(RoutesHeld(self._name, left=True))
            self._writer.flush(LEAVE_MS)
        except LogError:
            pass  # its silence says the same a little later
        self._writer.close()

    def _tell(self) -> None:
        self._beat_at = self._clock.monotonic_ms() + BEAT_MS
        names = list(self._untold)
        try:
            for first in range(0, max(1, len(names)), EPOCHS_MAX):
                part = {name: self._untold[name] for name in names[first : first + EPOCHS_MAX]}
                self._write(RoutesHeld(self._name, part))
        except LogError:
            return  # all of it comes again with the next beat
        self._untold = {}

    def _write(self, fact: RoutesHeld) -> None:
        self._writer.write([LogWrite(self._topic, encode_cluster(fact), self._name.encode(), 0)])
