"""A changed declaration: which changes need new replicas, and which the running ones take over as they are.

A replica is what its worker loaded (`ModelLaunch`) and where it may be. Fields of LIVE_FIELDS say neither: how many
replicas there are, what is promised and allowed, where requests come from and results go. They hold at once, and
replicas are only added or taken away. Every other field makes new replicas beside the old ones, and so does a field of
LIVE_FIELDS where it changes what a worker loads all the same: `kafka_output.value_serializer`, and the context length
of a model that spans devices, whose memory depends on it.
"""

from __future__ import annotations

import msgspec
from msgspec import Raw

from scheduler.elastic import redeclare
from scheduler.launches import Accepted
from scheduler.state import ModelState

LIVE_FIELDS = frozenset(
    {
        "description", "labels",
        "replicas", "slas", "tags", "quota", "deadline_ms", "baselines",
        "rollout", "probes", "kafka_input", "kafka_output",
        "max_seq_len", "supported_context_length", "max_concurrent_requests", "paged_attention",
    }
)  # fmt: skip


def changed_fields(before: Raw, after: Raw) -> list[str]:
    """Fields of two specs, as canonical JSON, whose values differ, sorted."""
    old: dict[str, object] = msgspec.json.decode(before)
    new: dict[str, object] = msgspec.json.decode(after)
    return sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))


def keeps_replicas(model: ModelState, accepted: Accepted) -> bool:
    """Whether the replicas of the present generation are replicas of this declaration, too."""
    return accepted.launch == model.launch and LIVE_FIELDS.issuperset(changed_fields(model.spec, accepted.spec))


def take_over_as_is(model: ModelState, accepted: Accepted) -> str:
    """The declaration changes beneath its replicas, which stay. Returns the reason, as a sentence."""
    changed = changed_fields(model.spec, accepted.spec)
    route = model.published_route
    if accepted.route != model.route or (route is not None and route.asleep):
        model.route_changed = True
    if accepted.rules.p99_ms != model.rules.p99_ms:
        model.sla_missed, model.sla_streak = (), {}
    model.spec = accepted.spec
    model.route = accepted.route
    model.not_enforced = accepted.not_enforced
    model.rules = accepted.rules
    redeclare(model, accepted.scaling, accepted.replicas_wanted)
    model.width = max(accepted.width, model.width)
    return f"The declaration of version {model.version} changed in {', '.join(changed)}, so its replicas stay."
