"""The Open Inference Protocol over HTTP against servers that are wrong on purpose. Real ones: tests/backends_real."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpu_worker.backends.base import EngineOutput, ModelRefused
from gpu_worker.backends.oip_backend import OipBackend
from gpu_worker.backends.served.failures import ServerDied
from sie_stream.control import ModelLaunch
from sie_stream.edge.clock import SystemClock
from tests.libraries.backends.launching import launch, row
from tests.libraries.backends.wrong_servers import Routes, Trouble, WrongServer, serving

INFER = "/v2/models/adder/infer"
LIVE = "/v2/health/live"
X = {"name": "x", "datatype": "FP32", "shape": [-1, 2]}
TOTAL = {"name": "total", "datatype": "FP32", "shape": [-1, 1]}


def totals(body: Any) -> Any:
    """What a good server answers: the sum of each row."""
    (x,) = body["inputs"]
    cells = x["data"]
    sums = [sum(cells[start : start + 2]) for start in range(0, len(cells), 2)]
    return {"outputs": [{"name": "total", "datatype": "FP32", "shape": [len(sums), 1], "data": sums}]}


def routes(**changes: Any) -> Routes:
    return {
        "/v2/health/ready": {},
        LIVE: {},
        "/v2": {"name": "wrong", "version": "1.2", "extensions": ["model_repository", "model_configuration"]},
        "/v2/models/adder": {"name": "adder", "versions": ["1"], "inputs": [X], "outputs": [TOTAL]},
        "/v2/models/adder/config": {"max_batch_size": 4},
        "/v2/models/adder/ready": {},
        "/v2/repository/models/adder/load": {},
        "/v2/repository/models/adder/unload": {},
        "/v2/repository/index": [{"name": "adder", "state": "UNAVAILABLE"}],
        INFER: totals,
        **changes,
    }


@pytest.fixture
def server() -> Iterator[WrongServer]:
    with serving(routes()) as made:
        yield made


def asked(address: str, **config: Any) -> ModelLaunch:
    return launch(Path("adder"), "triton", {"timeout_ms": 5_000, "url": address, **config})


def run(server: WrongServer, count: int = 3, **config: Any) -> list[EngineOutput]:
    model = OipBackend(SystemClock()).load(asked(server.url, **config))
    return model.run([row(str(number), {"x": [number, 1]}) for number in range(count)])


def test_rows_go_in_batches_and_come_back_in_order(server: WrongServer) -> None:
    answers = run(server, 10)
    assert [json.loads(one.outputs or b"")["total"] for one in answers] == [number + 1 for number in range(10)]
    assert [len(body["inputs"][0]["data"]) // 2 for body in server.asked(INFER)] == [4, 4, 2]


def test_columns_fill_one_tensor_in_their_order(server: WrongServer) -> None:
    model = OipBackend(SystemClock()).load(asked(server.url, columns=["b", "a"]))
    good, bad = model.run([row("good", {"a": 1, "b": 2.5}), row("bad", {"a": 1, "b": "2"})])
    assert server.asked(INFER)[0]["inputs"][0]["data"] == [2.5, 1.0]
    assert (good.error_code, bad.error_code) == (None, "invalid_input")


@pytest.mark.parametrize(
    ("inputs", "complaint"),
    [
        ({}, "inputs.x: is missing"),
        ({"x": [1]}, "has shape [1], the model takes [2]"),
        ({"x": [1, "2"]}, "must hold FP32 numbers"),
        ({"x": [1, [2]]}, "different lengths"),
        ({"x": [1, 1e39]}, "a number that FP32 cannot"),
        ({"x": [True, False]}, "must hold FP32 numbers"),
        (b"[1]", "inputs: Expected `object`"),
        (b"\xff", "inputs:"),
    ],
)
def test_a_bad_row_fails_alone(server: WrongServer, inputs: object, complaint: str) -> None:
    model = OipBackend(SystemClock()).load(asked(server.url))
    good, bad = model.run([row("good", {"x": [1, 2]}), row("bad", inputs)])
    assert json.loads(good.outputs or b"") == {"total": 3.0}
    assert bad.error_code == "invalid_input"
    assert complaint in (bad.error_message or "")


def output(**changes: Any) -> dict[str, Any]:
    return {"outputs": [{"name": "total", "datatype": "FP32", "shape": [1, 1], "data": [1.0], **changes}]}


@pytest.mark.parametrize(
    ("answer", "code", "complaint"),
    [
        (output(shape=[2, 1], data=[1.0, 2.0]), "server_bad_answer", "2 rows for 1 inputs"),
        (output(shape=[1, 2], data=[1.0, 2.0]), "server_bad_answer", "agreed was [1]"),
        (output(data=[1.0, 2.0]), "server_bad_answer", "holds 2 values"),
        (output(data=["one"]), "server_bad_answer", "does not hold FP32"),
        (output(datatype="FP31"), "server_bad_answer", "unknown type"),
        (output(name="sum"), "server_bad_answer", "lacks the outputs total"),
        (output(data=[None]), "output_not_finite", "total"),
        ({"outputs": 5}, "server_bad_answer", "Expected `array`"),
        ([], "server_bad_answer", "Expected `object`"),
        (b'{"outputs": [', "server_bad_answer", "not JSON"),
        (Trouble.CUT, "server_bad_answer", "peer closed connection"),
        (Trouble.NOT_HTTP, "server_bad_answer", "infer"),
        (Trouble.CLOSE, "server_bad_answer", "without sending"),
        (400, "server_refused", "status 400"),
        (500, "server_error", "status 500"),
    ],
)
def test_a_wrong_answer_is_an_error_of_that_row(answer: object, code: str, complaint: str) -> None:
    def respond(body: Any) -> object:
        return answer if 1.0 in body["inputs"][0]["data"][::2] else totals(body)

    with serving(routes(**{INFER: respond})) as server:
        answers = run(server)
    assert [one.error_code for one in answers] == [None, code, None]
    assert complaint in (answers[1].error_message or "")


def test_a_server_that_hangs_and_lives_fails_the_request_in_time() -> None:
    with serving(routes(**{INFER: Trouble.HANG})) as server:
        (answer,) = run(server, 1, timeout_ms=200)
        assert answer.error_code == "server_timeout"
        model = OipBackend(SystemClock()).load(asked(server.url))
        now_ms = SystemClock().now_ms()
        late, soon = model.run(
            [
                row("late", {"x": [1, 2]}, deadline_at_ms=now_ms - 1),
                row("soon", {"x": [1, 2]}, deadline_at_ms=now_ms + 200),
            ]
        )
    assert (late.error_code, soon.error_code) == ("deadline_exceeded", "deadline_exceeded")


@pytest.mark.parametrize("trouble", [Trouble.HANG, Trouble.CLOSE, Trouble.CUT])
def test_a_server_that_is_not_live_any_more_ends_the_engine(
    trouble: object, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(routes(**{INFER: trouble, LIVE: 503})) as server, pytest.raises(ServerDied) as died:
        run(server, timeout_ms=200)
    assert died.value.code == 69
    assert "does not answer any more" in capsys.readouterr().err


def test_a_server_that_is_gone_ends_the_engine() -> None:
    with serving(routes()) as server:
        model = OipBackend(SystemClock()).load(asked(server.url))
        server.end()
        with pytest.raises(ServerDied, match="refused"):
            model.run([row("r", {"x": [1, 2]})])


@pytest.mark.parametrize(
    ("config", "code", "complaint"),
    [
        ({"inputs": ["y"]}, "metadata_mismatch", "no 'y', only x"),
        ({"inputs": ["x:INT64"]}, "metadata_mismatch", "declared INT64, the server has FP32"),
        ({"inputs": ["x:FP32:3"]}, "metadata_mismatch", "declared [3], the server has [2]"),
        ({"outputs": ["totl"]}, "metadata_mismatch", "Did you mean 'total'"),
        ({"inputs": ["x:FP31"]}, "invalid_model_config", "Did you mean 'FP32'"),
        ({"columns": ["a", "b", "c"]}, "metadata_mismatch", "3 columns for x of shape [2]"),
        ({"token_input": "ids"}, "invalid_model_config", "'ids' is no input"),
        ({"colums": ["a"]}, "invalid_model_config", "Did you mean 'columns'"),
        ({"server": "tritonserver"}, "invalid_model_config", "give one of them"),
        ({"url": "ftp://x"}, "invalid_model_config", "does not start with http://"),
        ({"timeout_ms": 0}, "invalid_model_config", "whole number >= 1"),
        ({"model": "other"}, "server_refused", "status 404"),
    ],
)
def test_what_the_server_does_not_have_is_refused_at_load(
    server: WrongServer, config: dict[str, Any], code: str, complaint: str
) -> None:
    with pytest.raises(ModelRefused) as refusal:
        OipBackend(SystemClock()).load(asked(server.url, **config))
    assert refusal.value.code == code
    assert complaint in refusal.value.message


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"/v2": []}, "server_bad_answer"),
        ({"/v2": Trouble.CUT}, "server_bad_answer"),
        ({"/v2": Trouble.HANG}, "server_timeout"),
        ({"/v2/health/ready": 503}, "server_unreachable"),
        ({"/v2/models/adder/ready": 400, "/v2/repository/models/adder/load": 500}, "server_error"),
        ({"/v2/models/adder/ready": 400}, "model_not_ready"),
        ({"/v2/models/adder/config": {"max_batch_size": "4"}}, "server_bad_answer"),
    ],
)
def test_a_server_that_cannot_load_is_refused(changes: Routes, code: str) -> None:
    with serving(routes(**changes)) as server, pytest.raises(ModelRefused) as refusal:
        OipBackend(SystemClock()).load(asked(server.url, timeout_ms=300))
    assert refusal.value.code == code


def test_schemas_are_held_against_the_tensors(server: WrongServer) -> None:
    from_schema = {"input_schema": b'{"properties":{"y":{}}}', "output_schema": b'{"required":["label"]}'}
    for key, schema in from_schema.items():
        fields = {name: getattr(asked(server.url), name) for name in ModelLaunch.__struct_fields__}
        declared = ModelLaunch(**{**fields, key: schema})
        with pytest.raises(ModelRefused) as refusal:
            OipBackend(SystemClock()).load(declared)
        assert refusal.value.code == "schema_mismatch"


def test_a_declared_digest_cannot_be_promised_for_an_attached_server(server: WrongServer) -> None:
    with pytest.raises(ModelRefused, match="nobody can check"):
        OipBackend(SystemClock()).load(
            launch(Path("adder"), "triton", {"url": server.url}, digest=f"sha256:{'0' * 64}")
        )


def test_slots_load_and_unload_what_was_not_there(server: WrongServer) -> None:
    server.routes["/v2/models/adder/ready"] = lambda _: {} if server.asked("/v2/repository/models/adder/load") else 400
    backend = OipBackend(SystemClock())
    first, second = backend.load(asked(server.url)), backend.load(asked(server.url))
    assert len(server.asked("/v2/repository/models/adder/load")) == 1
    backend.unload(first)
    assert not server.asked("/v2/repository/models/adder/unload")
    backend.unload(second)
    assert len(server.asked("/v2/repository/models/adder/unload")) == 1


def test_a_model_that_was_there_before_stays(server: WrongServer) -> None:
    backend = OipBackend(SystemClock())
    backend.unload(backend.load(asked(server.url)))
    assert not server.asked("/v2/repository/models/adder/load")
    assert not server.asked("/v2/repository/models/adder/unload")


def test_nobody_there() -> None:
    with serving({}) as server:
        server.end()
        with pytest.raises(ModelRefused) as refusal:
            OipBackend(SystemClock()).load(asked(server.url))
    assert refusal.value.code == "server_unreachable"
    assert server.url in refusal.value.message
