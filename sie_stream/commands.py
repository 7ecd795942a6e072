"""Records on sie.cluster by which people and tools command; the scheduler answers each with a decision."""

from __future__ import annotations

from typing import Literal

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


class StartRollout(Struct, frozen=True, tag=True):
    """Roll a new version out, whether its declaration says `rollout` or not, or serve one more variant beside it."""

    spec: Raw
    variant: str = "canary"
    share: int = 0
    """Fixed share of the keys out of 10,000, for a variant that is compared and not promoted (a/b/n); 0: by steps."""
    actor: str = ""


class RolloutOrder(Struct, frozen=True, tag=True):
    """What a person wants of a rollout that runs, or (undo) of the one that ended last."""

    model: str
    order: Literal["pause", "resume", "promote", "abort", "undo"]
    variant: str = "canary"
    actor: str = ""


class HoldTopic(Struct, frozen=True, tag=True):
    """Nothing of this topic is to be removed until ReleaseTopic: a legal hold. `reason` is kept and shown."""

    topic: str
    reason: str
    actor: str = ""


class ReleaseTopic(Struct, frozen=True, tag=True):
    topic: str
    actor: str = ""
