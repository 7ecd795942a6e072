"""The Traffic Director in the fold: reports become shares of buckets, rarely, and never where order matters."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from msgspec import Raw, structs

from scheduler.direction import shares_devices
from scheduler.traffic import RELIEF_MS, SHARES
from sie_stream.commands import StartRollout
from sie_stream.control import RouteRow, WorkerLoad
from sie_stream.engine_facts import EngineLost, EngineModel
from sie_stream.loads import DeviceLoad, ModelLoad
from tests.unit.scheduler.kit import Cluster, decisions, joined, spec_json

ALIVE = (("w0", "a"), ("w1", "b"), ("w2", "c"))


def serving(workers: int = 2, most: int = 0, **fields: Any) -> Cluster:
    """One replica on each worker."""
    cluster = Cluster()
    cluster.lead()
    for worker, incarnation in ALIVE[:workers]:
        cluster.append(joined(worker, incarnation))
    cluster.apply(spec_json(replicas={"min": workers, "max": most or workers}, **fields))
    cluster.make_ready()
    cluster.release()
    assert len(set(cluster.owners().values())) == workers
    return cluster


def rounds(cluster: Cluster, reports: dict[str, tuple[int, int, int]], count: int = 1) -> None:
    """{worker: (p99 ms, queue, busy share in basis points)}, every two seconds, `count` times."""
    alive = tuple(one for one in ALIVE if one[0] in reports)
    for _ in range(count):
        for worker, incarnation in alive:
            p99_ms, queue, busy_bp = reports[worker]
            load = ModelLoad("churn", 100, 100, queue, 1, 1_000, p99_ms)
            cluster.append(WorkerLoad(worker, incarnation, 2_000, (load,), (DeviceLoad("cpu0", busy_bp),)))
        cluster.wait(2_000, alive)


def route(cluster: Cluster) -> RouteRow:
    return cluster.row("routes", "churn", RouteRow)


def share_of(cluster: Cluster, worker: str) -> int:
    width = route(cluster).width
    owners = cluster.owners()
    return sum(share for bucket, share in enumerate(route(cluster).shares) if owners[bucket % width] == worker)


def test_a_hot_worker_gives_thirty_percent_away() -> None:
    cluster = serving()
    before = route(cluster)
    rounds(cluster, {"w0": (400, 80, 9_500), "w1": (100, 0, 3_000)}, 3)
    (directed,) = decisions(cluster.commands, "traffic_directed")
    assert "device at 95 % with 80 queued" in directed.reason
    assert share_of(cluster, "w0") == 3_500
    assert sum(route(cluster).shares) == SHARES
    assert route(cluster).route_epoch > before.route_epoch
    assert directed.chosen["w0"] == "5000 -> 3500 of 10000"


@pytest.mark.parametrize("hot", [(400, 80, 8_400), (100, 50, 9_500)])
def test_below_either_limit_nothing_moves_at_once(hot: tuple[int, int, int]) -> None:
    cluster = serving()
    rounds(cluster, {"w0": hot, "w1": (100, 45, 8_400)}, 3)
    assert not [d for d in decisions(cluster.commands, "traffic_directed") if "limits" in d.reason]


def test_a_route_changes_at_most_once_in_the_time_of_relief_and_then_comes_to_rest() -> None:
    cluster = serving()
    rounds(cluster, {"w0": (1_200, 80, 9_900), "w1": (100, 0, 1_000)}, 60)
    times = [decision.at_ms for decision in decisions(cluster.commands, "traffic_directed")]
    assert len(times) >= 2
    assert all(later - earlier >= RELIEF_MS for earlier, later in pairwise(times))
    done = len(times)
    rounds(cluster, {"w0": (100, 0, 2_000), "w1": (100, 0, 2_000)}, 60)
    settled = decisions(cluster.commands, "traffic_directed")
    rounds(cluster, {"w0": (100, 0, 2_000), "w1": (100, 0, 2_000)}, 60)
    assert len(settled) > done
    assert decisions(cluster.commands, "traffic_directed") == settled
    assert abs(share_of(cluster, "w0") - 5_000) <= 1_250


def test_even_workers_are_left_alone() -> None:
    cluster = serving()
    rounds(cluster, {"w0": (100, 3, 5_000), "w1": (105, 2, 5_200)}, 60)
    assert not decisions(cluster.commands, "traffic_directed")
    assert route(cluster).shares == ()


def test_a_worker_with_more_buckets_gets_no_more_than_its_part() -> None:
    cluster = serving(most=3)
    rounds(cluster, {"w0": (100, 3, 5_000), "w1": (100, 3, 5_000)}, 3)
    assert abs(share_of(cluster, "w0") - share_of(cluster, "w1")) <= 2


def test_keys_that_keep_their_order_keep_their_partition() -> None:
    cluster = serving(ordering="key")
    rounds(cluster, {"w0": (900, 80, 9_900), "w1": (100, 0, 1_000)}, 30)
    assert not decisions(cluster.commands, "traffic_directed")
    assert route(cluster).shares == ()


def test_few_requests_say_nothing() -> None:
    cluster = serving()
    for _ in range(30):
        for worker, incarnation in ALIVE[:2]:
            load = ModelLoad("churn", 2, 2, 0, 0, 10, 900 if worker == "w0" else 10)
            cluster.append(WorkerLoad(worker, incarnation, 2_000, (load,)))
        cluster.wait(2_000, ALIVE[:2])
    assert not decisions(cluster.commands, "traffic_directed")


def test_a_new_version_starts_even() -> None:
    cluster = serving()
    rounds(cluster, {"w0": (400, 80, 9_500), "w1": (100, 0, 3_000)}, 3)
    cluster.apply(spec_json(version="2.0.0", replicas={"min": 2, "max": 2}))
    cluster.make_ready()
    cluster.release()
    assert route(cluster).shares == ()


def test_a_lost_worker_leaves_its_part_to_the_others() -> None:
    cluster = serving(workers=3)
    rounds(cluster, {"w0": (400, 80, 9_500), "w1": (100, 0, 3_000), "w2": (100, 0, 3_000)}, 3)
    cluster.fence(cluster.wait(30_000, ALIVE[1:]))
    rounds(cluster, {"w1": (100, 0, 3_000), "w2": (100, 0, 3_000)}, 20)
    owners = set(cluster.owners().values())
    assert owners == {"w1", "w2"}
    assert route(cluster).shares == () or abs(share_of(cluster, "w1") - share_of(cluster, "w2")) <= 1_250


def decoding(models: int = 2) -> Cluster:
    """Language models with a replica each on the only devices of two workers."""
    cluster = Cluster()
    cluster.lead()
    for worker, incarnation in ALIVE[:2]:
        cluster.append(structs.replace(joined(worker, incarnation), backends=("sglang",)))
    for name in "ab"[:models]:
        spec = spec_json(name, backend={"name": "sglang"}, replicas={"min": 2, "max": 2})
        cluster.apply(spec)
        cluster.make_ready(name)
        cluster.release(name)
        assert len(set(cluster.owners(name).values())) == 2
    return cluster


def decode_rounds(cluster: Cluster, count: int, waiting: dict[str, int] | None = None) -> None:
    """Each model keeps four tenths of a device busy; `waiting`: in its queue on each worker."""
    for _ in range(count):
        for worker, incarnation in ALIVE[:2]:
            loads = tuple(
                ModelLoad(name, 20, 20, (waiting or {}).get(name, 0), 1, 400, 100)
                for name in "ab"
                if name in cluster.machine.state.models
            )
            cluster.append(WorkerLoad(worker, incarnation, 2_000, loads, (DeviceLoad("cpu0", 9_000),)))
        cluster.wait(2_000, ALIVE[:2])


def shares_of(cluster: Cluster, name: str) -> dict[str, int]:
    """Of its keys, by worker; buckets are alike as long as no shares are published."""
    row = cluster.row("routes", name, RouteRow)
    owners = cluster.owners(name)
    found = {worker: 0 for worker, _ in ALIVE[:2]}
    for bucket, share in enumerate(row.shares or [SHARES // row.width] * row.width):
        found[owners[bucket]] += share
    return found


def test_models_that_decode_on_the_same_devices_take_one_each() -> None:
    cluster = decoding()
    assert shares_of(cluster, "a") == shares_of(cluster, "b") == {"w0": 5_000, "w1": 5_000}
    decode_rounds(cluster, 4)
    a, b = shares_of(cluster, "a"), shares_of(cluster, "b")
    assert sorted(a.values()) == sorted(b.values()) == [0, SHARES]
    assert a != b
    assert "In reserve" in decisions(cluster.commands, "traffic_directed")[-1].reason


def test_then_they_stay_where_they_are() -> None:
    cluster = decoding()
    decode_rounds(cluster, 4)
    said = decisions(cluster.commands, "traffic_directed")
    decode_rounds(cluster, 40)
    assert decisions(cluster.commands, "traffic_directed") == said


def test_a_queue_wakes_the_reserve_at_once() -> None:
    cluster = decoding()
    decode_rounds(cluster, 4)
    decode_rounds(cluster, 3, {"a": 30})
    assert 0 not in shares_of(cluster, "a").values()


def test_a_model_alone_on_its_devices_uses_all_of_them() -> None:
    cluster = decoding(models=1)
    decode_rounds(cluster, 4)
    assert shares_of(cluster, "a") == {"w0": 5_000, "w1": 5_000}


def test_when_the_worker_that_decodes_is_lost_the_reserve_has_the_keys() -> None:
    cluster = decoding()
    decode_rounds(cluster, 4)
    gone = next(worker for worker, share in shares_of(cluster, "a").items() if share)
    rest = tuple(one for one in ALIVE[:2] if one[0] != gone)
    cluster.fence(cluster.wait(30_000, rest))
    assert set(cluster.owners("a").values()) == {rest[0][0]}
    assert sum(cluster.row("routes", "a", RouteRow).shares) in (0, SHARES)


def test_while_the_engine_that_decodes_is_loaded_again_the_reserve_has_keys() -> None:
    cluster = decoding()
    decode_rounds(cluster, 4)
    gone, incarnation = next(one for one in ALIVE[:2] if shares_of(cluster, "a")[one[0]])
    replica = next(one for one in cluster.machine.state.models["a"].replicas if one.worker == gone)
    model = EngineModel("a", cluster.machine.state.models["a"].version, replica.placement_epoch)
    cluster.append(EngineLost(gone, incarnation, replica.device, "sglang", "SIGSEGV", (model,)))
    decode_rounds(cluster, 4)
    assert any(share for worker, share in shares_of(cluster, "a").items() if worker != gone)


def test_versions_that_are_compared_take_no_turns() -> None:
    cluster = decoding()
    spec = spec_json("a", version="2.0.0", backend={"name": "sglang"}, replicas={"min": 2, "max": 2})
    cluster.append(StartRollout(Raw(spec), "b", 1_000, "ada"))
    assert cluster.machine.state.models["a"].rollouts
    decode_rounds(cluster, 4)
    assert shares_of(cluster, "a") == {"w0": 5_000, "w1": 5_000}


def test_what_a_queue_woke_stays_awake_for_the_time_of_a_relief() -> None:
    cluster = decoding()
    decode_rounds(cluster, 4)
    decode_rounds(cluster, 3, {"a": 30})
    woken = cluster.machine.state.models["a"].directed_ms
    decode_rounds(cluster, 3)
    assert 0 not in shares_of(cluster, "a").values(), "a route for each queue would be a route for each round"
    decode_rounds(cluster, RELIEF_MS // 2_000)
    assert cluster.machine.state.models["a"].directed_ms >= woken + RELIEF_MS
    assert 0 in shares_of(cluster, "a").values()


def test_a_model_alone_on_its_devices_is_sized_for_all_of_them() -> None:
    for models, shared in ((1, False), (2, True)):
        cluster = decoding(models)
        decode_rounds(cluster, 4)
        state = cluster.machine.state
        assert shares_devices(state, state.models["a"]) == shared
