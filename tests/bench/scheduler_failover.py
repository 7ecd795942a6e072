"""Scenario `scheduler_failover`: two schedulers, the leader is killed (SIGKILL) or stopped (SIGSTOP), until the other
has published its first decision: until a reader has it, some 20 ms of reading included.

Every round waits until both are up again: one leads, one stands by.
"""

from __future__ import annotations

import os
import signal
import statistics
import time

from schemas.codec import decode_decision
from sie_stream.cli.cluster import Layout
from sie_stream.edge.supervisor import Child
from sie_stream.ids import TopicPartition
from sie_stream.ports import LogReader
from tests.bench.world import READY_S, Engine, engine, world
from tests.waiting import wait_until

ROUNDS, ROUNDS_QUICK = 5, 1
LAYOUT = Layout(workers=1, ingress=1, egress=1, schedulers=2)
TAKE_OVER_S = 30.0


def run(quick: bool) -> dict[str, float]:
    rounds = ROUNDS_QUICK if quick else ROUNDS
    with world() as here, engine(here, LAYOUT) as sie:
        killed = [one_round(sie, signal.SIGKILL) for _ in range(rounds)]
        stopped = [one_round(sie, signal.SIGSTOP) for _ in range(rounds)]
    return {
        "rounds": rounds,
        "killed_median_s": statistics.median(killed),
        "killed_max_s": max(killed),
        "stopped_median_s": statistics.median(stopped),
        "stopped_max_s": max(stopped),
    }


def one_round(sie: Engine, blow: signal.Signals) -> float:
    """Seconds from the blow to the first decision of another leader."""
    leading = wait_until(lambda: settled(sie), "a leader and a standby", READY_S)
    pid = sie.supervisor.children[leading].pid
    place = TopicPartition(sie.topics.decisions, 0)
    reader = sie.cluster.connection.reader()
    reader.assign(reader.end_offsets([place]))
    struck_at = time.time()
    os.kill(pid, blow)
    try:
        elected_at = wait_until(lambda: first_election(sie, reader), "another leader", TAKE_OVER_S)
    finally:
        reader.close()
        if blow == signal.SIGSTOP:
            os.kill(pid, signal.SIGCONT)
    return elected_at - struck_at


def settled(sie: Engine) -> str:
    """Name of the process that leads, once all others stand by; empty until then."""
    sie.cluster.watch()
    told = {name: state_of(child) for name, child in sie.supervisor.children.items() if name.startswith("scheduler-")}
    leading = [name for name, state in told.items() if state == "leading"]
    standby = [name for name, state in told.items() if state == "standby"]
    return leading[0] if len(leading) == 1 and len(standby) == LAYOUT.schedulers - 1 else ""


def state_of(child: Child) -> str:
    """What it logged last about leading, in its present life; empty: nothing yet."""
    with child.log_path.open("rb") as log:
        log.seek(child.log_offset)
        told = log.read()
    places = {state: told.rfind(b'"%s"' % state.encode()) for state in ("leading", "standby")}
    newest = max(places, key=lambda state: places[state])
    return newest if places[newest] >= 0 else ""


def first_election(sie: Engine, reader: LogReader) -> float:
    """When the first election was seen, in seconds: its transaction is committed then. 0: not yet."""
    sie.cluster.watch()
    decided = [decode_decision(record.value) for record in reader.poll(100, 10)]
    return time.time() if any(decision.kind == "scheduler_elected" for decision in decided) else 0.0
