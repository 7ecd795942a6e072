"""Names of things: topics, instances, transactional ids, request ids.

Everything here is a pure function of its arguments, so that any process, any language and any replay
derives the same name from the same facts.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

LANES = 3
"""Priority lanes of a work topic: P0, P1, P2."""


class TopicPartition(NamedTuple):
    """One partition of one topic."""

    topic: str
    partition: int


class TopicNames(NamedTuple):
    """The topics of one installation; `prefix` keeps installations apart on a shared Kafka cluster."""

    prefix: str = "sie."

    @property
    def requests(self) -> str:
        return f"{self.prefix}requests"

    @property
    def outputs(self) -> str:
        return f"{self.prefix}outputs"

    @property
    def results(self) -> str:
        return f"{self.prefix}results"

    @property
    def shadow(self) -> str:
        """Answers of shadow variants: compared, never given to anybody."""
        return f"{self.prefix}shadow"

    @property
    def deadletter(self) -> str:
        return f"{self.prefix}deadletter"

    @property
    def tokens(self) -> str:
        return f"{self.prefix}tokens"

    @property
    def wakeups(self) -> str:
        """Empty records that end the waiting of workers' fetches."""
        return f"{self.prefix}wakeups"

    @property
    def cluster(self) -> str:
        return f"{self.prefix}cluster"

    @property
    def telemetry(self) -> str:
        return f"{self.prefix}telemetry"

    @property
    def models(self) -> str:
        return f"{self.prefix}models"

    @property
    def instances(self) -> str:
        return f"{self.prefix}instances"

    @property
    def routes(self) -> str:
        return f"{self.prefix}routes"

    @property
    def placements(self) -> str:
        return f"{self.prefix}placements"

    @property
    def fingerprints(self) -> str:
        return f"{self.prefix}fingerprints"

    @property
    def decisions(self) -> str:
        return f"{self.prefix}decisions"

    @property
    def snapshots(self) -> str:
        return f"{self.prefix}snapshots"

    @property
    def schemas(self) -> str:
        return f"{self.prefix}schemas"

    @property
    def keys(self) -> str:
        return f"{self.prefix}keys"

    def work(self, model: str) -> str:
        """The topic that carries the work items of one model."""
        return f"{self.prefix}work.{model}"

    @property
    def ingress_group(self) -> str:
        return f"{self.prefix}ingress"

    @property
    def worker_group(self) -> str:
        """Consumer group that holds the committed offsets of all work partitions (it has no members)."""
        return f"{self.prefix}workers"

    @property
    def egress_group(self) -> str:
        return f"{self.prefix}egress"

    @property
    def scheduler_group(self) -> str:
        return f"{self.prefix}scheduler"

    @property
    def bridge_group(self) -> str:
        return f"{self.prefix}bridge"

    def worker_transactional_id(self, worker: str) -> str:
        """A new incarnation of a worker takes the same id, which fences the old one."""
        return f"{self.prefix}worker.{worker}"

    def ingress_transactional_id(self, ingress: str) -> str:
        return f"{self.prefix}ingress.{ingress}"

    def egress_transactional_id(self, egress: str) -> str:
        return f"{self.prefix}egress.{egress}"

    @property
    def schemas_transactional_id(self) -> str:
        """Whoever registers a schema takes it, so that no two assign the same id."""
        return f"{self.prefix}schemas"

    @property
    def keys_transactional_id(self) -> str:
        """Whoever shreds or rotates takes it, so that nobody writes a key again that another one is shredding."""
        return f"{self.prefix}keys"

    @property
    def scheduler_transactional_id(self) -> str:
        """One id for all schedulers: taking it is what makes a scheduler the leader."""
        return f"{self.prefix}scheduler"


def variant_unit(model: str, variant: str) -> str:
    """What carries one variant of a model beside the stable one: its key in sie.placements, and in its topic's name.

    Upper case, which no name of a model has, so that it can never be one.
    """
    return f"{model}.{variant.upper()}"


def base_of(unit: str) -> str:
    """The model that a unit belongs to; a model's own name is its own base."""
    base, _, variant = unit.rpartition(".")
    return base if base and variant.isupper() else unit


def variant_of(unit: str) -> str:
    """The variant that `variant_unit` made this name of."""
    return unit.rpartition(".")[2].lower()


def instance_id(model: str) -> str:
    """The stable `mi-` id of a model; it never changes while versions and replicas come and go."""
    return "mi-" + hashlib.blake2b(model.encode(), digest_size=6).hexdigest()


def derived_request_id(topic: str, partition: int, offset: int) -> str:
    """Request id of a record that carries none (or cannot be decoded): its place in the log."""
    return f"src:{topic}:{partition}:{offset}"


def keyed_hash(key: bytes, salt: bytes = b"") -> int:
    """64-bit keyed hash, the same in every process and on every machine (blake2b, 8-byte digest)."""
    return int.from_bytes(hashlib.blake2b(key, digest_size=8, key=salt[:64]).digest(), "big")
