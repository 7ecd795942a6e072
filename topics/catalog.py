"""The topics of an installation, from topics/*.yaml: `partitions` and `record_bytes_max` are numbers or settings.

The YAML files ship with the package; reading them is like reading code, so this module counts as pure.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Literal

import msgspec
import yaml
from msgspec import Struct

from sie_stream.ids import LANES
from sie_stream.ports import TopicSpec
from sie_stream.settings import Settings

BATCH_HEADROOM_BYTES = 64 * 1024
"""A record batch is larger than its records; a topic allows this much on top of the largest record."""
WORK_TOPIC = "work.MODEL"
LANES_TIMES_WIDTH = "lanes x width"
HOUR_MS = 3_600_000


class TopicDefinition(Struct, frozen=True, forbid_unknown_fields=True):
    """One YAML file."""

    name: str
    """Without the prefix."""
    partitions: int | str
    kind: Literal["log", "compacted"]
    record_bytes_max: int | str
    timestamp: Literal["CreateTime", "LogAppendTime"]
    key: str
    written_by: str
    purpose: str
    retention_hours: int = 0
    """Of a log; compacted topics keep the latest record of each key."""
    compaction_lag_hours: int = 0
    """Of a compacted topic: what is superseded is off the disk after that, about; 0: whenever there is enough of it."""


def _load() -> tuple[TopicDefinition, ...]:
    found = sorted((one for one in files("topics").iterdir() if one.name.endswith(".yaml")), key=lambda one: one.name)
    return tuple(msgspec.convert(yaml.safe_load(one.read_text(encoding="utf-8")), TopicDefinition) for one in found)


DEFINITIONS: tuple[TopicDefinition, ...] = _load()
BY_NAME: dict[str, TopicDefinition] = {definition.name: definition for definition in DEFINITIONS}


def system_topics(settings: Settings) -> list[TopicSpec]:
    """Every topic of the installation except those of single models, by name."""
    return [
        TopicSpec(
            f"{settings.topic_prefix}{definition.name}",
            _number(definition.partitions, settings),
            _config(definition, settings),
        )
        for definition in DEFINITIONS
        if definition.name != WORK_TOPIC
    ]


def work_topic(settings: Settings, model: str, width: int) -> TopicSpec:
    """The topic of one model: `width` buckets in each priority lane."""
    assert width >= 1, width
    return TopicSpec(settings.topics.work(model), LANES * width, _config(BY_NAME[WORK_TOPIC], settings))


def _number(value: int | str, settings: Settings) -> int:
    number = value if isinstance(value, int) else getattr(settings, value)
    assert isinstance(number, int), value
    return number


def _config(definition: TopicDefinition, settings: Settings) -> dict[str, str]:
    config = {
        "message.timestamp.type": definition.timestamp,
        "max.message.bytes": str(_number(definition.record_bytes_max, settings) + BATCH_HEADROOM_BYTES),
    }
    if definition.kind == "compacted":
        # Small segments and an eager cleaner: a reader of the table starts quickly.
        lag = {"max.compaction.lag.ms": str(definition.compaction_lag_hours * HOUR_MS)}
        return (
            config
            | (lag if definition.compaction_lag_hours else {})
            | {
                "cleanup.policy": "compact",
                "segment.ms": str(HOUR_MS),
                "min.cleanable.dirty.ratio": "0.2",
                "delete.retention.ms": str(24 * HOUR_MS),
            }
        )
    retention_ms = definition.retention_hours * HOUR_MS
    # Retention drops whole segments, so a short-lived log needs short segments.
    segment_ms = min(retention_ms, 24 * HOUR_MS)
    return config | {
        "cleanup.policy": "delete",
        "retention.ms": str(retention_ms),
        "segment.ms": str(segment_ms),
    }
