"""The rules of a placement, checked on a plan by its names: nothing of the solver's own bookkeeping."""

from __future__ import annotations

from collections.abc import Iterator

from scheduler.solver.constraints import forbids, forbids_staying
from scheduler.solver.model import Assignment, Demand, Device, Plan, PrecisionOption, Problem


def broken_rules(problem: Problem, plan: Plan) -> list[str]:
    """What the assignments of a plan break; a plan that is not taken describes what runs, so it is checked the same."""
    devices = {device.key: device for device in problem.devices}
    demands = {demand.key: demand for demand in problem.demands}
    found: list[str] = []
    for assigned in plan.assignments:
        demand = demands[assigned.model, assigned.generation, assigned.replica]
        found += _broken_by_one(demand, assigned, devices)
    found += _broken_on_devices(plan, demands, devices)
    found += _broken_limits(plan, demands)
    placed = {(a.model, a.generation, a.replica) for a in plan.assignments if not a.held}
    missing = {(u.model, u.generation, u.replica) for u in plan.unplaceable}
    if placed & missing or placed | missing != set(demands):
        found.append("a replica is in neither list, or in both")
    return found


def option_of(demand: Demand, assigned: Assignment) -> PrecisionOption:
    return next(option for option in demand.options if option.precision == assigned.place.precision)


def _broken_by_one(demand: Demand, assigned: Assignment, devices: dict[tuple[str, str], Device]) -> Iterator[str]:
    stays = demand.current is not None and (
        (demand.current.worker, sorted(demand.current.devices), demand.current.precision)
        == (assigned.place.worker, sorted(assigned.place.devices), assigned.place.precision)
    )
    if len(assigned.place.devices) != demand.tensor_parallel_size:
        yield f"{demand.shown} spans {assigned.place.devices}"
    if assigned.held and not stays:
        yield f"{demand.shown} is held where it does not run"
    for name in assigned.place.devices:
        device = devices[assigned.place.worker, name]
        rule = forbids_staying if stays else forbids
        if not assigned.held and (refusal := rule(demand, option_of(demand, assigned), device)):
            yield f"{demand.shown} on {device.shown}: {refusal.sentence}"
    if not assigned.held and not _near(assigned, demand, devices):
        yield f"{demand.shown} spans {assigned.place.devices}, which are not near enough for {demand.span}"


def _near(assigned: Assignment, demand: Demand, devices: dict[tuple[str, str], Device]) -> bool:
    of_worker = [device for device in devices.values() if device.worker == assigned.place.worker]
    chosen = [device for device in of_worker if device.name in assigned.place.devices]
    if len(chosen) == 1 or all(device.kind == "cpu" for device in chosen):
        return True
    islands = {device.island for device in chosen}
    if demand.span == "nvlink":
        return len(islands) == 1 and None not in islands
    if demand.span == "numa":
        # Over islands and nodes, step by step: each device is linked to, or beside, one that is.
        reached = chosen[:1]
        for _ in of_worker:
            reached += [d for d in of_worker if d not in reached and any(_beside(d, other) for other in reached)]
        return all(device in reached for device in chosen)
    return True


def _beside(one: Device, other: Device) -> bool:
    linked = one.island is not None and one.island == other.island
    return linked or (one.numa_node is not None and one.numa_node == other.numa_node)


def _broken_on_devices(
    plan: Plan, demands: dict[tuple[str, int, int], Demand], devices: dict[tuple[str, str], Device]
) -> Iterator[str]:
    for device in devices.values():
        there = [
            (demands[a.model, a.generation, a.replica], a)
            for a in plan.assignments
            if a.place.worker == device.worker and device.name in a.place.devices
        ]
        taken = sum(option_of(demand, assigned).memory_bytes for demand, assigned in there)
        if taken > device.memory_bytes - device.reserved_bytes:
            yield f"{device.shown} holds {taken} bytes"
        if len(there) > 1 and any(demand.exclusive for demand, _ in there):
            yield f"{device.shown} is shared, though one of {there} is exclusive"
        if len({demand.version for demand, _ in there}) < len(there):
            yield f"{device.shown} holds two replicas of a version"


def _broken_limits(plan: Plan, demands: dict[tuple[str, int, int], Demand]) -> Iterator[str]:
    for assigned in plan.assignments:
        demand = demands[assigned.model, assigned.generation, assigned.replica]
        same = [a for a in plan.assignments if (a.model, a.generation) == demand.version]
        if sum(a.place.worker == assigned.place.worker for a in same) > demand.max_per_worker:
            yield f"{demand.shown}: too many on worker {assigned.place.worker}"
        if demand.max_per_server and sum(a.server == assigned.server for a in same) > demand.max_per_server:
            yield f"{demand.shown}: too many on server {assigned.server}"
