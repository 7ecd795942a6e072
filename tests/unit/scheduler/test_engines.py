"""An engine process ends while its worker lives: rows tell the truth, and one that ends again and again is left."""

from __future__ import annotations

import pytest
from msgspec import structs

from scheduler.limits import ENGINE_DEATHS_MAX, ENGINE_DEATHS_MS
from scheduler.state import from_bytes, to_bytes
from sie_stream.control import TRIAL, EngineLost, InstanceRow, ReplicaReady
from sie_stream.engine_facts import EngineModel
from tests.unit.scheduler.kit import INSTANCE, Cluster, decisions, joined, kinds, running, spec_json
from tests.unit.scheduler.rolling import Rolling

OOM = "SIGKILL (out of memory)"


def lost(
    cluster: Cluster, *suspects: str, given_up: tuple[str, ...] = (), models: tuple[str, ...] = ("churn",)
) -> EngineLost:
    """The sklearn engine of the worker that holds churn."""
    (replica,) = cluster.model().replicas
    epochs = {name: cluster.model(name).replicas[0].placement_epoch for name in models}
    named = tuple(EngineModel(name, "1.0.0", epoch) for name, epoch in epochs.items())
    return EngineLost(
        replica.worker, replica.incarnation, replica.device, "sklearn", OOM, named, len(suspects), suspects, given_up
    )


def back(cluster: Cluster, name: str = "churn") -> ReplicaReady:
    (replica,) = cluster.model(name).replicas
    who = (replica.worker, replica.incarnation, name, "1.0.0", replica.placement_epoch)
    return ReplicaReady(*who, replica.memory_bytes, load_ms=40, warmup_ms=5)


def row(cluster: Cluster) -> InstanceRow:
    return cluster.row("instances", INSTANCE, InstanceRow)


def one_worker() -> Cluster:
    """churn and risk share the only engine."""
    cluster = Cluster()
    cluster.lead()
    cluster.append(joined("w0", "a"))
    for name in ("churn", "risk"):
        cluster.apply(spec_json(name))
        cluster.make_ready(name)
    return cluster


def test_the_chain_from_the_loss_to_the_last_model_that_is_back() -> None:
    cluster = one_worker()
    owners = cluster.owners()
    offset = len(cluster.log)
    (died,) = decisions(cluster.append(lost(cluster, "r1", "r2", models=("churn", "risk"))))
    assert (died.kind, died.subject) == ("engine_lost", "w0/cpu0")
    assert OOM in died.reason
    assert {move.model: (move.what, move.source) for move in died.moves} == {
        "churn": ("service", "w0/cpu0"),
        "risk": ("service", "w0/cpu0"),
    }
    assert row(cluster).status == "loading"
    assert [(one.state, OOM in one.message) for one in row(cluster).replicas] == [("loading", True)]
    cluster.now_ms += 900
    assert kinds(cluster.append(back(cluster))) == ["replica_ready"]
    assert row(cluster).status == "ready"
    cluster.now_ms += 100
    commands = cluster.append(back(cluster, "risk"))
    assert kinds(commands) == ["replica_ready", "engine_back"]
    for decision in decisions(commands):
        assert (decision.took_ms, decision.facts[1].offset) == (1_000, offset)
    assert cluster.owners() == owners, "the partitions stayed where they are"


def test_what_serves_is_not_moved_for_what_the_engine_of_versions_on_trial_does() -> None:
    cluster = Rolling()
    (serving,) = cluster.model().replicas
    record = EngineLost(serving.worker, serving.incarnation, serving.device, "sklearn", OOM, domain=TRIAL)
    made = [one for _ in range(ENGINE_DEATHS_MAX) for one in decisions(cluster.append(record))]
    assert made[0].reason.startswith("The sklearn engine for versions on trial ended")
    assert made[-1].kind == "engine_unstable"
    assert cluster.model().replicas == [serving]
    assert serving.down is None


