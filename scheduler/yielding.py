"""Who gives way when a pool of devices gets full, and who gets back when there is room again.

`relieve(state, pools, models)` is pure; time is that of the observation. A pool is all devices of one kind that models
compete for (usually a device class). Two things make it act:

- A pool above 85 % gives up capacity until it would be at 80 %: cost-sensitive models move to a cheaper pool, the
  largest first; then batch-job models give up replicas, one at a time from whoever has most above its minimum.
- A high-sla model lacks replicas that the pool has no room for: batch-job models give up that much at once, however
  full the pool is counted. Moving comes second here, because it takes longer.

The other way: when a pool is below 70 % and nothing changed for RESTORE_MS, one step is taken back: a batch-job model
gets one replica more, or, once none is held down, a moved model comes home; only if the pool still is at or below 80 %
then.
So a step back never is the reason for the next step aside: 80 is below 85.

A model never goes below its minimum of replicas, and high-sla models are never touched. What is returned are caps and
homes, not placements: caps become `ScalePolicy.replicas_max`, homes a constraint of the solver.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct, structs

from sie_stream.spec.model import Tag

PRESSED_BP = 8_500
RELIEVED_BP = 8_000
RESTORE_BP = 7_000
RESTORE_MS = 30_000
SETTLE_MS = 5_000
"""A step aside for a full pool waits so long after the last: what was asked to leave needs time to."""


class Pool(Struct, frozen=True):
    """Devices of one kind. Capacity in any one whole unit: bytes, thousandths of devices, slots."""

    name: str
    capacity: int
    used: int
    cost: int
    """Per device and hour, in any one unit; only the order counts."""

    @property
    def utilisation_bp(self) -> int:
        return self.used * 10_000 // self.capacity if self.capacity else 10_000


class Tenant(Struct, frozen=True):
    """A model as far as it matters here."""

    model: str
    tags: tuple[Tag, ...]
    pool: str
    """Where its replicas are now; while it moves, where they were."""
    replicas: int
    """That it has now, also those that still load."""
    replicas_min: int
    units: int
    """Capacity that one replica takes."""
    wanted: int = 0
    """Replicas that its load needs (scheduler/autoscale.py), before any cap."""
    lacking: int = 0
    """Replicas that found no room."""
    cheaper: tuple[str, ...] = ()
    """Cheaper pools on which it can run and keep its SLA, best first."""


class Step(Struct, frozen=True):
    """One thing that one model does."""

    kind: Literal["move", "give_up", "get_back", "return"]
    model: str
    pool: str
    """Whose load this changes; of a move, where the model leaves."""
    to_pool: str
    """Of moves and returns; else empty."""
    replicas: int
    """The cap after a give_up or get_back; the replicas that move otherwise."""
    reason: str


class Moved(Struct, frozen=True):
    """A model away from home."""

    home: str
    now: str


class YieldState(Struct, frozen=True):
    """Who gave way; a part of the scheduler's snapshot."""

    caps: dict[str, int] = {}
    """{batch-job model: most replicas}, only while held down."""
    moved: dict[str, Moved] = {}
    changed_ms: dict[str, int] = {}
    """{pool: time of its last step}."""


class Relief(Struct, frozen=True):
    at_ms: int
    steps: tuple[Step, ...]
    unmet: tuple[str, ...]
    """One sentence for each pool that stays too full or short for high-sla models: nobody can give way."""


def relieve(
    state: YieldState, at_ms: int, pools: Sequence[Pool], models: Sequence[Tenant]
) -> tuple[YieldState, Relief]:
    """What has to give way now, or may come back. Models and pools that are not listed any more are forgotten.

    A model is in at most one step per call. Pools are taken in the order given, models of equal claim by name.
    """
    plan = _Plan(_forgotten(state, pools, models), at_ms, pools, models)
    for pool in pools:
        _make_room(plan, pool.name)
    for pool in pools:
        _give_back(plan, pool.name)
    return plan.state, Relief(at_ms, tuple(plan.steps), tuple(plan.unmet))


