"""The Open Inference Protocol v2 over HTTP, with the model repository and model configuration extensions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from gpu_worker.backends.served.failures import BadAnswer, ServerRefused
from gpu_worker.backends.served.oip import ModelInfo, ServerInfo
from gpu_worker.backends.served.tensors import Tensor, TensorSpec, flat_array
from gpu_worker.backends.served.web import WebClient

T = TypeVar("T")


class _Metadata(msgspec.Struct):
    versions: tuple[str, ...] = ()
    inputs: tuple[TensorSpec, ...] | None = None
    outputs: tuple[TensorSpec, ...] | None = None


class _Configuration(msgspec.Struct):
    max_batch_size: int = 0


class _Indexed(msgspec.Struct):
    name: str
    state: str = ""


class _Output(msgspec.Struct):
    name: str
    datatype: str
    shape: list[int]
    data: list[Any]


class _Answer(msgspec.Struct):
    outputs: list[_Output]


class HttpServer:
    """Implements InferenceServer."""

    def __init__(self, url: str) -> None:
        self._web = WebClient(url)

    def close(self) -> None:
        self._web.close()

    def live(self) -> bool:
        return self._web.ok("/v2/health/live")

    def ready(self) -> bool:
        return self._web.ok("/v2/health/ready")

    def info(self, timeout_s: float) -> ServerInfo:
        return _as(ServerInfo, self._web.get("/v2", timeout_s), "server metadata")

    def model(self, name: str, version: str, timeout_s: float, describes_batches: bool) -> ModelInfo:
        found = _as(_Metadata, self._web.get(_path(name, version), timeout_s), "model metadata")
        batch_max = None
        if describes_batches:
            body = self._web.get(f"{_path(name, version)}/config", timeout_s)
            batch_max = _as(_Configuration, body, "model configuration").max_batch_size
        return ModelInfo(found.versions, found.inputs or (), found.outputs or (), batch_max)

    def model_ready(self, name: str, version: str, timeout_s: float) -> bool:
        try:
            self._web.text(f"{_path(name, version)}/ready", timeout_s)
        except ServerRefused:
            return False
        return True

    def load(self, name: str, timeout_s: float) -> None:
        self._web.order(f"/v2/repository/models/{quote(name, safe='')}/load", {}, timeout_s)

    def unload(self, name: str, timeout_s: float) -> None:
        self._web.order(f"/v2/repository/models/{quote(name, safe='')}/unload", {}, timeout_s)

    def states(self, timeout_s: float) -> dict[str, str]:
        rows = _as(list[_Indexed], self._web.post("/v2/repository/index", {}, timeout_s), "repository index")
        return {row.name: row.state for row in rows}

    def infer(
        self,
        model: str,
        version: str,
        tensors: Mapping[str, tuple[TensorSpec, Tensor]],
        outputs: Sequence[str],
        timeout_s: float,
    ) -> dict[str, Tensor]:
        body = {
            "inputs": [
                {"name": name, "datatype": spec.datatype, "shape": list(array.shape), "data": _cells(array)}
                for name, (spec, array) in tensors.items()
            ],
            "outputs": [{"name": name} for name in outputs],
        }
        answer = _as(_Answer, self._web.post(f"{_path(model, version)}/infer", body, timeout_s), "answer")
        found = {one.name: flat_array(one.name, one.datatype, one.shape, one.data) for one in answer.outputs}
        missing = [name for name in outputs if name not in found]
        if missing:
            raise BadAnswer(f"the answer lacks the outputs {', '.join(missing)}")
        return found


def _path(model: str, version: str) -> str:
    path = f"/v2/models/{quote(model, safe='')}"
    return f"{path}/versions/{quote(version, safe='')}" if version else path


def _cells(array: Tensor) -> list[object]:
    try:
        return [cell.decode() if isinstance(cell, bytes) else cell for cell in array.reshape(-1).tolist()]
    except UnicodeDecodeError as error:
        raise ServerRefused(400, f"JSON cannot carry bytes that are not UTF-8 ({error.reason}); use gRPC.") from error


def _as(kind: type[T], body: object, what: str) -> T:
    try:
        return msgspec.convert(body, kind, strict=True)
    except msgspec.ValidationError as error:
        raise BadAnswer(f"{what}: {error}") from error
