"""Rollouts as rows and as a picture: those under way with every step, and those that ended."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from scheduler.rollout import FULL, Ending, RolloutState, StepSeen
from scheduler.rollout_past import past_of
from scheduler.state import ClusterState, ModelState
from scheduler.verdicts import GateResult
from sie_stream.cli.output import as_text
from sie_stream.cli.since import shown_time
from sie_stream.ids import variant_unit
from sie_stream.sketch import quantile

ROLLOUTS = ("model", "variant", "version", "phase", "step", "share", "replicas", "note")
STEPS = ("share", "state", "held_s", "samples", "samples_min", "errors", "p99_ms", "stable_p99_ms", "gates")
HISTORY = ["ended", "model", "variant", "version", "ending", "took_s", "steps", "why"]
ENDED_SHOWN = 3
SHADOW = "shadow"
"""The step before the first share: copies of requests are compared, and nothing is answered by them."""


def status_rows(state: ClusterState, model: str = "") -> list[dict[str, Any]]:
    """One row for each rollout under way."""
    return [_row(state, found, rollout) for found, rollout in _under_way(state, model)]


def _under_way(state: ClusterState, model: str) -> Iterator[tuple[ModelState, RolloutState]]:
    for name, found in sorted(state.models.items()):
        if model in ("", name):
            for rollout in found.rollouts.values():
                yield found, rollout


def _row(state: ClusterState, model: ModelState, rollout: RolloutState) -> dict[str, Any]:
    unit = state.models.get(variant_unit(model.model, rollout.variant))
    ready = sum(replica.state == "ready" and not replica.awaited for replica in unit.replicas) if unit else 0
    waits = [] if unit is None else [unit.message]
    phase = SHADOW if rollout.shadow else rollout.phase
    note = rollout.holding or " ".join(filter(None, waits))
    return {
        "model": model.model,
        "rollout": rollout.rollout,
        "variant": rollout.variant,
        "version": f"{rollout.version_before} -> {rollout.version}",
        "phase": f"{phase}, paused by {rollout.paused}" if rollout.paused else phase,
        "step": SHADOW if rollout.shadow else f"{rollout.step + 1}/{len(rollout.plan.steps)}",
        "share": _percent(rollout.share),
        "replicas": f"{ready}/{unit.replicas_wanted if unit else 0}",
        "held_s": round((state.now_ms - rollout.since_ms) / 1_000, 1),
        "samples": rollout.new.samples,
        "samples_min": rollout.plan.samples_min,
        "errors": rollout.new.failed + rollout.new.expired,
        "gates": _gates(rollout.gates),
        "note": "; ".join(filter(None, [note, _shadow_note(rollout)])),
        "gate_results": [msgspec.to_builtins(gate) for gate in rollout.gates],
        "steps": step_rows(rollout, state.now_ms),
        "route_held": model.route_wait is None,
    }


def _shadow_note(rollout: RolloutState) -> str:
    if not rollout.shadow:
        return ""
    seen = f"{rollout.new.samples} of {rollout.plan.samples_min} samples"
    return f"copies are compared, nothing is answered by it: {seen}"


def step_rows(rollout: RolloutState, now_ms: int) -> list[dict[str, Any]]:
    """Every step of the plan: those that passed, the present one, and what is to come."""
    last = len(rollout.steps) - 1
    rows = [
        _step(seen, _left_as(seen, rollout.ending if number == last else None), rollout.plan.samples_min)
        for number, seen in enumerate(rollout.steps)
    ]
    if rollout.shadow or (rollout.phase in ("serving", "adopting") and rollout.step >= 0):
        new = rollout.new
        here = StepSeen(
            rollout.share,
            rollout.step_ms,
            now_ms,
            new.samples,
            new.failed + new.expired,
            rollout.windows,
            quantile(new.latency, 0.99),
            quantile(rollout.old.latency, 0.99),
            rollout.gates,
        )
        rows.append(_step(here, "adopting" if rollout.phase == "adopting" else "now", rollout.plan.samples_min))
    if rollout.phase != "ended":
        ahead = [_share(share) for share in rollout.plan.steps[rollout.step + 1 :]]
        if rollout.plan.shadow and rollout.phase == "loading":
            ahead = [SHADOW, *ahead]
        to_come = {"state": "to come", "samples_min": rollout.plan.samples_min}
        rows += [dict.fromkeys(STEPS) | to_come | {"share": share} for share in ahead]
    return rows


def _left_as(seen: StepSeen, ending: Ending | None) -> str:
    """How a step was left; `ending`: of the rollout, if it was its last one."""
    if ending not in (None, "completed"):
        return "aborted" if ending == "aborted" else "failed"
    return f"promoted by {seen.promoted_by}" if seen.promoted_by else "passed"


def _step(seen: StepSeen, state: str, samples_min: int) -> dict[str, Any]:
    return {
        "share": _share(seen.share),
        "state": state,
        "held_s": round((seen.ended_ms - seen.started_ms) / 1_000, 1),
        "samples": seen.samples,
        "samples_min": samples_min,
        "errors": seen.errors,
        "p99_ms": _ms(seen.p99_ms),
        "stable_p99_ms": _ms(seen.stable_p99_ms),
        "gates": _gates(seen.gates),
        "gate_results": [msgspec.to_builtins(gate) for gate in seen.gates],
    }


def history_rows(state: ClusterState, model: str = "") -> list[dict[str, Any]]:
    """Rollouts that ended, oldest first; also of models that were deleted."""
    past = [(name, one) for name in with_a_past(state) if model in ("", name) for one in past_of(state, name)]
    return [
        {
            "model": name,
            "rollout": rollout.rollout,
            "variant": rollout.variant,
            "version": rollout.version,
            "from": rollout.version_before,
            "started": shown_time(rollout.started_ms),
            "ended": shown_time(rollout.ended_ms),
            "took_s": round((rollout.ended_ms - rollout.started_ms) / 1_000, 1),
            "ending": rollout.ending,
            "why": rollout.why,
            "actor": rollout.actor,
            "steps": step_rows(rollout, rollout.ended_ms),
            "gate_results": [msgspec.to_builtins(gate) for gate in rollout.gates],
        }
        for name, rollout in sorted(past, key=lambda one: one[1].ended_ms)
    ]


def with_a_past(state: ClusterState) -> list[str]:
    """Names of the models that there are, and of deleted ones whose rollouts are remembered."""
    return sorted(state.models.keys() | state.gone_rollouts.keys())


def history_table_rows(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The same in few words, for people."""
    return [
        {
            **row,
            "ended": f"{datetime.fromisoformat(row['ended']):%Y-%m-%d %H:%M:%S}",
            "version": f"{row['from']} -> {row['version']}",
            "steps": " ".join(one["share"].replace(" ", "") for one in row["steps"]) or "none",
        }
        for row in rows
    ]


