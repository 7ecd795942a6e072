"""The traffic of the broker's training run: what SIE-Stream asks of a broker all day, for a few seconds.

A Java that archives profiles (JEP 515, Java 25) remembers which of the broker's methods were hot, so that later runs
compile these well at once instead of finding out for two minutes. Plain producers without linger, two hops of consume,
produce and commit in small transactions, and readers of committed records: the mix is what counts, not the payload.
Topics come and clients join meanwhile, as in a rollout. Code that was compiled without ever having seen that is thrown
away when it happens: for seconds p99 was twice as high.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

REQUESTS, WORK, RESULTS = "training-requests", "training-work", "training-results"
PARTITIONS = 4
CHANGE_EVERY_S = 1.0
REQUESTS_PER_S = 1_000
VALUE = b"x" * 200
REQUEST_TIMEOUT_S = 30
QUIET = {"log_level": 2}
"""A broker that has just started makes clients wait; they need not say so."""


class Route:
    """Topics between two hops: one that stays, and the newest of those that come and go. Shared by threads."""

    def __init__(self, *topics: str) -> None:
        self.topics = topics


def train(bootstrap_servers: str, seconds: float) -> int:
    """Returns the number of results that were read. Raises KafkaException when the broker does not work."""
    admin = AdminClient({"bootstrap.servers": bootstrap_servers})
    for topic in (REQUESTS, WORK, RESULTS):
        create(admin, topic)
    until = time.monotonic() + seconds
    requests, work, results = Route(REQUESTS), Route(WORK), Route(RESULTS)
    with ThreadPoolExecutor(max_workers=3) as threads:
        hops = [
            threads.submit(copy, bootstrap_servers, requests, work, until),
            threads.submit(copy, bootstrap_servers, work, results, until),
            threads.submit(change, bootstrap_servers, admin, work, until),
        ]
        seen = ask(bootstrap_servers, until)
        for hop in hops:
            hop.result()
    return seen


def create(admin: AdminClient, topic: str) -> None:
    for future in admin.create_topics([NewTopic(topic, PARTITIONS, 1)]).values():
        future.result(timeout=REQUEST_TIMEOUT_S)


def change(bootstrap_servers: str, admin: AdminClient, work: Route, until: float) -> None:
    """A new topic takes the place of the one before, and a client joins a group and leaves it."""
    for number in itertools.count(1):
        if time.monotonic() + CHANGE_EVERY_S >= until:
            return
        time.sleep(CHANGE_EVERY_S)
        topic = f"{WORK}-{number}"
        create(admin, topic)
        work.topics = (WORK, topic)
        visitor = reader_of(bootstrap_servers, f"training-visitor-{number}")
        visitor.subscribe([REQUESTS])
        visitor.consume(1, CHANGE_EVERY_S / 2)
        visitor.close()


def ask(bootstrap_servers: str, until: float) -> int:
    """Requests at a steady rate; returns how many came out at the other end."""
    reader = reader_of(bootstrap_servers, "training-reader")
    reader.assign(places((RESULTS,)))
    producer = Producer({"bootstrap.servers": bootstrap_servers, "linger.ms": 0, **QUIET})
    seen = 0
    while time.monotonic() < until:
        producer.produce(REQUESTS, VALUE, str(time.monotonic_ns()))
        producer.poll(0)
        seen += sum(message.error() is None for message in reader.consume(500, 1 / REQUESTS_PER_S))
    producer.flush(REQUEST_TIMEOUT_S)
    reader.close()
    return seen


def copy(bootstrap_servers: str, sources: Route, targets: Route, until: float) -> None:
    """One hop, in transactions with offsets, as ingress and workers do."""
    name = f"{sources.topics[0]}-reader"
    consumer = reader_of(bootstrap_servers, name)
    producer = Producer({"bootstrap.servers": bootstrap_servers, "transactional.id": name, "linger.ms": 0, **QUIET})
    producer.init_transactions(REQUEST_TIMEOUT_S)
    read: tuple[str, ...] = ()
    while time.monotonic() < until:
        if read != sources.topics:
            read = follow(consumer, read, sources.topics)
        messages = [message for message in consumer.consume(500, 0.01) if message.error() is None]
        if not messages:
            continue
        producer.begin_transaction()
        for message, target in zip(messages, itertools.cycle(targets.topics), strict=False):
            producer.produce(target, message.value(), message.key())
        moved = [place for place in consumer.position(places(read)) if place.offset >= 0]
        producer.send_offsets_to_transaction(moved, consumer.consumer_group_metadata(), REQUEST_TIMEOUT_S)
        producer.commit_transaction(REQUEST_TIMEOUT_S)
    consumer.close()
    producer.close()


def follow(consumer: Consumer, before: tuple[str, ...], now: tuple[str, ...]) -> tuple[str, ...]:
    """Reads what came, from its beginning, and no more what went."""
    gone = places(topic for topic in before if topic not in now)
    if gone:
        consumer.incremental_unassign(gone)
    consumer.incremental_assign(places(topic for topic in now if topic not in before))
    return now


def places(topics: Iterable[str]) -> list[TopicPartition]:
    return [TopicPartition(topic, number, 0) for topic in topics for number in range(PARTITIONS)]


def reader_of(bootstrap_servers: str, group: str) -> Consumer:
    return Consumer(
        {
            "bootstrap.servers": bootstrap_servers,
            "group.id": group,
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "fetch.wait.max.ms": 100,
            **QUIET,
        }
    )
