"""Topics on real Kafka: create, widen, configure, describe, delete. Many topics in one request."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Self, TypeVar

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,  # pyright: ignore[reportPrivateImportUsage]
    ConfigEntry,  # pyright: ignore[reportPrivateImportUsage]
    ConfigResource,  # pyright: ignore[reportPrivateImportUsage]
    ConfigSource,  # pyright: ignore[reportPrivateImportUsage]
    ResourceType,  # pyright: ignore[reportPrivateImportUsage]
)
from confluent_kafka.cimpl import NewPartitions, NewTopic

from sie_stream.edge.kafka_config import common_config
from sie_stream.edge.kafka_errors import from_exception, kafka_error, logger
from sie_stream.errors import LogError, Retriable
from sie_stream.ports import TopicSpec
from sie_stream.settings import Settings
from topics.plan import AddPartitions, ChangeConfig, CreateTopic, TopicChange, UnsetConfig, plan, repairable

TIMEOUT_S = 30.0
VISIBLE_BUDGET_S = 5.0
CLUSTER_DEFAULT = -1
T = TypeVar("T")


class KafkaAdmin:
    """Implements ports.TopicAdmin. `replication_factor` -1: the cluster's default."""

    def __init__(
        self,
        bootstrap: str,
        overrides: Mapping[str, str] | None = None,
        replication_factor: int = CLUSTER_DEFAULT,
    ) -> None:
        self._client = AdminClient(common_config(bootstrap, overrides), logger=logger)
        self._replication_factor = replication_factor

    @classmethod
    def of(cls, settings: Settings) -> Self:
        return cls(settings.bootstrap_servers, settings.client_overrides, settings.replication_factor)

    def ensure(self, topics: Sequence[TopicSpec]) -> None:
        """Create what is missing, add partitions where there are too few, set configuration that differs.

        Calling it again changes nothing. Raises Retriable or FatalLogError for the first topic that failed, after the
        others were done.
        """
        changes = repairable(plan(topics, self.describe([spec.topic for spec in topics])))
        self.apply(changes)
        if any(not isinstance(change, ChangeConfig) for change in changes):
            self._await_visible(topics)

    def _await_visible(self, topics: Sequence[TopicSpec]) -> None:
        """The controller answers a moment before brokers tell their clients."""
        wanted = {spec.topic: spec.partitions for spec in topics}
        deadline = time.monotonic() + VISIBLE_BUDGET_S
        while True:
            known = self._partitions(lambda topic: topic in wanted)
            if all(known.get(spec.topic, 0) >= spec.partitions for spec in topics):
                return
            if time.monotonic() > deadline:
                raise Retriable(f"topics made, but not announced within {VISIBLE_BUDGET_S} s")
            time.sleep(0.01)

    def apply(self, changes: Sequence[TopicChange]) -> None:
        """Carry a plan out. A topic that somebody else created meanwhile is fine."""
        created = [change for change in changes if isinstance(change, CreateTopic)]
        widened = [change for change in changes if isinstance(change, AddPartitions)]
        configured: dict[str, list[ChangeConfig | UnsetConfig]] = {}
        for change in changes:
            if isinstance(change, ChangeConfig | UnsetConfig):
                configured.setdefault(change.topic, []).append(change)
        failures: list[LogError] = []
        self._create(created, failures)
        self._widen(widened, failures)
        self._configure(configured, failures)
        if failures:
            raise failures[0]

    def _create(self, created: Sequence[CreateTopic], failures: list[LogError]) -> None:
        new = [
            NewTopic(
                change.topic,
                num_partitions=change.partitions,
                replication_factor=self._replication_factor,
                config=change.config,
            )
            for change in created
        ]
        if new:
            futures = self._client.create_topics(new, operation_timeout=TIMEOUT_S, request_timeout=TIMEOUT_S)
            _collect(futures, "create", KafkaError.TOPIC_ALREADY_EXISTS, failures)

    def _widen(self, widened: Sequence[AddPartitions], failures: list[LogError]) -> None:
        new = [NewPartitions(change.topic, change.partitions) for change in widened]
        if new:
            futures = self._client.create_partitions(new, operation_timeout=TIMEOUT_S, request_timeout=TIMEOUT_S)
            _collect(futures, "add partitions to", None, failures)

    def _configure(
        self, configured: Mapping[str, Sequence[ChangeConfig | UnsetConfig]], failures: list[LogError]
    ) -> None:
        resources = [
            ConfigResource(
                ResourceType.TOPIC,
                topic,
                incremental_configs=[_entry(change) for change in changes],
            )
            for topic, changes in configured.items()
        ]
        if resources:
            futures = self._client.incremental_alter_configs(resources, request_timeout=TIMEOUT_S)
            _collect({one.name: future for one, future in futures.items()}, "configure", None, failures)

    def describe(self, topics: Sequence[str]) -> dict[str, TopicSpec]:
        """Those of `topics` that exist, with the configuration set on the topic itself."""
        wanted = dict.fromkeys(topics)
        return self._describe(lambda topic: topic in wanted)

    def describe_all(self, prefix: str) -> list[TopicSpec]:
        """Every topic whose name starts with `prefix`, by name."""
        found = self._describe(lambda topic: topic.startswith(prefix))
        return [found[topic] for topic in sorted(found)]

    def _describe(self, wanted: Callable[[str], bool]) -> dict[str, TopicSpec]:
        partitions = self._partitions(wanted)
        if not partitions:
            return {}
        resources = [ConfigResource(ResourceType.TOPIC, topic) for topic in partitions]
        found: dict[str, TopicSpec] = {}
        for resource, future in self._client.describe_configs(resources, request_timeout=TIMEOUT_S).items():
            entries = _result(future, f"describe {resource.name}")
            config = {
                name: str(entry.value)
                for name, entry in sorted(entries.items())
                if entry.source == ConfigSource.DYNAMIC_TOPIC_CONFIG.value
            }
            found[resource.name] = TopicSpec(resource.name, partitions[resource.name], config)
        return found

    def _partitions(self, wanted: Callable[[str], bool]) -> dict[str, int]:
        """Number of partitions of each wanted topic, by name."""
        try:
            metadata = self._client.list_topics(timeout=TIMEOUT_S)
        except KafkaException as raised:
            raise from_exception(raised, "list topics") from raised
        return {
            name: len(topic.partitions)
            for name, topic in sorted(metadata.topics.items())
            if wanted(name) and topic.error is None
        }

    def delete(self, topics: Sequence[str]) -> None:
        """Topics that do not exist are fine."""
        failures: list[LogError] = []
        if topics:
            futures = self._client.delete_topics(list(topics), operation_timeout=TIMEOUT_S, request_timeout=TIMEOUT_S)
            _collect(futures, "delete", KafkaError.UNKNOWN_TOPIC_OR_PART, failures)
        if failures:
            raise failures[0]


def _entry(change: ChangeConfig | UnsetConfig) -> ConfigEntry:
    if isinstance(change, UnsetConfig):
        return ConfigEntry(change.name, None, incremental_operation=AlterConfigOpType.DELETE)
    return ConfigEntry(change.name, change.value, incremental_operation=AlterConfigOpType.SET)


def _collect(futures: Mapping[str, Future[None]], doing: str, fine: int | None, failures: list[LogError]) -> None:
    """Wait for all; errors other than `fine` are added to `failures`."""
    for topic, future in futures.items():
        try:
            future.result()
        except KafkaException as raised:
            if kafka_error(raised).code() != fine:
                failures.append(from_exception(raised, f"{doing} topic {topic}"))


def _result(future: Future[T], doing: str) -> T:
    try:
        return future.result()
    except KafkaException as raised:
        raise from_exception(raised, doing) from raised
