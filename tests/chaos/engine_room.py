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

from schemas.codec import decode_cluster, decode_result, decode_row, decode_work
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
from sie_stream.ids import TopicPartition
from sie_stream.records import LogWrite
from sie_stream.settings import Settings
from tests.chaos.careful_client import CarefulClient
from tests.waiting import PATIENCE_S, wait_until

MODELS = ("wine-logreg", "wine-rf", "iris-knn", "diabetes-ridge", "digits-logreg", "breast-cancer-logreg")
RATE = 60
"""Requests per second: enough that something is always in flight, little enough for a loaded machine."""
READY_S = 2 * PATIENCE_S
TICK_S = 0.05
LAST_LINES = 15
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
        self._broken: BaseException | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="chaos-load", daemon=True)
        connection = cluster.connection
        topics = connection.settings.topics
        self.tally = Tally(connection.reader("chaos"), topics.results, {})
        self._client = CarefulClient(connection.settings.bootstrap_servers)
        self._topic = topics.requests

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        """Sends at RATE, late requests included: a stalled broker is followed by a burst, as in life."""
        started = time.monotonic()
        try:
            while not self._stopping.wait(TICK_S):
                due = int((time.monotonic() - started) * RATE)
                self._client.send([self._next() for _ in range(due - self.sent)])
        except BaseException as error:
            self._broken = error
            raise

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
            assert self._broken is None, f"the load ended: {self._broken!r}"
            return probe()

        wait_until(looked, what, timeout_s)

    def prove_all(self, timeout_s: float) -> dict[str, Any]:
        """Stop the load, wait for every answer, let the witness count, and see who owned what. Returns the proof.

        Fails with where each request is that is lost, answered twice or was never asked.
        """
        self._end_load()
        self.watch_until(self._all_confirmed, "Kafka to have all requests", timeout_s)
        self._await_all_answers(timeout_s)
        bootstrap = self.cluster.settings.bootstrap_servers
        proof = prove(bootstrap)
        owners = owners_on(self.cluster.connection)
        assert owners.assignments > 0, "nothing was checked"
        wrong = {*proof["lost"], *proof["duplicates"], *proof["unasked"]}
        if wrong or owners.results != self.sent:
            seen = f"{self.sent} sent, {owners.results} answers of workers; on the topics: {proof}"
            raise AssertionError("\n".join([seen, *whereabouts(bootstrap, wrong)]))
        assert not owners.violations, "\n".join(owners.violations[:20])
        return proof

    def _end_load(self) -> None:
        self._stopping.set()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "the load does not end"

    def stop(self) -> None:
        """Before the cluster goes: its clients would only complain that nobody is there."""
        self._end_load()
        self.tally.close()

    def _all_confirmed(self) -> bool:
        self._client.turn()
        return self._client.unconfirmed == 0

    def _await_all_answers(self, timeout_s: float) -> None:
        """Fails with where each request that is not answered was last seen."""
        try:
            self.watch_until(lambda: self.tally.terminal >= self.sent, "all answers", timeout_s)
        except AssertionError as late:
            bootstrap = self.cluster.settings.bootstrap_servers
            proof = prove(bootstrap)
            seen = f"{self.sent} sent, {self.tally.terminal} answers seen; on the topics: {proof}"
            places = whereabouts(bootstrap, proof["lost"])
            committed = committed_on(self.cluster.connection)
            raise AssertionError("\n".join([str(late), seen, *places, *committed, *self._last_words()])) from late

    def _last_words(self) -> list[str]:
        """The end of what each process has logged."""
        logs = sorted((Path(self.cluster.settings.state_dir) / "logs").glob("*"))
        return [line for log in logs for line in (f"-- {log.name}", *log.read_text().splitlines()[-LAST_LINES:])]


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
    """Every copy of these requests, of their work items and of their terminal records."""
    lines = []
    for message in read_committed(bootstrap, "sie.requests"):
        name = request_id(message)
        if name in request_ids:
            place = f"requests[{message.partition()}]@{message.offset()} t={message.timestamp()[1]}"
            lines.append(f"{name} asked {place} key={message.key()}")
    for model in MODELS:
        for message in read_committed(bootstrap, f"sie.work.{model}"):
            item = decode_work(message.value())
            if item.request_id in request_ids:
                place = f"{message.topic()}[{message.partition()}]@{message.offset()} t={message.timestamp()[1]}"
                lines.append(f"{item.request_id} routed {place} epoch={item.route_epoch}")
    for message in read_committed(bootstrap, "sie.results"):
        result = decode_result(message.value())
        if result.request_id in request_ids:
            place = f"results[{message.partition()}]@{message.offset()} t={message.timestamp()[1]}"
            lines.append(f"{result.request_id} ended {place} {result.status} {result.timings_ms} {result.provenance}")
    return sorted(lines)


def committed_on(connection: Connection) -> list[str]:
    """What ingress and the workers have committed of each partition, and where it ends."""
    topics = connection.settings.topics
    groups = {topics.ingress_group: [topics.requests], topics.worker_group: [topics.work(model) for model in MODELS]}
    lines = []
    for group, names in groups.items():
        reader = connection.reader(group)
        try:
            places = [TopicPartition(name, number) for name in names for number in range(reader.partitions_of(name))]
            ends = reader.end_offsets(places)
            for place, committed in reader.committed(places).items():
                lines.append(f"{group} {place.topic}[{place.partition}] ends {ends[place]}, committed {committed}")
        finally:
            reader.close()
    return lines


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
        try:
            yield room
        finally:
            room.stop()
    finally:
        cluster.stop()
