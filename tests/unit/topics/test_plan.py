"""Topics as declared, and the plan that makes them so."""

from __future__ import annotations

import msgspec
import pytest

from sie_stream.ports import TopicSpec
from sie_stream.settings import Settings
from topics.catalog import BY_NAME, DEFINITIONS, TopicDefinition, system_topics, work_topic
from topics.plan import (
    AddPartitions,
    ChangeConfig,
    CreateTopic,
    Drift,
    Held,
    TopicChange,
    UnsetConfig,
    is_held,
    plan,
    plan_hold,
    plan_release,
    repairable,
)


def described(*specs: TopicSpec) -> dict[str, TopicSpec]:
    return {spec.topic: spec for spec in specs}


def test_every_topic_of_the_names_is_declared_and_no_other() -> None:
    settings = Settings(topic_prefix="x.")
    names = [name for name in dir(settings.topics) if isinstance(getattr(type(settings.topics), name, None), property)]
    topics = {getattr(settings.topics, name) for name in names if not name.endswith(("_group", "_id"))}
    assert {spec.topic for spec in system_topics(settings)} == topics


def test_work_topic_has_a_bucket_in_each_lane() -> None:
    spec = work_topic(Settings(record_bytes_max=500_000, request_bytes_max=300_000), "wine", 2)
    assert spec.topic == "sie.work.wine"
    assert spec.partitions == 6
    assert int(spec.config["max.message.bytes"]) > 600_000


def test_control_log_has_one_order_and_the_brokers_time() -> None:
    cluster = next(spec for spec in system_topics(Settings()) if spec.topic == "sie.cluster")
    assert cluster.partitions == 1
    assert cluster.config["message.timestamp.type"] == "LogAppendTime"


def test_what_is_shredded_is_off_the_disk_within_a_day() -> None:
    keys = next(spec for spec in system_topics(Settings()) if spec.topic == "sie.keys")
    assert (keys.config["cleanup.policy"], keys.config["max.compaction.lag.ms"]) == ("compact", "86400000")


def test_requests_follow_their_setting_and_take_large_records() -> None:
    requests = next(s for s in system_topics(Settings(requests_partitions=7)) if s.topic == "sie.requests")
    assert requests.partitions == 7
    assert int(requests.config["max.message.bytes"]) > 16 * 1024 * 1024


def test_definitions_say_what_they_are() -> None:
    for definition in DEFINITIONS:
        assert definition.purpose.strip()
        assert definition.written_by
        assert (definition.kind == "log") == (definition.retention_hours > 0), definition.name
    assert BY_NAME["models"].kind == "compacted"


def test_unknown_fields_in_a_definition_are_refused() -> None:
    fields = msgspec.to_builtins(BY_NAME["models"]) | {"retension_hours": 1}
    with pytest.raises(msgspec.ValidationError, match="retension_hours"):
        msgspec.convert(fields, TopicDefinition)


def test_plan_creates_widens_and_configures() -> None:
    desired = [
        TopicSpec("a", 3, {"retention.ms": "1"}),
        TopicSpec("b", 3, {"retention.ms": "1"}),
        TopicSpec("c", 3, {"retention.ms": "1", "cleanup.policy": "delete"}),
        TopicSpec("d", 3, {"retention.ms": "1"}),
    ]
    found = described(
        TopicSpec("b", 1, {"retention.ms": "1"}),
        TopicSpec("c", 3, {"retention.ms": "2", "segment.ms": "7"}),
        TopicSpec("d", 3, {"retention.ms": "1"}),
    )
    changes = plan(desired, found)
    assert changes == (
        CreateTopic("a", 3, {"retention.ms": "1"}),
        AddPartitions("b", 1, 3),
        ChangeConfig("c", "cleanup.policy", "", "delete"),
        ChangeConfig("c", "retention.ms", "2", "1"),
    )
    assert repairable(changes) == changes


def test_too_many_partitions_is_drift_that_nothing_repairs() -> None:
    desired = [TopicSpec("cluster", 1, {}), TopicSpec("requests", 2, {})]
    changes = plan(desired, described(TopicSpec("cluster", 2, {}), TopicSpec("requests", 4, {})))
    assert [type(change) for change in changes] == [Drift, Drift]
    assert isinstance(changes[0], Drift)
    assert "delete it and apply again" in changes[0].message
    assert repairable(changes) == ()


def test_a_plan_of_what_is_there_is_empty() -> None:
    desired = system_topics(Settings())
    assert plan(desired, described(*desired)) == ()


def test_a_held_topic_keeps_its_records_whatever_is_declared_and_gets_its_retention_back() -> None:
    for name in ("sie.results", "sie.models"):
        declared = next(spec for spec in system_topics(Settings()) if spec.topic == name)
        found = TopicSpec(name, declared.partitions, dict(declared.config))
        assert not is_held(found)
        held = changed(found, plan_hold(found))
        assert is_held(held)
        assert plan_hold(held) == ()
        (said,) = plan([declared], described(held))
        assert isinstance(said, Held)
        assert repairable((said,)) == ()
        other = TopicSpec(name, held.partitions, {**held.config, "max.message.bytes": "7"})
        assert [type(change) for change in plan([declared], described(other))] == [Held, ChangeConfig]
        released = changed(held, plan_release(declared, held))
        assert plan([declared], described(released)) == ()
        assert "retention.bytes" not in released.config


def test_no_declared_topic_looks_held() -> None:
    assert not any(is_held(spec) for spec in [*system_topics(Settings()), work_topic(Settings(), "m", 1)])


def changed(topic: TopicSpec, changes: tuple[TopicChange, ...]) -> TopicSpec:
    """The topic after these changes of its configuration."""
    config = dict(topic.config)
    for change in changes:
        if isinstance(change, ChangeConfig):
            config[change.name] = change.value
        elif isinstance(change, UnsetConfig):
            del config[change.name]
    return TopicSpec(topic.topic, topic.partitions, config)
