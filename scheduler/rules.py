"""What a declaration says about where its replicas may be."""

from __future__ import annotations

from msgspec import Struct

from scheduler.precision import choices_of
from scheduler.solver.model import Span, Toleration
from sie_stream.spec import ModelSpec

BASE_PREFIX = "model:"
POOL_LABEL = "pool"
"""Worker label that says which devices models compete for (see relief.py)."""


class PlacementRules(Struct, frozen=True):
    tier: str = ""
    """Group of workers kept apart; empty: those that belong to none."""
    tags: tuple[str, ...] = ()
    node_selector: dict[str, str] = {}
    tolerations: tuple[Toleration, ...] = ()
    requires: dict[str, str] = {}
    """Version ranges by what is versioned: {"pytorch": ">=2.6"}."""
    p99_ms: int = 0
    """99 % of requests must be answered within this; 0: nothing is promised."""
    span: Span = "nvlink"
    """How near the devices of one replica have to be."""
    trunk: str = ""
    """Models of one trunk may exchange KV; empty: with nobody. An adapter names its base (`BASE_PREFIX`)."""
    request_us: int = 0
    """Device time of one request in the largest declared baseline; 0: none is declared."""
    precisions: tuple[str, ...] = ()
    """What it may be loaded in, best first (see precision.py)."""


def rules_of(spec: ModelSpec) -> PlacementRules:
    return PlacementRules(
        tier=spec.tier or "",
        tags=spec.tags,
        node_selector=spec.node_selector,
        tolerations=tuple(Toleration(t.key, t.operator, t.value, t.effect) for t in spec.tolerations),
        requires={name: text for name, text in spec.requires.model_dump().items() if text is not None},
        p99_ms=spec.slas.p99_latency_ms or 0,
        span=spec.tensor_parallel_over,
        trunk=_trunk(spec),
        request_us=_request_us(spec),
        precisions=choices_of(spec),
    )


def _trunk(spec: ModelSpec) -> str:
    if not spec.shared_kv_cache:
        return ""
    if spec.lora is not None:
        return f"{BASE_PREFIX}{spec.lora.base}"
    return spec.source.digest or spec.source.uri


def _request_us(spec: ModelSpec) -> int:
    if not spec.baselines:
        return 0
    largest = max(spec.baselines, key=lambda baseline: baseline.batch_size)
    return round(1000 * largest.latency_ms / largest.batch_size)
