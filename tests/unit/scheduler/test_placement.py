"""Placement through the solver: fits, spreads, follows declarations, explains."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from scheduler.placement import DeviceOffer, PlacementPlan, PlacementProblem, ReplicaWish, Resident, place
from scheduler.rules import PlacementRules
from scheduler.solver.model import Toleration
from sie_stream.control import Taint


def offer(worker: str, memory: int = 100, reserved: int = 0, device: str = "cpu0", **fields: object) -> DeviceOffer:
    return DeviceOffer(worker, f"{worker}-1", device, "cpu", memory, reserved, ("sklearn",), **fields)  # type: ignore[arg-type]


def wish(model: str, memory: int = 10, **fields: object) -> ReplicaWish:
    values: dict[str, object] = {"generation": 1, "priority": 1, "backend": "sklearn", **fields}
    return ReplicaWish(model=model, memory_bytes=memory, **values)  # type: ignore[arg-type]  # a test's shorthand


def solve(devices: list[DeviceOffer], *wishes: ReplicaWish) -> PlacementPlan:
    return place(PlacementProblem(tuple(devices), wishes))


def where(plan: PlacementPlan) -> list[tuple[str, str]]:
    return [(chosen.wish.model, chosen.worker) for chosen in plan.chosen]


def test_models_spread_over_equal_devices() -> None:
    plan = solve([offer("w0"), offer("w1")], *[wish(f"m{number}") for number in range(6)])
    assert [worker for _, worker in where(plan)] == ["w0", "w1"] * 3


def test_replicas_of_one_version_go_to_different_workers() -> None:
    plan = solve([offer("w0"), offer("w0", device="cpu1"), offer("w1")], *[wish("m")] * 3)
    assert where(plan) == [("m", "w0"), ("m", "w1")]
    assert len(plan.unplaceable) == 1
    assert "already" in plan.unplaceable[0].why_not[0]


def test_another_version_may_share_the_worker() -> None:
    plan = solve([offer("w0")], wish("m"), wish("m", generation=2))
    assert where(plan) == [("m", "w0"), ("m", "w0")]


def test_higher_priority_is_placed_first() -> None:
    plan = solve([offer("w0", memory=10)], wish("a", priority=2), wish("z", priority=0))
    assert where(plan) == [("z", "w0")]
    assert plan.unplaceable[0].wish.model == "a"


def test_first_replicas_come_before_second_ones() -> None:
    plan = solve([offer("w0", memory=20), offer("w1", memory=20)], *[wish("a", 20)] * 2, wish("b", 20, priority=2))
    assert where(plan) == [("a", "w0"), ("b", "w1")]


def test_a_model_that_serves_already_waits_for_one_without_any_replica() -> None:
    devices = (offer("w0", memory=20), offer("w1", memory=20))
    serving = Resident(wish("a", 20), "w0", ("cpu0",))
    plan = place(PlacementProblem(devices, (wish("a", 20), wish("b", 20)), (serving,)))
    assert where(plan) == [("b", "w1")]


def test_why_not_names_every_device_and_number() -> None:
    plan = solve(
        [offer("w0", memory=5), offer("w1", reserved=95), offer("w2")], wish("m", backend="torch"), wish("n", memory=10)
    )
    assert plan.unplaceable[0].why_not == ("w0/cpu0, w1/cpu0, w2/cpu0: backend 'torch' is not offered (sklearn).",)
    rejected = dict(part.split(": ", 1) for part in plan.chosen[0].rejected)
    assert rejected == {
        "w0/cpu0": "needs 10 bytes, the whole device has 5.",
        "w1/cpu0": "needs 10 bytes, 5 of 100 are not reserved.",
    }


def test_no_worker_at_all_is_said() -> None:
    assert solve([], wish("m")).unplaceable[0].why_not == ("no live worker offers a device.",)


def test_a_device_where_it_failed_is_the_last_resort() -> None:
    failed_on = (("w0", "cpu0"),)
    assert where(solve([offer("w0"), offer("w1")], wish("m", failed_on=failed_on))) == [("m", "w1")]
    assert where(solve([offer("w0")], wish("m", failed_on=failed_on))) == [("m", "w0")]


def test_a_worker_that_came_back_is_preferred() -> None:
    assert where(solve([offer("w0"), offer("w1")], wish("m", prefer=("w1",)))) == [("m", "w1")]


def test_many_devices_give_few_sentences() -> None:
    plan = solve([offer(f"w{number:03}", memory=1) for number in range(100)], wish("m"))
    assert plan.unplaceable[0].why_not == (
        "w000/cpu0, w001/cpu0, w002/cpu0 and 97 more: needs 10 bytes, the whole device has 1.",
    )


def test_labels_taints_tiers_and_versions_are_followed() -> None:
    devices = [
        offer("plain"),
        offer("a100", labels={"gpu": "a100"}),
        offer("spot", taints=(Taint("spot", "true"),)),
        offer("fast", tier="tier-0"),
        offer("new", versions={"torch": "2.13.0"}, taints=(Taint("new"),)),
    ]
    rules = {
        "a100": PlacementRules(node_selector={"gpu": "a100"}),
        "fast": PlacementRules(tier="tier-0"),
        "new": PlacementRules(requires={"pytorch": ">=2.6"}, tolerations=(Toleration("new", "Exists"),)),
    }
    plan = solve(devices, *[wish(name, priority=0, rules=rule) for name, rule in rules.items()])
    assert where(plan) == [(name, name) for name in rules]
    plain = solve(devices, *[wish(f"m{number}") for number in range(6)])
    assert {worker for _, worker in where(plain)} == {"plain", "a100"}
    rejected = dict(part.split(": ", 1) for part in plain.chosen[0].rejected)
    assert "taint spot=true:NoSchedule is not tolerated" in rejected["spot/cpu0"]
    assert "409 Conflict" in rejected["fast/cpu0"]


def test_binpack_uses_as_few_devices_as_possible() -> None:
    wishes = tuple(wish(f"m{number}") for number in range(6))
    plan = place(PlacementProblem((offer("w0"), offer("w1")), wishes, packing="binpack"))
    assert len({worker for _, worker in where(plan)}) == 1


@given(
    memories=st.lists(st.integers(1, 50), max_size=6),
    wishes=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2), st.integers(1, 30)), max_size=30),
)
def test_no_device_is_filled_above_its_memory_and_no_fit_is_missed(
    memories: list[int], wishes: list[tuple[int, int, int]]
) -> None:
    devices = [offer(f"w{number}", memory=memory) for number, memory in enumerate(memories)]
    asked = [wish(f"m{model}", memory, priority=priority) for model, priority, memory in wishes]
    plan = solve(devices, *asked)
    assert len(plan.chosen) + len(plan.unplaceable) == len(asked)
    used = {device.worker: 0 for device in devices}
    hosts: dict[str, list[str]] = {}
    for chosen in plan.chosen:
        used[chosen.worker] += chosen.wish.memory_bytes
        hosts.setdefault(chosen.wish.model, []).append(chosen.worker)
    assert all(used[device.worker] <= device.memory_bytes for device in devices)
    assert all(len(workers) == len(set(workers)) for workers in hosts.values())
    for refused in plan.unplaceable:
        for device in devices:
            fits_now = used[device.worker] + refused.wish.memory_bytes <= device.memory_bytes
            assert not fits_now or device.worker in hosts.get(refused.wish.model, [])
