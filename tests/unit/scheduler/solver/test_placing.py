"""What a plan does: fits, packs or spreads, keeps neighbours apart or together, moves only what must move."""

from __future__ import annotations

import pytest
from msgspec import structs

from scheduler.solver import plan_fleet, replan, sla_weight
from scheduler.solver.model import Demand, Device, Objective, Plan, Problem
from sie_stream.errors import ConfigError
from tests.unit.scheduler.solver.checks import broken_rules
from tests.unit.scheduler.solver.fleets import NVLINK, assignment, carried_out, demand, device, place, where

BINPACK = Objective()
SPREAD = Objective(packing="spread")


def fleet(count: int, **fields: object) -> tuple[Device, ...]:
    return tuple(device(f"s{number}:g0", **fields) for number in range(count))  # type: ignore[arg-type]


def replan_of(devices: tuple[Device, ...], *demands: Demand, objective: Objective = BINPACK) -> Plan:
    problem = Problem(devices=devices, demands=demands, objective=objective)
    plan = replan(problem)
    assert not broken_rules(problem, plan)
    return plan


def test_binpack_uses_few_devices_and_spread_uses_all() -> None:
    demands = [demand(f"m{number}", 30) for number in range(3)]
    packed, spread = replan_of(fleet(3), *demands), replan_of(fleet(3), *demands, objective=SPREAD)
    assert set(where(packed).values()) == {"s0/g0"}
    assert sorted(where(spread).values()) == ["s0/g0", "s1/g0", "s2/g0"]
    assert packed.terms["devices_used"] == 1000
    assert spread.terms["balance"] == 0


def test_replicas_of_a_version_keep_apart_by_worker_and_by_server() -> None:
    two_workers = (device("s0:g0", worker="a"), device("s0:g1", worker="b"), device("s1:g0", worker="c"))
    by_worker = replan_of(two_workers, *(demand("m", 10, replica=n) for n in range(3)))
    assert sorted(where(by_worker).values()) == ["a/g0", "b/g1", "c/g0"]
    by_server = replan_of(two_workers, *(demand("m", 10, replica=n, max_per_server=1) for n in range(3)))
    assert len(by_server.assignments) == 2
    assert any("server s0 already holds 1 of this version" in why for why in by_server.unplaceable[0].why_not)


def test_a_lower_precision_is_taken_when_it_saves_a_device_that_costs_more() -> None:
    frugal = replan_of(fleet(2), demand("a", 60), demand("b", 60, 40, sla_weight=1))
    assert assignment(frugal, "b").place.precision == "int8"
    strict = replan_of(fleet(2), demand("a", 60), demand("b", 60, 40, sla_weight=8))
    assert assignment(strict, "b").place.precision == "bf16"


def test_a_tensor_parallel_replica_takes_one_island() -> None:
    islands = tuple(device(f"s0:g{n}", island=f"nvlink-{n // 2}") for n in range(4))
    busy = demand("busy", 80, current=place("s0:g0"))
    plan = replan_of(islands, busy, demand("big", 70, tensor_parallel_size=2))
    assert assignment(plan, "big").place.devices == ("g2", "g3")


def test_an_exclusive_replica_shares_its_device_with_nobody() -> None:
    plan = replan_of(fleet(2), demand("alone", 10, exclusive=True), demand("a", 10), demand("b", 10))
    homes = where(plan)
    assert homes["a#0"] == homes["b#0"] != homes["alone#0"]


def test_models_that_exchange_kv_share_an_island() -> None:
    devices = tuple(device(f"s{n // 2}:g{n}", island=NVLINK) for n in range(4))
    full = [demand("full", 95, current=place("s0:g1"))]
    pair = [demand("prefill", 60, kv_group="chat"), demand("decode", 60, kv_group="chat")]
    plan = replan_of(devices, *full, *pair)
    assert {assignment(plan, name).server for name in ("prefill", "decode")} == {"s1"}


