"""Scenario `deployment`: from `apply` of a model whose files are there already to its first committed answer.

A client asks for the model from the moment it is applied (and is refused until its route is there); the time ends with
the first result that a read_committed consumer gets. Once with the engine process running already, once on a worker
that never ran this backend, for a classical scorer and for the language model; and once for the language model on a
worker that was told to start such engines by itself (setting prestart_engines). What was asked is answered before the
next deployment begins.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterable

from confluent_kafka import Consumer, Producer

from schemas.codec import decode_result
from sie_stream.cli.cluster import Layout
from sie_stream.cli.declare import declare, load_specs
from sie_stream.spec import ModelSpec
from tests.bench.failover import at_end
from tests.bench.workload import MODEL, MODELS_DIR, requests
from tests.bench.world import Engine, engine, wait, world
from tests.waiting import wait_until

LANGUAGE_MODEL = "smollm2-135m-instruct"
ROUNDS, ROUNDS_QUICK = 10, 2
ANSWER_S = 60
ASK_EVERY_S = 0.02
PRESTART_S = 8.0


def run(quick: bool) -> dict[str, float]:
    rounds = ROUNDS_QUICK if quick else ROUNDS
    scorer = json.loads(next(iter(requests(0, 1)))[1])["inputs"]
    words = {"prompt": "The sea is"}
    with world() as here, engine(here, Layout(workers=1)) as sie:
        consumer = at_end(sie)
        cold = deploy(sie, consumer, MODEL, "deploy-cold", scorer)
        warm = [deploy(sie, consumer, MODEL, f"deploy-{number}", scorer) for number in range(rounds)]
        generator = deploy(sie, consumer, LANGUAGE_MODEL, "deploy-words", words)
        again = deploy(sie, consumer, LANGUAGE_MODEL, "deploy-words-2", words)
        consumer.close()
    with world() as here, engine(here, Layout(workers=1), prestart_engines="torch") as sie:
        wait(PRESTART_S)
        consumer = at_end(sie)
        prestarted = deploy(sie, consumer, LANGUAGE_MODEL, "deploy-words", words)
        consumer.close()
    return {
        "rounds": rounds,
        "warm_engine_median_s": statistics.median(warm),
        "warm_engine_max_s": max(warm),
        "cold_engine_s": cold,
        "language_model_cold_s": generator,
        "language_model_warm_s": again,
        "language_model_prestarted_s": prestarted,
        "slowest_s": max(*warm, cold, again, prestarted),
    }


def deploy(sie: Engine, consumer: Consumer, source: str, name: str, inputs: object) -> float:
    """Seconds from ApplyModel to the first ok result of a copy of `source` under this name."""
    spec, folder = load_specs(MODELS_DIR / source / "model-spec.yaml")[0]
    request = json.dumps({"model": name, "inputs": inputs, "parameters": _short(spec)}).encode()
    producer = Producer({"bootstrap.servers": sie.bootstrap, "linger.ms": 0})
    started = time.monotonic()
    declare(sie.cluster.connection, [(spec.model_copy(update={"name": name}), folder)], ANSWER_S, sie.cluster.watch)
    asked_at, asked, ended = 0.0, 0, 0

    def answered() -> bool:
        nonlocal asked_at, asked, ended
        if time.monotonic() - asked_at >= ASK_EVERY_S:
            asked_at = time.monotonic()
            asked += 1
            producer.produce(sie.topics.requests, request)
            producer.poll(0)
        results = list(_results(consumer))
        ended += len(results)
        return name in results

    def all_ended() -> bool:
        nonlocal ended
        ended += sum(1 for _ in _results(consumer))
        return ended >= asked

    wait_until(answered, f"an answer of {name}", ANSWER_S)
    took_s = time.monotonic() - started
    producer.flush(5)
    wait_until(all_ended, "the end of what else was asked", ANSWER_S)
    return took_s


def _short(spec: ModelSpec) -> dict[str, int]:
    """Few words: what is measured is the start, not the writing."""
    return {"max_tokens": 4} if spec.service_type == "text-generation" else {}


def _results(consumer: Consumer) -> Iterable[str]:
    """The results that came since: the model of an ok one, an empty text for another."""
    for message in consumer.consume(1_000, 0.01):
        if message.error() is None:
            result = decode_result(message.value())
            yield result.model if result.status == "ok" else ""
