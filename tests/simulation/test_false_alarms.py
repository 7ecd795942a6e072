"""Rollouts on a noisy machine: the same version again is hardly ever rolled back, and a worse one soon is.

`python -m tests.simulation.test_false_alarms 300` counts over so many seeds for each kind of noise.
"""

from __future__ import annotations

import sys
from collections import Counter

import pytest

from scheduler.rollout import RolloutState
from tests.simulation.noisy import WINDOWS_BEFORE, Noise, Version, run

pytestmark = pytest.mark.simulation

NOISES = {
    "calm": Noise(200),
    "few samples": Noise(40),
    "stalls of the machine": Noise(200, stalls_shared=0.1),
    "stalls of one worker": Noise(200, stalls_own=0.05),
    "stalls of both kinds": Noise(100, stalls_shared=0.1, stalls_own=0.05),
    "both versions fail at the limit": Noise(200, failing=0.01),
    "both versions fail above the limit": Noise(200, failing=0.03),
}
WORSE = {
    "p99_vs_stable_ms": Version(slower=2.0),
    "error_rate": Version(failing=0.05),
    "psi:score": Version(score_mean=0.45),
}
SEEDS = 12


@pytest.mark.parametrize("noise", NOISES.values(), ids=NOISES)
def test_the_same_version_is_not_rolled_back(noise: Noise) -> None:
    ends = [run(seed, noise) for seed in range(SEEDS)]
    assert [one.why for one in ends if one.ending == "rolled_back"] == []


@pytest.mark.parametrize(
    ("gate", "noise"),
    [
        ("p99_vs_stable_ms", "calm"),  # with stalls both have the p99 of the stalls
        ("error_rate", "calm"),
        ("error_rate", "stalls of the machine"),
        ("psi:score", "calm"),
        ("psi:score", "stalls of both kinds"),
    ],
)
def test_a_worse_version_is_found_within_a_few_windows(gate: str, noise: str) -> None:
    ends = [run(1_000 + seed, NOISES[noise], WORSE[gate]) for seed in range(SEEDS)]
    assert {one.ending for one in ends} == {"rolled_back"}
    assert all(gate in one.why or "ks:score" in one.why for one in ends)
    assert sorted(windows_of(one) for one in ends)[SEEDS // 2] <= 10, "half of them within twenty seconds"


def windows_of(state: RolloutState) -> int:
    """How many windows had answers of the new version when it ended."""
    return state.window_end_ms // 2_000 - WINDOWS_BEFORE


def main(seeds: int) -> None:
    for name, noise in NOISES.items():
        ends = [run(seed, noise) for seed in range(seeds)]
        kinds = dict(Counter(one.ending or one.phase for one in ends))
        whys = dict(Counter(one.why.split(" ")[0] for one in ends if one.ending == "rolled_back"))
        sys.stdout.write(f"{name}: {kinds} {whys}\n")
        for gate, version in WORSE.items():
            found = [run(seed, noise, version) for seed in range(seeds // 4)]
            waits = sorted(windows_of(one) for one in found if one.ending == "rolled_back")
            shown = f"median {waits[len(waits) // 2]}, worst {waits[-1]} windows" if waits else ""
            sys.stdout.write(f"    {gate}: found {len(waits)} of {len(found)}, {shown}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
