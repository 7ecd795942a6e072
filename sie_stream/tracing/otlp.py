"""A trace as OpenTelemetry spans, in OTLP's JSON. Pure.

Source: opentelemetry-proto 1.x, trace.proto, and the OTLP specification, "JSON Protobuf Encoding": ids are hexadecimal,
64-bit integers are strings, enums are numbers. Ids follow from the request, so that exporting again changes nothing.
"""

from __future__ import annotations

from typing import Any

from sie_stream.tracing.evidence import Step, Trace
from sie_stream.tracing.traceparent import made_span_id, made_trace_id, parse_traceparent

KIND_INTERNAL, KIND_SERVER, KIND_CONSUMER = 1, 2, 5
STATUS_OK, STATUS_ERROR = 1, 2
TIMED = ("bridge", "ingress", "device", "moved", "queue", "engine", "egress")
BESIDE = ("placement", "control", "repeat")
"""Not part of the request's own way."""
ENDS_BADLY = ("rejected", "expired", "shed", "failed")


def spans_json(trace: Trace, release: str) -> dict[str, Any]:
    """One ExportTraceServiceRequest. A child of the caller's span where the request had a traceparent."""
    context = parse_traceparent(trace.traceparent)
    trace_id = context.trace_id if context is not None else made_trace_id(trace.request_id)
    root_id = made_span_id(trace.request_id, "request")
    own = [step for step in trace.steps if step.stage not in BESIDE]
    begun = min((step.at_ms for step in own), default=0)
    ended = max((step.at_ms for step in own), default=0)
    root: dict[str, Any] = {
        "traceId": trace_id,
        "spanId": root_id,
        "name": f"sie {trace.model}".strip(),
        "kind": KIND_SERVER,
        "startTimeUnixNano": _nanos(begun),
        "endTimeUnixNano": _nanos(ended),
        "attributes": _attributes(trace),
        "events": [_event(step) for step in trace.steps if step.stage in (*BESIDE, "retried", "deadletter")],
        "status": _status(trace),
    }
    if context is not None:
        root["parentSpanId"] = context.parent_id
    children = [
        _child(trace, trace_id, root_id, number, step)
        for number, step in enumerate(trace.steps)
        if step.stage in TIMED and step.lasted_ms is not None
    ]
    resource = {"attributes": [_text("service.name", "sie-stream"), _text("service.version", release)]}
    scope = {"name": "sie_stream.tracing", "version": release}
    return {"resourceSpans": [{"resource": resource, "scopeSpans": [{"scope": scope, "spans": [root, *children]}]}]}


def _child(trace: Trace, trace_id: str, root_id: str, number: int, step: Step) -> dict[str, Any]:
    assert step.lasted_ms is not None
    kind = KIND_CONSUMER if step.stage in ("ingress", "queue") else KIND_INTERNAL
    return {
        "traceId": trace_id,
        "spanId": made_span_id(trace.request_id, f"{step.stage} {number}"),
        "parentSpanId": root_id,
        "name": step.stage,
        "kind": kind,
        "startTimeUnixNano": _nanos(step.at_ms - step.lasted_ms),
        "endTimeUnixNano": _nanos(step.at_ms),
        "attributes": [_text("sie.what", step.what), *([_text("sie.record", step.where)] if step.where else [])],
    }


def _event(step: Step) -> dict[str, Any]:
    return {"timeUnixNano": _nanos(step.at_ms), "name": step.stage, "attributes": [_text("sie.what", step.what)]}


def _attributes(trace: Trace) -> list[dict[str, Any]]:
    texts = {
        "sie.request_id": trace.request_id,
        "sie.status": trace.state,
        "sie.model": trace.model,
        "sie.version": trace.version,
        "sie.worker": trace.worker,
        "sie.incarnation": trace.incarnation,
        "sie.device": trace.device,
    }
    numbers = {"sie.batch_size": trace.batch_size, "sie.attempts": trace.attempts}
    return [
        *(_text(name, value) for name, value in texts.items() if value),
        *({"key": name, "value": {"intValue": str(value)}} for name, value in numbers.items()),
    ]


def _status(trace: Trace) -> dict[str, Any]:
    if trace.state in ENDS_BADLY:
        return {"code": STATUS_ERROR, "message": trace.verdict}
    return {"code": STATUS_OK} if trace.state == "ok" else {}


def _text(name: str, value: str) -> dict[str, Any]:
    return {"key": name, "value": {"stringValue": value}}


def _nanos(at_ms: float) -> str:
    return str(round(at_ms * 1_000) * 1_000)
