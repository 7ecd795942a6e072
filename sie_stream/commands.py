"""Records on sie.cluster by which people and tools command; the scheduler answers each with a decision."""

from __future__ import annotations

from msgspec import Raw, Struct


class ApplyModel(Struct, frozen=True, tag=True):
    """Declare or change a model. `spec` is a ModelSpec as a JSON object; the scheduler validates it again."""

    spec: Raw
    actor: str = ""


class DeleteModel(Struct, frozen=True, tag=True):
    model: str
    actor: str = ""


class CordonWorker(Struct, frozen=True, tag=True):
    """Place nothing new on this worker. Holds for every incarnation of it, until UncordonWorker."""

    worker: str
    actor: str = ""


class DrainWorker(Struct, frozen=True, tag=True):
    """Cordon it, and move what runs there elsewhere."""

    worker: str
    actor: str = ""


class UncordonWorker(Struct, frozen=True, tag=True):
    worker: str
    actor: str = ""


class UndoDecision(Struct, frozen=True, tag=True):
    """Put replicas back where they were before this decision (`d-OFFSET-N`), as a new decision."""

    decision: str
    actor: str = ""


class HoldTopic(Struct, frozen=True, tag=True):
    """Nothing of this topic is to be removed until ReleaseTopic: a legal hold. `reason` is kept and shown."""

    topic: str
    reason: str
    actor: str = ""


class ReleaseTopic(Struct, frozen=True, tag=True):
    topic: str
    actor: str = ""
