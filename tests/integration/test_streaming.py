"""Answers as they grow, on real Kafka with the real language model: provisional deltas, then the one result."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from schemas.codec import decode_token_delta
from sie_stream import Client
from sie_stream.client import InferenceResult, TextDelta
from sie_stream.edge.kafka_log import KafkaReader
from sie_stream.edge.tables import read_to_end
from sie_stream.records import TokenDelta
from tests.integration.test_a_day_with_the_cli import MODELS, Shell
from tests.waiting import PATIENCE_S

MODEL = "smollm2-135m-instruct"

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not (MODELS / MODEL / "build.json").exists(), reason="make models has not built SmolLM2"),
]


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    here = Shell(tmp_path_factory.mktemp("streaming"))
    here.run("up", "--workers", "1", "--detach")
    try:
        here.run("apply", "-f", str(MODELS / MODEL))
        yield here
    finally:
        here.run("down")


def deltas_of(shell: Shell, request_id: str) -> list[TokenDelta]:
    """As any consumer of the topic reads them."""
    reader = KafkaReader(shell.bootstrap, "test")
    try:
        records = list(read_to_end(reader, "sie.tokens"))
    finally:
        reader.close()
    mine = [record for record in records if record.key == request_id.encode()]
    assert len({record.partition for record in mine}) <= 1
    return [decode_token_delta(record.value) for record in mine]


def test_an_answer_is_streamed_and_ends_in_its_one_result(shell: Shell) -> None:
    with Client(shell.bootstrap) as client:
        found = list(
            client.stream(MODEL, {"prompt": "Count from one to ten:"}, request_id="s1", parameters={"max_tokens": 40})
        )
        quiet = client.submit(MODEL, {"prompt": "?"}, request_id="quiet").result(PATIENCE_S)
    result = found.pop()
    assert isinstance(result, InferenceResult)
    deltas = [delta for delta in found if isinstance(delta, TextDelta)]
    assert len(deltas) == len(found) >= 2
    assert result.outputs is not None
    assert "".join(delta.text for delta in deltas) == result.outputs["text"]
    told = deltas_of(shell, "s1")
    assert [delta.index for delta in told] == list(range(len(told)))
    assert {(delta.provisional, delta.incarnation, delta.attempt) for delta in told} == {
        (True, result.provenance.incarnation, 0)
    }
    assert "".join(delta.text for delta in told) == result.outputs["text"]
    assert sum(len(delta.token_ids) for delta in told) == result.usage.completion_tokens
    assert quiet.ok
    assert deltas_of(shell, "quiet") == []


def test_the_command_line_prints_while_it_is_written_and_a_form_is_kept_to(shell: Shell) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "London"]}, "size": {"type": "integer", "maximum": 99}},
        "required": ["city", "size"],
        "additionalProperties": False,
    }
    parameters = json.dumps({"response_format": {"type": "json_schema", "schema": schema}, "max_tokens": 40})
    asked = ("produce", "-m", MODEL, "-i", '{"prompt": "The capital of France"}', "--parameters", parameters)
    lines = [json.loads(line) for line in shell.run(*asked, "--stream", "-o", "json").splitlines()]
    assert [line["kind"] for line in lines[-1:]] == ["result"]
    text = "".join(line["text"] for line in lines if line["kind"] == "delta")
    assert text == lines[-1]["outputs"]["text"]
    assert json.loads(text)["city"] in ("Paris", "London")
    assert text in shell.run(*asked, "--stream")


def test_only_one_answer_can_be_shown(shell: Shell, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    assert "--stream" in shell.run("produce", "-m", MODEL, "-f", str(rows), "--stream", code=1)
