"""What one replica adds to the objective at one seat, beside everything else that is placed.

The difference of two of these is the difference of two `objective.evaluate`, without looking at the whole fleet again:
an explanation asks it once per sort of device.
"""

from __future__ import annotations

from scheduler.solver.classes import Seat
from scheduler.solver.ledger import Ledger
from scheduler.solver.objective import (
    TERMS,
    cold_cost,
    device_cost,
    fragment_cost,
    migration_cost,
    pair_cost,
    server_cost,
    span_cost,
)


def added_terms(ledger: Ledger, number: int, seat: Seat) -> dict[str, int]:
    """By term of the objective; `ledger` holds everything but this replica."""
    folded = ledger.folded
    terms = dict.fromkeys(TERMS, 0)
    kind = folded.kinds[folded.kind[number]]
    terms["migration"] = migration_cost(folded, number, seat)
    if folded.placed(number, seat):
        terms["spanning"] = span_cost(folded, folded.kind[number], seat[0])
        terms["kv_apart"] = folded.objective.kv_apart * ledger.apart(number, seat[0])
        for device in seat[0]:
            risk, precision, price = kind.costs[folded.device_class[device]][seat[1]]
            terms["sla_risk"] += risk + (kind.failed_cost if device in kind.failed_devices else 0)
            terms["precision"] += precision
            terms["price"] += price
            if seat != folded.current[number]:
                terms["warm_pool"] += cold_cost(folded, folded.kind[number], device)
    for device in seat[0]:
        count = ledger.count[device]
        terms["devices_used"] += 0 if count else device_cost(folded, device)
        terms["balance"] += pair_cost(folded) * count
        terms["load"] += ledger.load_cost(folded.kind[number], device)
    server = folded.server[seat[0][0]]
    if ledger.on_server.get((kind.version, server), 0):
        terms["same_server"] += server_cost(folded, kind.version)
    terms["nvlink_fragmentation"] += _fragmented(ledger, seat)
    return terms


def _fragmented(ledger: Ledger, seat: Seat) -> int:
    folded, fragment = ledger.folded, fragment_cost(ledger.folded)
    opened: dict[int, int] = {}
    for device in seat[0]:
        if folded.island[device] >= 0 and not ledger.count[device]:
            opened[folded.island[device]] = opened.get(folded.island[device], 0) + 1
    cost = 0
    for island, count in opened.items():
        cost -= fragment * count
        if not ledger.island_used[island]:
            cost += fragment * len(folded.islands[island])
    return cost
