"""Scenario `pipeline`: ingress and a worker with a real scikit-learn model, exactly once on both hops."""

from __future__ import annotations

from sie_stream.cli.cluster import Layout
from tests.bench.copy_loop import figures
from tests.bench.drain import Drain
from tests.bench.usage import family, resident_mb
from tests.bench.workload import MODEL
from tests.bench.world import Engine, engine, is_ok, world

RECORDS = 150_000
RECORDS_QUICK = 20_000


def run(quick: bool) -> dict[str, float]:
    records = RECORDS_QUICK if quick else RECORDS
    with world() as here, engine(here, Layout(workers=1)) as sie:
        sie.declare([MODEL])
        billed = groups(sie, here.broker.pid)
        drain = Drain(here.bootstrap, sie.topics.requests, sie.topics.results, billed, sie.check)
        drain.warm_up(records // 5)
        drained = drain.measure(records)
        drain.check(repeats_allowed=False, good=is_ok)
        memory = {
            "worker_host_mb": resident_mb(sie.pids("worker")[0]),
            "ingress_mb": resident_mb(sie.pids("ingress")[0]),
        }
    return figures(drained) | memory


def groups(sie: Engine, broker_pid: int) -> dict[str, list[int]]:
    """Who is billed separately: ingress, worker hosts, engine processes, the rest of ours, the broker."""
    hosts = sie.pids("worker")
    engines = [process.pid for process in family(hosts) if process.pid not in hosts]
    others = [pid for prefix in ("scheduler", "egress", "bridge") for pid in sie.pids(prefix)]
    return {
        "ingress": sie.pids("ingress"),
        "engine": engines,
        "others": others,
        "broker": [broker_pid],
        "worker": hosts,
    }
