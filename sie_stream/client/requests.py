"""What a client sends and gets: pure values, no connection."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct, field

from sie_stream.errors import ConfigError, SieError
from sie_stream.records import (
    REQUEST_ID_HEADER,
    TRACEPARENT_HEADER,
    InferenceRequest,
    InputsRef,
    LogWrite,
    Provenance,
    Result,
    ResultError,
    Status,
    Timings,
    Usage,
)

PRIORITIES = ("P0", "P1", "P2")
NOTHING = InferenceRequest().inputs
"""Left out of the record."""


class Request(Struct, frozen=True, kw_only=True):
    """One request for `Client.submit_many`. `model` may be name, name@version, or an instance id (`mi-...`)."""

    model: str
    inputs: Mapping[str, Any] = field(default_factory=dict)
    inputs_ref: InputsRef | None = None
    """Where the inputs are, instead of `inputs`; ingress must be allowed to read there (setting reference_prefixes)."""
    request_id: str | None = None
    """Made by the client when absent. Sending the same id again within the dedupe window is harmless."""
    parameters: Mapping[str, Any] | None = None
    priority: str | None = None
    deadline_ms: int | None = None
    session: str | None = None
    """Requests of one session go to the same replica."""
    tenant: str | None = None
    stream: bool = False
    reply_topic: str | None = None
    traceparent: str | None = None


class InferenceResult(Struct, frozen=True):
    """The terminal record of a request, with `outputs` as a dictionary."""

    request_id: str
    status: Status
    model: str
    version: str
    variant: str
    instance: str
    outputs: dict[str, Any] | None
    error: ResultError | None
    usage: Usage
    timings_ms: Timings
    provenance: Provenance
    finished_at: int

    @property
    def ok(self) -> bool:
        return self.status == "ok"


class RequestFailed(SieError):
    """A request ended in another terminal record than `ok`; `.result` is that record."""

    def __init__(self, result: InferenceResult) -> None:
        error = result.error or ResultError("unknown", "no error was given")
        where = f" (field {error.field})" if error.field else ""
        super().__init__(f"request {result.request_id} {result.status}: {error.code}: {error.message}{where}")
        self.code = error.code
        self.result = result


class ResultTimeout(SieError):
    """No terminal record arrived in time. The request may still be answered; asking again with its id is safe."""

    code = "result_timeout"


def to_write(request: Request, request_id: str, topic: str) -> LogWrite:
    """The record for sie.requests. Key: the session, else the request id, so that a repeat meets its first copy.

    Raises ConfigError for a priority outside P0..P2, a negative deadline, inputs that are not JSON, or two of them.
    """
    if request.inputs and request.inputs_ref is not None:
        raise ConfigError("inputs and inputs_ref: give one of them")
    if request.priority is not None and request.priority not in PRIORITIES:
        raise ConfigError(f"priority = {request.priority!r}: allowed {', '.join(PRIORITIES)}")
    if request.deadline_ms is not None and request.deadline_ms <= 0:
        raise ConfigError(f"deadline_ms = {request.deadline_ms}: must be positive milliseconds")
    instance = request.model if request.model.startswith("mi-") else ""
    record = InferenceRequest(
        request_id=request_id,
        model="" if instance else request.model,
        instance=instance,
        inputs=inputs_json(request) if request.inputs_ref is None else NOTHING,
        parameters=None if request.parameters is None else _json(request.parameters, "parameters"),
        priority=request.priority,
        deadline_ms=request.deadline_ms,
        session=request.session,
        tenant=request.tenant,
        stream=request.stream,
        reply_topic=request.reply_topic,
        inputs_ref=request.inputs_ref,
    )
    headers = [(REQUEST_ID_HEADER, request_id.encode())]
    if request.traceparent:
        headers.append((TRACEPARENT_HEADER, request.traceparent.encode()))
    return LogWrite(
        topic=topic,
        value=msgspec.json.encode(record),
        key=(request.session or request_id).encode(),
        headers=tuple(headers),
    )


def inputs_json(request: Request) -> msgspec.Raw:
    """The inputs as they travel. Raises ConfigError when they are not JSON."""
    return _json(request.inputs, "inputs")


def _json(value: Mapping[str, Any], name: str) -> msgspec.Raw:
    try:
        return msgspec.Raw(msgspec.json.encode(value))
    except TypeError as error:
        raise ConfigError(f"{name}: cannot be written as JSON: {error}") from error


def from_record(result: Result) -> InferenceResult:
    """A result as people want to hold it."""
    return InferenceResult(
        request_id=result.request_id,
        status=result.status,
        model=result.model,
        version=result.version,
        variant=result.variant,
        instance=result.instance,
        outputs=None if result.outputs is None else msgspec.json.decode(result.outputs),
        error=result.error,
        usage=result.usage,
        timings_ms=result.timings_ms,
        provenance=result.provenance,
        finished_at=result.finished_at,
    )
