"""Records of the data plane: what users send, what flows between stages, what users get.

Field names are the public contract (schemas/README.md); the Avro schemas of the same names mirror them.
`inputs`, `outputs` and `parameters` are JSON texts kept as bytes: they pass through untouched, so a stage that does
not look inside pays nothing for them.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import Raw, Struct

Status = Literal["ok", "rejected", "expired", "shed", "failed"]
STATUSES: tuple[Status, ...] = ("ok", "rejected", "expired", "shed", "failed")
Headers = tuple[tuple[str, bytes], ...]


class InputsRef(Struct, frozen=True, gc=False, omit_defaults=True, forbid_unknown_fields=True):
    """Where large inputs are: a JSON object of at most settings.reference_bytes_max bytes."""

    url: str
    """fsspec URL, below one of settings.reference_prefixes."""
    sha256: str
    """Of its bytes, hexadecimal: what makes the request repeatable."""
    size: int | None = None
    """Its bytes, if known."""


class InferenceRequest(Struct, frozen=True, gc=False, omit_defaults=True, forbid_unknown_fields=True):
    """One request as a user writes it (JSON form; in Avro `inputs` and `parameters` are JSON strings)."""

    model: str = ""
    """Model name, or name@version."""
    instance: str = ""
    """`mi-...` id; instead of `model`."""
    inputs: Raw = Raw(b"{}")
    request_id: str = ""
    parameters: Raw | None = None
    """max_tokens, temperature, top_p, seed, stop ... of generative models."""
    priority: Literal["P0", "P1", "P2"] | None = None
    deadline_ms: int | None = None
    """Milliseconds from the record's timestamp."""
    session: str | None = None
    tenant: str | None = None
    stream: bool = False
    reply_topic: str | None = None
    inputs_ref: InputsRef | None = None
    """Where the inputs are, instead of `inputs`."""


class WorkItem(Struct, frozen=True, gc=False):
    """A request after ingress: routed, validated, tokenised. Written to sie.work.MODEL."""

    request_id: str
    instance: str
    model: str
    version: str
    variant: str
    route_epoch: int
    priority: int
    """0, 1 or 2; also the lane of the partition."""
    inputs: bytes
    key: bytes
    """Key of the request record, and therefore of its result; may be empty."""
    source_topic: str
    source_partition: int
    source_offset: int
    requested_at_ms: int
    """Timestamp of the request record."""
    received_at_ms: int
    """When ingress took it up."""
    routed_at_ms: int
    schema_id: int = 0
    """Schema id of the request record in Confluent framing; 0 for JSON."""
    deadline_at_ms: int = 0
    """0: no deadline."""
    parameters: bytes | None = None
    token_ids: tuple[int, ...] | None = None
    seed: int | None = None
    session: str | None = None
    tenant: str | None = None
    stream: bool = False
    reply_topic: str | None = None
    output_topic: str | None = None
    """Bound output topic of the model on this cluster (kafka_output)."""
    traceparent: str | None = None


class ResultError(Struct, frozen=True, gc=False):
    code: str
    message: str
    field: str = ""


class Usage(Struct, frozen=True, gc=False):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Timings(Struct, frozen=True, gc=False):
    """Milliseconds. queue: ingress write to engine start; total: request timestamp to result written."""

    queue: float = 0.0
    preprocess: float = 0.0
    inference: float = 0.0
    first_token: float = 0.0
    postprocess: float = 0.0
    total: float = 0.0


class Provenance(Struct, frozen=True, gc=False):
    """Everything a result depended on."""

    source_topic: str
    source_partition: int
    source_offset: int
    work_topic: str = ""
    work_partition: int = -1
    work_offset: int = -1
    route_epoch: int = 0
    placement_epoch: int = 0
    worker: str = ""
    incarnation: str = ""
    device: str = ""
    weights_digest: str = ""
    engine: str = ""
    seed: int | None = None
    batch_size: int = 0
    schema_id: int = 0


class Result(Struct, frozen=True, gc=False):
    """The one terminal record of a request."""

    request_id: str
    status: Status
    instance: str
    model: str
    version: str
    variant: str
    outputs: bytes | None
    """JSON object by output_schema; None unless status is ok."""
    error: ResultError | None
    usage: Usage
    timings_ms: Timings
    provenance: Provenance
    finished_at: int
    """Milliseconds since the epoch."""


class RawOutput(Struct, frozen=True, gc=False):
    """What an engine produced for a pooled model, waiting for Stage 2 (sie.outputs)."""

    result: Result
    """The terminal record so far: outputs is None, timings.postprocess and finished_at still to be set."""
    key: bytes
    outputs: bytes | None = None
    token_ids: tuple[int, ...] | None = None
    finish_reason: str = ""
    reply_topic: str | None = None
    output_topic: str | None = None


class DeadLetter(Struct, frozen=True, gc=False):
    """Original bytes of a record that could not be processed, and why."""

    request_id: str
    reason: str
    """The error code of the terminal record."""
    message: str
    source_topic: str
    source_partition: int
    source_offset: int
    original: bytes
    """The record's value, cut to settings.deadletter_bytes_max."""
    original_bytes: int
    original_sha256: str
    stack_digest: str
    attempts: int
    at_ms: int
    component: str = ""


class TokenDelta(Struct, frozen=True, gc=False):
    """Tokens as they are generated (sie.tokens). Provisional: only the Result counts."""

    request_id: str
    index: int
    """Place among the deltas of the attempt, from 0."""
    token_ids: tuple[int, ...] = ()
    text: str = ""
    """Whole characters; it may trail the tokens, because what could still become part of a stop text is held back."""
    provisional: bool = True
    worker: str = ""
    incarnation: str = ""
    attempt: int = 0
    """How often an engine had failed before it began this answer. An attempt begins at index 0 and supersedes what
    came before."""


class LogRecord(Struct, frozen=True, gc=False):
    """One record read from the log."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: Headers = ()


class LogWrite(Struct, frozen=True, gc=False):
    """One record to be written. `partition` None: the client's keyed partitioner chooses."""

    topic: str
    value: bytes | None
    key: bytes | None = None
    partition: int | None = None
    headers: Headers = ()


class CommittedOffset(Struct, frozen=True, gc=False):
    """Position of a group in a partition: the next offset to process, and its metadata."""

    offset: int
    metadata: str = ""


def header(headers: Headers, name: str) -> bytes | None:
    """Value of the first header called `name`, or None."""
    for found, value in headers:
        if found == name:
            return value
    return None


REQUEST_ID_HEADER = "sie-request-id"
TRACEPARENT_HEADER = "traceparent"


class _RequestJson(InferenceRequest, frozen=True, gc=False, omit_defaults=True, forbid_unknown_fields=True):
    """msgspec refuses every object for a field of type `Raw | None`. An explicit null arrives as Raw(b"null")."""

    parameters: Raw = None  # type: ignore[assignment]  # absent; a default is not checked against the type


request_decoder: msgspec.json.Decoder[InferenceRequest] = msgspec.json.Decoder(_RequestJson)
