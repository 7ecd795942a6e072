"""The yardstick: one hop by the plainest exactly-once loop that confluent-kafka allows, values untouched.

`python -m tests.bench.copy_job BOOTSTRAP SOURCE TARGET`. Runs until it is told to stop. Nothing is decoded, looked up,
checked or scored; one transaction for up to 2,000 records.
"""

from __future__ import annotations

import sys

from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition

BATCH_MAX = 2_000


def main(bootstrap: str, source: str, target: str) -> None:
    common = {"bootstrap.servers": bootstrap}
    consumer = Consumer(
        {
            **common,
            "group.id": "copy",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "fetch.queue.backoff.ms": 5,
            "fetch.wait.max.ms": 50,
        }
    )
    producer = Producer(
        {
            **common,
            "transactional.id": "copy",
            "compression.type": "lz4",
            "linger.ms": 1,
            "retry.backoff.ms": 5,
            "delivery.report.only.error": True,
        }
    )
    producer.init_transactions()
    consumer.subscribe([source])
    while True:
        first = consumer.poll(0.1)
        if first is None:
            continue
        messages = [first, *consumer.consume(BATCH_MAX - 1, 0)]
        producer.begin_transaction()
        ends: dict[int, int] = {}
        for message in messages:
            if message.error() is not None:
                raise KafkaException(message.error())
            producer.produce(target, message.value(), message.key())
            ends[message.partition() or 0] = (message.offset() or 0) + 1
        offsets = [TopicPartition(source, partition, end) for partition, end in ends.items()]
        producer.send_offsets_to_transaction(offsets, consumer.consumer_group_metadata())
        producer.commit_transaction()


if __name__ == "__main__":
    main(*sys.argv[1:])
