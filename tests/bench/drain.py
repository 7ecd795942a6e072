"""How fast a backlog comes out of a topic, what processor time that took, and whether it came out complete.

The backlog is written in one transaction, so a read_committed contestant sees all of it at the same moment: then the
clock starts. Until it is done nobody reads the output; only its end is looked at, 20 times a second, so that watching
costs next to nothing. Afterwards a read_committed consumer holds the output against the input.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from confluent_kafka import Consumer, KafkaException, TopicPartition
from msgspec import Struct

from sie_stream.edge.kafka_log import KafkaReader
from sie_stream.errors import Retriable
from sie_stream.ids import TopicPartition as Place
from tests.bench.usage import Usage
from tests.bench.workload import backlog, number_of
from tests.waiting import POLL_S, wait_until

IDLE_S = 1.0
"""The output is complete when it has not grown for so long (and is long enough)."""
TIMEOUT_S = 150.0


class Drained(Struct, frozen=True):
    """From the moment the backlog became visible until the last record was committed."""

    records: int
    seconds: float
    cpu_s: dict[str, float]
    """By group of processes."""

    @property
    def per_second(self) -> float:
        return self.records / self.seconds


class End:
    """How long a topic is."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self._reader = KafkaReader(bootstrap, "bench-watch")
        self._topic = topic
        self._places: list[Place] = []

    def look(self) -> tuple[int] | None:
        """Offsets of all partitions added up (transaction markers count too); None while the broker cannot say."""
        try:
            if not self._places:
                count = self._reader.partitions_of(self._topic)
                self._places = [Place(self._topic, number) for number in range(count)]
            return (sum(self._reader.end_offsets(self._places).values()),) if self._places else None
        except Retriable:
            return None

    def close(self) -> None:
        self._reader.close()


class Drain:
    """Measures one contestant: `source` is what it reads, `target` what it writes in the end."""

    def __init__(
        self,
        bootstrap: str,
        source: str,
        target: str,
        groups: Mapping[str, Sequence[int]],
        alive: Callable[[], None],
        models: Sequence[str] = (),
        topic_of: Callable[[str], str] | None = None,
    ) -> None:
        """`topic_of`: where requests for a model go, if not to `source`."""
        self._bootstrap = bootstrap
        self._target = target
        self._groups = groups
        self._alive = alive
        self._models = models
        self._topic_of = topic_of or (lambda model: source)
        self._produced = 0

    def warm_up(self, records: int) -> None:
        self.measure(records)

    def measure(self, records: int) -> Drained:
        """Put `records` requests on the log and wait until all are answered. Raises AssertionError on time-out."""
        end = End(self._bootstrap, self._target)
        found = wait_until(end.look, f"{self._target} to exist")
        assert found is not None
        before = found[0]
        backlog(self._bootstrap, self._topic_of, self._produced, records, self._models)
        usage, started = Usage(self._groups), time.monotonic()
        self._produced += records
        grown = [(started, before, usage.seconds())]

        def complete() -> bool:
            self._alive()
            now, found = time.monotonic(), end.look()
            if found is not None and found[0] != grown[-1][1]:
                grown.append((now, found[0], usage.seconds()))
            return grown[-1][1] - before >= records and now - grown[-1][0] > IDLE_S

        wait_until(complete, f"{records} records on {self._target}", TIMEOUT_S)
        end.close()
        ended, _, cpu_s = grown[-1]
        return Drained(records, ended - started - POLL_S / 2, cpu_s)

    def check(self, repeats_allowed: bool, good: Callable[[bytes | None], bool] = lambda value: True) -> None:
        """Every request was answered, each once, and every answer is `good`. Raises AssertionError."""
        answers = read_answers(self._bootstrap, self._target)
        numbers = [number for number, _ in answers]
        bad = sum(not good(value) for _, value in answers)
        assert bad == 0, f"{bad} of {len(answers)} answers are no results"
        lost = self._produced - len(set(numbers))
        assert lost == 0, f"{lost} of {self._produced} requests were not answered"
        repeats = len(numbers) - self._produced
        assert repeats_allowed or repeats == 0, f"{repeats} answers too many"


def read_answers(bootstrap: str, topic: str) -> list[tuple[int, bytes | None]]:
    """All answers on `topic`: the number of the request, by the record's key, and the value."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "bench-count",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
        }
    )
    left = set(consumer.list_topics(topic, timeout=10).topics[topic].partitions)
    consumer.assign([TopicPartition(topic, number, 0) for number in left])
    answers: list[tuple[int, bytes | None]] = []
    deadline = time.monotonic() + TIMEOUT_S
    while left:
        assert time.monotonic() < deadline, f"{topic} could not be read back in {TIMEOUT_S:.0f} s"
        for message in consumer.consume(10_000, 0.2):
            error = message.error()
            if error is None:
                answers.append((number_of(message.key() or b""), message.value()))
            elif error.name() == "_PARTITION_EOF":
                left.discard(message.partition() or 0)
            else:
                raise KafkaException(error)
    consumer.close()
    return answers
