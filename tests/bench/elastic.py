"""A double-peak day in virtual time: what elastic replicas and yielding do for high-sla, and what batch-job pays.

    python -m tests.bench.elastic [seconds of an hour, default 600]

The same day three times: with yielding, without it on the same devices, and with devices for everybody. A day of 600 s
an hour has peaks that rise six times as fast as real ones; 3600 is a real day, and takes six times as long to compute.
Virtual time: the figures do not depend on the machine, apart from the last line.
"""

from __future__ import annotations

import sys
from time import perf_counter

from msgspec import structs

from scheduler.autoscale import ScalePolicy, decide, first_state
from scheduler.demand import Load
from tests.unit.scheduler.day import Cluster, Member, in_time, lived, shopping_day

COLUMNS = "{:<8} {:>9} {:>9} {:>12} {:>10} {:>10} {:>9} {:>8}"
DECISIONS = 20_000


def main() -> None:
    hour_s = int(sys.argv[1]) if len(sys.argv) > 1 else 600
    days = {
        "with yielding, 28 devices": shopping_day(hour_s),
        "without yielding, 28 devices": shopping_day(hour_s, yields=False),
        "devices for everybody (100)": shopping_day(hour_s, premium=100),
    }
    for title, cluster in days.items():
        lived(cluster, 24 * hour_s)
        table(title, cluster)
    batch_paid(days["with yielding, 28 devices"], days["devices for everybody (100)"])
    print(f"\none decision: {decision_us():.0f} us, on this machine, with its reason in words")


def table(title: str, cluster: Cluster) -> None:
    print(f"\n{title}: at most {cluster.fullest} in use, {len(cluster.steps)} steps of yielding")
    print(COLUMNS.format("model", "requests", "answered", "in SLA %", "mean ms", "p99 ms", "replica h", "changes"))
    for name, member in cluster.members.items():
        latencies = all_latencies(member)
        inside, requests = in_time(member) if member.policy.p99_ms else (0, 0)
        print(
            COLUMNS.format(
                name,
                member.station.arrived,
                len(latencies),
                f"{100 * inside / requests:.3f}" if requests else "-",
                f"{sum(latencies) / len(latencies):.0f}",
                f"{latencies[len(latencies) * 99 // 100]:.0f}",
                f"{member.station.replica_ms / 3_600_000:.1f}",
                len(member.decisions),
            )
        )


def all_latencies(member: Member) -> list[float]:
    return sorted(ms for second in member.station.latencies for ms in second)


def batch_paid(shared: Cluster, alone: Cluster) -> None:
    """The batch job of the shared day against the one that had all the devices it wanted."""
    paid, free = shared.members["report"], alone.members["report"]
    delay_s = (mean(all_latencies(paid)) - mean(all_latencies(free))) / 1000
    hours = (free.station.replica_ms - paid.station.replica_ms) / 3_600_000
    print(
        f"\nbatch-job paid: {hours:.1f} of {free.station.replica_ms / 3_600_000:.1f} replica hours, "
        f"those answered {delay_s:.0f} s later on average, {len(paid.station.waiting)} of {paid.station.arrived} "
        f"requests still waiting at midnight (alone {len(free.station.waiting)})"
    )


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def decision_us() -> float:
    policy = ScalePolicy("m", 1, 20, 1_000, None, ("high-sla",))
    load = Load(0, 1000, 20, 20, 3, 5, 6, 0, 6_500, 400, 10_000, 200)
    state = first_state(policy, 0, 6)
    began = perf_counter()
    for second in range(DECISIONS):
        state, _ = decide(policy, state, structs.replace(load, at_ms=second * 1000, ready=state.wanted))
    return (perf_counter() - began) * 1e6 / DECISIONS


if __name__ == "__main__":
    main()
