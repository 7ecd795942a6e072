"""Scenario `many_models`: 117 models on two workers against one model on the same two, and what 117 cost when idle.

All are the same logistic regression under different names, so that only their number differs.
"""

from __future__ import annotations

from sie_stream.cli.cluster import Layout
from tests.bench.copy_loop import figures
from tests.bench.drain import Drain
from tests.bench.pipeline import groups
from tests.bench.usage import Usage, resident_mb
from tests.bench.workload import MODEL
from tests.bench.world import Engine, engine, is_ok, wait, world

MODELS, MODELS_QUICK = 117, 24
RECORDS, RECORDS_QUICK = 117_000, 12_000
WORKERS = 2
SETTLE_S = 3.0
IDLE_S, IDLE_S_QUICK = 15.0, 4.0


def run(quick: bool) -> dict[str, float]:
    records = RECORDS_QUICK if quick else RECORDS
    one = measure([MODEL], WORKERS, records, 0.0)
    names = [f"scorer-{number:03d}" for number in range(MODELS_QUICK if quick else MODELS)]
    many = measure(names, 1, records, IDLE_S_QUICK if quick else IDLE_S)
    return {
        "models": len(names),
        "one_per_second": one["per_second"],
        "many_per_second": many["per_second"],
        "throughput_ratio": many["per_second"] / one["per_second"],
        "one_per_core_s": one["per_core_s"],
        "many_per_core_s": many["per_core_s"],
        "cpu_ratio": many["per_core_s"] / one["per_core_s"],
        "worker_host_mb": many["worker_host_mb"],
        **{name: value for name, value in many.items() if name.startswith("idle")},
    }


def measure(names: list[str], replicas: int, records: int, idle_s: float) -> dict[str, float]:
    """Throughput with these models, and (when asked) processor time of ours without traffic before it."""
    with world() as here, engine(here, Layout(workers=WORKERS)) as sie:
        sie.declare(names, replicas)
        idle = idle_cost(sie, here.broker.pid, idle_s) if idle_s else {}
        drain = Drain(
            here.bootstrap, sie.topics.requests, sie.topics.results, groups(sie, here.broker.pid), sie.check, names
        )
        drain.warm_up(records // 5)
        drained = drain.measure(records)
        drain.check(repeats_allowed=False, good=is_ok)
        memory = max(resident_mb(pid) for pid in sie.pids("worker"))
    return {**figures(drained), **idle, "worker_host_mb": memory}


def idle_cost(sie: Engine, broker_pid: int, seconds: float) -> dict[str, float]:
    """Part of one core that each kind of process uses while nothing is asked."""
    wait(SETTLE_S)
    usage = Usage(groups(sie, broker_pid))
    wait(seconds)
    shares = {f"idle_{group}": spent / seconds for group, spent in usage.seconds().items()}
    ours = sum(share for name, share in shares.items() if name != "idle_broker")
    return {**shares, "idle_ours": ours}
