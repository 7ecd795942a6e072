"""An installation on real Kafka whose log is made by hand, so that it can be as odd as logs get.

Ingress is the real process. The worker is this file: it answers with the model's own backend and writes what it is told
to, committed or not, at whatever time.
"""

from __future__ import annotations

import io
import json
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import fastavro
import msgspec
import yaml
from confluent_kafka import Producer
from msgspec import Raw

from gpu_worker.backends.base import EngineInput
from gpu_worker.backends.onnx_backend import OnnxBackend
from gpu_worker.guards import Guards
from gpu_worker.outcomes import engine_label
from scheduler.launches import accept
from schemas.codec import decode_result, decode_work, encode_cluster, encode_result, encode_row
from sie_stream.cli.replay import Asked, replayed
from sie_stream.cli.replaying.choosing import Question
from sie_stream.commands import ApplyModel
from sie_stream.edge.broker import EmbeddedBroker
from sie_stream.edge.clock import SystemClock
from sie_stream.edge.connection import Connection
from sie_stream.edge.kafka_log import KafkaReader, KafkaTransactionalWriter
from sie_stream.edge.key_table import KeyReaders, key_readers
from sie_stream.edge.keyring import Keyring
from sie_stream.edge.stop import StopFlag
from sie_stream.edge.tables import read_to_end
from sie_stream.privacy.vault import Guard, Vault
from sie_stream.provenance import Placed, result_key, work_provenance, work_result
from sie_stream.records import LogRecord, LogWrite, Result, Timings, Usage
from sie_stream.replay.report import Report
from tests.integration.test_ingress import Installation
from tests.waiting import wait_until

SOURCE = Path(".models/iris-gb-petal").absolute()
MODEL = "wine"
"""The name that Installation makes topics for."""
FLUSH_S = 10


def petals(number: int) -> dict[str, float]:
    """Inputs that differ from request to request."""
    return {"petal_length_cm": 1.0 + number % 50 / 10, "petal_width_cm": 0.1 + number % 7 / 3}


def framed(schema_id: int, schema: Any, fields: dict[str, Any]) -> bytes:
    """A record in Confluent framing."""
    body = io.BytesIO()
    fastavro.schemaless_writer(body, fastavro.parse_schema(schema), fields)
    return struct.pack(">bI", 0, schema_id) + body.getvalue()


