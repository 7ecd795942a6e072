"""Where the model of an open request is, by what the worker that holds its partition told last."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from schemas.codec import decode_row
from schemas.wire import CodecError
from sie_stream.control import PartitionPlacement
from sie_stream.edge.spans import partitions_of, read_spans, window
from sie_stream.ids import TopicNames
from sie_stream.ports import LogReader
from sie_stream.records import LogRecord, WorkItem
from sie_stream.telemetry import DeviceSample, ModelMemory, implausible
from sie_stream.touches import LEFT_MAX, KeptOut

BACK_MS = 5_000
"""Workers tell once a second."""
AHEAD_MS = 60_000


def kept_out(
    reader: LogReader, names: TopicNames, owner: PartitionPlacement, work: WorkItem, now_ms: int
) -> KeptOut | None:
    """None: its model is on a device, has none with a budget, or nobody told lately."""
    spans = window(reader, partitions_of(reader, names.telemetry), now_ms - BACK_MS, now_ms + AHEAD_MS)
    return outside(newest_samples(read_spans(reader, spans), owner, now_ms), work)


def newest_samples(records: Iterable[LogRecord], owner: PartitionPlacement, now_ms: int) -> dict[str, DeviceSample]:
    """Of the worker that has the partition, by device."""
    found: dict[str, DeviceSample] = {}
    for record in records:
        try:
            sample = decode_row(record.value, DeviceSample)
        except CodecError:
            continue  # somebody else's record
        if (sample.worker, sample.incarnation) != (owner.worker, owner.incarnation) or implausible(sample, now_ms):
            continue
        if sample.device not in found or sample.at_ms >= found[sample.device].at_ms:
            found[sample.device] = sample
    return found


def outside(samples: Mapping[str, DeviceSample], work: WorkItem) -> KeptOut | None:
    told: list[tuple[DeviceSample, ModelMemory]] = []
    for sample in samples.values():
        if sample.memory is None:
            continue
        told += [(sample, one) for one in sample.memory.models if one.model == work.model]
    of_version = [(sample, one) for sample, one in told if one.version == work.version] or told
    if not of_version or any(one.place == "device" for _, one in of_version):
        return None
    sample, own = of_version[0]
    assert sample.memory is not None
    others = [
        f"{one.model}@{one.version}"
        for one in sample.memory.models
        if one is not own and one.place in ("device", "coming")
    ]
    name = f"{own.model}@{own.version}"
    return KeptOut(sample.at_ms, sample.worker, sample.device, name, own.place, tuple(others[:LEFT_MAX]))