def picture(state: ClusterState, model: str) -> Group:
    """Rollouts under way, each with all its steps; below, what ended last."""
    parts: list[RenderableType] = []
    for row in status_rows(state, model):
        parts += [_table(ROLLOUTS, [row]), Text(), _table(STEPS, row["steps"], indent=2), Text()]
    ended = history_rows(state, model)
    lines = [
        f"{row['ended']}  {row['model']}  {row['version']}  {row['ending']}: {row['why']}"
        for row in history_table_rows(ended[-ENDED_SHOWN:])
    ]
    if not parts:
        parts = [Text("no rollout is under way")]
        if ended and model and ended[-1]["steps"]:
            parts += [Text(f"the last one, {ended[-1]['version']}:"), _table(STEPS, ended[-1]["steps"], indent=2)]
    return Group(*parts, *[Text(line, style="dim") for line in lines])


def _table(columns: Sequence[str], rows: Sequence[Mapping[str, Any]], indent: int = 0) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        table.add_column(" " * (0 if number else indent) + column.upper().replace("_", " "), overflow="fold")
    for row in rows:
        cells = [_cell(row[column]) for column in columns]
        style = "bold" if row.get("state") in ("now", "adopting") else "dim" if row.get("state") == "to come" else ""
        table.add_row(*as_text((" " * indent + cells[0], *cells[1:])), style=style)
    return table


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(str(one) for one in value)
    return "-" if value is None else str(value)


def _gates(gates: Sequence[GateResult]) -> list[str]:
    """Those that do not pass, each with its numbers; else how many pass."""
    bad = [f"{gate.verdict}: {gate}" for gate in gates if gate.verdict != "pass"]
    return bad or ([f"{len(gates)} pass"] if gates else [])


def _share(share: int) -> str:
    """Of a step: 0 is the one with copies only."""
    return _percent(share) if share else SHADOW


def _percent(share: int) -> str:
    return f"{share * 100 / FULL:g} %"


def _ms(value: float | None) -> float | None:
    return None if value is None else round(value, 1)