class OddLog(Installation):
    """`bound`: a topic that the model reads besides the common request topic, the values being its inputs as JSON.
    `ring`: a key ring; inputs then name a customer, whose label is encrypted and whose score is hashed."""

    def __init__(self, broker: EmbeddedBroker, prefix: str, bound: str = "", ring: Path | None = None) -> None:
        super().__init__(broker, prefix)
        self.settings = msgspec.structs.replace(self.settings, pii_keys=str(ring or ""))
        spec = yaml.safe_load((SOURCE / "model-spec.yaml").read_text())
        spec |= {"model_id": MODEL, "source": spec["source"] | {"uri": str(SOURCE)}}
        if bound:
            spec["kafka_input"] = {"topic": bound, "value_deserializer": "json"}
        if ring is not None:
            spec["input_schema"]["properties"]["customer"] = {"type": "string", "pii": "encrypt"}
            spec["input_schema"]["required"].append("customer")
            spec["pre_warmup"] = []
            spec["privacy"] = {"subject": "customer"}
            outputs = spec["output_schema"]["properties"]
            outputs["label"]["pii"], outputs["score"]["pii"] = "encrypt", "hash"
        declared = json.dumps(spec).encode()
        accepted = accept(declared, self.names)
        self.work = self.names.work(MODEL)
        self.writer.write(
            [
                LogWrite(self.names.cluster, encode_cluster(ApplyModel(Raw(declared))), MODEL.encode()),
                LogWrite(self.names.routes, encode_row(accepted.route), MODEL.encode()),
            ]
        )
        self.writer.flush(FLUSH_S * 1_000)
        backend = OnnxBackend(SystemClock())
        self._launch = accepted.launch
        self._model = backend.load(accepted.launch)
        self._placed = Placed(
            *(self.work, 1, "worker-0", "inc", "cpu:0", self._model.weights_digest),
            engine_label("onnx", backend.versions()),
        )
        self._reader = KafkaReader(self.settings.bootstrap_servers, f"{prefix}odd")
        self._producers = 0

    def close(self) -> None:
        self._reader.close()

    def produce(self, topic: str, value: bytes, key: str, at_ms: int | None = None, partition: int = -1) -> None:
        """One record as a foreign producer writes it."""
        producer = Producer({"bootstrap.servers": self.settings.bootstrap_servers})
        producer.produce(topic, value, key, partition, timestamp=at_ms or now_ms())
        assert not producer.flush(FLUSH_S)

    def transaction(self, writes: Iterable[LogWrite], at_ms: int | None = None) -> Producer:
        """Begun and flushed: the caller commits it, aborts it, or leaves it open."""
        self._producers += 1
        own = {"transactional.id": f"{self.names.prefix}odd-{self._producers}", "transaction.timeout.ms": 600_000}
        producer = Producer({"bootstrap.servers": self.settings.bootstrap_servers, **own})
        producer.init_transactions(FLUSH_S)
        producer.begin_transaction()
        for write in writes:
            partition = -1 if write.partition is None else write.partition
            producer.produce(write.topic, write.value, write.key, partition, timestamp=at_ms or now_ms())
        assert not producer.flush(FLUSH_S)
        return producer

    def records(self, topic: str) -> list[LogRecord]:
        """Everything that a read_committed reader sees."""
        return list(read_to_end(self._reader, topic))

    def results(self) -> list[Result]:
        return [decode_result(record.value) for record in self.records(self.names.results)]

    def routed(self, count: int) -> list[LogRecord]:
        """Work items, once there are so many; refusals count among them."""

        def taken() -> list[LogRecord] | None:
            found = self.records(self.work)
            refused = sum(not one.provenance.work_topic for one in self.results())
            return found if len(found) + refused >= count else None

        found = wait_until(taken, f"{count} requests to be routed")
        assert found is not None
        return found

    def guard(self) -> Guard | None:
        """Of a worker that starts now: its key ring, and the data keys that the log has."""
        vault = Vault(Keyring(Path(self.settings.pii_keys)), self.names.keys)
        for record in self.records(self.names.keys):
            vault.heed(record.key, record.value)
        return Guards(vault).guard_of(self._launch)

    def answers(
        self, items: Sequence[LogRecord], wrong: bytes | None = None, guard: Guard | None = None
    ) -> list[LogWrite]:
        """Terminal records of work items, by the model; `wrong`: these outputs instead."""
        works = [decode_work(record.value) for record in items]
        outputs = self._model.run([EngineInput(work.request_id, work.inputs) for work in works])
        writes: list[LogWrite] = []
        for record, work, output in zip(items, works, outputs, strict=True):
            origin = work_provenance(work, record.partition, record.offset, self._placed, len(items))
            now = now_ms()
            timings = Timings(inference=1.0, total=float(max(0, now - work.requested_at_ms)))
            answer = wrong or output.outputs
            if guard is not None:
                answer = guard.outputs(work, answer or b"", writes)
            result = work_result(work, "ok", answer, None, Usage(), timings, origin, now)
            key = result_key(work.key, work.request_id)
            writes.append(LogWrite(self.names.results, encode_result(result), key))
        return writes

    def answer(self, items: Sequence[LogRecord], at_ms: int | None = None, guard: Guard | None = None) -> None:
        self.transaction(self.answers(items, guard=guard), at_ms).commit_transaction(FLUSH_S)

    @contextmanager
    def changing_keys(self) -> Iterator[tuple[KeyReaders, KafkaTransactionalWriter]]:
        """What `keys shred` and `keys rotate` work with."""
        connection = Connection(self.settings)
        writer = connection.transactional_writer(self.names.keys_transactional_id)
        with key_readers(connection) as readers, closing(writer):
            yield readers, writer

    def replay(self, **question: Any) -> Report:
        return replayed(Connection(self.settings), Asked(Question(**question), ""), StopFlag())


def now_ms() -> int:
    return time.time_ns() // 1_000_000
