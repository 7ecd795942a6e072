"""Requests are neither made nor lost on the board, whatever policies do to its stations."""

from __future__ import annotations

import random
from collections import deque

import numpy as np
import pytest

from sie_stream.sim.fleet.board import Board
from sie_stream.sim.fleet.population import Population, build
from sie_stream.sim.fleet.queues import Cohort, put_at, take
from sie_stream.sim.fleet.scenario import Models, Scenario, Traffic
from sie_stream.sim.fleet.traces import FITTED

SCENARIO = Scenario(title="", models=Models(count=6, replicas=14), traffic=Traffic(requests_per_s=140))
STEP_MS = 1_000


def population() -> Population:
    return build(SCENARIO, FITTED, 1)


def unaccounted(board: Board) -> float:
    tally = board.tally
    return float(np.abs(tally.arrived - tally.completed - tally.failed - board.in_system()).max())


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("failover", [True, False])
def test_requests_are_conserved_through_anything(seed: int, failover: bool) -> None:
    models, chance = population(), random.Random(seed)
    board = Board(models, 8, STEP_MS, 5.0, seed, failover)
    arrivals = np.random.Generator(np.random.PCG64(seed))
    stations: list[int] = []
    for second in range(120):
        for _ in range(chance.randrange(3)):
            match chance.choice(("add", "add", "remove", "kill", "pause", "share")):
                case "add" if len(stations) < 30:
                    stations.append(board.add(chance.randrange(6), chance.randrange(8)))
                    board.opened(stations[-1])
                case "remove" | "kill" as how if stations:
                    board.remove(stations.pop(chance.randrange(len(stations))), second * STEP_MS, how == "kill")
                case "pause" if stations:
                    board.pause(chance.choice(stations), chance.random() < 0.5)
            model = chance.randrange(6)
            mine = [s for s in stations if board.model[s] == model]
            board.set_shares(model, {s: chance.choice((0.5, 1.0)) / len(mine) for s in mine})
        board.step(second * STEP_MS, arrivals.poisson(models.rate * 1.5))
        assert unaccounted(board) < 1e-6
    assert float(board.tally.completed.sum()) > 0
    assert (float(board.tally.failed.sum()) == 0) or not failover


def test_what_nobody_serves_waits_and_is_late() -> None:
    models = population()
    board = Board(models, 8, STEP_MS, 5.0, 1, failover=True)
    one = np.array([10, 0, 0, 0, 0, 0])
    for second in range(60):
        board.step(second * STEP_MS, one)
    assert board.waits_for(0) == pytest.approx(600)
    station = board.add(0, 0)
    board.opened(station)
    board.set_shares(0, {station: 1.0})
    for second in range(60, 200):
        board.step(second * STEP_MS, one * 0)
    assert float(board.tally.completed[0]) == pytest.approx(600)
    waited = 60_000 - float(models.sla_ms[0])
    late = max(0.0, min(1.0, waited / 60_000))
    assert 1 - float(board.tally.inside[0]) / 600 >= late - 0.05


def test_engines_on_one_gpu_slow_each_other_down() -> None:
    models = population()
    heavy = int(np.argmax(models.base_ms * models.continuous))
    attained: list[float] = []
    for devices in ((0, 1), (0, 0)):
        board = Board(models, 2, STEP_MS, 5.0, 1, failover=True)
        for device in devices:
            board.opened(board.add(heavy, device))
        board.set_shares(heavy, dict.fromkeys([int(s) for s in np.flatnonzero(board.alive)], 0.5))
        rates = np.zeros(6)
        rates[heavy] = 1.6 * models.per_s[heavy]
        for second in range(900):
            board.step(second * STEP_MS, np.round(rates).astype(np.int64))
        attained.append(float(board.tally.inside[heavy] / board.tally.arrived[heavy]))
    assert attained[0] > attained[1] + 0.1


def test_a_queue_is_first_in_first_out_whatever_comes_late() -> None:
    queue: deque[Cohort] = deque()
    for at_ms, count in ((100.0, 2.0), (300.0, 1.0), (200.0, 4.0), (200.0, 1.0)):
        put_at(queue, at_ms, count)
    assert list(queue) == [(100.0, 2.0), (200.0, 5.0), (300.0, 1.0)]
    served = list(take(queue, 4.0, 1_000.0, 1_000.0))
    assert [(at, count) for at, count, _ in served] == [(100.0, 2.0), (200.0, 2.0)]
    assert served[0][2] < served[1][2] <= 2_000.0
    assert sum(count for _, count in queue) == pytest.approx(4.0)


def test_what_waits_for_an_owner_goes_home_with_its_part_of_the_shares() -> None:
    """Half of the keys have no owner. When half of these get one, half of what waits is theirs."""
    models = population()
    board = Board(models, 8, STEP_MS, 5.0, 1, failover=True)
    one, other = board.add(0, 0), board.add(0, 1)
    board.opened(one)
    board.opened(other)
    board.set_shares(0, {one: 0.5})
    arrivals = np.array([100, 0, 0, 0, 0, 0])
    for second in range(10):
        board.step(second * STEP_MS, arrivals)
    waits = board.waits_for(0)
    assert waits == pytest.approx(500)
    board.set_shares(0, {one: 0.5, other: 0.25})
    board.step(10 * STEP_MS, 0 * arrivals)
    assert board.waits_for(0) == pytest.approx(waits / 2)
    board.set_shares(0, {one: 0.5, other: 0.5})
    board.step(11 * STEP_MS, 0 * arrivals)
    assert board.waits_for(0) == pytest.approx(0)
    assert unaccounted(board) < 1e-6


def test_a_continuous_engine_with_a_short_queue_is_not_full() -> None:
    """Five requests that waited for an owner take five of its slots, and it says so."""
    models = population()
    number = int(np.flatnonzero(models.continuous)[0])
    board = Board(models, 8, STEP_MS, 5.0, 1, failover=True)
    station = board.add(number, 0)
    board.opened(station)
    arrivals = np.zeros(6, dtype=np.int64)
    arrivals[number] = 5
    board.step(0, arrivals)
    assert board.waits_for(number) == pytest.approx(5)
    board.set_shares(number, {station: 1.0})
    board.seen.clear(station)
    board.step(STEP_MS, 0 * arrivals)
    _, _, busy_ms, _ = board.seen.take(station)
    assert board.waiting(station) == pytest.approx(0)
    assert board.running(station) == pytest.approx(5, rel=0.5)
    assert 0 < busy_ms < STEP_MS * 5 / float(models.batch[number]) * 1.5
