"""Why here, and why not elsewhere."""

from __future__ import annotations

import msgspec

from scheduler.solver import explain, plan_fleet, replan
from scheduler.solver.explain import Explanation
from scheduler.solver.model import Demand, Device, Problem
from tests.unit.scheduler.solver.fleets import NVLINK, demand, device, place


def explanation(devices: tuple[Device, ...], *demands: Demand, model: str = "m") -> Explanation:
    problem = Problem(devices=devices, demands=demands)
    return explain(problem, replan(problem), model)[0]


def test_every_device_has_a_verdict_and_a_sentence() -> None:
    devices = (
        device("s0:g0"),
        device("s1:g0", cordoned=True),
        device("s2:g0"),
        device("s3:g0", labels={"zone": "a"}),
        device("s4:g0"),
    )
    others = [demand("a", 20, current=place("s0:g0")), demand("b", 95, current=place("s2:g0"))]
    found = explanation(devices, *others, demand("m", 10))
    assert found.place == place("s0:g0")
    assert [(verdict.verdict, verdict.constraint) for verdict in found.devices] == [
        ("chosen", None),
        ("forbidden", "cordon"),
        ("full", "memory"),
        ("costlier", None),
        ("costlier", None),
    ]
    assert [verdict.sentence for verdict in found.devices] == [
        "s0/g0: chosen.",
        "s1/g0: the device is cordoned: it takes nothing new.",
        "s2/g0: needs 10 bytes, 5 of 100 are free beside b.",
        "s3/g0: fits, and costs 1000 more (devices_used +1000).",
        "s4/g0: fits, and costs 1000 more (devices_used +1000).",
    ]
    assert found.devices[3].extra_terms == {"devices_used": 1000}
    assert found.sentence == (
        "m#0 (generation 1) goes to s0/g0 (bf16): 1 device is forbidden, 1 has no room, 2 cost more, 0 cost the "
        "same, 0 cost less."
    )


def test_a_record_is_json() -> None:
    found = explanation((device("s0:g0"),), demand("m", 10))
    assert msgspec.json.decode(msgspec.json.encode(found), type=Explanation) == found


def test_neighbours_that_keep_it_away_are_named() -> None:
    devices = tuple(device(f"s{n}:g0") for n in range(3))
    alone = demand("alone", 10, exclusive=True, current=place("s0:g0"))
    first = demand("m", 10, replica=0, current=place("s1:g0"))
    verdicts = explain(
        problem := Problem(devices=devices, demands=(alone, first, demand("m", 10, replica=1))), replan(problem), "m"
    )[1].devices
    assert [verdict.constraint for verdict in verdicts] == ["exclusive", "anti_affinity", None]
    assert verdicts[0].sentence == "s0/g0: alone has the whole device for itself."
    assert verdicts[1].sentence == "s1/g0: worker s1 already holds a replica of this version."


def test_an_exclusive_model_says_what_is_in_its_way() -> None:
    found = explanation((device("s0:g0"),), demand("a", 1, current=place("s0:g0")), demand("m", 10, exclusive=True))
    assert found.place is None
    assert found.devices[0].sentence == "s0/g0: needs the whole device for itself, which holds a."


def test_a_group_of_devices_is_explained_by_its_island() -> None:
    devices = tuple(device(f"s{n // 2}:g{n}", island=NVLINK) for n in range(4))
    found = explanation(devices, demand("a", 60, current=place("s0:g0")), demand("m", 50, tensor_parallel_size=2))
    assert found.place == place("s1:g2+g3")
    assert [verdict.constraint for verdict in found.devices] == ["memory", "tensor_parallel", None, None]
    assert found.devices[1].sentence == "s0/g1: its NVLink island has 2 devices, but no 2 with room together."


def test_what_it_costs_to_be_apart_from_its_kv_group_is_said() -> None:
    devices = (device("s0:g0"), device("s1:g0"))
    partner = demand("prefill", 10, kv_group="chat", current=place("s0:g0"))
    found = explanation(devices, partner, demand("m", 10, kv_group="chat"))
    assert found.devices[1].sentence == "s1/g0: fits, and costs 2500 more (devices_used +1000, kv_apart +1500)."


def test_what_runs_and_what_would_be_cheaper_is_said() -> None:
    devices = (device("s0:g0"), device("s1:g0"))
    demands = (demand("a", 10, current=place("s0:g0")), demand("m", 10, current=place("s1:g0")))
    found = explanation(devices, *demands)
    assert found.sentence.startswith("m#0 (generation 1) stays on s1/g0 (bf16)")
    assert found.devices[0].verdict == "cheaper"
    assert "would cost 948 less (devices_used -1000, migration +52)" in found.devices[0].sentence
    problem = Problem(devices=devices, demands=demands)
    assert {found.place.worker for found in plan_fleet(problem).assignments} in ({"s0"}, {"s1"})


def test_an_unplaced_replica_is_explained_too() -> None:
    found = explanation((device("s0:g0", 5),), demand("m", 10))
    assert found.place is None
    assert found.sentence.startswith("m#0 (generation 1) has no place: 1 device is forbidden")


def test_a_cordon_does_not_hide_what_else_keeps_the_replica_away() -> None:
    devices = (
        device("s0:g0", cordoned=True),
        device("s1:g0", cordoned=True),
        device("s2:g0", draining=True),
    )
    others = [demand("a", 95, current=place("s1:g0"))]
    wanted = demand("m", 50, node_selector={"zone": "a"})
    assert [verdict.sentence for verdict in explanation(devices, *others, demand("m", 50)).devices] == [
        "s0/g0: the device is cordoned: it takes nothing new.",
        "s1/g0: the device is cordoned: it takes nothing new. In service it would not do, either: needs 50 bytes, 5 of "
        "100 are free beside a.",
        "s2/g0: the device is being drained.",
    ]
    found = explanation(devices, *others, wanted).devices
    assert {verdict.constraint for verdict in found} == {"cordon", "drain"}
    assert all("either: needs label zone='a', the server has no such label." in one.sentence for one in found)


def test_the_reason_of_the_scheduler_names_it_too() -> None:
    problem = Problem(devices=(device("s0:g0", 5, cordoned=True),), demands=(demand("m", 10),))
    [unplaced] = plan_fleet(problem).unplaceable
    assert unplaced.why_not == (
        "s0/g0: the device is cordoned: it takes nothing new. In service it would not do, either: needs 10 bytes, the "
        "whole device has 5.",
    )
