"""Refuses a topic that holds no requests: its replay would find nothing, and not say why."""

from __future__ import annotations

from collections.abc import Container, Sequence

import msgspec
from msgspec import Struct

from schemas.codec import decode_result
from schemas.wire import CodecError
from sie_stream.cli.replaying.outputs import WORKER
from sie_stream.cli.replaying.reading import Readers
from sie_stream.edge.stop import StopFlag
from sie_stream.errors import ConfigError
from sie_stream.ids import TopicNames, base_of
from sie_stream.records import Provenance

LOOKED_AT_MAX = 8
"""Partitions whose first record is looked at."""


class Written(Struct, frozen=True):
    """A result in either form, as far as it says where it comes from."""

    request_id: str
    model: str
    provenance: Provenance


_json = msgspec.json.Decoder(Written)


def refuse_topic_without_requests(
    readers: Readers, names: TopicNames, topic: str, inputs: Container[str], partitions: Sequence[int], stop: StopFlag
) -> None:
    """`inputs`: topics that models read from; results of one model may be the requests of the next.

    Raises ConfigError, which names the topic to give instead.
    """
    if topic in ("", names.requests, names.results) or topic.startswith(names.work("")) or topic in inputs:
        return
    places = readers.partitions(topic, partitions)
    if topic.startswith(names.prefix):
        raise ConfigError(
            f"--topic {topic}: a topic of SIE-Stream's own that holds no requests. Give --topic {names.requests}, "
            f"{names.results}, {names.work('MODEL')} (the same as --model MODEL), or a topic that a model reads from."
        )
    filled = [span for span in readers.spans(places, lambda _: None, lambda _: None) if span.size]
    for span in filled[:LOOKED_AT_MAX]:
        record = readers.first_of(span, stop)
        found = None if record is None else read_result(record.value)
        if found is not None:
            raise ConfigError(f"--topic {topic}: it holds {_told(found, names)}")


def read_result(value: bytes | None) -> Written | None:
    """None: it is no result."""
    try:
        result = decode_result(value)
    except CodecError:
        try:
            return _json.decode(value or b"")
        except msgspec.MsgspecError:
            return None
    return Written(result.request_id, result.model, result.provenance)


def _told(found: Written, names: TopicNames) -> str:
    origin = found.provenance
    work = origin.work_topic or names.work(base_of(found.model))
    if origin.worker == WORKER:
        return f"results of a replay, not requests. Give --topic {work}, which was replayed then, to have it again."
    return (
        f"results, not requests (the first is the answer to {found.request_id} of {origin.source_topic}). Give --topic "
        f"{origin.source_topic}, or --topic {work} for what {found.model} worked on."
    )
