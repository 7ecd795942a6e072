"""What is on each device while seats are given and taken: memory in bytes, neighbours, limits.

The constraints that depend on other replicas live here, each with a name and a sentence. A ledger is working state of
one solve: it is never kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from scheduler.solver.classes import Folded, Seat
from scheduler.solver.constraints import Refusal
from scheduler.solver.objective import load_cost


class Ledger:
    """Counts of what is seated. Held replicas take memory and count for anti-affinity; they serve nobody."""

    def __init__(self, folded: Folded, seats: Sequence[Seat | None] = ()) -> None:
        self.folded = folded
        self.free = list(folded.usable)
        self.count = [0] * len(folded.usable)
        self.load = [0] * len(folded.usable)
        """Percent of its time that replicas are expected to keep a device busy."""
        self.holders: list[dict[int, None]] = [{} for _ in folded.usable]
        self.on_device: dict[tuple[int, int], int] = {}
        self.on_worker: dict[tuple[int, int], int] = {}
        self.on_server: dict[tuple[int, int], int] = {}
        self.serving = [0] * folded.versions
        self.island_used = [0] * len(folded.islands)
        self.exchange: dict[int, dict[int, int]] = {}
        """By KV exchange: domain -> devices of members there."""
        for number, seat in enumerate(seats):
            if seat is not None:
                self.add(number, seat)

    def copy(self) -> Ledger:
        """One that goes its own way from here on."""
        other = Ledger.__new__(Ledger)  # every part is replaced here
        other.folded = self.folded
        other.free, other.count, other.load = self.free[:], self.count[:], self.load[:]
        other.holders = [holders.copy() for holders in self.holders]
        other.on_device, other.on_worker = self.on_device.copy(), self.on_worker.copy()
        other.on_server, other.serving = self.on_server.copy(), self.serving[:]
        other.island_used = self.island_used[:]
        other.exchange = {exchange: domains.copy() for exchange, domains in self.exchange.items()}
        return other

    def add(self, number: int, seat: Seat) -> None:
        self._count(number, seat, 1)

    def remove(self, number: int, seat: Seat) -> None:
        self._count(number, seat, -1)

    def _count(self, number: int, seat: Seat, step: int) -> None:
        folded, kind = self.folded, self.folded.kind[number]
        version, table = folded.version[number], folded.kinds[kind]
        size, exclusive = table.sizes[seat[1]], table.demand.exclusive
        for device in seat[0]:
            self.free[device] -= step * (folded.weight(kind, seat[1], device) if exclusive else size)
            was = self.count[device]
            self.count[device] = was + step
            self.load[device] += step * table.load
            island = folded.island[device]
            if island >= 0 and (was == 0 or was + step == 0):
                self.island_used[island] += step
            if step > 0:
                self.holders[device][number] = None
            else:
                del self.holders[device][number]
            self.on_device[version, device] = self.on_device.get((version, device), 0) + step
        first = seat[0][0]
        worker, server = (version, folded.worker[first]), (version, folded.server[first])
        self.on_worker[worker] = self.on_worker.get(worker, 0) + step
        self.on_server[server] = self.on_server.get(server, 0) + step
        if folded.placed(number, seat):
            self.serving[version] += step * (table.demand.purpose == "serve")
            if folded.kv[number] >= 0:
                domains = self.exchange.setdefault(folded.kv[number], {})
                for device in seat[0]:
                    domain = folded.domain[device]
                    domains[domain] = domains.get(domain, 0) + step
                    if not domains[domain]:
                        del domains[domain]

    def admits(self, number: int, device: int) -> bool:
        """Whether the neighbours, not the memory, let a new replica onto the device."""
        folded = self.folded
        version = folded.version[number]
        if self.on_worker.get((version, folded.worker[device]), 0) >= folded.worker_limit[version]:
            return False
        if self.on_server.get((version, folded.server[device]), 0) >= folded.server_limit[version]:
            return False
        return not self.on_device.get((version, device), 0)

    def beside(self, number: int, device: int) -> tuple[str, int] | None:
        """What keeps a new replica from the device by its neighbours, as what they have in common; None: nothing."""
        folded = self.folded
        version, worker, server = folded.version[number], folded.worker[device], folded.server[device]
        if self.on_worker.get((version, worker), 0) >= folded.worker_limit[version]:
            return "worker", worker
        if self.on_server.get((version, server), 0) >= folded.server_limit[version]:
            return "server", server
        return ("device", -1) if self.on_device.get((version, device), 0) else None

    def apart(self, number: int, devices: Iterable[int]) -> int:
        """Domains that the replica would add to its exchange of KV, beyond the first."""
        exchange = self.folded.kv[number]
        if exchange < 0:
            return 0
        there = self.exchange.get(exchange) or {}
        new = {self.folded.domain[device] for device in devices} - there.keys()
        return len(new) - (not there)

    def has_room(self, number: int, seat: Seat) -> bool:
        """Whether the replica can take the seat beside what is there."""
        folded, kind = self.folded, self.folded.kind[number]
        return all(
            self.free[device] >= folded.weight(kind, seat[1], device) and self.admits(number, device)
            for device in seat[0]
        )

    def load_cost(self, kind: int, device: int) -> int:
        """What one more replica of the kind costs there because of how busy the device is with others."""
        before, more = self.load[device], self.folded.kinds[kind].load
        return load_cost(self.folded, before + more) - load_cost(self.folded, before) if more else 0

    def refusal(self, number: int, option: int, device: int) -> Refusal | None:
        """Which neighbour keeps the replica from the device; None when it could start there now."""
        folded = self.folded
        version = folded.version[number]
        worker, server = folded.problem.devices[device].worker, folded.problem.devices[device].server
        if self.on_worker.get((version, folded.worker[device]), 0) >= folded.worker_limit[version]:
            return Refusal("anti_affinity", f"worker {worker} already holds a replica of this version.")
        if self.on_server.get((version, folded.server[device]), 0) >= folded.server_limit[version]:
            limit = folded.server_limit[version]
            return Refusal("anti_affinity", f"server {server} already holds {limit} of this version, its limit.")
        if self.on_device.get((version, device), 0):
            return Refusal("anti_affinity", "the device already holds a replica of this version.")
        return self._no_room(number, option, device)

    def _no_room(self, number: int, option: int, device: int) -> Refusal | None:
        folded = self.folded
        needed = folded.weight(folded.kind[number], option, device)
        if needed <= self.free[device]:
            return None
        demands = folded.problem.demands
        others = [demands[holder] for holder in self.holders[device]]
        alone = [other.model for other in others if other.exclusive]
        if alone:
            return Refusal("exclusive", f"{alone[0]} has the whole device for itself.")
        names = ", ".join(sorted({other.model for other in others}))
        if demands[number].exclusive:
            return Refusal("exclusive", f"needs the whole device for itself, which holds {names}.")
        wanted, free = demands[number].options[option].memory_bytes, max(0, self.free[device])
        sentence = f"needs {wanted} bytes, {free} of {folded.usable[device]} are free beside {names}."
        return Refusal("memory", sentence)


def keep(folded: Folded) -> tuple[list[Seat | None], bool]:
    """What runs, as it is, and whether all of it could be kept: False when memory or a limit is broken already.

    Of what cannot stay together the least valuable goes, the later one among equals.
    """
    ledger = Ledger(folded)
    seats: list[Seat | None] = [None] * len(folded.current)
    running = [number for number, seat in enumerate(folded.current) if seat is not None]
    whole = True
    for number in sorted(running, key=lambda n: (-folded.kinds[folded.kind[n]].unplaced_cost, n)):
        seat = folded.current[number]
        assert seat is not None
        if ledger.has_room(number, seat):
            ledger.add(number, seat)
            seats[number] = seat
        else:
            whole = False
    return seats, whole
