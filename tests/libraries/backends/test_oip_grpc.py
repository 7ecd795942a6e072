"""The Open Inference Protocol over gRPC, against a server that is wrong on purpose."""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from gpu_worker.backends.base import EngineOutput, ModelRefused
from gpu_worker.backends.oip_backend import OipBackend
from gpu_worker.backends.served.failures import BadAnswer, ServerDied
from gpu_worker.backends.served.oip_grpc import SERVICE, TYPES, from_raw, to_raw
from sie_stream.edge.clock import SystemClock
from tests.libraries.backends.launching import launch, row
from tests.waiting import PATIENCE_S

Respond = Callable[[Any], Any]


def good(request: Any) -> Any:
    rows = np.frombuffer(request.raw_input_contents[0], np.float32).reshape(-1, 2)
    return answer(rows.sum(axis=1), len(rows))


def answer(sums: Any, count: int, **changes: Any) -> Any:
    output = {"name": "total", "datatype": "FP32", "shape": [count, 1], **changes}
    return TYPES["ModelInferResponse"](
        outputs=[TYPES["InferTensor"](**output)], raw_output_contents=[np.asarray(sums, np.float32).tobytes()]
    )


def typed(request: Any) -> Any:
    """The same in typed contents, as some servers answer."""
    contents = TYPES["InferTensorContents"](fp32_contents=[3.0])
    tensor = TYPES["InferTensor"](name="total", datatype="FP32", shape=[1, 1], contents=contents)
    return TYPES["ModelInferResponse"](outputs=[tensor])


def _bytes_of(message: Any) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()


class _Calls(grpc.GenericRpcHandler):
    """Answers every method of the service with a message made from `fields`, and ModelInfer with `infer`."""

    def __init__(self, infer: Respond, live: bool) -> None:
        tensor = TYPES["TensorMetadata"]
        self._infer = infer
        self._fields: dict[str, dict[str, Any]] = {
            "ServerLive": {"live": live},
            "ServerReady": {"ready": True},
            "ModelReady": {"ready": True},
            "ServerMetadata": {"name": "wrong", "version": "1", "extensions": ["model_configuration"]},
            "ModelMetadata": {
                "inputs": [tensor(name="x", datatype="FP32", shape=[-1, 2])],
                "outputs": [tensor(name="total", datatype="FP32", shape=[-1, 1])],
            },
            "ModelConfig": {"config": TYPES["ModelConfig"](max_batch_size=4)},
        }

    def service(self, handler_call_details: Any) -> Any:
        method = handler_call_details.method.removeprefix(f"/{SERVICE}/")
        respond = self._infer if method == "ModelInfer" else lambda _: self._made(method)
        return grpc.unary_unary_rpc_method_handler(
            lambda request, context: respond(request),
            request_deserializer=TYPES[f"{method}Request"].FromString,
            response_serializer=_bytes_of,
        )

    def _made(self, method: str) -> Any:
        return TYPES[f"{method}Response"](**self._fields[method])


@contextmanager
def serving(infer: Respond, live: bool = True) -> Iterator[tuple[str, grpc.Server]]:
    server = grpc.server(ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers((_Calls(infer, live),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"grpc://127.0.0.1:{port}", server
    finally:
        server.stop(0).wait()


def run(url: str, count: int = 1, **config: Any) -> list[EngineOutput]:
    model = OipBackend(SystemClock()).load(launch(Path("adder"), "triton", {"url": url, "timeout_ms": 5_000, **config}))
    return model.run([row(str(number), {"x": [number, 1]}) for number in range(count)])


def test_rows_go_out_and_come_back() -> None:
    with serving(good) as (url, _):
        answers = run(url, 10)
    assert [json.loads(one.outputs or b"")["total"] for one in answers] == [number + 1 for number in range(10)]


def test_typed_contents_are_read_as_well() -> None:
    with serving(typed) as (url, _):
        (one,) = run(url)
    assert json.loads(one.outputs or b"") == {"total": 3.0}


@pytest.mark.parametrize(
    ("respond", "complaint"),
    [
        (lambda _: answer([1.0, 2.0], 1), "8 bytes are no FP32"),
        (lambda _: answer([1.0, 2.0], 2), "2 rows for 1 inputs"),
        (lambda _: answer([1.0], 1, name="sum"), "lacks the outputs total"),
        (lambda _: answer([1.0], 1, datatype="FP31"), "unknown type"),
        (lambda _: b"\xff\xff\xff", "ModelInfer"),
        (lambda _: TYPES["ModelInferResponse"](raw_output_contents=[b""]), "0 outputs and the contents of 1"),
    ],
)
def test_half_answers_are_errors_of_the_request(respond: Respond, complaint: str) -> None:
    with serving(respond) as (url, _):
        (one,) = run(url)
    assert one.error_code == "server_bad_answer"
    assert complaint in (one.error_message or "")


def test_hangs_end_in_time_and_deaf_servers_end_the_engine() -> None:
    released = threading.Event()

    def hang(request: Any) -> Any:
        released.wait(PATIENCE_S)
        return good(request)

    with serving(hang) as (url, _):
        (one,) = run(url, timeout_ms=200)
        released.set()
    assert one.error_code == "server_timeout"
    with serving(lambda _: b"\xff", live=False) as (url, _), pytest.raises(ServerDied):
        run(url)


def test_a_server_that_is_gone_ends_the_engine() -> None:
    with serving(good) as (url, server):
        model = OipBackend(SystemClock()).load(launch(Path("adder"), "triton", {"url": url}))
        server.stop(0).wait()
        with pytest.raises(ServerDied):
            model.run([row("r", {"x": [1, 2]})])
        with pytest.raises(ModelRefused) as refusal:
            OipBackend(SystemClock()).load(launch(Path("adder"), "triton", {"url": url}))
    assert refusal.value.code == "server_unreachable"


@pytest.mark.parametrize("datatype", ["BOOL", "UINT8", "INT64", "FP16", "FP64", "BYTES"])
def test_raw_contents_come_back_as_they_went(datatype: str) -> None:
    cells = [b"one", b"", "naïve".encode()] if datatype == "BYTES" else [0, 1, 1]
    array: Any = np.array(
        cells, {"BOOL": "?", "UINT8": "u1", "INT64": "i8", "FP16": "f2", "FP64": "f8"}.get(datatype, "O")
    )
    back = from_raw("t", datatype, [3, 1], to_raw(datatype, array))
    assert back.shape == (3, 1)
    assert back.reshape(-1).tolist() == array.tolist()


def test_a_text_that_is_cut_off_is_no_text() -> None:
    with pytest.raises(BadAnswer, match="cut off"):
        from_raw("t", "BYTES", [1], struct.pack("<I", 5) + b"abc")
    with pytest.raises(BadAnswer):
        from_raw("t", "BYTES", [1], b"\x01")
