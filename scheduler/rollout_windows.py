"""Windows of answers, counted into a rollout and judged."""

from __future__ import annotations

from msgspec import structs

from scheduler.gates import added, judge
from scheduler.latency_gates import with_window
from scheduler.rollout import RolloutState
from sie_stream.rollout_records import STABLE, VariantWindow


def add_window(state: RolloutState, window: VariantWindow, now_ms: int) -> RolloutState:
    """Count a window of the new or of the stable version, and judge. Repeated, broken and older ones change nothing."""
    if state.phase not in ("serving", "adopting"):
        return state
    is_new = window.variant == state.variant and window.version == state.version
    if not is_new and (window.variant != STABLE or window.version == state.version):
        return state  # of another variant, or of the model itself that has taken the version over
    seen_to_ms = state.window_end_ms if is_new else state.stable_end_ms
    if window.end_ms <= seen_to_ms:
        return state
    if not window.complete:
        return structs.replace(state, broken_windows=state.broken_windows + 1)
    if not is_new:
        old, slow = added(state.old, window.stats), state.stable_latency
        slow = slow.with_window(window.start_ms, window.stats.latency)
        return structs.replace(state, old=old, stable_latency=slow, stable_end_ms=window.end_ms, heard_ms=now_ms)
    moved = structs.replace(state, window_end_ms=window.end_ms, heard_ms=now_ms, answered_ms=now_ms)
    if window.start_ms < state.step_ms and state.step > 0:
        return moved  # of the step before
    new = added(state.new, window.stats)
    latency = with_window(state.latency, state.stable_latency, window.start_ms, window.stats.latency)
    gates = judge(new, state.old, state.plan.limits, latency, state.stable_latency.slowest_ms)
    return structs.replace(moved, new=new, latency=latency, windows=state.windows + 1, gates=gates)