def test_a_new_replica_goes_where_its_weights_are_and_not_where_it_failed() -> None:
    warm = replan_of(fleet(3), demand("m", 10, warm_on=("s2",)))
    assert where(warm) == {"m#0": "s2/g0"}
    failed = replan_of(fleet(2), demand("m", 10, failed_on=(("s0", "g0"),)))
    assert where(failed) == {"m#0": "s1/g0"}
    nothing_else = replan_of(fleet(1), demand("m", 10, failed_on=(("s0", "g0"),)))
    assert where(nothing_else) == {"m#0": "s0/g0"}


def test_a_cost_sensitive_model_goes_to_the_cheaper_kind_unless_its_sla_breaks_there() -> None:
    devices = (device("s0:g0", price=4), device("s1:c0", kind="cpu"))
    cheap = replan_of(devices, demand("m", 10, tags=("cost-sensitive",)))
    assert where(cheap) == {"m#0": "s1/c0"}
    late = replan_of(devices, demand("m", 10, tags=("cost-sensitive",), risk_permille={"cpu": 900}, sla_weight=4))
    assert where(late) == {"m#0": "s0/g0"}


def test_first_replicas_come_before_second_ones_when_not_all_fit() -> None:
    plan = replan_of(fleet(2, memory=50), *(demand("a", 50, replica=n) for n in range(2)), demand("b", 50))
    assert sorted(where(plan)) == ["a#0", "b#0"]


def test_a_standby_replica_takes_room_but_opens_a_device_only_when_it_is_likely() -> None:
    likely = replan_of(fleet(1), demand("m", 10, purpose="standby", likelihood_permille=900))
    unlikely = replan_of(fleet(1), demand("m", 10, purpose="standby", likelihood_permille=100))
    assert likely.taken
    assert not unlikely.taken
    assert unlikely.moves == ()
    beside = replan_of(fleet(1), demand("a", 10), demand("m", 10, purpose="standby", likelihood_permille=100))
    assert where(beside) == {"a#0": "s0/g0", "m#0": "s0/g0"}


# ---------------------------------------------------------------- changes


def running(devices: tuple[Device, ...], *demands: Demand) -> Problem:
    problem = Problem(devices=devices, demands=demands)
    return carried_out(problem, replan(problem))


def test_a_lost_device_moves_only_what_was_on_it() -> None:
    problem = running(fleet(3), *(demand(f"m{n}", 60) for n in range(2)))
    lost = structs.replace(problem, devices=tuple(one for one in problem.devices if one.server != "s0"))
    plan = replan(lost)
    assert [(move.kind, move.model) for move in plan.moves] == [("start", "m0")]
    assert where(plan) == {"m0#0": "s2/g0", "m1#0": "s1/g0"}
    assert plan.do_nothing_cost is not None
    assert plan.cost < plan.do_nothing_cost


def test_nothing_to_change_means_nothing_is_done() -> None:
    problem = running(fleet(3), *(demand(f"m{n}", 60) for n in range(2)))
    plan = replan(problem)
    assert not plan.taken
    assert plan.moves == ()
    assert plan.cost == plan.do_nothing_cost == plan.lower_bound


def test_neighbours_move_only_when_nothing_else_makes_room() -> None:
    small = [demand(f"small{n}", 40, current=place(f"s{n}:g0")) for n in range(2)]
    problem = Problem(devices=fleet(2), demands=(*small, demand("big", 90)))
    plan = replan(problem)
    assert not plan.unplaceable
    assert not broken_rules(problem, plan)
    assert [(move.kind, move.wave, move.order) for move in plan.moves] == [
        ("move", 0, "new-first"),
        ("start", 1, "new-first"),
    ]


def test_a_less_valuable_replica_yields_when_there_is_no_room() -> None:
    batch = demand("batch", 80, priority="P2", sla_weight=1, current=place("s0:g0"))
    plan = replan_of(fleet(1), batch, demand("scorer", 80, priority="P0", sla_weight=32))
    assert where(plan) == {"scorer#0": "s0/g0"}
    assert [(move.kind, move.model, move.wave) for move in plan.moves] == [("stop", "batch", 0), ("start", "scorer", 1)]
    assert plan.unplaceable[0].model == "batch"


