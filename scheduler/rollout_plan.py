"""How a declaration says that its version takes over."""

from __future__ import annotations

from scheduler.rollout import FULL, Plan
from scheduler.verdicts import GateLimits
from sie_stream.rollout_records import STABLE, VariantRule
from sie_stream.spec import ModelSpec, Rollout


def plan_of(spec: ModelSpec, variant: str) -> Plan:
    """The declared rollout, or the default one, in shares out of 10,000."""
    declared = spec.rollout or Rollout()
    gates = declared.gates
    return Plan(
        steps=tuple(percent * FULL // 100 for percent in declared.steps),
        hold_ms=declared.hold_ms,
        samples_min=declared.samples_min,
        shadow=declared.shadow,
        limits=GateLimits(
            error_rate_max=gates.error_rate_max,
            p99_ratio_max=gates.p99_ratio_max,
            p99_sla_ms=spec.slas.p99_latency_ms,
            psi_max=gates.psi_max,
            ks_max=gates.ks_max,
            schema_violations_max=gates.schema_violations_max,
            cost_ratio_max=gates.cost_ratio_max,
        ),
        rules=tuple(
            VariantRule(pin.by, pin.name, pin.equals, variant if pin.to == "new" else STABLE) for pin in declared.pins
        ),
    )
