"""The pieces a solve is made of: classes, candidates, filling, the bound."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from scheduler.solver.bound import Relaxation
from scheduler.solver.candidates import candidates
from scheduler.solver.classes import fold
from scheduler.solver.cpsat import minimise
from scheduler.solver.filling import Item, fill, subset
from scheduler.solver.greedy import greedy
from scheduler.solver.ledger import Ledger
from scheduler.solver.model import Demand, Device, Problem
from scheduler.solver.objective import TERMS, evaluate, total
from scheduler.solver.program import Program
from scheduler.solver.solve import Limits, plan_fleet, replan
from tests.bench.solver import added, fleet, models, running, without_server
from tests.unit.scheduler.solver.checks import broken_rules
from tests.unit.scheduler.solver.fleets import NVLINK, demand, device, place


def rack(servers: int, each: int = 4) -> tuple[Device, ...]:
    return tuple(device(f"s{s}:g{n}", island=NVLINK) for s in range(servers) for n in range(each))


def test_devices_that_no_demand_tells_apart_are_one_class() -> None:
    labels = [{"zone": "a", "host": "1"}, {"zone": "a", "host": "2"}, {"zone": "b", "host": "3"}]
    devices = tuple(device(f"s{n}:g0", labels=label, versions={"cuda": f"12.{n}"}) for n, label in enumerate(labels))
    assert fold(Problem(devices=devices, demands=(demand("m", 1),))).classes == 1
    assert fold(Problem(devices=devices, demands=(demand("m", 1, node_selector={"zone": "a"}),))).classes == 2
    assert fold(Problem(devices=devices, demands=(demand("m", 1, requires={"cuda": ">=12"}),))).classes == 3


def test_replicas_that_differ_in_number_and_place_only_are_one_kind() -> None:
    demands = (demand("m", 1, current=place("s0:g0")), demand("m", 1, replica=1), demand("m", 2, generation=2))
    folded = fold(Problem(devices=rack(1), demands=demands))
    assert [kind.members for kind in folded.kinds] == [(0, 1), (2,)]
    in_a_group = tuple(demand("m", 1, replica=n, kv_group="chat") for n in range(2))
    assert len(fold(Problem(devices=rack(1), demands=in_a_group)).kinds) == 2


def seen(devices: tuple[Device, ...], *demands: Demand) -> list[int]:
    """Candidates for the demands that do not run, beside those that do."""
    folded = fold(Problem(devices=devices, demands=demands))
    base = [seat if folded.may_stay[n] else None for n, seat in enumerate(folded.current)]
    free = [n for n, seat in enumerate(base) if seat is None]
    return candidates(folded, Ledger(folded, base), free, greedy(folded, base))


def test_one_new_replica_looks_at_one_device_of_each_sort() -> None:
    running = demand("a", 30, current=place("s2:g1"))
    # The one in use, a free one beside it (same island), and one of an untouched server.
    assert len(seen(rack(40), running, demand("m", 10))) <= 3
    assert 2 * 4 + 1 in seen(rack(40), running, demand("m", 10))


def test_free_memory_counts_only_as_far_as_sizes_can_use_it() -> None:
    running = [demand(f"a{n}", 30 + n, current=place(f"s0:g{n}")) for n in range(4)]
    # One of the four, whose free memory is all the same to 10 bytes, and the one that best fit took.
    assert seen(rack(1), *running, demand("m", 10)) == [0, 3]
    assert seen(rack(1), *running, demand("m", 68)) == [0, 2]


def test_full_devices_are_left_out() -> None:
    running = [demand(f"a{n}", 95, current=place(f"s0:g{n}")) for n in range(3)]
    assert seen(rack(1), *running, demand("m", 10)) == [3]


@given(st.lists(st.integers(1, 40), max_size=9), st.integers(0, 120))
def test_a_subset_fills_as_much_as_any(sizes: list[int], limit: int) -> None:
    items = [Item(number, 0, size) for number, size in enumerate(sizes)]
    chosen = subset(items, limit)
    sums = {0}
    for size in sizes:
        sums |= {known + size for known in sums}
    assert sum(item.size for item in chosen) == max(found for found in sums if found <= limit)
    assert len({item.number for item in chosen}) == len(chosen)


def test_filling_finds_the_pairs_that_best_fit_misses() -> None:
    """Largest first into the tightest gap leaves 2 x 35 behind; sums of three fill both devices."""
    sizes = [45, 40, 35, 30, 30, 20]
    folded = fold(Problem(devices=rack(3, 1), demands=tuple(demand(f"m{n}", s) for n, s in enumerate(sizes))))
    seats = fill(folded, [None] * len(sizes))
    assert evaluate(folded, seats)["devices_used"] == 2000


def test_options_of_the_relaxation_say_which_precision_pays() -> None:
    demands = (demand("a", 60), demand("b", 60, 40))
    folded = fold(Problem(devices=rack(1, 2), demands=demands))
    relaxed = Relaxation(folded, Ledger(folded), (0, 1), [None, None])
    answer = minimise(relaxed.program, 100_000)
    assert answer.proven
    assert answer.values is not None
    assert relaxed.options(answer.values) == [0, 1]


def test_the_bound_knows_that_halves_and_a_bit_do_not_share_a_device() -> None:
    demands = tuple(demand(f"m{n}", 51) for n in range(6))
    folded = fold(Problem(devices=tuple(device(f"s{n}:g0") for n in range(9)), demands=demands))
    relaxed = Relaxation(folded, Ledger(folded), range(6), [None] * 6)
    assert minimise(relaxed.program, 100_000).bound == 6000


def test_the_bound_knows_that_replicas_keep_apart_by_server() -> None:
    demands = tuple(demand("m", 1, replica=n, max_per_server=1) for n in range(3))
    folded = fold(Problem(devices=rack(4), demands=demands))
    relaxed = Relaxation(folded, Ledger(folded), range(3), [None] * 3)
    best = total(evaluate(folded, greedy(folded, [None] * 3)))
    assert minimise(relaxed.program, 100_000).bound == best == 3 * (1000 + 3 * 100)


def test_terms_are_reported_by_name_in_one_order() -> None:
    folded = fold(Problem(devices=rack(1), demands=(demand("m", 1),)))
    terms = evaluate(folded, [((0,), 0)])
    assert tuple(terms) == TERMS
    assert {term: cost for term, cost in terms.items() if cost} == {"devices_used": 1000, "nvlink_fragmentation": 300}


def test_a_program_is_minimised_and_proven() -> None:
    """max 3x + 2y with x + y <= 4 and x <= 3."""
    program = Program()
    x, y = program.variable(3, -3), program.variable(9, -2)
    program.at_most([(x, 1), (y, 1)], 4)
    answer = minimise(program, 100_000)
    assert (answer.values, answer.bound, answer.proven) == ((3, 1), -11, True)
    assert program.value((3, 1)) == -11
    assert program.broken_by((3, 2)) == program.rows


def test_plans_found_by_windows_keep_every_rule() -> None:
    """The small fleets of the slow twin are one program each; these are not."""
    problem = Problem(devices=fleet(7), demands=models(30, 70))
    limits = Limits(exact_free_max=2, exact_seats_max=100, windows_max=6, gap_permille=0)
    plan = plan_fleet(problem, limits)
    assert plan.statistics["programs"] > 2
    assert not plan.unplaceable
    assert not broken_rules(problem, plan)
    base = structs.replace(problem, demands=running(problem.demands, plan))
    for changed in [*added(base, 3), *without_server(base, 2)]:
        after = replan(changed, limits)
        assert not broken_rules(changed, after)
        assert after.lower_bound <= after.cost
