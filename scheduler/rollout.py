"""One rollout as a pure state machine: `advance(state, seen, now_ms)` gives the next state, and what to say of it.

    loading -> serving (step 0, 1, ... with growing shares) -> adopting -> completed
       |          |  holds while paused, while statistics are missing, or while a gate is unsure
       |          +--> rolled_back (a gate was breached, or its replicas were given up)
       +--> refused (golden requests, or it does not load)        aborted: a person said so

    adopting -> rolled_back as well, as long as replicas of the version before still serve

`seen` is what the fold knows of the cluster at this moment; time is log time. Statistics come as windows through
`add_window` of rollout_windows.py. Nothing here promotes without samples: when windows stop, the rollout holds.
"""

from __future__ import annotations

import math
from typing import Literal

from msgspec import Raw, Struct, structs

from scheduler.actors import named, named_first
from scheduler.counts import counted, replicas_in_words
from scheduler.latency_gates import LatencyWindow, StableLatency
from scheduler.rollout_seen import Seen
from scheduler.verdicts import GateLimits, GateResult, as_numbers, in_words
from sie_stream.rollout_records import VariantRule, VariantStats
from sie_stream.routing import Range
from sie_stream.sketch import quantile

FULL = 10_000
STATS_LOST_MS = 12_000
"""Without a complete window for so long the statistics count as lost."""
TOLD_AGAIN_MS = 600_000
"""A reason to hold that comes and goes is told again after so long: sparse traffic is no news each time it pauses."""

NO_STATISTICS = "no statistics"
DIFFERS = "differs"

Phase = Literal["loading", "serving", "adopting", "ended"]
Ending = Literal["completed", "rolled_back", "aborted", "refused", "undone"]


class Plan(Struct, frozen=True):
    """How the new version takes over. `steps`: shares out of 10,000, rising."""

    steps: tuple[int, ...] = (1_000, 2_000, 5_000, FULL)
    hold_ms: int = 15_000
    samples_min: int = 200
    shadow: bool = False
    promotes: bool = True
    """False: a variant that is only compared (a/b/n); it stays at its last step until somebody ends it."""
    limits: GateLimits = GateLimits()
    rules: tuple[VariantRule, ...] = ()


class StepSeen(Struct, frozen=True):
    """A step that was left, as it was then. `share` 0: the one with copies only."""

    share: int
    started_ms: int
    ended_ms: int
    samples: int
    errors: int
    windows: int
    p99_ms: float | None
    stable_p99_ms: float | None
    """Of the stable version since the rollout began."""
    gates: tuple[GateResult, ...]
    promoted_by: str = ""
    """Who sent it past this step whatever its gates said; empty: nobody."""


