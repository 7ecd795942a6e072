"""Elastic replicas: how many replicas of one model are wanted, between its minimum and its maximum.

`decide(policy, state, load)` is pure; time is that of the observation. `scheduler/demand.py` has the law that turns a
load into a need, and its sources. Here is what keeps the answer calm:

- One change at a time. While fewer replicas are ready than wanted, they are on their way and count as supply; while
  more are ready, some are leaving. Until that is over, or has taken much longer than a cold start, nothing changes,
  unless what arrives is more than all of them will take.
- Growing looks ahead by the cold start: at the arrival rate then, and at the backlog that will have piled up by then.
- Hysteresis: shrinking asks whether fewer replicas would do for a load that is a quarter higher.
- Stabilisation window, as the Kubernetes HorizontalPodAutoscaler has it: replicas leave when they were not needed for
  a whole window, down to the largest need in it, and at most half of them at once. Growing by at most a factor of 2 in
  15 s (or by 4) is also from there; a change that takes a longer cold start may be as much larger.
- A sudden jump of the arrivals is answered by the observation after it, once, in its full size.
- Waits and windows scale with the cold start of the model: what is slow to come back is slow to go. A model that may go
  to zero does so after ten idle cold starts (within limits): whoever waits for a constant times the price of a return
  pays at most a constant factor more than one who knew the future (ski rental; Karlin et al., 1988).
- p99 above the SLA although the law is content: the law is wrong about this model. One replica more, kept for a while;
  if it was needed again, for twice as long the next time.
"""

from __future__ import annotations

from functools import cache
from typing import Literal

from msgspec import Struct, structs

from scheduler.counts import counted
from scheduler.demand import Demand, Load, Need, forecast_per_s, need_of, observed
from sie_stream.spec.model import ModelSpec, Tag

Rule = Literal["hold", "bounds", "from_zero", "to_zero", "grow", "shrink", "sla"]
REASONED: tuple[Rule, ...] = ("from_zero", "grow", "shrink", "sla")
"""Changes that follow from the load: their reasons end with its numbers. Most observations change nothing, and nobody
reads why.
"""

HYSTERESIS = 1.25
SHARE_FOR_WAITING = 2
"""Of a p99 without a declared queue time, one part in so many may be spent waiting."""
GROWTH_STEP = 4
GROWTH_MS = 15_000
SHRINK_FACTOR = 2
WINDOW_MS = 300_000
"""The HorizontalPodAutoscaler's default. Traffic that wanders within minutes does not load and unload replicas."""
RESERVE_WINDOWS = 2
"""Of models that take turns on devices: what is not needed rests there, loaded, until the next burst."""
JUMP_FACTOR = 1.25
"""Growing waits for one more observation while the last is so far above the level."""
PATIENCE_FACTOR = 2
"""A p99 above the SLA is the law's fault when it stays for twice as long as a backlog may take to drain."""
EXTRA_KEEP_MS = 600_000
EXTRA_KEEP_MAX_MS = 14_400_000


class Aim(Struct, frozen=True):
    """What the business tags mean for capacity."""

    target_bp: int
    """Highest average utilisation when growing."""
    late_ppm: int
    """Requests in a million that may wait longer than promised."""
    drain_ms: int = 10_000
    """So long a backlog may take to drain; or one cold start, if that is longer."""


AIMS: dict[Tag, Aim] = {
    "high-sla": Aim(6_000, 100),
    "a/b-test": Aim(7_500, 10_000),
    "cost-sensitive": Aim(8_000, 10_000),
    "batch-job": Aim(9_000, 10_000, 600_000),
}
"""The first tag in this order counts."""
AIM = Aim(7_500, 10_000)


@cache
def _aim_of(tags: tuple[Tag, ...]) -> Aim:
    """There are few sets of tags, and every look asks for each model."""
    return next((aim for tag, aim in AIMS.items() if tag in tags), AIM)


RESERVE_BP = 1_500
"""So much lower is the aim of models that take turns on devices: a replica more is a reserve that is loaded already,
on a device where another computes."""
NEVER_ZERO: tuple[Tag, ...] = ("high-sla", "a/b-test")
"""An arm of a test that pays for cold starts is not comparable with the other."""


@cache
def _least_of(tags: tuple[Tag, ...]) -> int:
    return 1 if any(tag in NEVER_ZERO for tag in tags) else 0


