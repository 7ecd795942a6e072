"""How a declaration says that its version takes over."""

from __future__ import annotations

from msgspec import structs

from scheduler.rollout import FULL, Plan
from scheduler.verdicts import GateLimits
from sie_stream.rollout_records import STABLE, VariantRule
from sie_stream.spec import ModelSpec, Rollout

DEFAULTS = GateLimits()


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
            psi_max=DEFAULTS.psi_max if gates.psi_max is None else gates.psi_max,
            ks_max=DEFAULTS.ks_max if gates.ks_max is None else gates.ks_max,
            schema_violations_max=gates.schema_violations_max,
            cost_ratio_max=gates.cost_ratio_max,
        ),
        rules=tuple(
            VariantRule(pin.by, pin.name, pin.equals, variant if pin.to == "new" else STABLE) for pin in declared.pins
        ),
    )


def compared(plan: Plan, spec: ModelSpec, share: int) -> Plan:
    """The same at a fixed share of the keys, out of 10,000, and never promoted by itself.

    That its answers differ is what it is looked at for: it only stops it where the declaration itself says how much.
    """
    gates = (spec.rollout or Rollout()).gates
    declared = {"ks": gates.ks_max, "psi": gates.psi_max}
    reported = tuple(family for family, limit in declared.items() if limit is None)
    return structs.replace(plan, steps=(share,), promotes=False, limits=structs.replace(plan.limits, reported=reported))


def taking_over(plan: Plan, version: str, before: str) -> str:
    """How the version takes over, for people: what comes first, what each share needs, what ends it early."""
    shares = shares_of(plan)
    needs = f"held {plan.hold_ms} ms and until {plan.samples_min} answers passed the gates"
    copies = (
        f"First it gets copies of all requests: what it answers is compared and nobody gets it, {needs}. "
        if plan.shadow
        else ""
    )
    if not plan.promotes:
        return (
            f"Version {version} is loaded beside {before} and answers its golden requests. {copies}Then it takes "
            f"{shares} % of the keys until somebody ends it: it is compared, and not promoted by itself. "
            f"{_stopped_by(plan)}"
        )
    return (
        f"Version {version} is loaded beside {before} and answers its golden requests. {copies}"
        f"Then it takes {shares} % of the keys, each share {needs}. "
        f"A breach takes it back at once, also before {plan.samples_min} answers: these are needed to go on, not to "
        "stop."
    )


def _stopped_by(plan: Plan) -> str:
    told = " and ".join(family.upper() for family in plan.limits.reported)
    but = f"; how far its scores drift ({told}) is told, and stops nothing" if told else ""
    return f"A breach of its gates takes it back at once{but}."


def shares_of(plan: Plan) -> str:
    """In percent, as they follow each other."""
    return " -> ".join(f"{share * 100 / FULL:g}" for share in plan.steps)
