"""Arrivals: how many requests of each model come in each step. The same for every policy of a run.

Rate of a model = its mean x the shape of the day, shifted by up to two hours per model x a lognormal factor that
changes every minute (spread from the trace) x a burst (as high as the trace's busiest minute, at least 1.5, with a ramp
of half a minute, two to ten minutes long). Arrivals in a step are Poisson with that rate.
"""

from __future__ import annotations

import numpy as np

from sie_stream.sim.fleet.population import Population
from sie_stream.sim.fleet.scenario import Scenario
from sie_stream.sim.fleet.traces import curve

SHIFT_HOURS = 2.0
RAMP_S = 30.0
MEMORY = 0.7
"""Of the factor of the minute before."""
BURST_S = (120.0, 600.0)


class Workload:
    """Call `arrivals` once per step, in order."""

    def __init__(self, scenario: Scenario, population: Population, seed: int) -> None:
        self._traffic = scenario.traffic
        self._population = population
        self._random = np.random.Generator(np.random.PCG64([seed, 1]))
        count = len(population.names)
        flat = scenario.traffic.shape == "flat"
        self._shift = np.zeros(count) if flat else self._random.uniform(-SHIFT_HOURS, SHIFT_HOURS, count)
        self._sigma = np.sqrt(np.log1p(population.burst_cv**2))
        self._factor = np.zeros(count)
        """Logarithm, in standard deviations."""
        self._minute = -1
        self._burst_from = np.full(count, -1e9)
        self._burst_to = np.full(count, -1e9)
        self._burst_height = np.ones(count)

    def arrivals(self, at_s: float, step_s: float) -> np.ndarray:
        """Whole requests per model that come in [at_s, at_s + step_s)."""
        return self._random.poisson(self.rates(at_s) * step_s)

    def rates(self, at_s: float) -> np.ndarray:
        """Requests per second per model."""
        while self._minute < int(at_s // 60):
            self._next_minute()
        hour = self._traffic.start_hour + at_s / 3600 + self._shift
        noise = np.exp(self._sigma * self._factor - 0.5 * self._sigma**2)
        up = np.clip((at_s - self._burst_from) / RAMP_S, 0.0, 1.0)
        down = np.clip((self._burst_to - at_s) / RAMP_S, 0.0, 1.0)
        burst = 1.0 + (self._burst_height - 1.0) * np.minimum(up, down)
        return self._population.rate * curve(self._traffic.shape, hour) * noise * burst

    def _next_minute(self) -> None:
        self._minute += 1
        count = len(self._population.names)
        fresh = self._random.standard_normal(count)
        self._factor = MEMORY * self._factor + (1 - MEMORY**2) ** 0.5 * fresh
        chance = self._random.random(count)
        lasts = self._random.uniform(*BURST_S, count)
        height = self._random.uniform(1.0, np.maximum(1.5, self._population.peak))
        every = self._traffic.burst_minutes
        if every <= 0:
            return
        now = self._minute * 60.0
        begins = (chance < 1 / every) & (self._burst_to < now)
        self._burst_from = np.where(begins, now, self._burst_from)
        self._burst_to = np.where(begins, now + lasts, self._burst_to)
        self._burst_height = np.where(begins, height, self._burst_height)
