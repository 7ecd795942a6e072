"""What the tests of processors share: routes, records, and an ingress over the log in memory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from msgspec import Raw
from msgspec.structs import replace

from processors.ingress.decode import Bound
from processors.ingress.events import CommitBatch, GroupBatch, RecordsPolled, RoutesChanged
from processors.ingress.host import IngressHost
from processors.ingress.machine import IngressMachine
from processors.tokenise import TextEncoder
from processors.turns import Ports
from schemas import codec
from sie_stream.control import RouteRow, VariantRow
from sie_stream.errors import ConfigError, InvalidRequest
from sie_stream.ids import TopicNames
from sie_stream.ports import TopicSpec
from sie_stream.records import DeadLetter, Headers, InputsRef, LogRecord, LogWrite, Result, WorkItem
from sie_stream.settings import Settings
from sie_stream.sim.log import SimLog

NOW_MS = 1_700_000_000_000
NAMES = TopicNames()
SCHEMA: dict[str, Any] = {
    "properties": {
        "x": {"type": "number", "minimum": -10, "maximum": 10},
        "name": {"type": "string", "maxLength": 5},
    },
    "required": ["x"],
}
STABLE = (VariantRow("stable", "1.0.0", 10_000),)


def route(model: str = "wine", **changes: Any) -> RouteRow:
    row = RouteRow(
        instance=f"mi-{model}",
        model=model,
        route_epoch=7,
        topic=NAMES.work(model),
        lanes=3,
        width=1,
        variants=STABLE,
        service_type="classification",
        priority=1,
        input_schema=Raw(json.dumps(SCHEMA).encode()),
        tokenizer="",
        tokenizer_digest="",
        context_tokens_max=0,
    )
    if "input_schema" in changes:
        changes["input_schema"] = Raw(json.dumps(changes["input_schema"]).encode())
    return replace(row, **changes)


def body(**changes: Any) -> bytes:
    return json.dumps({"model": "wine", "inputs": {"x": 1}, **changes}).encode()


def record(
    value: bytes | None,
    offset: int = 0,
    key: bytes | None = b"k",
    headers: Headers = (),
    topic: str = NAMES.requests,
    at_ms: int = NOW_MS,
) -> LogRecord:
    return LogRecord(topic, 0, offset, at_ms, key, value, headers)


class Encoders:
    """Tokenizers by path."""

    def __init__(self, known: dict[str, TextEncoder] | None = None) -> None:
        self._known = known or {}

    def get(self, path: str, digest: str = "") -> TextEncoder:
        if path not in self._known:
            raise ConfigError(f"tokenizer {path!r} cannot be read: No such file or directory")
        return self._known[path]


class Contents:
    """Implements ports.Contents: what a test says is there, by URL."""

    def __init__(self) -> None:
        self.there: dict[str, bytes | InvalidRequest] = {}
        self.prepared: list[str] = []
        self.asked: list[str] = []
        self.waits = 0

    def prepare(self, ref: InputsRef) -> None:
        self.prepared.append(ref.url)

    def ask(self, ref: InputsRef) -> bytes | InvalidRequest | None:
        self.asked.append(ref.url)
        return self.there.get(ref.url)

    def wait(self, wait_ms: int) -> None:
        self.waits += 1

    def settled(self) -> None:
        return None


def machine(
    *rows: RouteRow,
    topics: Sequence[str] = (),
    encoders: Encoders | None = None,
    contents: Contents | None = None,
    **settings: Any,
) -> IngressMachine:
    """`topics`: what exists besides SIE-Stream's own."""
    made = IngressMachine(
        Settings(**settings), encoders or Encoders(), lambda topic: topic in topics, contents=contents
    )
    made.decide([RoutesChanged(tuple((row.model, row) for row in rows))])
    return made


class Written:
    """What one batch writes, decoded."""

    def __init__(self, batch: CommitBatch) -> None:
        self.batch = batch
        self.work: list[WorkItem] = []
        self.results: list[Result] = []
        self.letters: list[DeadLetter] = []
        self.copies: list[LogWrite] = []
        self.work_writes: list[LogWrite] = []
        for write in batch.writes:
            if write.topic.startswith(NAMES.work("")):
                self.work.append(codec.decode_work(write.value))
                self.work_writes.append(write)
            elif write.topic == NAMES.results:
                self.results.append(codec.decode_result(write.value))
            elif write.topic == NAMES.deadletter:
                self.letters.append(codec.decode_deadletter(write.value))
            else:
                self.copies.append(write)


def take_up(
    ingress: IngressMachine, *records: LogRecord, group: str = NAMES.ingress_group, now_ms: int = NOW_MS
) -> Written:
    (command,) = ingress.decide([RecordsPolled((GroupBatch(group, list(records)),), now_ms)])
    assert isinstance(command, CommitBatch)
    return Written(command)


def bound(deserializer: str, text_field: str = "text") -> Bound:
    return Bound("mi-wine", deserializer, text_field)


class World:
    """A simulated cluster with SIE-Stream's topics, and ingress processes on it."""

    def __init__(self, *rows: RouteRow, partitions: int = 2, topics: Sequence[str] = (), **settings: Any) -> None:
        self.contents = Contents()
        self.settings = Settings(**settings)
        self.log = SimLog()
        own = (NAMES.results, NAMES.deadletter, NAMES.outputs, NAMES.routes)
        specs = [TopicSpec(NAMES.requests, partitions, {})]
        specs += [TopicSpec(topic, 1, {}) for topic in (*own, *topics)]
        specs += [TopicSpec(row.topic, row.lanes * row.width, {}) for row in rows]
        self.log.admin().ensure(specs)
        self.events: list[tuple[str, dict[str, object]]] = []
        self.publish(*rows)

    def event(self, name: str, **facts: object) -> None:
        self.events.append((name, facts))

    def publish(self, *rows: RouteRow) -> None:
        self.log.plain_writer().write(
            [LogWrite(NAMES.routes, codec.encode_row(row), row.model.encode()) for row in rows]
        )

    def unpublish(self, model: str) -> None:
        self.log.plain_writer().write([LogWrite(NAMES.routes, None, model.encode())])

    def ingress(self, name: str = "0") -> IngressHost:
        host = IngressHost(self.settings, self.ports(name), Encoders(), self, contents=self.contents)
        host.start()
        return host

    def ports(self, name: str) -> Ports:
        return Ports(
            make_reader=self.log.reader,
            make_latest_reader=self.log.latest_reader,
            make_group_reader=lambda group: self.log.group_reader(group, f"member-{name}"),
            writer=self.log.transactional_writer(f"sie.test.{name}"),
            make_plain_writer=self.log.plain_writer,
            clock=self.log.clock,
        )

    def send(self, *values: bytes | None, key: bytes | None = b"k", topic: str = NAMES.requests) -> None:
        self.log.plain_writer().write([LogWrite(topic, value, key) for value in values])

    def run(self, *hosts: Any, turns: int = 5) -> None:
        for _ in range(turns):
            for host in hosts:
                host.turn()
            self.log.clock.advance(10)

    def work(self, model: str = "wine") -> list[WorkItem]:
        return [codec.decode_work(one.value) for one in self.log.visible(NAMES.work(model))]

    def results(self) -> list[Result]:
        return [codec.decode_result(one.value) for one in self.log.visible(NAMES.results)]
