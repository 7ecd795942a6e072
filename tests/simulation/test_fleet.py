"""Short lives of small fleets, with the real scheduler: the same twice, nothing lost, faults survived."""

from __future__ import annotations

import msgspec
import pytest

from sie_stream.errors import ConfigError
from sie_stream.sim.fleet.lru import Lru
from sie_stream.sim.fleet.run import BASELINES, OURS, Report, faults, simulate
from sie_stream.sim.fleet.scenario import Fault, Fleet, Models, Scenario, Traffic

pytestmark = pytest.mark.simulation

SMALL = Scenario(
    title="small",
    hours=0.1,
    fleet=Fleet(servers=3, gpus=4, workers="per-gpu"),
    models=Models(count=8, replicas=14),
    traffic=Traffic(requests_per_s=130, start_hour=10),
)
STORM = msgspec.structs.replace(
    SMALL,
    faults=(
        Fault("gpu-lost", 30, for_s=120),
        Fault("server-lost", 60, for_s=100),
        Fault("worker-paused", 120, for_s=8),
        Fault("drain", 200, for_s=60),
    ),
)
ROLLING = msgspec.structs.replace(
    SMALL,
    hours=0.35,
    traffic=Traffic(requests_per_s=70, shape="flat", burst_minutes=0),
    faults=(Fault("rolling-restart", 30, for_s=5, at_once=3),),
)


def same(report: Report) -> bytes:
    """Everything but what was measured on this machine."""
    fields = msgspec.structs.asdict(report)
    fields.pop("measured")
    return msgspec.json.encode(fields)


def test_the_same_seed_is_the_same_world_and_another_is_not() -> None:
    first, again, other = (simulate(STORM, OURS, seed) for seed in (7, 7, 8))
    assert same(first) == same(again)
    assert first.digest != other.digest


@pytest.mark.parametrize("policy", [OURS, *BASELINES])
def test_every_request_of_a_storm_is_accounted_for(policy: str) -> None:
    report = simulate(STORM, policy, 3)
    assert report.lost == 0
    assert abs(report.requests - report.completed - report.failed - report.waiting) <= 3
    assert report.requests > 20_000
    assert report.failed == 0 or policy != OURS


def test_every_policy_gets_the_same_requests_and_faults() -> None:
    counts = {simulate(msgspec.structs.replace(STORM, hours=0.03), policy, 5).requests for policy in BASELINES}
    assert len(counts) == 1
    assert faults(STORM, 5) == faults(STORM, 5)


class WatchedLru(Lru):
    """Remembers by how much a model ever exceeded its declared maximum."""

    beyond = -64

    def load(self, model: int, device: int) -> None:
        super().load(model, device)
        copies = sum(copy.model == model for copy in self.copies)
        WatchedLru.beyond = max(WatchedLru.beyond, copies - int(self.population.replicas_max[model]))


def test_lru_has_no_more_copies_than_the_declarations_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BASELINES, "lru", WatchedLru)
    crowded = msgspec.structs.replace(SMALL, hours=0.05, traffic=Traffic(requests_per_s=2_000, start_hour=10))
    simulate(crowded, "lru", 3)
    assert WatchedLru.beyond == 0


def test_a_rolling_restart_under_load_fails_no_request() -> None:
    report = simulate(ROLLING, OURS, 2)
    assert report.decisions["worker_drained"] == 12
    assert report.decisions["worker_left"] == 12
    assert (report.failed, report.lost, report.redelivered) == (0, 0, 0)


def test_models_share_gpus_where_static_gives_each_its_own() -> None:
    ours, static = (simulate(SMALL, policy, 4) for policy in (OURS, "static"))
    assert ours.memory_of_held > static.memory_of_held
    assert static.memory_of_held <= 0.6
    assert ours.measured.traffic_speed > 1


def test_an_unknown_policy_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'static'"):
        simulate(SMALL, "statik", 1)
