"""Scenario `failover`: SIGKILL of a worker until the first new result of what it owned, with a warm replica elsewhere.

A steady stream of requests flows; each result says which partition it came through. The time ends with the first
result, finished after the kill, of a partition that the killed worker held. Once as `sie-stream up` runs workers (the
supervisor reports the exit), once with nobody reporting, so that only the missing heartbeats tell.
"""

from __future__ import annotations

import os
import signal
import statistics
import time
from threading import Event, Thread

from confluent_kafka import Consumer, Producer, TopicPartition

from schemas.codec import decode_result, decode_row
from sie_stream.cli.cluster import Layout
from sie_stream.control import PlacementRow
from sie_stream.edge.tables import latest_values
from tests.bench.workload import MODEL, requests
from tests.bench.world import READY_S, Engine, engine, world
from tests.waiting import wait_until

ROUNDS, ROUNDS_QUICK = 10, 2
RATE_PER_S = 200
KEYS = 512
"""Requests stick to partitions by key: enough keys for every partition."""


def run(quick: bool) -> dict[str, float]:
    rounds = ROUNDS_QUICK if quick else ROUNDS
    reported = measure(rounds, reports=True)
    silent = measure(rounds, reports=False)
    return {
        "rounds": rounds,
        "reported_median_s": statistics.median(reported),
        "reported_max_s": max(reported),
        "heartbeat_median_s": statistics.median(silent),
        "heartbeat_max_s": max(silent),
    }


def measure(rounds: int, *, reports: bool) -> list[float]:
    with world() as here, engine(here, Layout(workers=2)) as sie:
        if not reports:
            sie.supervisor.on_exit = lambda child, code: None
        sie.declare([MODEL], replicas=2)
        stop = Event()
        stream = Thread(target=ask, args=(here.bootstrap, sie.topics.requests, stop), daemon=True)
        stream.start()
        try:
            return [one_round(sie, f"worker-{number % 2}") for number in range(rounds)]
        finally:
            stop.set()
            stream.join(10)


def one_round(sie: Engine, victim: str) -> float:
    """Seconds until what the victim owned is answered again."""
    owned = wait_until(lambda: balanced(sie, victim), f"{victim} and the other to serve", READY_S)
    consumer = at_end(sie)
    incarnation = sie.supervisor.children[victim].incarnation
    wait_until(lambda: answered(sie, consumer, owned, 0.0, ""), "results to flow", 30)
    killed_at = time.time()
    os.kill(sie.supervisor.children[victim].pid, signal.SIGKILL)
    finished_at = wait_until(lambda: answered(sie, consumer, owned, killed_at, incarnation), "a new result", 60)
    consumer.close()
    return finished_at - killed_at


def balanced(sie: Engine, victim: str) -> set[int]:
    """The victim's partitions, once both workers are ready and each has some; else the empty set."""
    sie.cluster.watch()
    reader = sie.cluster.connection.reader()
    value = latest_values(reader, sie.topics.placements).get(MODEL)
    reader.close()
    if value is None:
        return set()
    row = decode_row(value, PlacementRow)
    alive = {child.incarnation for child in sie.supervisor.children.values()}
    if len({one.incarnation for one in row.replicas} & alive) < 2:
        return set()
    held = {one.partition: one for one in row.partitions if one.state == "assigned" and one.incarnation in alive}
    if len(held) < len(row.partitions) or len({one.worker for one in held.values()}) < 2:
        return set()
    return {number for number, one in held.items() if one.worker == victim}


def at_end(sie: Engine) -> Consumer:
    """Reads new results only."""
    consumer = Consumer(
        {
            "bootstrap.servers": sie.bootstrap,
            "group.id": "bench-failover",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "fetch.wait.max.ms": 10,
        }
    )
    found = consumer.list_topics(sie.topics.results, timeout=10).topics[sie.topics.results].partitions
    consumer.assign([TopicPartition(sie.topics.results, number, -1) for number in found])
    return consumer


def answered(sie: Engine, consumer: Consumer, partitions: set[int], after: float, not_by: str) -> float:
    """When the first result was seen that came through one of the partitions, not by that incarnation; 0: not yet."""
    sie.cluster.watch()
    for message in consumer.consume(1_000, 0.02):
        if message.error() is not None:
            continue
        origin = decode_result(message.value()).provenance
        if origin.work_partition in partitions and origin.incarnation != not_by and time.time() > after:
            return time.time()
    return 0.0


def ask(bootstrap: str, topic: str, stop: Event) -> None:
    """A steady stream of requests."""
    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 0})
    for number, (_, value) in enumerate(requests(0, 10_000_000)):
        if stop.wait(1 / RATE_PER_S):
            break
        producer.produce(topic, value, b"%d" % (number % KEYS))
        producer.poll(0)
    producer.flush(5)
