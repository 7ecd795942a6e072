"""The users of a world: they declare models, send requests of every kind, and know what must become of each."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import msgspec
from msgspec import Raw, Struct

from schemas.codec import decode_row, encode_cluster, encode_request
from sie_stream.control import ApplyModel, ClusterRecord, DeleteModel, DrainWorker, InstanceRow, UncordonWorker
from sie_stream.ids import TopicNames, derived_request_id, instance_id
from sie_stream.ports import TopicSpec
from sie_stream.records import REQUEST_ID_HEADER, InferenceRequest, LogRecord, LogWrite, header
from sie_stream.sim.scenario import Delete, Scenario
from sie_stream.sim.world import World

NUMBER_HEADER = "sim-number"
ASK_AGAIN_MS = 100
BURST_EVERY_MS = 700
BOUND_MODEL = "m0"
BOUND_TOPIC = "orders"
BOUND_GROUP = "orders-group"
COPIES_TOPIC = "copies"
USER_TOPICS = (TopicSpec(BOUND_TOPIC, 2, {}), TopicSpec(COPIES_TOPIC, 2, {}))
MALFORMED: tuple[bytes | None, ...] = (
    b'{"model": "m0", "inputs": ',
    b"\xff\xfe\x00no text",
    b"",
    None,
    b"\x00\x00\x00\x27\x0fwho knows",
    b"[" * 80 + b"]" * 80,
    b'{"model": "m0", "inputs": {"x": NaN}}',
)


VERSIONS_MAX = 1_000


def _version(number: int) -> str:
    return f"1.{number}.0"


def _versions(models: list[str], every: int) -> Iterator[tuple[str, str]]:
    """(model, version) of every so-manieth one, beginning with another version for each model; 0: none."""
    for at, model in enumerate(models):
        for number in range(2, VERSIONS_MAX) if every else ():
            if (number + at) % every == 0:
                yield model, _version(number)


class Expected(Struct, frozen=True):
    """What must become of one request. `inputs` None: there is no answer to compare."""

    request_id: str
    statuses: tuple[str, ...]
    inputs: bytes | None = None
    dead_letter: bool = False


class Unfit(Struct, frozen=True):
    """Request ids that break engines: they die, hang, raise, or answer with an error."""

    kills: set[str]
    hangs: set[str]
    raises: set[str]
    refused: set[str]


def right_answer(request_id: str, inputs: bytes) -> bytes:
    """The outputs object of a request: a function of its id and its inputs."""
    return b'{"y":"%s"}' % hashlib.blake2b(request_id.encode() + inputs, digest_size=8).hexdigest().encode()


class Traffic:
    """Plans every request at the start; sends them once all models have been ready."""

    def __init__(self, world: World, scenario: Scenario, names: TopicNames) -> None:
        workload = scenario.workload
        self.world = world
        self.names = names
        self.expected: dict[int, Expected] = {}
        """By number; each request record carries its number in a header."""
        self.unfit = Unfit(set(), set(), set(), set())
        self.models = [f"m{number}" for number in range(workload.models)]
        self.streaming: dict[str, bytes] = {}
        """Inputs of the requests that ask for token deltas, by id."""
        self.broken = set(_versions(self.models, workload.broken_versions))
        self._shadows = set(_versions(self.models, workload.shadow_versions))
        self.unsent = 0
        self.by_id: dict[str, Expected] = {}
        self._workload = workload
        self._gone: tuple[str, ...] = ()
        """How requests may end because their model was deleted."""
        if any(isinstance(fault, Delete) for fault in scenario.faults):
            self._gone = ("rejected", "failed")
        self._versions = dict.fromkeys(self.models, 0)
        self._writer = world.log.plain_writer(client="user")
        self._plan: list[tuple[int, LogWrite]] = []
        for number in range(workload.requests):
            self._add(number)
        self.unsent = len(self._plan)
        for model in self.models:
            self.declare(model)
        world.after(ASK_AGAIN_MS, self._start)

    # ------------------------------------------------------------ models

    def declare(self, model: str) -> None:
        """Declare a model for the first time, or its next version. The third one is pooled, the second keeps order."""
        chance = self.world.random
        number = int(model[1:])
        self._versions[model] += 1
        most = chance.randint(1, 3)
        spec: dict[str, object] = {
            "name": model,
            "version": _version(self._versions[model]),
            "source": {"uri": f"/models/{model}"},
            "backend": {"name": "sim"},
            "service_type": "scoring",
            "min_gpu_memory_mb": chance.randrange(100, self._workload.memory_mb + 1, 100),
            "replicas": {"min": chance.randint(1, min(most, self._workload.replicas)), "max": most},
            "batch_sizes": {"max": chance.choice((1, 4, 16))},
            "ordering": "key" if number % 3 == 1 else "none",
            "fusion": "pooled" if number % 3 == 2 else "fused",
            "input_schema": {
                "type": "object",
                "properties": {"x": {"type": "integer", "minimum": 0}},
                "required": ["x"],
                "additionalProperties": False,
            },
            "output_schema": {"type": "object", "properties": {"y": {"type": "string"}}, "required": ["y"]},
        }
        if self._workload.sleepy and chance.random() < self._workload.sleepy:
            spec["replicas"] = {"min": 0, "max": most}
        if self._workload.rollout_hold_ms:
            shadow = (model, spec["version"]) in self._shadows
            spec["rollout"] = {"hold_ms": self._workload.rollout_hold_ms, "samples_min": 2, "shadow": shadow}
        if model == BOUND_MODEL:
            spec["kafka_input"] = {"topic": BOUND_TOPIC, "group_id": BOUND_GROUP, "value_deserializer": "json"}
            spec["kafka_output"] = {"topic": COPIES_TOPIC, "value_serializer": "avro"}
        self.world.note(f"declare {model} {spec['version']} replicas {spec['replicas']}")
        self._order(ApplyModel(Raw(msgspec.json.encode(spec)), "simulator"))

    def declare_again(self) -> None:
        self.declare(self.world.random.choice(self.models))

    def delete(self, for_ms: int | None) -> None:
        """Delete a model and declare it again later; `for_ms` None: never."""
        model = self.world.random.choice(self.models)
        self.world.note(f"delete {model} {'for good' if for_ms is None else f'for {for_ms} ms'}")
        self._order(DeleteModel(model, "simulator"))
        if for_ms is not None:
            self.world.after(for_ms, lambda: self.declare(model))

    def drain(self, worker: str, for_ms: int) -> None:
        self.world.note(f"drain {worker} for {for_ms} ms")
        self._order(DrainWorker(worker, "simulator"))
        self.world.after(for_ms, lambda: self._order(UncordonWorker(worker, "simulator")))

    def _order(self, command: ClusterRecord) -> None:
        self._writer.write([LogWrite(self.names.cluster, encode_cluster(command), partition=0)])

    def ordered(self, model: str) -> bool:
        return int(model[1:]) % 3 == 1

    # ------------------------------------------------------------ requests

    def _add(self, number: int) -> None:
        chance, load = self.world.random, self._workload
        key = None if chance.random() < 0.1 else b"key%d" % chance.randrange(load.keys)
        at_ms = chance.randrange(load.over_ms)
        if chance.random() < load.bursts:
            at_ms -= at_ms % BURST_EVERY_MS - chance.randrange(20)
        if load.waves > 1:
            at_ms += chance.randrange(load.waves) * load.wave_every_ms
        luck = chance.random()
        if chance.random() < load.bound:
            request = self._bound(number, key)
        elif luck < load.malformed:
            request = self._malformed(number, key)
        else:
            request = self._well_formed(number, key, luck - load.malformed)
        self._plan.append((at_ms, request))
        # Without a key the copy may land on another partition, which another process may read: not deduplicated.
        if key is not None and self.expected[number].request_id and chance.random() < load.duplicates:
            self._plan.append((at_ms + chance.choice((0, 1, 30, 2_000)), request))

    def _malformed(self, number: int, key: bytes | None) -> LogWrite:
        request_id = f"r{number}" if self.world.random.random() < 0.5 else ""
        headers = ((NUMBER_HEADER, str(number).encode()),)
        if request_id:
            headers += ((REQUEST_ID_HEADER, request_id.encode()),)
        self._expect(number, Expected(request_id, ("rejected",), dead_letter=True))
        return LogWrite(self.names.requests, self.world.random.choice(MALFORMED), key, None, headers)

    def _well_formed(self, number: int, key: bytes | None, luck: float) -> LogWrite:
        chance, load = self.world.random, self._workload
        request_id = "" if chance.random() < load.anonymous else f"r{number}"
        model = chance.choice(self.models)
        inputs = b'{"x":%d}' % chance.randrange(1_000_000)
        deadline_ms: int | None = None
        statuses: tuple[str, ...] = ("ok",)
        dead_letter = False
        if luck < load.unknown_model:
            model, statuses = "mX", ("rejected",)
        elif luck < (load.unknown_model + load.bad_inputs):
            inputs, statuses = b'{"x":"one"}', ("rejected",)
        elif chance.random() < load.deadline:
            deadline_ms, statuses = chance.choice((20, 300, 2_000)), ("ok", "expired")
        elif request_id:
            statuses, dead_letter = self._maybe_unfit(request_id)
        request = InferenceRequest(
            model=model,
            inputs=Raw(inputs),
            request_id=request_id,
            deadline_ms=deadline_ms,
            priority=chance.choice((None, "P0", "P1", "P2")),
            session=chance.choice((None, None, "s1", "s2")),
            stream=bool(load.streams) and bool(request_id) and chance.random() < load.streams,
        )
        if request.stream:
            self.streaming[request_id] = inputs
        value = encode_request(request) if chance.random() < load.avro else msgspec.json.encode(request)
        answer = inputs if "ok" in statuses else None
        self._expect(number, Expected(request_id, statuses + self._gone, answer, dead_letter))
        return LogWrite(self.names.requests, value, key, None, ((NUMBER_HEADER, str(number).encode()),))

    def _bound(self, number: int, key: bytes | None) -> LogWrite:
        """Bare inputs on the user's own topic."""
        inputs = b'{"x":%d}' % self.world.random.randrange(1_000_000)
        self._expect(number, Expected("", ("ok", *self._gone), inputs))
        return LogWrite(BOUND_TOPIC, inputs, key, None, ((NUMBER_HEADER, str(number).encode()),))

    def _maybe_unfit(self, request_id: str) -> tuple[tuple[str, ...], bool]:
        """Statuses of a request that engines may not survive, and whether it is to be dead-lettered."""
        luck, load = self.world.random.random(), self._workload
        for share, unfit, dead_letter in (
            (load.kills_engine, self.unfit.kills, True),
            (load.hangs_engine, self.unfit.hangs, True),
            (load.raises_in_engine, self.unfit.raises, True),
            (load.refused_by_engine, self.unfit.refused, False),
        ):
            if luck < share:
                unfit.add(request_id)
                return ("failed",), dead_letter
            luck -= share
        return ("ok",), False

    def _expect(self, number: int, expected: Expected) -> None:
        self.expected[number] = expected
        if expected.request_id:
            self.by_id[expected.request_id] = expected

    def _start(self) -> None:
        ready = self._ready()
        if not all(model in ready for model in self.models):
            self.world.after(ASK_AGAIN_MS, self._start)
            return
        self.world.note("all models are ready")
        for after_ms, write in self._plan:
            self.world.after(ASK_AGAIN_MS + after_ms, lambda write=write: self._send(write))

    def _ready(self) -> dict[str, None]:
        """Models that answered at some time. Before that a request may be refused: ingress may not know it yet.

        One that lacks replicas for which there is no place is degraded for good, and answers all the same.
        """
        rows = [decode_row(one.value, InstanceRow) for one in self.world.log.visible(self.names.instances) if one.value]
        return {row.model: None for row in rows if row.status == "ready" or _answers(row)}

    def _send(self, write: LogWrite) -> None:
        self.unsent -= 1
        self._writer.write([write])

    # ------------------------------------------------------------ what checkers ask

    def id_of(self, record: LogRecord) -> str:
        """Request id of a record that a user sent: the one it was given, or its place."""
        number = header(record.headers, NUMBER_HEADER)
        assert number is not None, record
        expected = self.expected[int(number)]
        if expected.request_id:
            return expected.request_id
        request_id = derived_request_id(record.topic, record.partition, record.offset)
        if record.topic == BOUND_TOPIC:
            request_id += ":" + instance_id(BOUND_MODEL)
        self.by_id[request_id] = expected
        return request_id

    def everything_sent(self) -> dict[str, Expected]:
        """All requests in the log, by id."""
        sent = [record for topic in self.sources() for record in self.world.log.visible(topic)]
        return {request_id: self.by_id[request_id] for request_id in map(self.id_of, sent)}

    def sources(self) -> tuple[str, str]:
        """Topics that users write to."""
        return self.names.requests, BOUND_TOPIC


def _answers(row: InstanceRow) -> bool:
    return row.status == "degraded" and any(replica.state == "ready" for replica in row.replicas)