def test_a_drained_device_is_left_new_before_old_and_a_cordoned_one_is_not() -> None:
    drained = (device("s0:g0", draining=True), device("s1:g0"))
    plan = replan_of(drained, demand("m", 10, current=place("s0:g0")))
    move = plan.moves[0]
    assert (move.kind, move.order, move.source, move.target) == ("move", "new-first", place("s0:g0"), place("s1:g0"))
    cordoned = (device("s0:g0", cordoned=True), device("s1:g0"))
    assert not replan_of(cordoned, demand("m", 10, current=place("s0:g0"))).taken


def test_a_drained_replica_without_another_place_is_held() -> None:
    plan = replan_of((device("s0:g0", draining=True),), demand("m", 10, current=place("s0:g0")))
    assert assignment(plan, "m").held
    assert plan.unplaceable[0].why_not == ("s0/g0: the device is being drained.",)
    assert plan.moves == ()


def test_a_rebalance_pays_for_its_moves() -> None:
    scattered = tuple(demand(f"m{n}", 30, current=place(f"s{n}:g0")) for n in range(3))
    problem = Problem(devices=fleet(3), demands=scattered)
    plan = plan_fleet(problem)
    assert plan.taken
    assert plan.terms["devices_used"] == 1000
    assert plan.terms["migration"] == 2 * (50 + 2)
    assert len(plan.moves) == 2
    dear = plan_fleet(structs.replace(problem, objective=Objective(move=2000)))
    assert not dear.taken
    assert dear.cost == dear.do_nothing_cost


def test_doing_nothing_is_no_choice_when_memory_does_not_hold_it() -> None:
    both = [demand(name, 60, current=place("s0:g0"), sla_weight=weight) for name, weight in (("a", 1), ("b", 4))]
    plan = replan_of(fleet(2), *both)
    assert plan.do_nothing_cost is None
    assert where(plan) == {"a#0": "s1/g0", "b#0": "s0/g0"}


def test_places_that_exchange_stop_the_less_valuable_first() -> None:
    selector = {"a": {"zone": "1"}, "b": {"zone": "0"}}
    devices = tuple(device(f"s{n}:g0", labels={"zone": str(n)}) for n in range(2))
    demands = [
        demand("a", 80, node_selector=selector["a"], current=place("s0:g0"), sla_weight=4),
        demand("b", 80, node_selector=selector["b"], current=place("s1:g0"), sla_weight=1),
    ]
    plan = replan_of(devices, *demands)
    assert [(move.kind, move.model, move.order) for move in plan.moves] == [
        ("stop", "b", "old-first"),
        ("move", "a", "new-first"),
        ("start", "b", "old-first"),
    ]
    assert [move.wave for move in plan.moves] == sorted(move.wave for move in plan.moves)


# ---------------------------------------------------------------- answers


def test_what_fits_nowhere_says_why_once_per_reason() -> None:
    devices = (*fleet(5), device("s9:c0", backends=("onnx",)))
    plan = replan_of(devices, demand("m", 101))
    assert plan.unplaceable[0].why_not == (
        "s0/g0, s1/g0, s2/g0 and 2 more: needs 101 bytes, the whole device has 100.",
        "s9/c0: backend 'torch' is not offered (onnx).",
    )
    assert replan_of((), demand("m", 1)).unplaceable[0].why_not == ("no live worker offers a device.",)