class ScalePolicy(Struct, frozen=True):
    """What the declaration says. To hold a model down (scheduler/yielding.py), lower `replicas_max`."""

    model: str
    replicas_min: int
    replicas_max: int
    p99_ms: int | None = None
    queue_ms: int | None = None
    tags: tuple[Tag, ...] = ()
    sharing: int = 1
    """So many engines take turns on one device, so that a replica is worth so much less than a device. What is measured
    is replica time of those that have the device to themselves, as the others rest (scheduler/time_slices.py)."""

    @property
    def floor(self) -> int:
        return min(max(self.replicas_min, _least_of(self.tags)), self.replicas_max)

    @property
    def aim(self) -> Aim:
        return _aim_of(self.tags)

    @property
    def target_bp(self) -> int:
        """Highest average utilisation when growing."""
        return self.aim.target_bp - (RESERVE_BP if self.sharing > 1 else 0)


class ScaleState(Struct, frozen=True):
    """What is kept from one decision to the next; a part of the scheduler's snapshot."""

    wanted: int
    changed_ms: int
    """When `wanted` last changed."""
    seen_ms: int
    """Time of the last observation."""
    busy_ms: int
    """When the model last had anything to do."""
    demand: Demand = Demand()
    low_since_ms: int | None = None
    """Since when fewer replicas than wanted would do, without a break; None: they would not."""
    low_need: int = 0
    """The largest need since then."""
    breach_since_ms: int | None = None
    """Since when p99 is above the SLA."""
    extra: int = 0
    """Replicas on top of what the law says, because it was wrong."""
    extra_until_ms: int = 0
    extra_keep_ms: int = EXTRA_KEEP_MS
    """How long the next of them is kept."""


class ScaleDecision(Struct, frozen=True):
    model: str
    at_ms: int
    before: int
    wanted: int
    rule: Rule
    need: int
    """What the load needs, before bounds and calm."""
    reason: str

    @property
    def changed(self) -> bool:
        return self.wanted != self.before


def policy_of(spec: ModelSpec) -> ScalePolicy:
    slas = spec.slas
    return ScalePolicy(
        spec.name, spec.replicas.min, spec.replicas.max, slas.p99_latency_ms, slas.max_queue_time_ms, spec.tags
    )


def first_state(policy: ScalePolicy, at_ms: int, wanted: int = 0) -> ScaleState:
    """State of a model that was placed with `wanted` replicas (moved into its bounds) at `at_ms`."""
    return ScaleState(min(max(wanted, policy.floor), policy.replicas_max), at_ms, at_ms, at_ms)


