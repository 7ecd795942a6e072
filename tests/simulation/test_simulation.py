"""Worlds by the thousand: the hosts of production over the log in memory, with everything going wrong.

SIE_SIM_SEEDS sets how many worlds (default 1,000); `make sim SCENARIO=... SEED=...` runs one and shows what happened.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from sie_stream.errors import ConfigError
from sie_stream.sim.main import (
    SCENARIOS,
    Job,
    load_scenario,
    mixed_jobs,
    report_failure,
    run_many,
    run_one,
    scenario_names,
)
from sie_stream.sim.scenario import parse_scenario

SEEDS = int(os.environ.get("SIE_SIM_SEEDS", "1000"))
REGRESSIONS = tomllib.loads((Path(__file__).parent / "regressions.toml").read_text())["regression"]
REPORTS_MAX = 3

pytestmark = pytest.mark.simulation


@pytest.mark.slow
@pytest.mark.timeout(1_800)
def test_all_seeds() -> None:
    failures = []
    statuses: set[str] = set()
    faults: set[str] = set()
    marks: set[str] = set()
    for outcome in run_many(mixed_jobs(SEEDS), os.cpu_count() or 1):
        statuses.update(outcome.statuses)
        faults.update(outcome.faults)
        marks.update(outcome.marks)
        if outcome.failure:
            failures.append(outcome)
    assert not failures, f"{len(failures)} worlds failed\n" + "\n\n".join(map(report_failure, failures[:REPORTS_MAX]))
    if SEEDS >= 200:  # what never happens is not tested
        assert statuses >= {"ok", "rejected", "expired", "failed"}
        assert faults >= {
            *("kill_worker", "kill_ingress", "kill_egress", "kill_scheduler", "pause_worker", "pause_ingress"),
            *("stop_worker", "stop_ingress", "join_ingress", "join_worker", "evict", "hold", "slow_call", "retriable"),
            *("aborted", "commit_answer_lost", "commit_request_lost", "slow_engine", "kill_engine", "new_version"),
            *(
                "twin_worker",
                "twin_ingress",
                "delete",
                "drain",
                "lose_device",
                "in_write",
                "in_send_offsets",
                "in_commit",
                "in_poll",
            ),
        }
        assert marks >= {
            *("worker_lost", "worker_fenced", "worker_replaced", "worker_left", "partitions_asked_back"),
            *("replica_draining", "model_draining", "model_deleted", "worker_drained", "scheduler_elected"),
            *("engine_lost", "engine_back", "engine_unstable"),
            *("device_lost", "device_back", "plan_started", "replica_moving", "plan_ended"),
            *("snapshot", "metadata", "copy", "dead_letter", "to_zero", "from_zero"),
            *("rollout_started", "rollout_step", "rollout_completed", "route_held", "canary"),
            *("rollout_shadowing", "shadow", "rollout_rolled_back", "rollout_bypassed", "rollout_back"),
            *("sequence_exported", "sequence_resumed"),
        }


@pytest.mark.parametrize("regression", REGRESSIONS, ids=lambda one: f"{one['scenario']}-{one['seed']}")
def test_regressions(regression: dict[str, str | int]) -> None:
    outcome = run_one((str(regression["scenario"]), int(regression["seed"])))
    assert not outcome.failure, f"{regression['defect']}\n{report_failure(outcome)}"


@pytest.mark.parametrize("job", [("chaos", 7), ("handover", 3), ("rebalance_storm", 5)])
def test_a_seed_is_a_world(job: Job) -> None:
    first, again = run_one(job), run_one(job)
    assert first.digest == again.digest
    assert first == again
    assert run_one((job[0], job[1] + 1)).digest != first.digest


@pytest.mark.parametrize("hash_seed", ["1", "4711"])
def test_a_world_is_the_same_in_another_process(hash_seed: str) -> None:
    command = [sys.executable, "-m", "sie_stream.sim.main", "--scenario", "chaos", "--seed", "7"]
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    root = Path(__file__).resolve().parents[2]
    ran = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert f"digest {run_one(('chaos', 7)).digest}" in ran.stdout


@pytest.mark.parametrize("name", scenario_names())
def test_every_scenario_is_understood_and_named_by_its_title(name: str) -> None:
    assert load_scenario(name).title
    assert load_scenario(name).heal_at_ms > 0


def test_scenarios_cover_what_can_go_wrong() -> None:
    assert scenario_names(SCENARIOS) == [
        "back_pressure",
        "broker_hiccup",
        "calm",
        "chaos",
        "continuous",
        "crowded",
        "deletes",
        "device_losses",
        "duplicate_deliveries",
        "engine_kills",
        "handover",
        "ingress_kills",
        "maintenance",
        "moving_sequences",
        "ordered_keys",
        "pauses",
        "poison",
        "rebalance_storm",
        "rollouts",
        "scheduler_kills",
        "sleepers",
        "slow_engine",
        "tight_memory",
        "twins",
        "worker_kills",
    ]


def test_a_wrong_scenario_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"chaoss.*Did you mean 'chaos'"):
        load_scenario("chaoss")
    with pytest.raises(ConfigError, match="unknown field `healed_at_ms`"):
        parse_scenario('title = "x"\nhealed_at_ms = 3', "x")
    with pytest.raises(ConfigError, match="least and most"):
        parse_scenario('title = "x"\nfaults = [{ kind = "evict", target = "ingress", every_ms = [5, 2] }]', "x")
