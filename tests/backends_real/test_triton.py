"""The Open Inference Protocol against a real Triton, over HTTP and gRPC."""

from __future__ import annotations

import json
import os
import signal
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from gpu_worker.backends.base import ModelRefused
from gpu_worker.backends.oip_backend import OipBackend
from gpu_worker.backends.served.failures import ServerDied
from gpu_worker.backends.served.oip_model import OipModel
from sie_stream.edge.clock import SystemClock
from tests.libraries.backends.launching import launch, row
from tests.waiting import wait_until

CONFIG = """
backend: "python"
max_batch_size: 8
input [ { name: "x" data_type: TYPE_FP32 dims: [ 3 ] }, { name: "who" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "sum" data_type: TYPE_FP32 dims: [ 1 ] }, { name: "hello" data_type: TYPE_STRING dims: [ 1 ] } ]
instance_group [ { kind: KIND_CPU } ]
dynamic_batching { }
"""
CODE = """
import threading
import numpy
import triton_python_backend_utils as triton

class TritonPythonModel:
    def execute(self, requests):
        return [self.one(request) for request in requests]

    def one(self, request):
        x = triton.get_input_tensor_by_name(request, "x").as_numpy()
        who = triton.get_input_tensor_by_name(request, "who").as_numpy()
        if (x[:, 0] == 13).any():
            raise ValueError("thirteen")
        if (x[:, 0] == 99).any():
            threading.Event().wait(5)
        hello = numpy.array([[b"hello " + name for name in names] for names in who], dtype=object)
        total = x.sum(axis=1, keepdims=True).astype(numpy.float32)
        return triton.InferenceResponse([triton.Tensor("sum", total), triton.Tensor("hello", hello)])
"""
pytestmark = pytest.mark.timeout(240)


def model_folder(folder: Path, name: str, code: str = CODE) -> Path:
    place = folder / name
    (place / "1").mkdir(parents=True)
    (place / "config.pbtxt").write_text(CONFIG)
    (place / "1" / "model.py").write_text(textwrap.dedent(code))
    return place


@pytest.fixture(scope="module")
def options(triton: tuple[Path, Path, list[str]]) -> dict[str, Any]:
    server, backends, environment = triton
    return {
        "server": str(server),
        "server_args": [f"--backend-directory={backends}"],
        "environment": environment,
        "timeout_ms": 60_000,
    }


@pytest.fixture(params=["http", "grpc"])
def backend(
    request: pytest.FixtureRequest, options: dict[str, Any], tmp_path: Path
) -> Iterator[tuple[OipBackend, dict[str, Any]]]:
    made = OipBackend(SystemClock())
    yield made, {**options, "protocol": request.param}
    made.close()


def rows(*firsts: float) -> list[Any]:
    return [row(str(number), {"x": [first, 1, 2], "who": f"né{number}"}) for number, first in enumerate(firsts)]


def test_rows_are_answered_and_slots_come_and_go(backend: tuple[OipBackend, dict[str, Any]], tmp_path: Path) -> None:
    made, config = backend
    first = made.load(launch(model_folder(tmp_path, "first"), "triton", config))
    second = made.load(launch(model_folder(tmp_path, "second"), "triton", {**config, "outputs": ["sum"]}))
    assert isinstance(first, OipModel)
    assert first.link.states(5.0) == {"first": "READY", "second": "READY"}
    answers = first.run(rows(*range(11)))
    expected = [{"sum": number + 3.0, "hello": f"hello né{number}"} for number in range(11)]
    assert [json.loads(one.outputs or b"") for one in answers] == expected
    assert json.loads(second.run(rows(1))[0].outputs or b"") == {"sum": 4.0}
    made.unload(first)
    assert second.run(rows(1))[0].error_code is None
    made.unload(second)
    assert isinstance(second, OipModel)
    assert "READY" not in second.link.states(5.0).values()


def test_a_row_that_the_model_refuses_fails_alone(backend: tuple[OipBackend, dict[str, Any]], tmp_path: Path) -> None:
    made, config = backend
    model = made.load(launch(model_folder(tmp_path, "m"), "triton", config))
    good, bad, also_good = model.run(rows(1, 13, 2))
    assert (good.error_code, bad.error_code, also_good.error_code) == (None, "server_error", None)
    assert "thirteen" in (bad.error_message or "")


def test_a_slow_answer_passes_its_deadline(backend: tuple[OipBackend, dict[str, Any]], tmp_path: Path) -> None:
    made, config = backend
    model = made.load(launch(model_folder(tmp_path, "m"), "triton", config))
    soon = SystemClock().now_ms() + 1_000
    (late,) = model.run([row("late", {"x": [99, 0, 0], "who": "x"}, deadline_at_ms=soon)])
    assert late.error_code == "deadline_exceeded"


def test_what_triton_cannot_load_is_refused(backend: tuple[OipBackend, dict[str, Any]], tmp_path: Path) -> None:
    made, config = backend
    broken = model_folder(tmp_path, "broken", "this is no Python")
    with pytest.raises(ModelRefused, match="broken") as refusal:
        made.load(launch(broken, "triton", config))
    assert refusal.value.code in ("server_error", "server_refused")
    with pytest.raises(ModelRefused) as refusal:
        made.load(launch(model_folder(tmp_path, "m"), "triton", {**config, "inputs": ["x:INT64", "who"]}))
    assert refusal.value.code == "metadata_mismatch"


def test_a_killed_server_ends_the_engine_and_comes_back(
    backend: tuple[OipBackend, dict[str, Any]], tmp_path: Path
) -> None:
    made, config = backend
    declared = launch(model_folder(tmp_path, "m"), "triton", config)
    model = made.load(declared)
    (server,) = [one for one in psutil.Process().children(recursive=True) if "tritonserver" in one.name()]
    stubs = server.children(recursive=True)
    os.kill(server.pid, signal.SIGKILL)
    wait_until(lambda: not any(one.is_running() for one in (server, *stubs)), "the server and its stubs to end")
    with pytest.raises(ServerDied):
        model.run(rows(1))
    again = made.load(declared)
    assert again.run(rows(1))[0].error_code is None
