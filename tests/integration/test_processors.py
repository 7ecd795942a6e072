"""Egress and bridge processes on real Kafka. The "other cluster" is the same broker under another name."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from msgspec.structs import replace

from processors.bridge.links import cluster_tag
from schemas import codec
from sie_stream.edge.broker import EmbeddedBroker
from sie_stream.edge.env_settings import settings_environment
from sie_stream.ports import TopicSpec
from sie_stream.records import LogWrite
from sie_stream.settings import Settings
from tests.integration.test_ingress import Installation
from tests.unit.processors.kit import route
from tests.unit.processors.test_egress import raw
from tests.waiting import PATIENCE_MS, PATIENCE_S, wait_until
from topics.edge.admin import KafkaAdmin

pytestmark = pytest.mark.integration


@contextmanager
def process(settings: Settings, module: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process that has said that it is ready; stopped cleanly at the end."""
    started = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        env=settings_environment(settings) | {"PATH": ""},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert started.stdout is not None
        line = started.stdout.readline()
        assert line, f"{module} ended with {started.wait()}"
        assert json.loads(line)["event"] == "ready"
        yield started
        started.terminate()
        assert started.wait(PATIENCE_S) == 0
    finally:
        started.kill()
        started.wait()
        assert started.stdout is not None
        started.stdout.close()


def test_egress_finishes_each_output_once_across_a_kill(kafka: EmbeddedBroker) -> None:
    here = Installation(kafka, "egress1.")

    def produce(first: int) -> None:
        outputs = [raw(f"r{number}") for number in range(first, first + 50)]
        here.writer.write([LogWrite(here.names.outputs, codec.encode_raw_output(one), b"k") for one in outputs])
        here.writer.flush(PATIENCE_MS)

    with here.reader_of(here.names.results) as results:
        with process(here.settings, "processors.egress.main", "--id", "0") as dying:
            produce(0)
            wait_until(lambda: len(results.results()) >= 50, "the first results")
            produce(50)
            dying.kill()
            dying.wait()
            dying.returncode = 0  # it was told to
        with process(here.settings, "processors.egress.main", "--id", "0"):
            produce(100)
            wait_until(lambda: len(results.results()) >= 150, "all results")
        assert sorted(one.request_id for one in results.results()) == sorted(f"r{number}" for number in range(150))


def test_the_bridge_carries_requests_in_and_results_out(kafka: EmbeddedBroker) -> None:
    here = Installation(kafka, "bridge1.")
    elsewhere = kafka.bootstrap_servers.replace("127.0.0.1", "localhost")
    assert elsewhere != kafka.bootstrap_servers
    KafkaAdmin(kafka.bootstrap_servers).ensure([TopicSpec(topic, 1, {}) for topic in ("there.orders", "there.scores")])
    row = replace(
        route(topic=here.names.work("wine"), input_deserializer="json", output_serializer="json"),
        input_topic="there.orders",
        input_bootstrap=elsewhere,
        input_group="there.group",
        output_topic="there.scores",
        output_bootstrap=elsewhere,
    )
    here.writer.write(
        [
            LogWrite(here.names.routes, codec.encode_row(row), b"wine"),
            LogWrite("there.orders", b'{"x": 1}', b"k"),
            LogWrite("there.orders", b'{"x": "wrong"}', b"k"),
        ]
    )
    here.writer.flush(PATIENCE_MS)
    with (
        process(here.settings, "processors.bridge.main"),
        process(here.settings, "processors.ingress.main", "--id", "0"),
        here.reader_of(here.names.work("wine")) as work,
        here.reader_of("there.scores") as scores,
    ):
        wait_until(lambda: sum(work.work_ids().values()) == 1, "the work item")
        wait_until(lambda: len(scores.more()) == 1, "the result elsewhere")
        assert list(work.work_ids()) == [f"src:{cluster_tag(elsewhere)}/there.orders:0:0:mi-wine"]
        assert json.loads(scores.records[0].value or b"")["error"]["code"] == "wrong_type"
