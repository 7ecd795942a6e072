"""The whole system as real processes, with requests flowing all the time, and ways to hurt it."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from schemas.codec import decode_cluster, decode_result, decode_row
from sie_stream.auditing.owners import Owners, owners_of
from sie_stream.cli.cluster import Cluster, Layout
from sie_stream.cli.declare import apply_specs
from sie_stream.cli.demo.proof import prove, read_committed, request_id
from sie_stream.cli.demo.tally import Tally
from sie_stream.cli.demo.traffic import DemoModel, load_models
from sie_stream.client.requests import Request, to_write
from sie_stream.control import PlacementRow
from sie_stream.edge.connection import Connection
from sie_stream.edge.tables import read_to_end
from sie_stream.errors import FatalLogError, Retriable
from sie_stream.records import LogWrite
from sie_stream.settings import Settings
from tests.waiting import wait_until

MODELS = ("wine-logreg", "wine-rf", "iris-knn", "diabetes-ridge", "digits-logreg", "breast-cancer-logreg")
RATE = 60
"""Requests per second: enough that something is always in flight, little enough for a loaded machine."""
READY_S = 180.0
TICK_S = 0.05
TWO_OF_EACH = Layout(workers=2, ingress=2)


def with_replicas(model: DemoModel, count: int) -> DemoModel:
    """The same model with so many warm replicas, each on a worker of its own."""
    replicas = model.spec.replicas.model_copy(update={"min": count, "max": count})
    return dataclasses.replace(model, spec=model.spec.model_copy(update={"replicas": replicas}))


class EngineRoom:
    """A running cluster under a steady load. Every request is remembered; `prove_all` accounts for each."""

    def __init__(self, cluster: Cluster, models: list[DemoModel], label: str) -> None:
        self.cluster = cluster
        self.models = models
        self._label = label
        self.sent = 0
        self._unconfirmed: list[LogWrite] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="chaos-load", daemon=True)
        connection = cluster.connection
        topics = connection.settings.topics
        self.tally = Tally(connection.reader("chaos"), topics.results, {})
        self._writer = connection.plain_writer()
        self._topic = topics.requests

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        """Sends at RATE, late requests included: a stalled broker is followed by a burst, as in life."""
        started = time.monotonic()
        while not self._stopping.wait(TICK_S):
            due = int((time.monotonic() - started) * RATE)
            self._send([self._next() for _ in range(due - self.sent)])

    def _send(self, writes: list[LogWrite]) -> None:
        """As a careful client: what is not confirmed is sent again by a new producer when the old one gives up.

        The ids stay the same, so a copy that had arrived is dropped by ingress.
        """
        self._unconfirmed += writes
        try:
            self._writer.write(writes)
            self._writer.flush(0)
        except Retriable:
            return
        except FatalLogError:
            self._writer = self.cluster.connection.plain_writer()
            self._writer.write(self._unconfirmed)
            return
        self._unconfirmed = []

    def _next(self) -> LogWrite:
        model = self.models[self.sent % len(self.models)]
        row = model.samples[self.sent % len(model.samples)]
        request_id = f"{self._label}-{self.sent:06d}"
        self.sent += 1
        return to_write(Request(model=model.spec.model_id, inputs=row), request_id, self._topic)

    def pid(self, name: str) -> int:
        assert self.cluster.supervisor is not None
        return self.cluster.supervisor.children[name].pid

    def signal(self, name: str, number: signal.Signals) -> None:
        os.kill(self.pid(name), number)

    def await_progress(self, answers: int, timeout_s: float) -> None:
        """Until that many more terminal records have come; the supervisor keeps its watch meanwhile."""
        target = self.tally.terminal + answers
        self.watch_until(lambda: self.tally.terminal >= target, f"{answers} more answers", timeout_s)

    def watch_until(self, probe: Callable[[], bool], what: str, timeout_s: float) -> None:
        def looked() -> bool:
            self.cluster.watch()
            assert self.tally.error is None, self.tally.error
            return probe()

        wait_until(looked, what, timeout_s)

    def prove_all(self, timeout_s: float) -> dict[str, Any]:
        """Stop the load, wait for every answer, let the witness count, and see who owned what. Returns the proof."""
        self._stopping.set()
        self._thread.join(30)
        self._writer.flush(30_000)
        self.watch_until(lambda: self.tally.terminal >= self.sent, "all answers", timeout_s)
        self.tally.close()
        owners = owners_on(self.cluster.connection)
        assert owners.assignments > 0, "nothing was checked"
        assert owners.results == self.sent
        assert not owners.violations, "\n".join(owners.violations[:20])
        return prove(self.cluster.settings.bootstrap_servers)


def owners_on(connection: Connection) -> Owners:
    """Who owned which partition and who answered, held against each other, on the topics as they are."""
    topics = connection.settings.topics
    reader = connection.reader("owners")
    try:
        return owners_of(
            (
                (record.offset, record.timestamp_ms, decode_cluster(record.value))
                for record in read_to_end(reader, topics.cluster)
            ),
            (
                decode_row(record.value, PlacementRow)
                for record in read_to_end(reader, topics.placements)
                if record.value is not None
            ),
            (decode_result(record.value) for record in read_to_end(reader, topics.results)),
        )
    finally:
        reader.close()


def whereabouts(bootstrap: str, request_ids: Collection[str]) -> list[str]:
    """Every copy of these requests and of their terminal records: the first thing to know when one is doubled."""
    lines = []
    for message in read_committed(bootstrap, "sie.requests"):
        name = request_id(message)
        if name in request_ids:
            place = f"requests[{message.partition()}]@{message.offset()} t={message.timestamp()[1]}"
            lines.append(f"{name} asked {place} key={message.key()}")
    for message in read_committed(bootstrap, "sie.results"):
        result = decode_result(message.value())
        if result.request_id in request_ids:
            place = f"results[{message.partition()}]@{message.offset()} t={message.timestamp()[1]}"
            lines.append(f"{result.request_id} ended {place} {result.status} {result.timings_ms} {result.provenance}")
    return sorted(lines)


@contextmanager
def engine_room(
    state_dir: Path, models_dir: Path, label: str, layout: Layout = TWO_OF_EACH, replicas: int = 2
) -> Iterator[EngineRoom]:
    """Start everything, declare six models with so many replicas each, and let requests flow."""
    models = [with_replicas(model, replicas) for model in load_models(models_dir) if model.spec.model_id in MODELS]
    assert len(models) == len(MODELS), "run `make models` first"
    settings = Settings(state_dir=str(state_dir), models_dir=str(models_dir))
    cluster = Cluster(settings, layout)
    try:
        cluster.start()
        specs = [(model.spec, model.folder) for model in models]
        apply_specs(cluster.connection, specs, READY_S, lambda _count: None, cluster.watch)
        room = EngineRoom(cluster, models, label)
        room.start()
        yield room
    finally:
        cluster.stop()
