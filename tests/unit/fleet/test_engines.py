"""The engine model against the slow twin, and its limits."""

from __future__ import annotations

import numpy as np
import pytest

from sie_stream.sim.fleet.engines import Laws, Served, capacity_per_ms, filled, normal_cdf, room, serve, within
from tests.unit.fleet.twin import batching, continuous


def laws(base: float, each: float, batch: float, sla: float, sigma: float = 0.0, continuous: bool = False) -> Laws:
    return Laws(*(np.array([value]) for value in (base, each, batch, sigma, continuous, sla)))


def settled(law: Laws, per_s: float, speed: float = 1.0) -> Served:
    """After ten minutes at one rate."""
    running, found = np.zeros(1), None
    for _ in range(600):
        found = serve(law, np.array([speed]), np.array([per_s / 1000]), running, 1000.0)
        running = found.running
    assert found is not None
    return found


@pytest.mark.parametrize("load", [0.05, 0.3, 0.6, 0.85])
def test_a_batching_engine_is_as_fast_as_its_twin(load: float) -> None:
    base, each, batch = 8.0, 0.5, 64
    per_s = load * 1000 * batch / (base + each * batch)
    twin = batching(base, each, batch, per_s, 60.0, seed=3)
    sla = 60.0
    model = settled(laws(base, each, batch, sla), per_s)
    assert float(model.mean_ms[0]) == pytest.approx(sum(twin) / len(twin), rel=0.25)
    assert float(model.inside[0]) == pytest.approx(sum(ms <= sla for ms in twin) / len(twin), abs=0.05)


@pytest.mark.parametrize("load", [0.1, 0.4, 0.7, 0.9])
def test_a_continuous_engine_is_as_fast_as_its_twin(load: float) -> None:
    base, each, batch, sigma = 2_000.0, 35.0, 48, 0.7
    per_s = load * 1000 * batch / (base + each * batch)
    twin = continuous(base, each, batch, sigma, per_s, 1_500.0, seed=5)
    twin = twin[len(twin) // 10 :]  # it began empty
    sla = 12_000.0
    model = settled(laws(base, each, batch, sla, sigma, continuous=True), per_s)
    assert float(model.mean_ms[0]) == pytest.approx(sum(twin) / len(twin), rel=0.15)
    assert float(model.inside[0]) == pytest.approx(sum(ms <= sla for ms in twin) / len(twin), abs=0.02)


def test_half_the_speed_is_half_the_capacity_and_twice_the_time() -> None:
    law = laws(8.0, 0.5, 64, 1_000.0)
    whole, half = (capacity_per_ms(law, np.array([speed]))[0] for speed in (1.0, 0.5))
    assert half == pytest.approx(whole / 2)
    assert float(settled(law, 0.01, 0.5).mean_ms[0]) == pytest.approx(2 * 8.5, rel=0.01)


def test_more_requests_never_make_an_engine_faster() -> None:
    law = laws(8.0, 0.5, 64, 60.0)
    means = [float(settled(law, per_s).mean_ms[0]) for per_s in (1, 100, 400, 800, 1_200, 1_500)]
    assert means == sorted(means)


def test_a_wait_as_long_as_the_sla_leaves_nothing_in_time() -> None:
    for sigma in (0.0, 0.7):
        law = laws(2_000.0, 35.0, 48, 12_000.0, sigma, continuous=True)
        assert float(within(law, np.array([3_000.0]), np.array([12_000.0]))[0]) == pytest.approx(0.0, abs=1e-6)
        assert float(within(law, np.array([10.0]), np.array([0.0]))[0]) == pytest.approx(1.0, abs=1e-6)


def test_the_table_of_the_normal_distribution() -> None:
    assert normal_cdf(np.array([0.0, 1.96, -3.0])) == pytest.approx([0.5, 0.975, 0.00135], abs=1e-5)


def test_a_full_engine_stays_full_and_starts_what_it_ends() -> None:
    law = laws(2_000.0, 40.0, 48, 30_000.0, 0.7, continuous=True)
    speed, full = np.ones(1), np.array([48.0])
    most = capacity_per_ms(law, speed) * 1_000.0
    left, took_ms = filled(law, speed, most, full, 1_000.0)
    assert float(left[0]) == pytest.approx(48)
    assert float(took_ms[0]) == pytest.approx(2_000 + 40 * 48)
    assert float(room(law, speed, full, most, 1_000.0)[0]) == pytest.approx(float(most[0]))


def test_free_slots_are_filled_at_once_and_few_requests_are_quick() -> None:
    law = laws(2_000.0, 40.0, 48, 30_000.0, 0.7, continuous=True)
    speed, few = np.ones(1), np.array([4.0])
    most = capacity_per_ms(law, speed) * 1_000.0
    assert float(room(law, speed, few, most, 1_000.0)[0]) >= 44
    left, took_ms = filled(law, speed, np.array([4.0]), few, 1_000.0)
    assert 4 < float(left[0]) < 8
    assert float(took_ms[0]) < 2_000 + 40 * 8


def test_a_batching_engine_with_a_queue_is_full() -> None:
    law = laws(8.0, 0.5, 64, 120.0)
    speed = np.ones(1)
    most = capacity_per_ms(law, speed) * 1_000.0
    _, took_ms = filled(law, speed, np.array([10.0]), np.zeros(1), 1_000.0)
    assert float(took_ms[0]) == pytest.approx(8 + 0.5 * 64)
    assert float(room(law, speed, np.zeros(1), most, 1_000.0)[0]) == pytest.approx(float(most[0]))
