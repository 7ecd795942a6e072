"""How fast a replay answers again what the engine has just answered: `python -m tests.bench.replay [--records N]`.

The same machine, the same records, one after the other: a backlog drains through ingress and a worker, then
`sie-stream replay` answers all of it again and compares every byte. The goal is 0.8 of the live rate.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import pstats
import resource
import sys
import time

from sie_stream.cli.cluster import Layout
from sie_stream.cli.replay import GC_THRESHOLDS, Asked, replayed
from sie_stream.cli.replaying.choosing import Question
from sie_stream.edge.connection import Connection
from sie_stream.edge.stop import StopFlag
from sie_stream.settings import Settings
from tests.bench.drain import Drain
from tests.bench.pipeline import groups
from tests.bench.workload import MODEL
from tests.bench.world import engine, world

RECORDS = 200_000


def run(records: int, profile: cProfile.Profile | None = None) -> dict[str, float]:
    with world() as here, engine(here, Layout(workers=1)) as sie:
        sie.declare([MODEL])
        billed = groups(sie, here.broker.pid)
        drain = Drain(here.bootstrap, sie.topics.requests, sie.topics.results, billed, sie.check)
        live = drain.measure(records)
        sys.stderr.write(f"live: {live.per_second:.0f}/s\n")
        connection = Connection(Settings(bootstrap_servers=here.bootstrap))
        gc.set_threshold(*GC_THRESHOLDS)
        usage = [_cpu_s(resource.RUSAGE_SELF), _cpu_s(resource.RUSAGE_CHILDREN)]
        started = time.monotonic()
        if profile is not None:
            profile.enable()
        report = replayed(connection, Asked(Question(model=MODEL), ""), StopFlag())
        if profile is not None:
            profile.disable()
        took_s = time.monotonic() - started
        own_s = _cpu_s(resource.RUSAGE_SELF) - usage[0]
        engine_s = _cpu_s(resource.RUSAGE_CHILDREN) - usage[1]
    assert report.equal == report.replayed == records, (report.replayed, report.equal, report.causes, report.reasons)
    worker_s = live.cpu_s["worker"] + live.cpu_s["engine"]
    return {
        "records": records,
        "live_per_second": round(live.per_second),
        "replay_per_second": round(records / took_s),
        "ratio": round(records / took_s / live.per_second, 3),
        "us_cpu_replay": round(own_s / records * 1e6, 2),
        "us_cpu_replay_engine": round(engine_s / records * 1e6, 2),
        "us_cpu_worker_and_engine": round(worker_s / records * 1e6, 2),
        "us_cpu_ingress": round(live.cpu_s["ingress"] / records * 1e6, 2),
    }


def _cpu_s(who: int) -> float:
    """Of this process with all threads, or of the engines it has waited for (their start included)."""
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=RECORDS)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    profile = cProfile.Profile() if options.profile else None
    print(json.dumps(run(options.records, profile), indent=1))
    if profile is not None:
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
