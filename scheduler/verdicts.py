"""What gates have in common: limits as declared, their verdicts, and the chance that a verdict rests on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

ALPHA = 0.0001
"""Of one look. A rollout looks some hundred times (windows, gates, steps), and must not be taken back by chance more
often than once in a hundred; tests/simulation/test_false_alarms.py counts."""
Z_ALPHA = 3.719

Verdict = Literal["pass", "breach", "unsure", "differs"]
"""`differs`: as sure as a breach, of a gate that only reports."""


class GateLimits(Struct, frozen=True):
    """As declared; None: not looked at."""

    error_rate_max: float = 0.01
    p99_ratio_max: float = 1.2
    p99_sla_ms: int | None = None
    psi_max: float = 0.2
    ks_max: float = 0.1
    schema_violations_max: float = 0.0
    cost_ratio_max: float | None = None
    reported: tuple[str, ...] = ()
    """Families of gates (`ks`, `psi`) that stop nothing: what exceeds them is told."""

    def only_reports(self, gate: str) -> bool:
        return gate.partition(":")[0] in self.reported


class GateResult(Struct, frozen=True):
    """`value` is what was seen, `limit` what is allowed. Rounded, so that records stay readable."""

    gate: str
    verdict: Verdict
    value: float
    limit: float
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.gate} {self.value:g} (allowed {self.limit:g}{f'; {self.detail}' if self.detail else ''})"


def in_words(gates: Sequence[GateResult], verdict: Verdict) -> str:
    """Those with this verdict, as one sentence; empty: none."""
    found = [gate for gate in gates if gate.verdict == verdict]
    return "; ".join(str(gate) for gate in found) + "." if found else ""


def as_numbers(gates: Sequence[GateResult]) -> str:
    return ", ".join(
        f"{one.gate} {one.value:g} {'<=' if one.value <= one.limit else '>'} {one.limit:g}" for one in gates
    )


def verdict_of(exceeded: bool, sure: bool) -> Verdict:
    if not exceeded:
        return "pass"
    return "breach" if sure else "unsure"


def short(value: float) -> float:
    return float(f"{value:.6g}")


def binomial_tail(count: int, trials: int, chance: float) -> float:
    """P(X >= count) of `trials` tries that each hit with `chance`."""
    if count <= 0:
        return 1.0
    if chance <= 0.0:
        return 0.0
    if chance >= 1.0 or count <= trials * chance:
        return 1.0  # not above what is expected: no need to know exactly
    log_hit, log_miss = math.log(chance), math.log1p(-chance)
    whole = math.lgamma(trials + 1)
    total = 0.0
    for hits in range(count, trials + 1):
        term = math.exp(
            whole - math.lgamma(hits + 1) - math.lgamma(trials - hits + 1) + hits * log_hit + (trials - hits) * log_miss
        )
        total += term
        if term < total * 1e-9:
            break
    return min(1.0, total)