def test_a_tier_conflict_is_said_apart() -> None:
    plan = replan_of(fleet(1, tier="tier-0"), demand("m", 10, tier="tier-0", priority="P1"))
    assert plan.unplaceable[0].conflict is not None
    assert plan.unplaceable[0].conflict.startswith("409 Conflict: tier 'tier-0'")


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (Problem(devices=(*fleet(1), *fleet(1)), demands=()), "s0/g0 is listed twice"),
        (Problem(devices=fleet(1, reserved_bytes=101), demands=()), "reserved_bytes is 101; allowed: 0 to"),
        (Problem(devices=(), demands=(demand("m", 1), demand("m", 1))), "m#0 .generation 1. is listed twice"),
        (Problem(devices=(), demands=(demand("m"),)), "options must hold at least one"),
        (Problem(devices=(), demands=(demand("m", 0),)), "each of 1 byte or more"),
        (Problem(devices=(), demands=(demand("m", 1, max_per_server=0),)), "max_per_server is 0; allowed: 1 or more"),
        (Problem(devices=(), demands=(demand("m", 1, requires={"cuda": "12"}),)), "requires.cuda: version range '12'"),
    ],
)
def test_a_problem_that_makes_no_sense_names_the_field(problem: Problem, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replan(problem)


def test_tags_and_priority_weigh_the_sla() -> None:
    assert [sla_weight(p, ()) for p in ("P0", "P1", "P2")] == [8, 4, 2]
    assert sla_weight("P0", ("high-sla",)) == 32
    assert sla_weight("P2", ("batch-job",)) == 1


def test_the_nearest_devices_are_taken_and_wider_ones_only_when_allowed() -> None:
    """Bridges over pairs, two pairs, each of one NUMA node; the devices without a bridge are of the first."""
    nodes, islands = (0, 0, 1, 1, 0, 0), ("b0", "b0", "b1", "b1", None, None)
    devices = tuple(device(f"s0:g{n}", numa_node=nodes[n], island=islands[n]) for n in range(6))
    near, numa, wide = (
        assignment(replan_of(devices, demand("m", 10, tensor_parallel_size=size, span="any")), "m").place.devices
        for size in (2, 4, 5)
    )
    assert near in (("g0", "g1"), ("g2", "g3"))
    assert numa == ("g0", "g1", "g4", "g5")
    assert len(wide) == 5
    full = demand("full", 95, current=place("s0:g0"))
    refused = replan_of(devices, full, demand("m", 10, tensor_parallel_size=3, span="nvlink"))
    assert refused.unplaceable[0].why_not
    beside = replan_of(devices, full, demand("m", 10, tensor_parallel_size=3, span="numa"))
    assert assignment(beside, "m").place.devices == ("g1", "g4", "g5")


def test_a_shared_device_near_by_is_better_than_an_empty_one_across_the_sockets() -> None:
    devices = tuple(device(f"s0:g{n}", numa_node=n // 2, island=f"b{n // 2}") for n in range(4))
    there = [demand(f"a{n}", 10, current=place(f"s0:g{2 * n}")) for n in range(2)]
    wanted = demand("m", 40, tensor_parallel_size=2, span="any", sla_weight=8)
    plan = replan_of(devices, *there, wanted, objective=SPREAD)
    assert assignment(plan, "m").place.devices in (("g0", "g1"), ("g2", "g3")), "not g1 and g3, which hold nothing"


def test_a_wide_group_is_allowed_once_per_worker_only() -> None:
    with pytest.raises(ConfigError, match="max_per_worker 1 only"):
        replan_of(fleet(2), demand("m", 10, tensor_parallel_size=2, span="any", max_per_worker=2))


def test_spreading_takes_broken_islands_first_but_shares_no_device_for_that() -> None:
    islands = tuple(device(f"s{n // 4}:g{n % 4}", island=NVLINK) for n in range(8))
    objective = Objective(packing="spread")
    demands = [demand(f"m{n}", 10) for n in range(6)]
    plan = plan_fleet(Problem(devices=islands, demands=tuple(demands), objective=objective))
    homes = where(plan)
    assert len(set(homes.values())) == 6
    by_server = sorted(sum(home.startswith(server) for home in homes.values()) for server in ("s0", "s1"))
    assert by_server == [2, 4], "one island is full before the other is touched"


def test_partners_in_kv_are_apart_only_when_they_must() -> None:
    devices = (device("s0:g0"), device("s1:g0"))
    full = demand("full", 90, current=place("s0:g0"))
    prefill = demand("prefill", 10, kv_group="chat", current=place("s0:g0"))
    plan = replan_of(devices, full, prefill, demand("decode", 10, kv_group="chat"))
    assert assignment(plan, "decode").server == "s1"
    assert plan.terms["kv_apart"] == Objective().kv_apart