class RolloutState(Struct, frozen=True):
    rollout: str
    """`r-OFFSET` of the record that started it."""
    variant: str
    version: str
    version_before: str
    spec: Raw
    spec_before: Raw
    plan: Plan
    started_ms: int
    actor: str = ""
    phase: Phase = "loading"
    step: int = -1
    """Index of the present step; -1: no traffic yet, or copies only."""
    share: int = 0
    """Of the keys, out of 10,000, in the route."""
    ranges: tuple[Range, ...] = ()
    since_ms: int = 0
    """Since when the present step is held: later than its start when it had to hold without statistics."""
    step_ms: int = 0
    """When the present step, or that with copies only, began; 0: none has."""
    steps: tuple[StepSeen, ...] = ()
    """Those that were left, oldest first."""
    forced: bool = False
    """Somebody promoted it whatever the gates say: they are still judged, and roll nothing back."""
    promoted_by: str = ""
    """Who did."""
    paused: str = ""
    """Who paused it."""
    holding: str = ""
    """Why it does not go on; said once, and again when it changes."""
    holding_told: bool = False
    """Whether that was said: not where it was said a short time before, and something else came between."""
    told: dict[str, int] = {}
    """{reason to hold: when it was said} in the present step, in log time."""
    new: VariantStats = VariantStats()
    """Of the present step."""
    old: VariantStats = VariantStats()
    """Of the stable version, since the rollout took traffic."""
    latency: tuple[LatencyWindow, ...] = ()
    """Of the windows of the present step."""
    stable_latency: StableLatency = StableLatency()
    windows: int = 0
    """Counted in this step."""
    broken_windows: int = 0
    """Not counted, because something of them may be missing."""
    window_end_ms: int = 0
    """End of the newest window of the new version."""
    stable_end_ms: int = 0
    heard_ms: int = 0
    answered_ms: int = 0
    """Log time at which the newest complete window came: of either version, and of the new one."""
    gates: tuple[GateResult, ...] = ()
    ending: Ending | None = None
    ended_ms: int = 0
    why: str = ""
    bypassed: bool = False
    """Its share goes to the stable version for the time (see rollout_bypass.py)."""

    @property
    def shadow(self) -> int:
        return FULL if self.plan.shadow and self.phase == "serving" and self.step < 0 else 0

    @property
    def next_share(self) -> int:
        """The share to prepare replicas for: that of the next step while one is being left, else the present one."""
        if self.phase == "loading":
            return self.plan.steps[0]
        return self.plan.steps[min(self.step + 1, len(self.plan.steps) - 1)]

    def part_of(self, replicas: int) -> int:
        """Replicas that the next share needs, where all keys have so many."""
        return max(1, math.ceil(replicas * self.next_share / FULL))


class Said(Struct, frozen=True):
    """What is to be recorded as a decision."""

    kind: str
    reason: str
    do_nothing: str = ""


def ended(state: RolloutState, ending: Ending, why: str, now_ms: int) -> RolloutState:
    """Weight 0 at once."""
    return structs.replace(
        _left(state, now_ms),
        phase="ended",
        ending=ending,
        ended_ms=now_ms,
        why=why,
        share=0,
        ranges=(),
        holding="",
        paused="",
        bypassed=False,
    )


def _left(state: RolloutState, now_ms: int) -> RolloutState:
    """The present step is over: keep what was seen of it."""
    if not state.step_ms:
        return state
    new = state.new
    seen = StepSeen(
        share=state.share,
        started_ms=state.step_ms,
        ended_ms=now_ms,
        samples=new.samples,
        errors=new.failed + new.expired,
        windows=state.windows,
        p99_ms=quantile(new.latency, 0.99),
        stable_p99_ms=quantile(state.old.latency, 0.99),
        gates=state.gates,
        promoted_by=state.promoted_by,
    )
    return structs.replace(state, steps=(*state.steps, seen))


def advance(state: RolloutState, seen: Seen, now_ms: int) -> tuple[RolloutState, Said | None]:
    """What follows from what is seen now. At most one transition for each call."""
    if state.phase == "ended":
        return state, None
    if seen.deleted:
        return _end(state, "aborted", "The model was deleted.", now_ms)
    if state.phase == "adopting":
        return _adopting(state, seen, now_ms)
    if seen.golden and state.phase == "loading":
        return _end(state, "refused", f"Golden requests: {seen.golden}", now_ms)
    if seen.given_up:
        ending: Ending = "refused" if state.phase == "loading" else "rolled_back"
        return _end(state, ending, f"Its replicas were given up: {seen.failure}", now_ms)
    if state.phase == "loading":
        return _loading(state, seen, now_ms)
    return _serving(state, seen, now_ms)


def _end(state: RolloutState, ending: Ending, why: str, now_ms: int) -> tuple[RolloutState, Said]:
    said = Said(f"rollout_{ending}", why, f"{_share(state.share)} of the keys would go on to {state.version}.")
    return ended(state, ending, why, now_ms), said


