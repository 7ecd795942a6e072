"""Scenario `tiers`: a P0 scorer alone, and beside a language model that generates without a pause on the same machine.

Alone, beside, alone, beside: rounds take turns, so that a machine that slows down slows both. Once with tiers (the
scorer on a worker of tier-0, the language model on one of tier-1), once without, on two equal workers.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread

from confluent_kafka import Consumer, Producer

from sie_stream.cli.cluster import Layout
from sie_stream.cli.declare import apply_specs, load_specs
from tests.bench.failover import at_end
from tests.bench.workload import MODEL, MODELS_DIR, number_of, requests
from tests.bench.world import READY_S, Engine, engine, wait, world
from tests.waiting import wait_until

LANGUAGE_MODEL = "smollm2-135m-instruct"
RATE_PER_S = 100
ROUNDS, ROUNDS_QUICK = 4, 1
ROUND_S = 12.0
WARM_S = 2.0
WRITERS = 4
"""Generations in flight."""
WRITER_KEY = b"words"
PROMPT = "Tell a long story about a ship that sails to the end of the sea."


def run(quick: bool) -> dict[str, float]:
    rounds = ROUNDS_QUICK if quick else ROUNDS
    tiered = measure(rounds, ("tier-0", "tier-1"))
    plain = measure(rounds, ())
    return {
        **{f"tiers_{name}": value for name, value in tiered.items()},
        **{f"no_tiers_{name}": value for name, value in plain.items()},
    }


def measure(rounds: int, tiers: tuple[str, ...]) -> dict[str, float]:
    """Medians over the rounds of the scorer's p99."""
    with world() as here, engine(here, Layout(workers=2, tiers=tiers)) as sie:
        declare(sie, tiers)
        score(sie, WARM_S)
        alone, beside = [], []
        words = 0
        for _ in range(rounds):
            alone.append(score(sie, ROUND_S))
            with writing(sie) as answered:
                beside.append(score(sie, ROUND_S))
            words += answered[0]
    first, second = statistics.median(alone), statistics.median(beside)
    return {
        "p99_alone_ms": first,
        "p99_beside_ms": second,
        "p99_ratio": second / first,
        "generations_per_s": words / (rounds * ROUND_S),
    }


def declare(sie: Engine, tiers: tuple[str, ...]) -> None:
    scorer, folder = load_specs(MODELS_DIR / MODEL / "model-spec.yaml")[0]
    writer, home = load_specs(MODELS_DIR / LANGUAGE_MODEL / "model-spec.yaml")[0]
    first, second = tiers or (None, None)
    specs = [
        (scorer.model_copy(update={"priority_level": "P0", "tier": first}), folder),
        (writer.model_copy(update={"tier": second}), home),
    ]
    apply_specs(sie.cluster.connection, specs, READY_S, lambda count: None, sie.cluster.watch)


def score(sie: Engine, seconds: float) -> float:
    """p99 in milliseconds of requests at a steady rate, from produce to a read_committed consumer."""
    consumer = at_end(sie)
    consumer.poll(0.2)
    total = round(RATE_PER_S * seconds)
    sent_at, seen_at = [0.0] * total, [0.0] * total
    reading = Thread(target=read, args=(consumer, seen_at), daemon=True)
    reading.start()
    producer = Producer({"bootstrap.servers": sie.bootstrap, "linger.ms": 0})
    start = time.monotonic() + 0.1
    for number, (key, value) in enumerate(requests(0, total)):
        due = start + number / RATE_PER_S
        while (left := due - time.monotonic()) > 0:
            producer.poll(left)
        sent_at[number] = due
        producer.produce(sie.topics.requests, fresh(value), key)
    producer.flush(10)
    reading.join(60)
    assert not reading.is_alive(), f"{seen_at.count(0.0)} of {total} requests were not answered in time"
    consumer.close()
    sie.check()
    took = sorted(1000 * (seen - sent) for seen, sent in zip(seen_at, sent_at, strict=True))
    return took[len(took) * 99 // 100]


def fresh(value: bytes) -> bytes:
    """The same request under an id that was not used before in this run."""
    document = json.loads(value)
    document["request_id"] = f"{time.monotonic_ns()}"
    return json.dumps(document).encode()


def read(consumer: Consumer, seen_at: list[float]) -> None:
    left = len(seen_at)
    while left:
        for message in consumer.consume(500, 0.05):
            if message.error() is None and message.key() != WRITER_KEY:
                seen_at[number_of(message.key() or b"")] = time.monotonic()
                left -= 1


@contextmanager
def writing(sie: Engine) -> Iterator[list[int]]:
    """The language model generates all the time; yields a list with the number of its answers."""
    stop, answered = Event(), [0]
    thread = Thread(target=write, args=(sie, stop, answered), daemon=True)
    thread.start()
    wait_until(lambda: answered[0] > 0, "the first generation", 60)
    answered[0] = 0
    try:
        yield answered
    finally:
        stop.set()
        thread.join(60)
        assert not thread.is_alive(), "the last generations were not answered"
        wait(0.5)


def write(sie: Engine, stop: Event, answered: list[int]) -> None:
    """WRITERS requests in flight until stopped; then waits for the last ones."""
    consumer = at_end(sie)
    consumer.poll(0.2)
    producer = Producer({"bootstrap.servers": sie.bootstrap, "linger.ms": 0})
    request = {"model": LANGUAGE_MODEL, "inputs": {"prompt": PROMPT}, "parameters": {"max_tokens": 48}}
    flying = 0
    while flying or not stop.is_set():
        while flying < WRITERS and not stop.is_set():
            producer.produce(sie.topics.requests, json.dumps(request), WRITER_KEY)
            flying += 1
        producer.poll(0)
        for message in consumer.consume(500, 0.05):
            if message.error() is None and message.key() == WRITER_KEY:
                flying -= 1
                answered[0] += 1
    producer.flush(5)
    consumer.close()
