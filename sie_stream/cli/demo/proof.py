"""An independent witness: counts requests and terminal records with a plain confluent-kafka consumer.

It shares no code with the engine on purpose: Confluent framing is taken apart here, records are decoded by fastavro
from the released schema file, ids come from the request header or the JSON text. Run alone:

    python -m sie_stream.cli.demo.proof --bootstrap-servers localhost:9092
"""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fastavro
import fastavro.schema
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

import schemas

RESULT_SCHEMA = Path(schemas.__file__).parent / "Result.avsc"


def read_committed(bootstrap: str, topic: str) -> Iterator[Message]:
    """Every committed record of a topic, from its beginning to its present end."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "sie-proof",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "auto.offset.reset": "error",
            "enable.partition.eof": True,
        }
    )
    try:
        metadata = consumer.list_topics(topic, timeout=10).topics[topic]
        open_partitions = set()
        for partition in metadata.partitions:
            low, high = consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=10)
            if high > low:
                open_partitions.add(partition)
                consumer.incremental_assign([TopicPartition(topic, partition, low)])
        while open_partitions:
            message = consumer.poll(20.0)
            if message is None:
                raise TimeoutError(f"{topic}: no record and no end of partition within 20 s")
            error = message.error()
            if error is None:
                yield message
            elif error.code() == KafkaError._PARTITION_EOF:
                open_partitions.discard(message.partition())
            else:
                raise KafkaException(error)
    finally:
        consumer.close()


def request_id(message: Message) -> str:
    """Id of a request record: its header, its JSON field, or its place in the log."""
    for name, value in message.headers() or []:
        if name == "sie-request-id" and isinstance(value, bytes) and value.isascii():
            return value.decode()
    try:
        found = json.loads(message.value() or b"").get("request_id")
    except (ValueError, AttributeError):
        found = None
    return found or f"src:{message.topic()}:{message.partition()}:{message.offset()}"


def prove(bootstrap: str, prefix: str = "sie.") -> dict[str, Any]:
    """Requests against terminal records. `lost` and `duplicates` are lists of request ids; both must be empty."""
    schema = fastavro.schema.load_schema(str(RESULT_SCHEMA))
    asked = Counter(request_id(message) for message in read_committed(bootstrap, f"{prefix}requests"))
    answered: Counter[str] = Counter()
    statuses: Counter[str] = Counter()
    for message in read_committed(bootstrap, f"{prefix}results"):
        value = message.value()
        assert value, "a result is never a tombstone"
        result = fastavro.schemaless_reader(io.BytesIO(value[5:]), schema, None)
        assert isinstance(result, dict)
        answered[result["request_id"]] += 1
        statuses[result["status"]] += 1
    return {
        "requests": len(asked),
        "repeated_requests": sum(asked.values()) - len(asked),
        "terminal_records": sum(answered.values()),
        "statuses": dict(sorted(statuses.items())),
        "duplicates": sorted(name for name, count in answered.items() if count > 1),
        "lost": sorted(asked.keys() - answered.keys()),
        "unasked": sorted(answered.keys() - asked.keys()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Count requests and terminal records, independently of the engine.")
    parser.add_argument("--bootstrap-servers", required=True)
    parser.add_argument("--topic-prefix", default="sie.")
    arguments = parser.parse_args()
    proof = prove(arguments.bootstrap_servers, arguments.topic_prefix)
    print(json.dumps(proof))
    sys.exit(1 if proof["duplicates"] or proof["lost"] or proof["unasked"] else 0)


if __name__ == "__main__":
    main()