def _loading(state: RolloutState, seen: Seen, now_ms: int) -> tuple[RolloutState, Said | None]:
    if seen.ready < max(1, seen.wanted) or state.paused:
        return _hold(state, _waits_for_room(seen), now_ms) if seen.no_room else (state, None)
    base = structs.replace(state, phase="serving", since_ms=now_ms, heard_ms=now_ms, holding="")
    replicas = counted(seen.ready, "replica is", "replicas are")
    passes = "passes" if seen.ready == 1 else "pass"
    if state.plan.shadow:
        base = structs.replace(base, step_ms=now_ms)
        reason = f"{replicas} ready and {passes}. It gets copies of all requests and answers none."
        return base, Said("rollout_shadowing", reason, "Nothing would be known of it.")
    return _to_step(base, 0, f"{replicas} ready and {passes} the golden requests.", now_ms)


def _to_step(state: RolloutState, step: int, reason: str, now_ms: int) -> tuple[RolloutState, Said]:
    share = state.plan.steps[step]
    moved = structs.replace(
        _counting_anew(_left(state, now_ms), now_ms), step=step, share=share, step_ms=now_ms, holding="", told={}
    )
    return moved, Said("rollout_step", f"{reason} {_share(share)} of the keys go to {state.version}.", "It would wait.")


def _counting_anew(state: RolloutState, now_ms: int) -> RolloutState:
    return structs.replace(state, since_ms=now_ms, new=VariantStats(), latency=(), windows=0, gates=())


def _serving(state: RolloutState, seen: Seen, now_ms: int) -> tuple[RolloutState, Said | None]:
    breached = in_words(state.gates, "breach")
    if breached:
        return _end(state, "rolled_back", breached, now_ms)
    differs = in_words(state.gates, "differs")
    if differs and DIFFERS not in state.told:
        return _differing(state, differs, now_ms)
    if state.paused or state.bypassed:
        return state, None
    if now_ms - state.heard_ms > STATS_LOST_MS:
        why = (
            f"{NO_STATISTICS}: for {STATS_LOST_MS // 1_000} s no answers were reported (no traffic, nobody counts "
            "them, or an open transaction hides them), and nothing is promoted without; what was counted stays"
        )
        return _hold(state, why, now_ms)
    if state.holding.startswith(NO_STATISTICS):
        goes_on = structs.replace(state, holding="", since_ms=now_ms)
        if not state.holding_told:
            return goes_on, None
        said = Said(
            "rollout_goes_on",
            "Statistics come again; what was counted stays, and the step is held anew.",
            "It would hold.",
        )
        return goes_on, said
    last = state.step == len(state.plan.steps) - 1
    if last and not state.plan.promotes:
        return state, None
    if now_ms - state.since_ms < state.plan.hold_ms or not state.windows:
        return state, None
    if state.new.by_key < state.plan.samples_min:
        few = f"too few samples of the new version: {state.new.by_key} of {state.plan.samples_min}"
        beside = f", beside {state.new.pinned} that were pinned to it" if state.new.pinned else ""
        return _hold_quietly(state, few + beside)
    if state.answered_ms and now_ms - state.answered_ms > STATS_LOST_MS:
        # It may hang, and then it has no errors and no latencies: its last good ones prove nothing.
        return _hold(state, f"the new version is silent: no answer of it for {STATS_LOST_MS // 1_000} s", now_ms)
    limits = state.plan.limits
    unsure = [gate for gate in state.gates if gate.verdict == "unsure" and not limits.only_reports(gate.gate)]
    if unsure:
        return _hold_quietly(state, f"not sure yet: {', '.join(gate.gate for gate in unsure)}")
    if last:
        return _adopt(state, f"All gates passed at {_share(state.share)}.", now_ms)
    if seen.ready < seen.wanted:
        return _hold(state, _waits_for_room(seen), now_ms)
    return _to_step(state, state.step + 1, f"{_numbers(state)}.", now_ms)


def _waits_for_room(seen: Seen) -> str:
    why = f": {seen.lacking}" if seen.lacking else ""
    needs, ready = replicas_in_words(max(1, seen.wanted)), counted(seen.ready, "is", "are")
    return f"the next step needs {needs}, {ready} ready{why}"


