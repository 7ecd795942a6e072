"""A model as a service of its own, as most are run today: one process, one topic, the plainest exactly-once loop.

`python -m tests.bench.lone_job BOOTSTRAP SOURCE TARGET FOLDER`. Says `ready` when the model is loaded and it reads.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition

from gpu_worker.backends.absent import absent
from gpu_worker.backends.sklearn_shortcuts import shortcut

with absent("torch", "pytest", "_pytest", "pandas"):  # as lean as our own engine
    from skops.io import load

BATCH_MAX = 2_000
FEATURES = ("sepal_length_cm", "sepal_width_cm", "petal_length_cm", "petal_width_cm")
LABELS = ("setosa", "versicolor", "virginica")


class Scorer:
    def __init__(self, folder: str) -> None:
        estimator = load(next(Path(folder).glob("*.skops")), trusted=[])
        self._predict = shortcut(estimator, estimator.predict_proba)

    def score(self, values: list[bytes]) -> list[bytes]:
        """JSON requests to JSON results, in order."""
        items = [msgspec.json.decode(value) for value in values]
        rows = np.array([[item["inputs"][name] for name in FEATURES] for item in items], np.float64)
        return [self._result(item, row) for item, row in zip(items, self._predict(rows).tolist(), strict=True)]

    def _result(self, item: dict[str, Any], shares: list[float]) -> bytes:
        best = max(range(len(shares)), key=shares.__getitem__)
        outputs = {"label": LABELS[best], "score": shares[best]}
        return msgspec.json.encode({"request_id": item["request_id"], "status": "ok", "outputs": outputs})


def main(bootstrap: str, source: str, target: str, folder: str) -> None:
    scorer = Scorer(folder)
    common = {"bootstrap.servers": bootstrap}
    consumer = Consumer(
        {
            **common,
            "group.id": f"lone-{source}",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "fetch.queue.backoff.ms": 5,
        }
    )
    producer = Producer({**common, "transactional.id": f"lone-{source}", "compression.type": "lz4", "linger.ms": 1})
    producer.init_transactions()
    consumer.subscribe([source], on_assign=lambda *_: print("ready", flush=True))
    while True:
        first = consumer.poll(0.1)
        if first is None:
            continue
        messages = [first, *consumer.consume(BATCH_MAX - 1, 0)]
        ends: dict[int, int] = {}
        for message in messages:
            if message.error() is not None:
                raise KafkaException(message.error())
            ends[message.partition() or 0] = (message.offset() or 0) + 1
        producer.begin_transaction()
        answers = scorer.score([message.value() or b"" for message in messages])
        for message, answer in zip(messages, answers, strict=True):
            producer.produce(target, answer, message.key())
        offsets = [TopicPartition(source, partition, end) for partition, end in ends.items()]
        producer.send_offsets_to_transaction(offsets, consumer.consumer_group_metadata())
        producer.commit_transaction()


if __name__ == "__main__":
    main(*sys.argv[1:])