class _Plan:
    """The plan as it grows: what every pool and model would have once the steps so far are done."""

    def __init__(self, state: YieldState, at_ms: int, pools: Sequence[Pool], models: Sequence[Tenant]) -> None:
        self.state = state
        self.at_ms = at_ms
        self.pools = {pool.name: pool for pool in pools}
        self.models: dict[str, Tenant] = {}
        self.steps: list[Step] = []
        self.unmet: list[str] = []
        for model in sorted(models, key=lambda model: model.model):
            self.models[model.model] = self._as_intended(model)

    def _as_intended(self, model: Tenant) -> Tenant:
        """With the steps of earlier calls done, also those that are still under way: nobody is asked twice."""
        pool = self.state.moved[model.model].now if model.model in self.state.moved else model.pool
        replicas = min(model.replicas, self.state.caps.get(model.model, model.replicas))
        if model.pool in self.pools and pool in self.pools:
            self.use(model.pool, -model.replicas * model.units)
            self.use(pool, replicas * model.units)
        return structs.replace(model, pool=pool, replicas=replicas)

    def among(self, pool: str, tag: Tag) -> list[Tenant]:
        """Models of a pool with a tag that may still take a step. high-sla beside another tag protects."""
        busy = {step.model for step in self.steps}
        return [
            model
            for model in self.models.values()
            if model.pool == pool and tag in model.tags and "high-sla" not in model.tags and model.model not in busy
        ]

    def use(self, pool: str, units: int) -> None:
        found = self.pools[pool]
        self.pools[pool] = structs.replace(found, used=max(found.used + units, 0))

    def bp_with(self, pool: str, units: int) -> int:
        """Utilisation if `units` more were used, rounded up."""
        found = self.pools[pool]
        return -(-(found.used + units) * 10_000 // found.capacity) if found.capacity else 10_000

    def step(self, step: Step, **changes: dict[str, int] | dict[str, Moved]) -> None:
        self.steps.append(step)
        times = self.state.changed_ms | {step.pool: self.at_ms}
        self.state = structs.replace(self.state, changed_ms=times, **changes)

    def quiet_ms(self, pool: str) -> int:
        """Since the last step of a pool."""
        return self.at_ms - self.state.changed_ms.get(pool, -RESTORE_MS)


def _forgotten(state: YieldState, pools: Sequence[Pool], models: Sequence[Tenant]) -> YieldState:
    named = {model.model for model in models}
    held = {model.model for model in models if "batch-job" in model.tags and "high-sla" not in model.tags}
    there = {pool.name for pool in pools}
    return YieldState(
        {model: cap for model, cap in state.caps.items() if model in held},
        {model: way for model, way in state.moved.items() if model in named and {way.home, way.now} <= there},
        {pool: since for pool, since in state.changed_ms.items() if pool in there},
    )


# ---------------------------------------------------------------- stepping aside


def _make_room(plan: _Plan, name: str) -> None:
    pool = plan.pools[name]
    lacking = _lacking(plan, pool)
    if lacking > 0:
        why = f"high-sla models lack {lacking} units on {name}"
        freed = _give_up(plan, name, lacking, why)
        freed += _move_away(plan, name, lacking - freed, why)
        if freed < lacking:
            plan.unmet.append(
                f"{name}: {why}, and {freed} can be freed: no batch-job or cost-sensitive model can yield more."
            )
    full = plan.pools[name].utilisation_bp
    if full <= PRESSED_BP or plan.quiet_ms(name) < SETTLE_MS:
        return
    excess = plan.pools[name].used - pool.capacity * RELIEVED_BP // 10_000
    why = f"{name} is at {full / 100:.0f} %, above {PRESSED_BP // 100} %"
    freed = _move_away(plan, name, excess, why)
    freed += _give_up(plan, name, excess - freed, why)
    if plan.pools[name].utilisation_bp > PRESSED_BP:
        plan.unmet.append(f"{why}, and {freed} of {excess} units can be freed: no other model can yield.")


def _lacking(plan: _Plan, pool: Pool) -> int:
    """Units that high-sla models lack on a pool, beyond what is free on it."""
    needed = sum(
        model.lacking * model.units
        for model in plan.models.values()
        if model.pool == pool.name and "high-sla" in model.tags
    )
    return max(needed - max(pool.capacity - pool.used, 0), 0) if needed else 0


def _move_away(plan: _Plan, name: str, units: int, why: str) -> int:
    """Moves cost-sensitive models until `units` are free; returns how many are. The largest go first: fewest moves."""
    freed = 0
    movable = plan.among(name, "cost-sensitive")
    for model in sorted(movable, key=lambda model: (-model.replicas * model.units, model.model)):
        size = model.replicas * model.units
        target = next((to for to in model.cheaper if _takes(plan, to, name, size)), None)
        if freed >= units or size == 0 or target is None:
            continue
        home = plan.state.moved[model.model].home if model.model in plan.state.moved else name
        reason = f"{why}; {target} costs {plan.pools[target].cost} instead of {plan.pools[name].cost} and has room."
        step = Step("move", model.model, name, target, model.replicas, reason)
        plan.step(step, moved=plan.state.moved | {model.model: Moved(home, target)})
        plan.use(name, -size)
        plan.use(target, size)
        plan.models[model.model] = structs.replace(model, pool=target)
        freed += size
    return freed


def _takes(plan: _Plan, to: str, name: str, size: int) -> bool:
    cheap = to in plan.pools and plan.pools[to].cost < plan.pools[name].cost
    return cheap and plan.bp_with(to, size) <= RELIEVED_BP


def _give_up(plan: _Plan, name: str, units: int, why: str) -> int:
    """Takes replicas from batch-job models until `units` are free; returns how many are."""
    models = {model.model: model for model in plan.among(name, "batch-job")}
    left = {model: found.replicas for model, found in models.items()}
    freed = 0
    while freed < units:
        most = max(models, key=lambda model: (left[model] - models[model].replicas_min, model), default=None)
        if most is None or left[most] <= models[most].replicas_min:
            break
        left[most] -= 1
        freed += models[most].units
    for model, found in models.items():
        if left[model] < found.replicas:
            plan.step(
                Step(
                    "give_up",
                    model,
                    name,
                    "",
                    left[model],
                    f"{why}; {model} goes from {found.replicas} to {left[model]}.",
                ),
                caps=plan.state.caps | {model: left[model]},
            )
            plan.use(name, (left[model] - found.replicas) * found.units)
            plan.models[model] = structs.replace(found, replicas=left[model])
    return freed


# ---------------------------------------------------------------- coming back


def _give_back(plan: _Plan, name: str) -> None:
    """At most one step."""
    full = plan.pools[name].utilisation_bp
    if full >= RESTORE_BP or plan.quiet_ms(name) < RESTORE_MS or _lacking(plan, plan.pools[name]):
        return
    why = f"{name} is at {full / 100:.0f} %, below {RESTORE_BP // 100} %"
    capped = [model for model in plan.among(name, "batch-job") if model.model in plan.state.caps]
    if capped:
        _lift(plan, min(capped, key=lambda model: (plan.state.caps[model.model], model.model)), why)
        return
    busy = {step.model for step in plan.steps}
    for model, moved in sorted(plan.state.moved.items()):
        found = plan.models[model]
        size = found.replicas * found.units
        if moved.home == name and model not in busy and plan.bp_with(name, size) <= RELIEVED_BP:
            rest = {other: where for other, where in plan.state.moved.items() if other != model}
            plan.step(Step("return", model, name, name, found.replicas, f"{why}; {model} comes home."), moved=rest)
            return


def _lift(plan: _Plan, model: Tenant, why: str) -> None:
    """Raises a cap by one, or drops it when it does not hold the model down any more."""
    cap = plan.state.caps[model.model]
    rest = {other: held for other, held in plan.state.caps.items() if other != model.model}
    if cap >= model.wanted:
        step = Step(
            "get_back", model.model, model.pool, "", cap, f"{why}; {model.model} needs {model.wanted} and is free."
        )
        plan.step(step, caps=rest)
    elif plan.bp_with(model.pool, model.units) <= RELIEVED_BP:
        reason = f"{why}; {model.model} may have {cap + 1} of the {model.wanted} that it needs."
        plan.step(Step("get_back", model.model, model.pool, "", cap + 1, reason), caps=rest | {model.model: cap + 1})
