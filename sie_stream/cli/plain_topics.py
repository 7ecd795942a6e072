"""Which topics hold what users wrote, unprotected, and until when. Pure: topics as described in, rows and lines out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec import Struct

from sie_stream.cli.since import shown_time
from sie_stream.ids import TopicNames
from sie_stream.ports import TopicSpec
from topics.plan import is_held

NAMED_MAX = 5
"""Topics with one and the same end that are named; of more, it is told how many."""


class PlainTopic(Struct, frozen=True):
    """A topic whose records are as users wrote them."""

    topic: str
    until_ms: int | None
    """Log time by which retention has removed what is there now, about; None: unknown, or never."""
    why: str


def plain_topics(names: TopicNames, described: Iterable[TopicSpec], now_ms: int) -> list[PlainTopic]:
    """Requests and work items, which nobody protects: results, copies and dead letters are.

    described: topics of the installation, with the configuration set on them.
    """
    work = names.work("")
    return [
        _plain(found, now_ms) for found in described if found.topic == names.requests or found.topic.startswith(work)
    ]


def _plain(found: TopicSpec, now_ms: int) -> PlainTopic:
    """Kafka removes whole segments, so up to one segment's time may be added to the retention."""
    config = found.config
    if is_held(found):
        return PlainTopic(found.topic, None, "for ever, it is under a legal hold (`topics release` ends that)")
    if "delete" not in config.get("cleanup.policy", "delete"):
        return PlainTopic(found.topic, None, f"for ever, its cleanup.policy is {config['cleanup.policy']}")
    if "retention.ms" not in config:
        return PlainTopic(found.topic, None, "as long as the broker's log.retention.ms says: the topic sets none")
    retention_ms = int(config["retention.ms"])
    if retention_ms < 0:
        return PlainTopic(found.topic, None, f"for ever, its retention.ms is {retention_ms}")
    segment_ms = int(config.get("segment.ms", "0"))
    end_ms = now_ms + retention_ms + segment_ms
    why = f"until about {shown_time(end_ms)} (retention.ms {retention_ms}, segment.ms {segment_ms})"
    return PlainTopic(found.topic, end_ms, why)


def plain_in_words(topics: Iterable[PlainTopic]) -> Iterator[str]:
    """One line for each end, the topics that share it together."""
    by_end: dict[str, list[str]] = {}
    for one in topics:
        by_end.setdefault(one.why, []).append(one.topic)
    if by_end:
        yield "requests and work items are not encrypted: what this person sent before may still be read in"
    for why, names in by_end.items():
        more = f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
        yield f"    {', '.join(names[:NAMED_MAX])}{more}: {why}"
    yield "topics of your own that models read from (kafka_input) are yours to empty"
