"""Requests that name their inputs, over real Kafka and real files: read once, checked, and never in the way."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

import pytest

from schemas import codec
from sie_stream.client import Client, Request
from sie_stream.edge.broker import EmbeddedBroker
from sie_stream.edge.connection import Connection
from sie_stream.errors import RecordTooLarge
from sie_stream.ids import TopicNames
from sie_stream.ports import TopicSpec
from sie_stream.records import LogWrite
from tests.integration.test_ingress import Installation
from tests.unit.processors.kit import route
from tests.waiting import PATIENCE_MS, PATIENCE_S, wait_until
from topics.edge.admin import KafkaAdmin

pytestmark = pytest.mark.integration

LARGE = b'{"x": 1' + b" " * 3_000_000 + b"}"
"""More than a record of sie.requests may have, and than Kafka takes by default."""


def ref(path: Path, content: bytes) -> dict[str, Any]:
    return {"url": f"file://{path}", "sha256": sha256(content).hexdigest()}


def send(here: Installation, requests: dict[str, dict[str, Any]], partition: int) -> None:
    here.writer.write(
        [
            LogWrite(
                here.names.requests,
                json.dumps({"model": "wine", "request_id": name, **fields}).encode(),
                name.encode(),
                partition,
            )
            for name, fields in requests.items()
        ]
    )
    here.writer.flush(PATIENCE_MS)


def test_files_become_work_and_every_bad_one_its_own_ending(kafka: EmbeddedBroker, tmp_path: Path) -> None:
    place = tmp_path / "inputs"
    place.mkdir()
    for name, content in (("large", LARGE), ("text", b"no json"), ("list", b"[1]"), ("wrong", b'{"x": 99}')):
        (place / name).write_bytes(content)
    (tmp_path / "secret").write_bytes(b'{"x": 1}')
    (place / "link").symlink_to(tmp_path / "secret")
    here = Installation(kafka, "references1.", reference_prefixes=str(place), reference_bytes_max=4_000_000)
    (place / "huge").write_bytes(b" " * 4_000_001)
    requests = {
        "large": {"inputs_ref": ref(place / "large", LARGE) | {"size": len(LARGE)}},
        "gone": {"inputs_ref": ref(place / "gone", b"")},
        "changed": {"inputs_ref": ref(place / "large", b"other")},
        "outside": {"inputs_ref": ref(tmp_path / "secret", b'{"x": 1}')},
        "link": {"inputs_ref": ref(place / "link", b'{"x": 1}')},
        "huge": {"inputs_ref": ref(place / "huge", b" ")},
        "text": {"inputs_ref": ref(place / "text", b"no json")},
        "list": {"inputs_ref": ref(place / "list", b"[1]")},
        "wrong": {"inputs_ref": ref(place / "wrong", b'{"x": 99}')},
        "inline": {"inputs": {"x": 2}},
        "again": {"inputs_ref": ref(place / "large", LARGE)},
    }
    with here.reader_of(here.names.work("wine")) as work, here.reader_of(here.names.results) as results:
        with here.ingress("a"):
            send(here, requests, 0)
            wait_until(lambda: len(results.results()) == 8, "eight refusals")
            wait_until(lambda: len(work.work_ids()) == 3, "three work items")
        found = {item.request_id: item.inputs for item in work.work()}
        codes = {result.request_id: result.error.code for result in results.results() if result.error}
    assert found == {"large": LARGE, "again": LARGE, "inline": b'{"x": 2}'}
    assert codes == {
        "gone": "reference_missing",
        "changed": "reference_mismatch",
        "outside": "reference_not_allowed",
        "link": "reference_not_allowed",
        "huge": "reference_too_large",
        "text": "not_json",
        "list": "wrong_type",
        "wrong": "out_of_range",
    }


def test_without_places_no_file_is_read(kafka: EmbeddedBroker, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b'{"x": 1}')
    here = Installation(kafka, "references2.")
    with here.reader_of(here.names.results) as results, here.ingress("a"):
        send(here, {"one": {"inputs_ref": ref(tmp_path / "a", b'{"x": 1}')}}, 0)
        wait_until(results.results, "the refusal")
        (result,) = results.results()
    assert result.error is not None
    assert (result.status, result.error.code) == ("rejected", "reference_not_allowed")
    assert "reference_prefixes" in result.error.message


def test_every_reference_is_routed_once_though_a_process_dies(kafka: EmbeddedBroker, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(LARGE)
    here = Installation(kafka, "references3.", reference_prefixes=str(tmp_path))
    ids = [f"r{number}" for number in range(60)]
    with here.reader_of(here.names.work("wine")) as work:
        with here.ingress("a") as dying:
            send(here, {one: {"inputs_ref": ref(tmp_path / "a", LARGE)} for one in ids[:30]}, 0)
            wait_until(work.work_ids, "the first")
            dying.kill()
            dying.wait()
        send(here, {one: {"inputs_ref": ref(tmp_path / "a", LARGE)} for one in ids[15:]}, 0)
        with here.ingress("a"):
            wait_until(lambda: len(work.work_ids()) == 60, "all of them")
            send(here, {"last": {"inputs": {"x": 1}}}, 0)
            wait_until(lambda: work.work_ids()["last"], "what came last")
        assert set(work.work_ids().values()) == {1}


def test_a_client_with_a_store_sends_what_is_too_large_for_a_request(kafka: EmbeddedBroker, tmp_path: Path) -> None:
    here = Installation(kafka, "references4.", reference_prefixes=str(tmp_path), request_bytes_max=2_000)
    row = route(topic=here.names.work("wine"), input_schema={"properties": {"text": {"type": "string"}}})
    here.writer.write([LogWrite(here.names.routes, codec.encode_row(row), b"wine")])
    here.writer.flush(PATIENCE_MS)
    connection = Connection(here.settings)
    texts = {"small": "a", "large": "a" * 3_000, "larger": "b" * 2_000_000}
    with here.reader_of(here.names.work("wine")) as work, here.ingress("a"):
        with Client(connection=connection, reference_store=str(tmp_path)) as client:
            client.submit_many(
                Request(model="wine", inputs={"text": text}, request_id=one) for one, text in texts.items()
            )
        with Client(connection=connection) as client:
            refused = client.submit("wine", {"text": texts["large"]}).result(PATIENCE_S)
            with pytest.raises(RecordTooLarge, match="produce --store"):
                client.submit("wine", {"text": texts["larger"]})
        wait_until(lambda: len(work.work_ids()) == 3, "three work items")
        assert {one.request_id: json.loads(one.inputs)["text"] for one in work.work()} == texts
    assert len(list(tmp_path.iterdir())) == 2
    assert refused.error is not None
    assert (refused.error.code, "inputs_ref" in refused.error.message) == ("payload_too_large", True)


def test_a_work_topic_with_a_lower_limit_refuses_one_request_only(kafka: EmbeddedBroker, tmp_path: Path) -> None:
    """The broker refuses the record, so its request ends; it must not stop the stream."""
    blanks = Random(7).randbytes(6_000_000).translate(bytes(b" \t\r\n"[number % 4] for number in range(256)))
    large = b'{"x": 1' + blanks + b"}"  # a topic's limit is that of compressed batches
    (tmp_path / "large").write_bytes(large)
    here = Installation(kafka, "references5.", reference_prefixes=str(tmp_path))
    older = TopicSpec(TopicNames("references5.").work("wine"), 3, {"max.message.bytes": "1000000"})
    KafkaAdmin(kafka.bootstrap_servers).ensure([older])
    requests = {"large": {"inputs_ref": ref(tmp_path / "large", large)}, "inline": {"inputs": {"x": 2}}}
    with (
        here.reader_of(here.names.work("wine")) as work,
        here.reader_of(here.names.results) as results,
        here.ingress("a"),
    ):
        send(here, requests, 0)
        wait_until(lambda: work.work_ids()["inline"], "the neighbour")
        (result,) = wait_until(results.results, "the refusal")
    assert result.error is not None
    assert (result.request_id, result.error.code) == ("large", "payload_too_large")