def test_a_domain_that_does_not_exist_leaves_nothing_behind() -> None:
    cluster = one_worker()
    assert not decisions(cluster.append(structs.replace(lost(cluster, "r1"), domain="x" * 100)))
    assert cluster.machine.state.workers["w0"].engines == {}


def test_it_survives_a_snapshot() -> None:
    cluster = one_worker()
    cluster.append(lost(cluster, "r1"))
    loaded = from_bytes(to_bytes(cluster.machine.state))
    assert loaded == cluster.machine.state


def test_a_replica_that_never_comes_back_has_failed_in_the_end() -> None:
    cluster = running()
    cluster.append(lost(cluster))
    wait_ms = cluster.settings.load_timeout_ms + 20_000
    commands = cluster.wait(wait_ms, (("w0", "a"), ("w1", "b")))
    (failed,) = decisions(commands, "replica_failed")
    assert "after it lost its engine" in failed.reason


def die(cluster: Cluster, *deaths: EngineLost) -> list[str]:
    """Each death with its recovery a second later; kinds of what the last death led to."""
    found: list[str] = []
    for death in deaths:
        cluster.now_ms += 1_000
        found = kinds(cluster.append(death))
        if cluster.model().replicas and cluster.model().replicas[0].down is not None:
            cluster.append(back(cluster))
    return found


def test_an_unstable_engine_is_left_for_another_device() -> None:
    cluster = running()
    first = cluster.model().replicas[0].worker
    found = die(cluster, *(lost(cluster, f"r{n}") for n in range(ENGINE_DEATHS_MAX)))
    assert found[:3] == ["engine_lost", "engine_unstable", "replica_failed"]
    (failed,) = decisions(cluster.commands, "replica_failed")
    assert failed.chosen["code"] == "engine_unstable"
    cluster.wait(2_000, (("w0", "a"), ("w1", "b")))
    assert cluster.model().replicas[0].worker != first
    cluster.make_ready()
    assert cluster.release() == 6
    assert cluster.model().failures == 0


def test_a_model_that_kills_engines_does_not_wander_from_one_to_the_next() -> None:
    cluster = running()
    for _ in range(2):
        die(cluster, *(lost(cluster, f"r{n}") for n in range(ENGINE_DEATHS_MAX)))
        cluster.wait(2_000, (("w0", "a"), ("w1", "b")))
        cluster.make_ready()
    assert len(decisions(cluster.commands, "engine_unstable")) == 2
    assert len(decisions(cluster.commands, "replica_failed")) == 1


def test_without_another_device_it_stays() -> None:
    cluster = one_worker()
    found = die(cluster, *(lost(cluster, f"r{n}") for n in range(ENGINE_DEATHS_MAX)))
    assert found == ["engine_lost", "engine_unstable"]
    assert cluster.model().replicas


@pytest.mark.parametrize(
    "deaths",
    [
        ((("bad", "r1"), ()), (("bad",), ()), (("bad",), ())),
        ((("bad", "worse"), ()), (("bad",), ()), (("bad",), ("bad",)), (("worse",), ()), (("worse",), ("worse",))),
        ((("load:risk",), ()), (("load:risk",), ()), (("load:risk",), ("load:risk",)), (("r1",), ())),
    ],
    ids=["one request is to blame", "two are, one after the other", "a load is"],
)
def test_what_a_request_or_a_load_explains_does_not_count(
    deaths: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...],
) -> None:
    cluster = running()
    die(cluster, *(lost(cluster, *suspects, given_up=given_up) for suspects, given_up in deaths))
    assert not decisions(cluster.commands, "engine_unstable")


def test_deaths_far_apart_are_no_pattern() -> None:
    cluster = running()
    for number in range(2 * ENGINE_DEATHS_MAX):
        die(cluster, lost(cluster, f"r{number}"))
        cluster.now_ms += ENGINE_DEATHS_MS
    assert not decisions(cluster.commands, "engine_unstable")
