"""The traffic of the broker's training run: what SIE-Stream asks of a broker all day, for a few seconds.

A Java that archives profiles (JEP 515, Java 25) remembers which of the broker's methods were hot, so that later runs
compile these well at once instead of finding out for two minutes. Plain producers without linger, two hops of consume,
produce and commit in small transactions, and readers of committed records: the mix is what counts, not the payload.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

TOPICS = ("training-requests", "training-work", "training-results")
PARTITIONS = 4
REQUESTS_PER_S = 1_000
VALUE = b"x" * 200
REQUEST_TIMEOUT_S = 30
QUIET = {"log_level": 2}
"""A broker that has just started makes clients wait; they need not say so."""


def train(bootstrap_servers: str, seconds: float) -> int:
    """Returns the number of results that were read. Raises KafkaException when the broker does not work."""
    admin = AdminClient({"bootstrap.servers": bootstrap_servers})
    for future in admin.create_topics([NewTopic(topic, PARTITIONS, 1) for topic in TOPICS]).values():
        future.result(timeout=REQUEST_TIMEOUT_S)
    until = time.monotonic() + seconds
    with ThreadPoolExecutor(max_workers=len(TOPICS)) as threads:
        hops = [threads.submit(copy, bootstrap_servers, *hop, until) for hop in pairwise(TOPICS)]
        seen = ask(bootstrap_servers, until)
        for hop in hops:
            hop.result()
    return seen


def ask(bootstrap_servers: str, until: float) -> int:
    """Requests at a steady rate; returns how many came out at the other end."""
    reader = reader_of(bootstrap_servers, TOPICS[-1], "training-reader")
    producer = Producer({"bootstrap.servers": bootstrap_servers, "linger.ms": 0, **QUIET})
    seen = 0
    while time.monotonic() < until:
        producer.produce(TOPICS[0], VALUE, str(time.monotonic_ns()))
        producer.poll(0)
        seen += sum(message.error() is None for message in reader.consume(500, 1 / REQUESTS_PER_S))
    producer.flush(REQUEST_TIMEOUT_S)
    reader.close()
    return seen


def copy(bootstrap_servers: str, source: str, target: str, until: float) -> None:
    """One hop, in transactions with offsets, as ingress and workers do."""
    consumer = reader_of(bootstrap_servers, source, target)
    producer = Producer({"bootstrap.servers": bootstrap_servers, "transactional.id": target, "linger.ms": 0, **QUIET})
    producer.init_transactions(REQUEST_TIMEOUT_S)
    while time.monotonic() < until:
        messages = [message for message in consumer.consume(500, 0.01) if message.error() is None]
        if not messages:
            continue
        producer.begin_transaction()
        for message in messages:
            producer.produce(target, message.value(), message.key())
        positions = consumer.position([TopicPartition(source, number) for number in range(PARTITIONS)])
        moved = [place for place in positions if place.offset >= 0]
        producer.send_offsets_to_transaction(moved, consumer.consumer_group_metadata(), REQUEST_TIMEOUT_S)
        producer.commit_transaction(REQUEST_TIMEOUT_S)
    consumer.close()
    producer.close()


def reader_of(bootstrap_servers: str, topic: str, group: str) -> Consumer:
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap_servers,
            "group.id": group,
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "fetch.wait.max.ms": 100,
            **QUIET,
        }
    )
    consumer.assign([TopicPartition(topic, number, 0) for number in range(PARTITIONS)])
    return consumer
