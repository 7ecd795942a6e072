"""What has to change so that the topics are as declared. Pure: two lists in, a list of changes out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from sie_stream.ports import TopicSpec


class CreateTopic(Struct, frozen=True, tag=True):
    topic: str
    partitions: int
    config: dict[str, str]


class AddPartitions(Struct, frozen=True, tag=True):
    topic: str
    partitions_now: int
    partitions: int


class ChangeConfig(Struct, frozen=True, tag=True):
    topic: str
    name: str
    value_now: str
    """Empty when the topic follows the broker's default."""
    value: str


class Drift(Struct, frozen=True, tag=True):
    """A difference that no command repairs."""

    topic: str
    message: str


TopicChange = CreateTopic | AddPartitions | ChangeConfig | Drift


def plan(desired: Sequence[TopicSpec], described: Mapping[str, TopicSpec]) -> tuple[TopicChange, ...]:
    """Changes in the order of `desired`. `described`: topics that exist, with the configuration set on them.

    Configuration that is set on a topic but not declared is left alone.
    """
    changes: list[TopicChange] = []
    for spec in desired:
        found = described.get(spec.topic)
        if found is None:
            changes.append(CreateTopic(spec.topic, spec.partitions, dict(spec.config)))
            continue
        if found.partitions < spec.partitions:
            changes.append(AddPartitions(spec.topic, found.partitions, spec.partitions))
        elif found.partitions > spec.partitions:
            changes.append(Drift(spec.topic, _too_many(found.partitions, spec.partitions)))
        for name in sorted(spec.config):
            value_now = found.config.get(name, "")
            if value_now != spec.config[name]:
                changes.append(ChangeConfig(spec.topic, name, value_now, spec.config[name]))
    return tuple(changes)


def _too_many(found: int, declared: int) -> str:
    text = f"has {found} partitions, declared {declared}; Kafka cannot remove partitions"
    if declared == 1:
        return f"{text}, and this topic needs one order: delete it and apply again"
    return f"{text}, which does no harm"


def repairable(changes: Sequence[TopicChange]) -> tuple[TopicChange, ...]:
    """The changes that `topics apply` carries out."""
    return tuple(change for change in changes if not isinstance(change, Drift))
