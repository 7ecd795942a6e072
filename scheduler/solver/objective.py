"""What a placement costs, term by term. The integer program states the same costs as a linear objective; this is the
plain definition that the program, the greedy answer and the enumeration are compared by."""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.solver.classes import Folded, Seat
from scheduler.solver.model import Priority

TERMS = (
    *("unplaced", "sla_risk", "precision", "price", "devices_used", "nvlink_fragmentation", "balance"),
    *("load", "same_server", "migration", "warm_pool", "spanning", "kv_apart"),
)
WEIGHT_OF: dict[Priority, int] = {"P0": 8, "P1": 4, "P2": 2}


def sla_weight(priority: Priority, tags: Sequence[str]) -> int:
    """1 to 32: how much a breach of this model counts beside others."""
    weight = WEIGHT_OF[priority]
    if "high-sla" in tags:
        weight *= 4
    if "batch-job" in tags:
        weight //= 2
    return weight


def evaluate(folded: Folded, seats: Sequence[Seat | None]) -> dict[str, int]:
    """Every term of TERMS for these seats, one per demand."""
    terms = dict.fromkeys(TERMS, 0)
    serving = [0] * folded.versions
    holding, load = [0] * len(folded.usable), [0] * len(folded.usable)
    on_server: dict[tuple[int, int], int] = {}
    exchanges: dict[int, dict[int, None]] = {}
    for number, seat in enumerate(seats):
        kind = folded.kinds[folded.kind[number]]
        if seat is not None and folded.placed(number, seat):
            serving[kind.version] += kind.demand.purpose == "serve"
            if folded.kv[number] >= 0:
                exchanges.setdefault(folded.kv[number], {}).update((folded.domain[d], None) for d in seat[0])
            _add_seat(folded, number, seat, terms)
        else:  # one that is held has its breach counted in full
            terms["unplaced" if kind.demand.purpose == "serve" else "warm_pool"] += kind.unplaced_cost
        if seat is not None:
            for device in seat[0]:
                holding[device] += 1
                load[device] += kind.load
            place = kind.version, folded.server[seat[0][0]]
            on_server[place] = on_server.get(place, 0) + 1
        terms["migration"] += migration_cost(folded, number, seat)
    terms["unplaced"] += sum(cost for cost, count in zip(folded.first_cost, serving, strict=True) if not count)
    terms["same_server"] = sum(
        server_cost(folded, version) * (count - 1) for (version, _), count in on_server.items() if count > 1
    )
    terms["kv_apart"] = sum(folded.objective.kv_apart * (len(domains) - 1) for domains in exchanges.values())
    allowed = folded.objective.load_free
    terms["load"] = folded.objective.load * sum(percent - allowed for percent in load if percent > allowed)
    _add_devices(folded, holding, terms)
    return terms


def total(terms: dict[str, int]) -> int:
    return sum(terms.values())


class Worth:
    """What placements of one problem cost, each looked at once: a solve asks for a few of them again and again."""

    def __init__(self, folded: Folded) -> None:
        self._folded = folded
        self._known: dict[tuple[Seat | None, ...], dict[str, int]] = {}

    def terms(self, seats: Sequence[Seat | None]) -> dict[str, int]:
        """As `evaluate`."""
        key = tuple(seats)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = evaluate(self._folded, seats)
        return dict(found)

    def total(self, seats: Sequence[Seat | None]) -> int:
        return total(self.terms(seats))


def cost_without(folded: Folded, seats: Sequence[Seat | None], free: Sequence[int], worth: Worth | None = None) -> int:
    """What everything but the free replicas costs, as if those did not exist."""
    others, missing = list(seats), dict.fromkeys(free)
    cost, versions = 0, dict[int, None]()
    for number in free:
        others[number] = None
        kind = folded.kinds[folded.kind[number]]
        cost -= kind.unplaced_cost + migration_cost(folded, number, None)
        versions[kind.version] = None
    for number, seat in enumerate(others):
        if number not in missing and folded.placed(number, seat):
            kind = folded.kinds[folded.kind[number]]
            if kind.demand.purpose == "serve":
                versions.pop(kind.version, None)
    worth = Worth(folded) if worth is None else worth
    return cost + worth.total(others) - sum(folded.first_cost[version] for version in versions)


def seat_cost(folded: Folded, kind: int, option: int, device: int) -> int:
    """What one device of a seat costs, apart from a cold start."""
    table = folded.kinds[kind]
    failed = table.failed_cost if device in table.failed_devices else 0
    return sum(table.costs[folded.device_class[device]][option]) + failed


def cold_cost(folded: Folded, kind: int, device: int) -> int:
    """What one device of a load there costs because its worker has not the weights."""
    table = folded.kinds[kind]
    return 0 if folded.worker[device] in table.warm_workers else table.cold_cost


def device_cost(folded: Folded, device: int) -> int:
    """What it costs that the device holds anything."""
    weights = folded.objective
    return weights.device_used * folded.problem.devices[device].price if weights.packing == "binpack" else 0


def fragment_cost(folded: Folded) -> int:
    """What a free device of a touched island costs."""
    weights = folded.objective
    return weights.fragment if weights.packing == "binpack" else weights.fragment_spread


def span_cost(folded: Folded, kind: int, devices: Sequence[int]) -> int:
    """What it costs that the devices of one replica are not all of one island."""
    table = folded.kinds[kind]
    return table.span_cost * folded.spanned(kind, devices) if table.level else 0


def pair_cost(folded: Folded) -> int:
    """What two replicas on one device cost."""
    return folded.objective.pair if folded.objective.packing == "spread" else 0


def server_cost(folded: Folded, version: int) -> int:
    """What each replica of the version costs that is on a server with another one of it."""
    return folded.server_weight[version]


def load_cost(folded: Folded, percent: int) -> int:
    """What it costs that replicas keep a device so busy together: they slow each other down, and SLAs are missed.

    Linear above a threshold, so each further replica costs at least as much as the one before.
    """
    weights = folded.objective
    return weights.load * max(0, percent - weights.load_free)


def migration_cost(folded: Folded, number: int, seat: Seat | None) -> int:
    """A move costs. A held replica owes its move; one that is stopped without a new place is worse off than that."""
    if folded.current[number] is None or (seat == folded.current[number] and folded.may_stay[number]):
        return 0
    return folded.move_cost[number] + (folded.kinds[folded.kind[number]].stop_cost if seat is None else 0)


def _add_seat(folded: Folded, number: int, seat: Seat, terms: dict[str, int]) -> None:
    kind = folded.kinds[folded.kind[number]]
    terms["spanning"] += span_cost(folded, folded.kind[number], seat[0])
    for device in seat[0]:
        risk, precision, price = kind.costs[folded.device_class[device]][seat[1]]
        terms["sla_risk"] += risk + (kind.failed_cost if device in kind.failed_devices else 0)
        terms["precision"] += precision
        terms["price"] += price
        if seat != folded.current[number]:
            terms["warm_pool"] += cold_cost(folded, folded.kind[number], device)


def _add_devices(folded: Folded, holding: Sequence[int], terms: dict[str, int]) -> None:
    fragment, pair = fragment_cost(folded), pair_cost(folded)
    terms["devices_used"] += sum(device_cost(folded, device) for device, count in enumerate(holding) if count)
    if pair:
        terms["balance"] += pair * sum(count * (count - 1) // 2 for count in holding)
    for island in folded.islands:
        free = [holding[device] for device in island].count(0)
        terms["nvlink_fragmentation"] += fragment * free if free < len(island) else 0
