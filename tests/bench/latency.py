"""Scenario `latency`: 500 requests a second, whether answers come or not, from produce to a read_committed consumer."""

from __future__ import annotations

import gc
import time
from threading import Thread

from confluent_kafka import Consumer, Producer, TopicPartition

from sie_stream.cli.cluster import Layout
from tests.bench.pipeline import groups
from tests.bench.usage import Usage
from tests.bench.workload import MODEL, number_of, requests
from tests.bench.world import engine, world

RATE_PER_S = 500
SECONDS, SECONDS_QUICK = 20, 4
WARM_S, WARM_S_QUICK = 60, 3
"""At the same rate, not counted: `sie-stream up` runs a broker that compiles for the long run."""


def run(quick: bool) -> dict[str, float]:
    warm_s = WARM_S_QUICK if quick else WARM_S
    total = RATE_PER_S * (warm_s + (SECONDS_QUICK if quick else SECONDS))
    with world("steady") as here, engine(here, Layout(workers=1)) as sie:
        sie.declare([MODEL])
        sent_at: list[float] = [0.0] * total
        seen_at: list[float] = [0.0] * total
        consumer = Consumer(
            {
                "bootstrap.servers": here.bootstrap,
                "group.id": "bench-latency",
                "isolation.level": "read_committed",
                "enable.auto.commit": False,
            }
        )
        found = consumer.list_topics(sie.topics.results, timeout=10).topics[sie.topics.results].partitions
        consumer.assign([TopicPartition(sie.topics.results, number, 0) for number in found])
        gc.collect()
        gc.freeze()
        reading = Thread(target=read, args=(consumer, seen_at), daemon=True)
        reading.start()
        usage, started = Usage(groups(sie, here.broker.pid)), time.monotonic()
        send(here.bootstrap, sie.topics.requests, sent_at)
        shares = {f"cores_{name}": spent / (time.monotonic() - started) for name, spent in usage.seconds().items()}
        reading.join(30)
        gc.unfreeze()
        assert not reading.is_alive(), (
            f"{sum(at == 0.0 for at in seen_at)} of {total} requests were not answered in time"
        )
        consumer.close()
    skipped = RATE_PER_S * warm_s
    took_ms = sorted(1000 * (seen - sent) for sent, seen in zip(sent_at[skipped:], seen_at[skipped:], strict=True))
    return {
        "requests": len(took_ms),
        "p50_ms": took_ms[len(took_ms) // 2],
        "p90_ms": took_ms[len(took_ms) * 9 // 10],
        "p99_ms": took_ms[len(took_ms) * 99 // 100],
        "max_ms": took_ms[-1],
        **shares,
    }


def send(bootstrap: str, topic: str, sent_at: list[float]) -> None:
    """One request every 2 ms by the clock: one that is late is sent at once, and counts from when it was due."""
    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 0, "acks": "all"})
    start = time.monotonic() + 0.1
    for number, (key, value) in enumerate(requests(0, len(sent_at))):
        due = start + number / RATE_PER_S
        while (left := due - time.monotonic()) > 0:
            producer.poll(left)
        sent_at[number] = due
        producer.produce(topic, value, key)
    producer.flush(10)


def read(consumer: Consumer, seen_at: list[float]) -> None:
    left = len(seen_at)
    while left:
        first = consumer.poll(1.0)
        if first is None:
            continue
        for message in (first, *consumer.consume(1_000, 0)):
            if message.error() is None:
                seen_at[number_of(message.key() or b"")] = time.monotonic()
                left -= 1
