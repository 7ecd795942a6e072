"""The last output of engines is waited for all together: a worker with many of them stops as soon."""

from __future__ import annotations

import pytest

from gpu_worker.edge import engine_link
from gpu_worker.edge.engine_link import OUTPUT_WAIT_S, EngineLinks
from sie_stream.sim.clock import SimClock


class Held:
    """Output whose pipe somebody else holds: it never ends."""

    def __init__(self, clock: SimClock) -> None:
        self._clock = clock
        self.waited_s: list[float] = []

    def join(self, timeout_s: float) -> None:
        self.waited_s.append(timeout_s)
        self._clock.advance(round(1_000 * timeout_s))


def test_pipes_that_are_held_cost_one_timeout_and_not_one_each(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimClock()
    outputs = [Held(clock) for _ in range(20)]
    links = EngineLinks(1)
    monkeypatch.setattr(engine_link, "SystemClock", lambda: clock)
    monkeypatch.setattr(links, "_outputs", outputs)
    began_ms = clock.monotonic_ms()
    links.close()
    assert clock.monotonic_ms() - began_ms == pytest.approx(1_000 * OUTPUT_WAIT_S)
    assert all(len(one.waited_s) == 1 for one in outputs), "each is asked, so that those that ended are done"
