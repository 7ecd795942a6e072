"""The Open Inference Protocol v2 over gRPC, with the model repository and model configuration extensions.

The messages are described here field by field, as far as they are used, instead of by generated code: protobuf skips
fields it does not know. Names and numbers are those of the protocol's `grpc_service.proto`.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import grpc
import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from gpu_worker.backends.served.failures import BadAnswer, ServerFailure, ServerRefused, ServerTimeout, Unreachable
from gpu_worker.backends.served.oip import ModelInfo, ServerInfo
from gpu_worker.backends.served.tensors import DTYPES, Tensor, TensorSpec
from gpu_worker.backends.served.web import PROBE_TIMEOUT_S

SERVICE = "inference.GRPCInferenceService"
MESSAGE_BYTES_MAX = 64 * 1024 * 1024
MODEL = "name=1:string version=2:string"
TENSOR = "name=1:string datatype=2:string shape=3:int64* contents=5:InferTensorContents"
MESSAGES: dict[str, str] = {
    "ServerLiveRequest": "",
    "ServerLiveResponse": "live=1:bool",
    "ServerReadyRequest": "",
    "ServerReadyResponse": "ready=1:bool",
    "ServerMetadataRequest": "",
    "ServerMetadataResponse": "name=1:string version=2:string extensions=3:string*",
    "ModelReadyRequest": MODEL,
    "ModelReadyResponse": "ready=1:bool",
    "ModelMetadataRequest": MODEL,
    "TensorMetadata": "name=1:string datatype=2:string shape=3:int64*",
    "ModelMetadataResponse": "name=1:string versions=2:string* inputs=4:TensorMetadata* outputs=5:TensorMetadata*",
    "ModelConfigRequest": MODEL,
    "ModelConfig": "name=1:string max_batch_size=4:int32",
    "ModelConfigResponse": "config=1:ModelConfig",
    "RepositoryIndexRequest": "repository_name=1:string ready=2:bool",
    "ModelIndex": "name=1:string version=2:string state=3:string reason=4:string",
    "RepositoryIndexResponse": "models=1:ModelIndex*",
    "RepositoryModelLoadRequest": "repository_name=1:string model_name=2:string",
    "RepositoryModelLoadResponse": "",
    "RepositoryModelUnloadRequest": "repository_name=1:string model_name=2:string",
    "RepositoryModelUnloadResponse": "",
    "InferTensorContents": "bool_contents=1:bool* int_contents=2:int32* int64_contents=3:int64* "
    "uint_contents=4:uint32* uint64_contents=5:uint64* fp32_contents=6:float* fp64_contents=7:double* "
    "bytes_contents=8:bytes*",
    "InferTensor": TENSOR,
    "RequestedOutput": "name=1:string",
    "ModelInferRequest": "model_name=1:string model_version=2:string id=3:string inputs=5:InferTensor* "
    "outputs=6:RequestedOutput* raw_input_contents=7:bytes*",
    "ModelInferResponse": "model_name=1:string model_version=2:string id=3:string outputs=5:InferTensor* "
    "raw_output_contents=6:bytes*",
}
CONTENTS = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}


def message_types(messages: Mapping[str, str]) -> dict[str, Any]:
    """Classes for messages written as `name=NUMBER:TYPE`, with `*` for repeated fields."""
    fields = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="open_inference.proto", package="inference", syntax="proto3")
    for name, text in messages.items():
        message = file.message_type.add(name=name)
        for part in text.split():
            field, _, rest = part.partition("=")
            number, _, kind = rest.partition(":")
            label = fields.LABEL_REPEATED if kind.endswith("*") else fields.LABEL_OPTIONAL
            added = message.field.add(name=field, number=int(number), label=label)
            kind = kind.rstrip("*")
            if kind in messages:
                added.type, added.type_name = fields.TYPE_MESSAGE, f".inference.{kind}"
            else:
                added.type = fields.Type.Value(f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"inference.{name}")) for name in messages}


TYPES = message_types(MESSAGES)


class GrpcServer:
    """Implements InferenceServer. `address` is HOST:PORT."""

    def __init__(self, address: str) -> None:
        size = [(f"grpc.max_{way}_message_length", MESSAGE_BYTES_MAX) for way in ("send", "receive")]
        self._channel = grpc.insecure_channel(address, options=[*size, ("grpc.enable_http_proxy", 0)])

    def close(self) -> None:
        self._channel.close()

    def _call(self, method: str, timeout_s: float, **fields: object) -> Any:
        request, answer = TYPES[f"{method}Request"], TYPES[f"{method}Response"]
        call = self._channel.unary_unary(
            f"/{SERVICE}/{method}",
            request_serializer=request.SerializeToString,
            response_deserializer=answer.FromString,
        )
        try:
            return call(request(**fields), timeout=timeout_s)
        except grpc.RpcError as error:
            raise failure(method, error, timeout_s) from error

    def live(self) -> bool:
        return self._says("ServerLive", "live")

    def ready(self) -> bool:
        return self._says("ServerReady", "ready")

    def _says(self, method: str, field: str) -> bool:
        try:
            return bool(getattr(self._call(method, PROBE_TIMEOUT_S), field))
        except ServerFailure:
            return False

    def info(self, timeout_s: float) -> ServerInfo:
        found = self._call("ServerMetadata", timeout_s)
        return ServerInfo(found.name, found.version, tuple(found.extensions))

    def model(self, name: str, version: str, timeout_s: float, describes_batches: bool) -> ModelInfo:
        found = self._call("ModelMetadata", timeout_s, name=name, version=version)
        batch_max = None
        if describes_batches:
            batch_max = self._call("ModelConfig", timeout_s, name=name, version=version).config.max_batch_size
        return ModelInfo(tuple(found.versions), _specs(found.inputs), _specs(found.outputs), batch_max)

    def model_ready(self, name: str, version: str, timeout_s: float) -> bool:
        try:
            return bool(self._call("ModelReady", timeout_s, name=name, version=version).ready)
        except ServerRefused:
            return False

    def load(self, name: str, timeout_s: float) -> None:
        self._call("RepositoryModelLoad", timeout_s, model_name=name)

    def unload(self, name: str, timeout_s: float) -> None:
        self._call("RepositoryModelUnload", timeout_s, model_name=name)

    def states(self, timeout_s: float) -> dict[str, str]:
        return {one.name: one.state for one in self._call("RepositoryIndex", timeout_s).models}

    def infer(
        self,
        model: str,
        version: str,
        tensors: Mapping[str, tuple[TensorSpec, Tensor]],
        outputs: Sequence[str],
        timeout_s: float,
    ) -> dict[str, Tensor]:
        answer = self._call(
            "ModelInfer",
            timeout_s,
            model_name=model,
            model_version=version,
            inputs=[
                TYPES["InferTensor"](name=name, datatype=spec.datatype, shape=array.shape)
                for name, (spec, array) in tensors.items()
            ],
            outputs=[TYPES["RequestedOutput"](name=name) for name in outputs],
            raw_input_contents=[to_raw(spec.datatype, array) for spec, array in tensors.values()],
        )
        raw = answer.raw_output_contents
        if raw and len(raw) != len(answer.outputs):
            raise BadAnswer(f"the answer has {len(answer.outputs)} outputs and the contents of {len(raw)}")
        found = {one.name: _tensor(one, raw[place] if raw else None) for place, one in enumerate(answer.outputs)}
        missing = [name for name in outputs if name not in found]
        if missing:
            raise BadAnswer(f"the answer lacks the outputs {', '.join(missing)}")
        return found


def _specs(tensors: Any) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(one.name, one.datatype, tuple(one.shape)) for one in tensors)


def to_raw(datatype: str, array: Tensor) -> bytes:
    """Little-endian, row by row; every text of a BYTES tensor after its length in 32 bits."""
    if datatype == "BYTES":
        return b"".join(struct.pack("<I", len(cell)) + cell for cell in array.reshape(-1).tolist())
    return array.astype(array.dtype.newbyteorder("<")).tobytes()


def from_raw(name: str, datatype: str, shape: Sequence[int], raw: bytes) -> Tensor:
    """Raises BadAnswer when the bytes are not such a tensor."""
    if datatype not in DTYPES:
        raise BadAnswer(f"output {name} has the unknown type {datatype!r}")
    try:
        if datatype == "BYTES":
            array = np.array([*_texts_of(raw)], np.object_)
        else:
            array = np.frombuffer(raw, np.dtype(DTYPES[datatype]).newbyteorder("<"))
        return array.reshape(tuple(shape))
    except (ValueError, struct.error) as error:
        raise BadAnswer(f"output {name}: {len(raw)} bytes are no {datatype} of {list(shape)}: {error}") from error


def _texts_of(raw: bytes) -> list[bytes]:
    texts: list[bytes] = []
    place = 0
    while place < len(raw):
        (size,) = struct.unpack_from("<I", raw, place)
        place += 4
        if place + size > len(raw):
            raise ValueError("a text is cut off")
        texts.append(raw[place : place + size])
        place += size
    return texts


def _tensor(output: Any, raw: bytes | None) -> Tensor:
    if raw is not None:
        return from_raw(output.name, output.datatype, output.shape, raw)
    if output.datatype not in CONTENTS:
        raise BadAnswer(f"output {output.name} has the unknown type {output.datatype!r}")
    cells = list(getattr(output.contents, CONTENTS[output.datatype]))
    try:
        return np.array(cells, DTYPES[output.datatype]).reshape(tuple(output.shape))
    except (ValueError, OverflowError) as error:
        raise BadAnswer(f"output {output.name}: {len(cells)} values for shape {list(output.shape)}") from error


def failure(method: str, error: Any, timeout_s: float) -> ServerFailure:
    """What a status of gRPC means here."""
    status, details = error.code(), error.details() or ""
    codes = grpc.StatusCode
    match status:
        case codes.DEADLINE_EXCEEDED:
            return ServerTimeout(f"{method}: no answer within {timeout_s:g} s")
        case codes.UNAVAILABLE | codes.CANCELLED:
            return Unreachable(f"{method}: {details}")
        case codes.UNKNOWN | codes.INTERNAL if "deserializ" in details or "stream" in details.lower():
            return BadAnswer(f"{method}: {details}")
        case codes.INVALID_ARGUMENT | codes.NOT_FOUND | codes.FAILED_PRECONDITION | codes.ALREADY_EXISTS:
            return ServerRefused(400, f"{status.name}: {details}")
        case codes.UNIMPLEMENTED:
            return ServerRefused(404, f"{method} is not served there: {details}")
        case _:
            return ServerRefused(500, f"{status.name}: {details}")