def cooldown_ms(cold_start_ms: int) -> int:
    """Between a change and the next growth."""
    return _within(cold_start_ms // 2, 5_000, 30_000)


def window_ms(cold_start_ms: int) -> int:
    """So long replicas must have been superfluous before they leave."""
    return _within(5 * cold_start_ms, WINDOW_MS, 600_000)


def _window_ms(policy: ScalePolicy, load: Load) -> int:
    return window_ms(load.cold_start_ms) * (RESERVE_WINDOWS if policy.sharing > 1 else 1)


def idle_ms(cold_start_ms: int) -> int:
    """So long a model must have been idle before it goes to zero."""
    return _within(10 * cold_start_ms, 60_000, 1_800_000)


def stuck_ms(cold_start_ms: int) -> int:
    """After so long a change that is not complete does not hold up the next one any more."""
    return 3 * cold_start_ms + 10_000


def growth_limit(wanted: int, cold_start_ms: int) -> int:
    """The most replicas that one change may lead to."""
    return max(wanted << _within(1 + cold_start_ms // GROWTH_MS, 1, 6), wanted + GROWTH_STEP)


def _within(value: int, low: int, high: int) -> int:
    return min(max(value, low), high)


def decide(policy: ScalePolicy, state: ScaleState, load: Load) -> tuple[ScaleState, ScaleDecision]:
    """The replicas wanted after one more observation, why, and the state to bring along next time.

    Call it once per observation and model. Observations older than the last are not counted.
    """
    if load.at_ms < state.seen_ms:
        said = f"The observation of {load.at_ms} is older than the last, of {state.seen_ms}."
        return state, ScaleDecision(policy.model, load.at_ms, state.wanted, state.wanted, "hold", state.wanted, said)
    state = _noticed(policy, state, load)
    ahead = forecast_per_s(state.demand, load.cold_start_ms)
    need = _need(policy, state, load, ahead, _backlog(policy, state, load))
    state = _stabilised(policy, state, load, ahead)
    wanted, rule, reason = _choice(policy, state, load, need)
    if rule in REASONED:
        reason = f"{reason} {_words(policy, state, load, need, ahead)}"
    decision = ScaleDecision(policy.model, load.at_ms, state.wanted, wanted, rule, need.replicas + state.extra, reason)
    return (_changed(state, decision) if decision.changed else state), decision


# ---------------------------------------------------------------- what is remembered


def _noticed(policy: ScalePolicy, state: ScaleState, load: Load) -> ScaleState:
    breached = policy.p99_ms is not None and load.p99_ms is not None and load.p99_ms > policy.p99_ms
    since = load.at_ms if state.breach_since_ms is None else state.breach_since_ms
    expired = state.extra > 0 and load.at_ms >= state.extra_until_ms
    return structs.replace(
        state,
        seen_ms=load.at_ms,
        busy_ms=state.busy_ms if load.idle else load.at_ms,
        demand=observed(state.demand, load),
        breach_since_ms=since if breached else None,
        extra=state.extra - 1 if expired else state.extra,
        extra_until_ms=load.at_ms + state.extra_keep_ms if expired else state.extra_until_ms,
    )


def _stabilised(policy: ScalePolicy, state: ScaleState, load: Load, ahead: float) -> ScaleState:
    """Keeps since when, and to what, the model could shrink: judged by a load that is higher by the hysteresis."""
    queued = load.waiting * state.demand.each_ms
    low = max(_need(policy, state, load, ahead * HYSTERESIS, queued).replicas + state.extra, policy.floor, 1)
    if low >= state.wanted:
        return structs.replace(state, low_since_ms=None, low_need=0)
    if state.low_since_ms is None:
        return structs.replace(state, low_since_ms=load.at_ms, low_need=low)
    return structs.replace(state, low_need=max(low, state.low_need))


def _changed(state: ScaleState, decision: ScaleDecision) -> ScaleState:
    state = structs.replace(
        state, wanted=decision.wanted, changed_ms=decision.at_ms, low_since_ms=None, low_need=0, breach_since_ms=None
    )
    if decision.rule != "sla":
        return state
    forgotten = decision.at_ms - state.extra_until_ms > EXTRA_KEEP_MAX_MS
    keep_ms = EXTRA_KEEP_MS if forgotten else state.extra_keep_ms
    return structs.replace(
        state,
        extra=state.extra + 1,
        extra_until_ms=decision.at_ms + keep_ms,
        extra_keep_ms=min(2 * keep_ms, EXTRA_KEEP_MAX_MS),
    )


# ---------------------------------------------------------------- what is needed


def _need(policy: ScalePolicy, state: ScaleState, load: Load, rate_per_s: float, queued_ms: float) -> Need:
    """queued_ms: replica time that waits in the queue."""
    each_ms = state.demand.each_ms
    aim = policy.aim
    budget_ms = _budget_ms(policy)
    promise = None if budget_ms is None else (budget_ms / each_ms, aim.late_ppm)
    drain_ms = max(policy.aim.drain_ms, load.cold_start_ms)
    offered = rate_per_s * each_ms * policy.sharing / 1000
    return need_of(offered, policy.target_bp, promise, queued_ms / drain_ms, policy.replicas_max)


def _budget_ms(policy: ScalePolicy) -> float | None:
    """How long a request may wait: as declared, else a part of its p99; None when neither is declared."""
    if policy.queue_ms is not None:
        return float(policy.queue_ms)
    return None if policy.p99_ms is None else policy.p99_ms / SHARE_FOR_WAITING


def _backlog(policy: ScalePolicy, state: ScaleState, load: Load) -> float:
    """Replica time waiting now, and what will have been added before a replica that is asked for now is ready."""
    each_ms = state.demand.each_ms
    short = max(state.demand.fast_per_s * each_ms / 1000 - state.wanted / policy.sharing, 0.0)
    return load.waiting * each_ms + short * load.cold_start_ms


# ---------------------------------------------------------------- what is wanted


def _choice(policy: ScalePolicy, state: ScaleState, load: Load, need: Need) -> tuple[int, Rule, str]:
    now, wanted = load.at_ms, state.wanted
    bounded = min(max(wanted, policy.floor), policy.replicas_max)
    if bounded != wanted:
        allowed = f"{policy.floor} to {policy.replicas_max} replicas are allowed."
        return bounded, "bounds", f"{wanted} -> {bounded}: {allowed}"
    asked = min(max(need.replicas + state.extra, policy.floor), policy.replicas_max)
    if wanted == 0:
        return _from_zero(policy, load, asked)
    held = _held(state, load)
    if held and not _outgrown(state, load, need):
        return wanted, "hold", f"Stays at {wanted}: {held}"
    if asked > wanted:
        if now < (ends := state.changed_ms + cooldown_ms(load.cold_start_ms)):
            return wanted, "hold", f"Stays at {wanted}, {asked} are needed: cools down for {ends - now} ms more."
        if state.demand.jump_per_s > state.demand.fast_per_s * JUMP_FACTOR:
            return wanted, "hold", f"Stays at {wanted}: arrivals jumped; the next observation tells how far."
        grown = min(asked, growth_limit(wanted, load.cold_start_ms))
        limited = f" of the {asked} needed, the most for one change" if grown < asked else ""
        return grown, "grow", f"{wanted} -> {grown}{limited}:"
    if state.breach_since_ms is not None:
        return _breached(policy, state, load)
    if policy.floor == 0 and now - state.busy_ms >= idle_ms(load.cold_start_ms):
        limit = idle_ms(load.cold_start_ms)
        return 0, "to_zero", f"{wanted} -> 0: idle for {now - state.busy_ms} ms, {limit} ms are enough. {_cold(load)}"
    return _shrunk(policy, state, load)


def _from_zero(policy: ScalePolicy, load: Load, asked: int) -> tuple[int, Rule, str]:
    if load.waiting == 0 and load.arrivals == 0:
        return 0, "hold", "Stays at 0: nothing waits."
    waits = counted(load.waiting, "request waits", "requests wait")
    grown = min(max(asked, 1), policy.replicas_max, growth_limit(0, load.cold_start_ms))
    if grown == 0:
        return 0, "hold", f"Stays at 0, held down: {waits}."
    return grown, "from_zero", f"0 -> {grown}: {waits}. {_cold(load)}"


def _held(state: ScaleState, load: Load) -> str:
    """Why no change is made whatever the load is; empty when none is under way."""
    taken_ms = load.at_ms - state.changed_ms
    if load.ready == state.wanted or taken_ms >= stuck_ms(load.cold_start_ms):
        return ""
    if load.ready < state.wanted:
        return f"{load.ready} ready and {load.loading} loading, {taken_ms} ms after the last change."
    return f"{load.ready - state.wanted} still leaving, {taken_ms} ms after the last change."


def _outgrown(state: ScaleState, load: Load, need: Need) -> bool:
    """What arrives would keep more busy than are ready and on their way, all together."""
    return load.ready < state.wanted == load.ready + load.loading and need.offered > state.wanted


def _breached(policy: ScalePolicy, state: ScaleState, load: Load) -> tuple[int, Rule, str]:
    """p99 is above the SLA, but the law asks for nothing."""
    wanted = state.wanted
    said = f"p99 {load.p99_ms} ms is above the SLA of {policy.p99_ms} ms"
    if wanted >= policy.replicas_max:
        return wanted, "hold", f"Stays at {wanted}, the most that is allowed: {said}."
    if load.waiting == 0 and load.utilisation_bp * policy.sharing < policy.target_bp:
        return wanted, "hold", f"Stays at {wanted}: {said}, but nothing waits; more replicas would not help."
    patience_ms = PATIENCE_FACTOR * max(policy.aim.drain_ms, load.cold_start_ms)
    since_ms = max(state.breach_since_ms or 0, state.changed_ms)
    if load.at_ms - since_ms < patience_ms:
        return wanted, "hold", f"Stays at {wanted}: {said} since {load.at_ms - since_ms} of {patience_ms} ms."
    return wanted + 1, "sla", f"{wanted} -> {wanted + 1}: {said} since {load.at_ms - since_ms} ms."


def _shrunk(policy: ScalePolicy, state: ScaleState, load: Load) -> tuple[int, Rule, str]:
    wanted = state.wanted
    if state.low_since_ms is None:
        return wanted, "hold", f"Stays at {wanted}."
    low_ms, window = load.at_ms - state.low_since_ms, _window_ms(policy, load)
    if low_ms < window:
        return wanted, "hold", f"Stays at {wanted}, {state.low_need} would do since {low_ms} of {window} ms."
    least = max(state.low_need, wanted - max(wanted // SHRINK_FACTOR, 1), policy.floor)
    return least, "shrink", f"{wanted} -> {least}: {state.low_need} would have done for {low_ms} ms."


def _cold(load: Load) -> str:
    return f"A cold start takes {load.cold_start_ms} ms."


def _words(policy: ScalePolicy, state: ScaleState, load: Load, need: Need, ahead: float) -> str:
    each_ms = state.demand.each_ms
    taking_turns = f", {policy.sharing} of which share a device," if policy.sharing > 1 else ""
    said = [
        f"{state.demand.fast_per_s:.1f} requests/s ({ahead:.1f} in {load.cold_start_ms} ms) of {each_ms:.0f} ms"
        f"{taking_turns} keep "
        f"{need.offered:.2f} replicas busy: {need.by_target} at {policy.target_bp // 100} % utilisation"
    ]
    if need.by_wait:
        late, budget = policy.aim.late_ppm, _budget_ms(policy) or 0
        said.append(f"{need.by_wait} so that at most {late} in a million wait over {budget:.0f} ms")
    if need.by_backlog:
        said.append(f"{need.by_backlog} to drain the queue of {load.waiting}")
    if state.extra:
        said.append(f"{state.extra} more because p99 was above the SLA")
    return ", ".join(said) + f"; {policy.floor} to {policy.replicas_max} are allowed."