def _differing(state: RolloutState, differs: str, now_ms: int) -> tuple[RolloutState, Said]:
    told = structs.replace(state, told={**state.told, DIFFERS: now_ms})
    return told, Said("rollout_differs", f"Its answers are not those of {state.version_before}: {differs} It goes on.")


def _hold(state: RolloutState, why: str, now_ms: int) -> tuple[RolloutState, Said | None]:
    """Say why it waits: once for as long as it does, and not again soon when that reason comes and goes."""
    reason = why.partition(":")[0]
    same = state.holding.partition(":")[0] == reason
    before_ms = state.told.get(reason)
    if (same and state.holding_told) or (before_ms is not None and now_ms - before_ms < TOLD_AGAIN_MS):
        silent = structs.replace(state, holding=why, holding_told=same and state.holding_told)
        return silent, None
    held = structs.replace(state, holding=why, holding_told=True, told={**state.told, reason: now_ms})
    return held, Said("rollout_held", f"It holds: {why}.", "It would go on without being judged.")


def _hold_quietly(state: RolloutState, why: str) -> tuple[RolloutState, None]:
    """Not said: the numbers in the reason grow all the time."""
    return structs.replace(state, holding=why, holding_told=False), None


def _adopt(state: RolloutState, reason: str, now_ms: int) -> tuple[RolloutState, Said]:
    adopting = structs.replace(state, phase="adopting", since_ms=now_ms, holding="", paused="")
    said = Said(
        "rollout_adopting", f"{reason} The model itself takes {state.version} over, behind the rollout's replicas."
    )
    return adopting, said


def _adopting(state: RolloutState, seen: Seen, now_ms: int) -> tuple[RolloutState, Said | None]:
    if not seen.adopted:
        why = "" if state.forced else in_words(state.gates, "breach")
        if seen.given_up:
            why = f"The replicas that were to take it over were given up: {seen.failure}"
        if not why:
            return state, None
        if seen.old_ready:
            return _end(state, "rolled_back", why, now_ms)
        held = f"{state.version_before} has no replica left to go back to, so it goes on in spite of {why}"
        return _hold(state, held, now_ms)
    why = f"Promoted by {named(state.promoted_by)}." if state.forced else "All steps passed."
    done = ended(state, "completed", why, now_ms)
    return done, Said(
        "rollout_completed", f"{state.version} is the stable version.", "Its traffic would have two homes."
    )


# ---------------------------------------------------------------- what people say


def paused(state: RolloutState, actor: str) -> RolloutState | None:
    """None: there is nothing to pause."""
    if state.phase not in ("loading", "serving") or state.paused:
        return None
    return structs.replace(state, paused=named(actor))


def resumed(state: RolloutState, now_ms: int) -> RolloutState | None:
    return structs.replace(state, paused="", since_ms=now_ms, heard_ms=now_ms) if state.paused else None


def promoted(state: RolloutState, seen: Seen, actor: str, now_ms: int) -> tuple[RolloutState, Said] | None:
    """To all keys at once, whatever the gates say. None: it has nothing ready, or is past that."""
    if state.phase not in ("loading", "serving") or not seen.ready:
        return None
    last = len(state.plan.steps) - 1
    by = structs.replace(state, forced=True, promoted_by=named(actor), bypassed=False)
    reason = f"{named_first(actor)} promotes it."
    if state.phase == "serving" and state.step == last and state.share == FULL:
        return _adopt(by, reason, now_ms)
    base = structs.replace(by, phase="serving", paused="", heard_ms=now_ms)
    full = structs.replace(
        base, plan=structs.replace(base.plan, steps=(FULL,), hold_ms=0, samples_min=1, promotes=True)
    )
    moved, said = _to_step(full, 0, reason, now_ms)
    return structs.replace(moved, phase="adopting"), said


def _numbers(state: RolloutState) -> str:
    answers = counted(state.new.samples, "answer", "answers")
    windows = counted(state.windows, "window", "windows")
    return f"{answers} in {windows} at {_share(state.share)}: {as_numbers(state.gates)}"


def _share(share: int) -> str:
    return f"{share / 100:g} %"
