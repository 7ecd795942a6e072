"""What every contestant works on: the same requests of 200 bytes for the same logistic regression."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice, repeat
from pathlib import Path

from confluent_kafka import Producer

MODEL = "iris-logreg"
MODELS_DIR = Path(__file__).parents[2] / ".models"
REQUEST_BYTES = 200
PRODUCE_SETTINGS = {
    "compression.type": "lz4",
    "linger.ms": 5,
    "queue.buffering.max.messages": 300_000,
    "acks": "all",
    "log_level": 3,
}
ID_DIGITS = 9


def request_id(number: int) -> str:
    return f"{number:0{ID_DIGITS}d}"


def number_of(key: bytes) -> int:
    """The number of the request with this record key."""
    return int(key)


def requests(first: int, count: int, model: str = MODEL, step: int = 1) -> Iterator[tuple[bytes, bytes]]:
    """`count` times (key, value), numbered from `first` in steps; ids are filled up to make REQUEST_BYTES bytes."""
    rows = [json.loads(line) for line in (MODELS_DIR / MODEL / "samples.jsonl").read_text().splitlines()]
    tails = [json.dumps({"model": model, "inputs": row}, separators=(",", ":"))[1:].encode() for row in rows]
    for number in range(first, first + count * step, step):
        tail = tails[number % len(tails)]
        key = request_id(number).encode()
        head = b'{"request_id":"' + key + b"-"
        padding = REQUEST_BYTES - len(head) - len(tail) - 2
        yield key, head + b"x" * max(1, padding) + b'",' + tail


def backlog(bootstrap: str, topic_of: Callable[[str], str], first: int, count: int, models: Sequence[str] = ()) -> None:
    """`count` requests, in turn for each of `models`, in one transaction. Returns once they are visible."""
    producer = Producer({"bootstrap.servers": bootstrap, "transactional.id": "bench-backlog", **PRODUCE_SETTINGS})
    producer.init_transactions(30)
    producer.begin_transaction()
    for model, (key, value) in in_turn(first, count, models or (MODEL,)):
        while True:
            try:
                producer.produce(topic_of(model), value, key)
                break
            except BufferError:
                producer.poll(0.05)
    producer.commit_transaction(120)
    producer.close()


def in_turn(first: int, count: int, models: Sequence[str]) -> Iterator[tuple[str, tuple[bytes, bytes]]]:
    """Requests as traffic for many models comes: a few for each, in turn; with the model."""
    share = -(-count // len(models))
    streams = [zip(repeat(model), requests(first + at, share, model, len(models))) for at, model in enumerate(models)]
    turns = zip(*streams, strict=True)
    return islice(chain.from_iterable(turns), count)
