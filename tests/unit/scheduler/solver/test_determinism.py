"""The same problem gives the same bytes in every process, whatever the seed of Python's hashes."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.waiting import PATIENCE_S

SCRIPT = """
import sys
import msgspec
from msgspec import structs
from scheduler.solver import Limits, explain, plan_fleet, replan
from scheduler.solver.model import Problem
from tests.bench.solver import added, fleet, models, running, without_server

problem = Problem(devices=fleet(7), demands=models(20, 45))
plan = plan_fleet(problem, Limits(exact_seats_max=200, windows_max=3, gap_permille=0))
base = structs.replace(problem, demands=running(problem.demands, plan))
changed = [*added(base, 2), *without_server(base, 1)]
near = [structs.replace(one, kv_group="chat") if n % 9 == 0 else one for n, one in enumerate(problem.demands)]
near = [structs.replace(one, span="any") if one.tensor_parallel_size > 1 else one for one in near]
apart = tuple(structs.replace(one, island=f"bridge-{n % 4 // 2}") for n, one in enumerate(problem.devices[:16]))
spanning = Problem(devices=apart, demands=tuple(near[:24]))
plans = [plan, *map(replan, changed), plan_fleet(spanning, Limits(exact_work=50_000))]
assert plan.statistics["programs"] > 1, "the search by windows has to take part"
sys.stdout.buffer.write(msgspec.json.encode([plans, explain(problem, plan, "m003")]))
"""


def plans(hash_seed: int) -> bytes:
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, check=False, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


def test_plans_are_the_same_bytes_under_other_hash_seeds() -> None:
    first, second = plans(1), plans(4242)
    assert len(first) > 10_000
    assert first == second
