"""Which of the language models on a device decodes there, and which rests: loaded, ready, and without traffic.

An engine that decodes takes its turn on the device whenever it has any request, so two of them halve each other's pace
however little each has to do. Two models with a replica each on two devices are both served twice as fast when each has
one device, and the same keys in half the places: as many requests run at once, in half the time. The other replica is
in reserve: it takes keys as soon as its model has more to do than its devices can, without a load.

`share_out(tenants, before, rested)` is pure. Each device gets an owner among the models that decode on it:

- a model that cannot rest now (one replica, keys in order, partitions on their way) takes its devices as they are, but
  for those on which it gets no keys;
- owners of before stay, so that keys do not wander;
- a device without one goes to the model with the most load per device that it owns;
- a device goes to a model with much to do (more than `EASED`) when the one that gives it has less to do afterwards than
  the taker had before, by a margin. Each change costs: the one that leaves still ends what it began.

A model rests on the devices that others own. One that owns none, or has more to do than what it owns can (`PRESSED`),
also decodes on as many of them as that takes; one with a queue on all.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import ceil

from msgspec import Struct

PRESSED, EASED = 0.85, 0.6
"""Load per owned device above which a model uses devices of others, and below which it rests there again."""
MARGIN = 1.25
"""So much more to do than the giver will have, or the device stays where it is."""


class Tenant(Struct, frozen=True):
    """A model that decodes."""

    model: str
    devices: tuple[str, ...]
    """Where it is ready, in the order of names."""
    load: float
    """Devices that its requests would keep busy, if it had them to itself."""
    may_rest: bool
    """Its keys can be taken off a device now."""
    queued: bool = False
    """More requests wait than run."""
    pressed: bool = False
    """It used devices of others when this was last looked at."""
    woken: bool = False
    """It does so too short a time to rest there again."""
    keyless: tuple[str, ...] = ()
    """Where one that may not rest gets no keys at present: it does not decode there."""


class Slices(Struct, frozen=True):
    """Who decodes where."""

    owners: dict[str, str]
    """{device: model}, of devices on which several decode."""
    resting: dict[str, tuple[str, ...]]
    """{model: devices on which it rests}, of those that do."""
    pressed: tuple[str, ...]
    """Models that own too little and use all that they have."""


def share_out(
    tenants: Sequence[Tenant], before: Mapping[str, str], rested: Mapping[str, Sequence[str]] | None = None
) -> Slices:
    """Owners of the devices that several tenants share. The same tenants in another order give the same answer.

    `before`, `rested`: who owned what, and who rested where, so that little changes.
    """
    plan = _Plan(sorted(tenants, key=lambda tenant: tenant.model), before)
    plan.fill()
    plan.exchange()
    return plan.slices(rested or {})


class _Plan:
    def __init__(self, tenants: Sequence[Tenant], before: Mapping[str, str]) -> None:
        self.tenants = {tenant.model: tenant for tenant in tenants}
        self.on: dict[str, list[str]] = {}
        for tenant in tenants:
            for device in tenant.devices:
                self.on.setdefault(device, []).append(tenant.model)
        self.owners: dict[str, str] = {}
        self.owned = dict.fromkeys(self.tenants, 0)
        """Devices of each, those included that nobody else is on."""
        self.fixed: dict[str, None] = {}
        """Devices where somebody cannot rest."""
        for device in sorted(self.on):
            here = self.on[device]
            bound = [model for model in here if self._is_bound(model, device)]
            if bound:
                self.fixed[device] = None
            if bound or len(here) == 1:
                self._own(device, max(bound or here, key=self.pressure))
            elif before.get(device) in here:
                self._own(device, before[device])

    def _is_bound(self, model: str, device: str) -> bool:
        tenant = self.tenants[model]
        return not tenant.may_rest and device not in tenant.keyless

    def _own(self, device: str, model: str) -> None:
        self.owners[device] = model
        self.owned[model] += 1

    def pressure(self, model: str, more: int = 0) -> float:
        """Load per owned device, with so many more of them; beyond every load without any."""
        owned = self.owned[model] + more
        load = self.tenants[model].load
        return load / owned if owned > 0 else 1e9 + load

    def fill(self) -> None:
        """Devices without an owner, where there is least choice first."""
        free = [device for device in self.on if device not in self.owners]
        for device in sorted(free, key=lambda device: (len(self.on[device]), device)):
            self._own(device, max(self.on[device], key=lambda model: (self.pressure(model), model)))

    def exchange(self) -> None:
        """One device after another changes hands, always to whoever is worst off, as long as that is worth it."""
        for _ in range(len(self.owners)):
            if not self._exchange_one():
                return

    def _exchange_one(self) -> bool:
        for taker in sorted(self.tenants, key=lambda model: (-self.pressure(model), model)):
            if self.pressure(taker) <= EASED:
                return False
            if not self.tenants[taker].may_rest:
                continue
            gives: list[tuple[float, str]] = []
            for device in self.tenants[taker].devices:
                owner = self.owners[device]
                if owner != taker and device not in self.fixed:
                    gives.append((self.pressure(owner, -1), device))
            if not gives:
                continue
            left, device = min(gives)
            if left * MARGIN < self.pressure(taker):
                self.owned[self.owners[device]] -= 1
                self._own(device, taker)
                return True
        return False

    def slices(self, rested: Mapping[str, Sequence[str]]) -> Slices:
        resting: dict[str, tuple[str, ...]] = {}
        pressed: list[str] = []
        for model, tenant in self.tenants.items():
            limit = EASED if tenant.pressed else PRESSED
            away = tuple(device for device in tenant.devices if self.owners[device] != model)
            if not tenant.may_rest or not away:
                continue
            if tenant.queued or tenant.woken or self.pressure(model) > limit:
                pressed.append(model)
                woken = self._woken(tenant, away, rested.get(model, ()))
                away = tuple(device for device in away if device not in woken)
            if away:
                resting[model] = away
        owners = {device: model for device, model in sorted(self.owners.items()) if len(self.on[device]) > 1}
        return Slices(owners, resting, tuple(pressed))

    def _woken(self, tenant: Tenant, away: Sequence[str], rested: Sequence[str]) -> Collection[str]:
        """Of the devices that others own those that it uses as well, because it has too much to do.

        As many as its load needs, where each is worth half a device; those that it used before, and then those whose
        owners have least to do. All of them while requests wait.
        """
        if tenant.queued:
            return away
        used = [device for device in away if tenant.pressed and device not in rested]
        missing = tenant.load / PRESSED - self.owned[tenant.model]
        count = max(1, ceil(2 * missing), len(used) if tenant.woken else 0)
        return sorted(away, key=lambda device: (device not in used, self.pressure(self.owners[device]), device))[:count]
