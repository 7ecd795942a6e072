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


class UnsetConfig(Struct, frozen=True, tag=True):
    """Follow the broker's default again."""

    topic: str
    name: str
    value_now: str


class Held(Struct, frozen=True, tag=True):
    """Nothing of the topic is ever removed, and plans leave that as it is: a legal hold."""

    topic: str
    message: str


class Drift(Struct, frozen=True, tag=True):
    """A difference that no command repairs."""

    topic: str
    message: str


TopicChange = CreateTopic | AddPartitions | ChangeConfig | UnsetConfig | Held | Drift

HELD_CONFIG = {"cleanup.policy": "delete", "retention.bytes": "-1", "retention.ms": "-1"}
"""Removes nothing, of a compacted topic neither. No declared topic is kept for ever, so this is the mark of a hold too:
whoever plans sees it on the topic itself, also a scheduler that has not read the log yet."""


def plan(desired: Sequence[TopicSpec], described: Mapping[str, TopicSpec]) -> tuple[TopicChange, ...]:
    """Changes in the order of `desired`. `described`: topics that exist, with the configuration set on them.

    Configuration that is set on a topic but not declared is left alone, and so is what keeps the records of a held one.
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
        held = is_held(found)
        if held:
            changes.append(Held(spec.topic, "held: nothing is removed until `topics release`"))
        for name in sorted(spec.config):
            if held and name in HELD_CONFIG:
                continue
            value_now = found.config.get(name, "")
            if value_now != spec.config[name]:
                changes.append(ChangeConfig(spec.topic, name, value_now, spec.config[name]))
    return tuple(changes)


def is_held(topic: TopicSpec) -> bool:
    """Whether its configuration keeps everything. `topic` as described."""
    return all(topic.config.get(name) == value for name, value in HELD_CONFIG.items())


def plan_hold(topic: TopicSpec) -> tuple[TopicChange, ...]:
    """What puts a hold on an existing topic in force. `topic` as described."""
    return tuple(
        ChangeConfig(topic.topic, name, topic.config.get(name, ""), value)
        for name, value in HELD_CONFIG.items()
        if topic.config.get(name) != value
    )


def plan_release(declared: TopicSpec, found: TopicSpec) -> tuple[TopicChange, ...]:
    """What ends a hold: the declared configuration, and the broker's default for what is not declared."""
    changes: list[TopicChange] = []
    for name in HELD_CONFIG:
        value_now = found.config.get(name, "")
        wanted = declared.config.get(name)
        if wanted is None and value_now:
            changes.append(UnsetConfig(found.topic, name, value_now))
        elif wanted is not None and wanted != value_now:
            changes.append(ChangeConfig(found.topic, name, value_now, wanted))
    return tuple(changes)


def _too_many(found: int, declared: int) -> str:
    text = f"has {found} partitions, declared {declared}; Kafka cannot remove partitions"
    if declared == 1:
        return f"{text}, and this topic needs one order: delete it and apply again"
    return f"{text}, which does no harm"


def repairable(changes: Sequence[TopicChange]) -> tuple[TopicChange, ...]:
    """The changes that `topics apply` carries out."""
    return tuple(change for change in changes if not isinstance(change, Drift | Held))
