"""The declarations that the control log still holds, taken apart by the scheduler's own code."""

from __future__ import annotations

from collections.abc import Iterator

from scheduler.adapter_bases import Following
from scheduler.launches import accept
from schemas.codec import decode_cluster
from schemas.wire import CodecError
from sie_stream.commands import ApplyModel, DeleteModel, StartRollout
from sie_stream.edge.tables import read_to_end
from sie_stream.ids import TopicNames
from sie_stream.ports import LogReader
from sie_stream.problems import SpecError
from sie_stream.replay.versions import Declared, Withdrawn

MARKS = (b"ApplyModel", b"DeleteModel", b"StartRollout")
"""Heartbeats and ticks are nearly everything on that topic: those are not decoded."""


def declarations(reader: LogReader, names: TopicNames) -> Iterator[Declared | Withdrawn]:
    """In the order of sie.cluster. What the scheduler would reject is left out.

    An adapter over a declared model comes once for each version of that model that may have been its base.
    """
    bases = Following()
    for record in read_to_end(reader, names.cluster, timeout_s=600.0):
        if record.value is None or not any(mark in record.value[:64] for mark in MARKS):
            continue
        try:
            command = decode_cluster(record.value)
            if isinstance(command, DeleteModel):
                bases.withdrawn(command.model)
                yield Withdrawn(record.timestamp_ms, command.model)
                continue
            if not isinstance(command, ApplyModel | StartRollout):
                continue
            accepted = [accept(bytes(one), names) for one in bases.readings(command)]
        except (CodecError, SpecError):
            continue
        beside = isinstance(command, StartRollout)
        for one in accepted:
            yield Declared(record.offset, record.timestamp_ms, one.launch, one.route, beside)
