"""Scenario `copy`: the yardstick, a bare transactional copy of one topic to another."""

from __future__ import annotations

from tests.bench.drain import Drain, Drained
from tests.bench.world import jobs, python, world

RECORDS = 150_000
RECORDS_QUICK = 20_000


def run(quick: bool) -> dict[str, float]:
    records = RECORDS_QUICK if quick else RECORDS
    with world() as here:
        here.create("source", "target")
        command = python("tests.bench.copy_job", here.bootstrap, "source", "target")
        with jobs(here, {"copy": command}) as (job,):
            groups = {"client": [job.pid], "broker": [here.broker.pid]}
            drain = Drain(here.bootstrap, "source", "target", groups, job.check)
            drain.warm_up(records // 5)
            drained = drain.measure(records)
            drain.check(repeats_allowed=False)
    return figures(drained)


def figures(drained: Drained) -> dict[str, float]:
    """How cores are counted, for every contestant alike: processor time of its own processes, all threads, librdkafka's
    included, and apart from that the broker's. `per_core_s` is records for each second of the first,
    `per_core_s_with_broker` of both.
    """
    clients = sum(seconds for group, seconds in drained.cpu_s.items() if group != "broker")
    broker = drained.cpu_s["broker"]
    by_group = {f"us_{group}": 1e6 * seconds / drained.records for group, seconds in drained.cpu_s.items()}
    return {
        "records": drained.records,
        "seconds": drained.seconds,
        "per_second": drained.per_second,
        "cores": clients / drained.seconds,
        "cores_broker": broker / drained.seconds,
        "per_core_s": drained.records / clients,
        "per_core_s_with_broker": drained.records / (clients + broker),
        **by_group,
    }
