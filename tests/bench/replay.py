"""How fast a replay answers again what the engine has just answered: `python -m tests.bench.replay [--records N]`.

The same machine, the same records, in turn, several times: a backlog drains through ingress and a worker, then
`sie-stream replay` answers all of it again and compares every byte. The goal is 0.8 of the live rate. On a machine that
others use too a rate says little; the processor time for each record, of both and in the same minute, says more. What a
replay costs before its first record (engine process, libraries, model) is measured apart, by a replay of few records.
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
from datetime import UTC, datetime
from statistics import median

from msgspec import Struct, to_builtins

from sie_stream.cli.cluster import Layout
from sie_stream.cli.replay import GC_THRESHOLDS, Asked, replayed
from sie_stream.cli.replaying.choosing import Question
from sie_stream.edge.connection import Connection
from sie_stream.edge.stop import StopFlag
from sie_stream.settings import Settings
from tests.bench.drain import Drain, Drained
from tests.bench.pipeline import groups
from tests.bench.usage import Usage
from tests.bench.workload import MODEL
from tests.bench.world import engine, world

RECORDS = 200_000
ROUNDS = 3
FEW = 100


class Round(Struct, frozen=True):
    """Records a second, and microseconds of processor time for each record."""

    live_per_second: float
    replay_per_second: float
    ratio: float
    live_us: float
    """Ingress, worker host and engine process."""
    live_broker_us: float
    replay_us: float
    """The command, its threads, and its engine process, which it starts anew."""
    replay_us_after_start: float
    """The same without what a replay of few records costs too."""
    replay_command_us: float
    replay_broker_us: float


class Replayed(Struct, frozen=True):
    seconds: float
    command_s: float
    engine_s: float
    broker_s: float


def run(records: int, rounds: int, profile: cProfile.Profile | None = None) -> dict[str, object]:
    with world() as here, engine(here, Layout(workers=1)) as sie:
        sie.declare([MODEL])
        billed = groups(sie, here.broker.pid)
        drain = Drain(here.bootstrap, sie.topics.requests, sie.topics.results, billed, sie.check)
        connection = Connection(Settings(bootstrap_servers=here.bootstrap))
        gc.set_threshold(*GC_THRESHOLDS)
        found: list[Round] = []
        drain.warm_up(FEW)
        few = replay(connection, "", FEW, here.broker.pid)
        for _ in range(rounds):
            begun = datetime.now(UTC).isoformat()
            live = drain.measure(records)
            again = replay(connection, begun, records, here.broker.pid, profile)
            found.append(compared(records, live, again, few))
            sys.stderr.write(f"{found[-1]}\n")
    names = Round.__struct_fields__
    return {
        "records": records,
        "median": {name: round(median(getattr(one, name) for one in found), 3) for name in names},
        "start": {"seconds": round(few.seconds, 2), "cpu_s": round(few.command_s + few.engine_s, 2)},
        "rounds": to_builtins(found),
    }


def replay(
    connection: Connection, begun: str, records: int, broker: int, profile: cProfile.Profile | None = None
) -> Replayed:
    """Answer what was produced since `begun` again. Raises AssertionError unless it is all there and all equal."""
    usage = [_cpu_s(resource.RUSAGE_SELF), _cpu_s(resource.RUSAGE_CHILDREN)]
    others = Usage({"broker": [broker]})
    started = time.monotonic()
    if profile is not None:
        profile.enable()
    report = replayed(connection, Asked(Question(model=MODEL, first=begun), ""), StopFlag())
    if profile is not None:
        profile.disable()
    took_s = time.monotonic() - started
    assert report.equal == report.replayed == records, (report.replayed, report.equal, report.causes, report.reasons)
    return Replayed(
        took_s,
        _cpu_s(resource.RUSAGE_SELF) - usage[0],
        _cpu_s(resource.RUSAGE_CHILDREN) - usage[1],
        others.seconds()["broker"],
    )


def compared(records: int, live: Drained, again: Replayed, few: Replayed) -> Round:
    def us(seconds: float) -> float:
        return round(seconds / records * 1e6, 2)

    return Round(
        round(live.per_second),
        round(records / again.seconds),
        round(records / again.seconds / live.per_second, 3),
        us(live.cpu_s["ingress"] + live.cpu_s["worker"] + live.cpu_s["engine"]),
        us(live.cpu_s["broker"]),
        us(again.command_s + again.engine_s),
        us(again.command_s + again.engine_s - few.command_s - few.engine_s),
        us(again.command_s),
        us(again.broker_s),
    )


def _cpu_s(who: int) -> float:
    """Of this process with all threads, or of the engines it has waited for (their start included)."""
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=RECORDS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    profile = cProfile.Profile() if options.profile else None
    print(json.dumps(run(options.records, options.rounds, profile), indent=1))
    if profile is not None:
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
