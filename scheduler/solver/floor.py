"""A lower bound in one look, for the daily change: what each free replica costs at least beside what is fixed.

Costs of a seat only grow with what else is seated (pairs, shared servers, load), but for opening a device or an island,
which two replicas may share; so openings count only where they cannot. With one free replica, or a few of one model,
the greedy answer usually meets this bound, and then no program has to be built to know that it is the best.
"""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.solver.classes import Folded
from scheduler.solver.ledger import Ledger
from scheduler.solver.objective import cold_cost, device_cost, fragment_cost, pair_cost, seat_cost, server_cost


def least(folded: Folded, fixed: Ledger, free: Sequence[int]) -> int:
    """What the free replicas add at least to `objective.cost_without`; `fixed` holds everything but them."""
    versions = {folded.version[number] for number in free}
    # Replicas of one version share no device, when a worker takes one of them only.
    apart = len(free) == 1 or (len(versions) == 1 and folded.worker_limit[folded.version[free[0]]] == 1)
    by_kind: dict[int, list[int]] = {}
    for number in free:
        by_kind.setdefault(folded.kind[number], []).append(number)
    return sum(_cheapest(folded, fixed, kind, members, apart) for kind, members in by_kind.items())


def _cheapest(folded: Folded, fixed: Ledger, kind: int, members: Sequence[int], apart: bool) -> int:
    """Of seats for all of them, no two on one worker when they are `apart`, or of leaving them out.

    0 for what runs somewhere, and for what takes several devices.
    """
    table = folded.kinds[kind]
    if table.demand.tensor_parallel_size > 1 or any(folded.current[number] is not None for number in members):
        return 0
    by_worker: dict[int, int] = {}
    smallest = min(table.sizes)
    for device, group in enumerate(folded.device_class):
        if fixed.free[device] < smallest:
            continue
        options = [o for o in table.fits[group] if folded.weight(kind, o, device) <= fixed.free[device]]
        if not options or not fixed.admits(members[0], device):
            continue
        beside = (
            server_cost(folded, table.version) if fixed.on_server.get((table.version, folded.server[device])) else 0
        )
        around = beside + _opening(folded, fixed, device, apart) + cold_cost(folded, kind, device)
        around += fixed.load_cost(kind, device)
        cost = around + min(seat_cost(folded, kind, option, device) for option in options)
        worker = folded.worker[device]
        by_worker[worker] = min(cost, by_worker.get(worker, table.unplaced_cost))
    costs = sorted(by_worker.values()) + [table.unplaced_cost] * len(members)
    return sum(costs[: len(members)]) if apart else costs[0] * len(members)


def _opening(folded: Folded, fixed: Ledger, device: int, apart: bool) -> int:
    if fixed.count[device]:
        return pair_cost(folded) * fixed.count[device]
    cost = device_cost(folded, device) - (fragment_cost(folded) if folded.island[device] >= 0 else 0)
    return cost if apart else min(0, cost)
