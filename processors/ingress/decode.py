"""From the bytes of a record to a request. Every way a record can be wrong has its code here. Pure.

Codes: tombstone, empty_record, payload_too_large, bad_utf8, not_json, not_finite, too_deep, bad_avro,
unknown_schema_id, unknown_field, wrong_type, bad_request_id, missing_model, ambiguous_model, bad_priority,
bad_deadline, bad_reply_topic. What breaks the model's input_schema has the codes of sie_stream.input_schema.
"""

from __future__ import annotations

import json
import re
from typing import NamedTuple, NoReturn

import msgspec
from msgspec import Raw, Struct

from schemas import codec
from schemas.codec import CodecError, SchemaTable
from schemas.reference import RELEASED_TABLE
from sie_stream.errors import InvalidRequest, did_you_mean
from sie_stream.ids import derived_request_id
from sie_stream.problems import shown
from sie_stream.records import REQUEST_ID_HEADER, InferenceRequest, LogRecord, header, request_decoder
from sie_stream.references import how_to_refer

NAME_CHARS_MAX = 256
"""Longest request id, session, tenant, model or topic name."""
DEADLINE_MS_MAX = 366 * 24 * 3600 * 1000
HEADER_BYTES_MAX = 1_024

_STRUCTURE = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[{]|[\]}]', re.DOTALL)
_AT_FIELD = re.compile(r" - at `\$\.([A-Za-z_0-9]+)")
_EXPECTED = {
    "model": "a string, NAME or NAME@VERSION",
    "instance": "a string, mi-...",
    "inputs": "an object that fits the model's input_schema",
    "request_id": f"a string of at most {NAME_CHARS_MAX} characters",
    "parameters": "an object, or left out",
    "priority": "P0, P1 or P2, or left out",
    "deadline_ms": "a whole number of milliseconds from the record's timestamp, at least 1, or left out",
    "session": "a string, or left out",
    "tenant": "a string, or left out",
    "stream": "true or false",
    "reply_topic": "the name of an existing topic, or left out",
    "inputs_ref": "an object with url, sha256 and perhaps size, or left out",
}
_CODE_OF_FIELD = {"priority": "bad_priority", "deadline_ms": "bad_deadline", "reply_topic": "bad_reply_topic"}
_CODE_OF_CODEC = {"empty_record": "empty_record", "unknown_schema_id": "unknown_schema_id", "bad_avro": "bad_avro"}


class Limits(NamedTuple):
    """What a record may be. `schemas`: registered Avro schemas of users, besides our own. `places`: from which inputs
    are read that a request names.
    """

    request_bytes_max: int
    json_depth_max: int
    schemas: SchemaTable = RELEASED_TABLE
    places: tuple[str, ...] = ()


class Bound(NamedTuple):
    """How records of a topic that is bound to one model are read.

    deserializer: json (the value is the inputs object), string (the value is text), avro (the record's fields are the
    inputs), request-json or request-avro (a whole request; the model may be left out).
    text_field: the input that text goes to.
    """

    instance: str
    deserializer: str
    text_field: str


class _IdOnly(Struct, frozen=True, gc=False):
    request_id: str = ""


_id_decoder = msgspec.json.Decoder(_IdOnly)
_any_decoder = msgspec.json.Decoder()
_text_encoder = msgspec.json.Encoder()


def decode_request(record: LogRecord, limits: Limits) -> tuple[InferenceRequest, int]:
    """The request (JSON, or Avro in Confluent framing) and its schema id (0: JSON). Raises InvalidRequest."""
    value = record.value
    if not value or len(value) + len(record.key or b"") > limits.request_bytes_max:
        value = checked_value(record, limits)
    if value[0] == 0:
        return _decode_avro(value, limits)
    return _decode_json(value), 0


def decode_bound(record: LogRecord, bound: Bound, limits: Limits) -> tuple[InferenceRequest, int]:
    """The request in a record of a topic bound to one model. Raises InvalidRequest."""
    value = checked_value(record, limits)
    match bound.deserializer:
        case "json":
            _check_json_bytes(value, limits)
            return InferenceRequest(instance=bound.instance, inputs=Raw(value)), 0
        case "string":
            text = _text(value)
            inputs = Raw(_text_encoder.encode({bound.text_field: text}))
            return InferenceRequest(instance=bound.instance, inputs=inputs), 0
        case "avro":
            inputs, schema_id = _avro_fields(value, limits)
            return InferenceRequest(instance=bound.instance, inputs=inputs), schema_id
        case "request-json":
            request, schema_id = _decode_json(value), 0
        case _:
            request, schema_id = _decode_avro(value, limits)
    if not request.model and not request.instance:
        request = msgspec.structs.replace(request, instance=bound.instance)
    return request, schema_id


def checked_value(record: LogRecord, limits: Limits) -> bytes:
    """The value of a record that is there and not too large."""
    value = record.value
    if value is None:
        raise InvalidRequest("tombstone", "the record has no value (a tombstone). A request is a JSON object.")
    if not value:
        raise InvalidRequest("empty_record", "the record's value is empty. A request is a JSON object.")
    size = len(value) + len(record.key or b"")
    if size > limits.request_bytes_max:
        raise InvalidRequest(
            "payload_too_large",
            f"the record has {size} bytes, allowed are {limits.request_bytes_max}: {how_to_refer(limits.places)}, send "
            "less in one request, or raise the setting request_bytes_max.",
        )
    return value


def recovered_request_id(record: LogRecord) -> str:
    """The id of a record that could not be decoded, if it can be found at all; else empty."""
    given = header_request_id(record)
    if given:
        return given
    value = record.value
    if not value:
        return ""
    found = _id_in(value)
    return found if id_fits(found) else ""


def source_id(record: LogRecord) -> str:
    return derived_request_id(record.topic, record.partition, record.offset)


def header_request_id(record: LogRecord) -> str:
    """Request id in the record's headers, or empty."""
    if not record.headers:
        return ""
    given = header(record.headers, REQUEST_ID_HEADER)
    if not given or len(given) > HEADER_BYTES_MAX:
        return ""
    try:
        text = given.decode()
    except UnicodeDecodeError:
        return ""
    return text if id_fits(text) else ""


def remembered_id(record: LogRecord, bound: Bound | None) -> str:
    """The id by which a record read back from the log is remembered, or empty: header first, else a minimal decode."""
    headers = record.headers
    if headers:
        name, given = headers[0]
        if name == REQUEST_ID_HEADER and given and len(given) <= NAME_CHARS_MAX and given.isascii():
            return given.decode()
        found = header_request_id(record)
        if found:
            return found
    value = record.value
    if not value or (bound is not None and not bound.deserializer.startswith("request-")):
        return ""
    return _id_in(value)


def _id_in(value: bytes) -> str:
    if value[0] == 0:
        try:
            return codec.decode_request(value)[0].request_id
        except CodecError:
            return ""
    try:
        return _id_decoder.decode(value).request_id
    except (ValueError, RecursionError):
        return ""


def id_fits(request_id: str) -> bool:
    return len(request_id) <= NAME_CHARS_MAX and request_id.isprintable()


# ------------------------------------------------------------------------------------------------ JSON


def _decode_json(value: bytes) -> InferenceRequest:
    """Nesting is not counted here: it can only be inside `inputs` and `parameters`, which are looked into later."""
    if not value.isascii():
        _text(value)
    try:
        return request_decoder.decode(value)
    except (ValueError, RecursionError) as refusal:  # msgspec's errors are ValueErrors
        _explain(value, refusal)


def _check_json_bytes(value: bytes, limits: Limits) -> None:
    """UTF-8 and nesting."""
    if not value.isascii():
        _text(value)
    check_depth(value, limits.json_depth_max)


def check_depth(value: bytes, levels_max: int) -> None:
    """Raises InvalidRequest (`too_deep`). Cheap for JSON with few brackets."""
    if value.count(b"[") + value.count(b"{") > levels_max and _depth(value, levels_max) > levels_max:
        raise InvalidRequest("too_deep", f"the JSON has more than {levels_max} levels (setting json_depth_max).")


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest("bad_utf8", f"byte {error.start} is not UTF-8: {error.reason}.") from error


def _depth(value: bytes, enough: int) -> int:
    """Deepest nesting, counted no further than one past `enough`."""
    depth = deepest = 0
    for found in _STRUCTURE.finditer(value):
        first = found.group()[0]
        if first in b"[{":
            depth += 1
            deepest = max(deepest, depth)
            if deepest > enough:
                break
        elif first in b"]}":
            depth -= 1
    return deepest


class _NotFinite(ValueError):
    pass


def _refuse_constant(name: str) -> NoReturn:
    raise _NotFinite(name)


def _explain(value: bytes, refusal: Exception) -> NoReturn:
    """Say what is wrong with JSON that the decoder refused: syntax first, then the fields in order."""
    try:
        document = json.loads(value, parse_constant=_refuse_constant)
    except _NotFinite as constant:
        raise InvalidRequest(
            "not_finite", f"{constant} is not a JSON number. Leave the field out or send a finite number."
        ) from refusal
    except RecursionError:
        raise InvalidRequest("too_deep", "the JSON is nested too deeply.") from refusal
    except ValueError as error:
        raise InvalidRequest("not_json", f"the record is neither JSON nor framed Avro: {error}.") from refusal
    if not isinstance(document, dict):
        raise InvalidRequest("wrong_type", f"a request is a JSON object, this is {_kind(document)}.") from refusal
    for name in document:
        if name not in _EXPECTED:
            raise InvalidRequest(
                "unknown_field",
                f"unknown field {name!r}.{did_you_mean(name, _EXPECTED)} Fields: {', '.join(_EXPECTED)}.",
                name,
            ) from refusal
    at = _AT_FIELD.search(str(refusal))
    if at is None:
        raise InvalidRequest("not_json", f"the record cannot be read: {refusal}.") from refusal
    field = at.group(1)
    raise InvalidRequest(
        _CODE_OF_FIELD.get(field, "wrong_type"),
        f"{field} = {_shown_scalar(document.get(field))}: must be {_EXPECTED.get(field, 'something else')}.",
        field,
    ) from refusal


def _kind(value: object) -> str:
    """What stands where a whole request belongs may be its inputs, whose values no message repeats."""
    match value:
        case None:
            return "null"
        case bool():
            return "true or false"
        case str():
            return "a string"
        case int() | float():
            return "a number"
        case list():
            return "an array"
    return "an object"


def _shown_scalar(value: object) -> str:
    return _kind(value) if isinstance(value, list | dict) else shown(value)


# ------------------------------------------------------------------------------------------------ Avro


def _decode_avro(value: bytes, limits: Limits) -> tuple[InferenceRequest, int]:
    try:
        request, schema_id = codec.decode_request(value, limits.schemas)
    except CodecError as refusal:
        raise _avro_refusal(refusal) from refusal
    check_json_text(bytes(request.inputs), "inputs", limits)
    if request.parameters is not None:
        check_json_text(bytes(request.parameters), "parameters", limits)
    return request, schema_id


def check_json_text(text: bytes, field: str, limits: Limits) -> None:
    """A JSON text inside an Avro record, which nobody has parsed yet."""
    try:
        _check_json_bytes(text, limits)
        _any_decoder.decode(text)
    except InvalidRequest as refusal:
        raise InvalidRequest(refusal.code, refusal.message, field) from refusal
    except (ValueError, RecursionError) as refusal:
        code = "not_finite" if re.search(rb"\b(NaN|Infinity)\b", text) else "not_json"
        raise InvalidRequest(code, f"{field} is not JSON: {refusal}.", field) from refusal


def _avro_fields(value: bytes, limits: Limits) -> tuple[Raw, int]:
    """The fields of any Avro record whose schema is registered, as a JSON object."""
    try:
        return codec.decode_fields(value, limits.schemas)
    except CodecError as refusal:
        raise _avro_refusal(refusal) from refusal


def _avro_refusal(refusal: CodecError) -> InvalidRequest:
    return InvalidRequest(_CODE_OF_CODEC[refusal.code], f"not a framed Avro request: {refusal.message}.")


# ------------------------------------------------------------------------------------------------ fields


def check_fields(request: InferenceRequest, limits: Limits) -> None:
    """What the types cannot say. Raises InvalidRequest; the order is fixed, so a request always has one code."""
    if (
        request.model
        and not request.instance
        and request.parameters is None
        and request.deadline_ms is None
        and request.session is None
        and request.tenant is None
    ):
        return
    if not request.model and not request.instance:
        raise InvalidRequest("missing_model", "the request names no model: set `model` or `instance`.", "model")
    if request.model and request.instance:
        raise InvalidRequest(
            "ambiguous_model", "the request names both `model` and `instance`: set one of them.", "instance"
        )
    deadline = request.deadline_ms
    if deadline is not None and not 1 <= deadline <= DEADLINE_MS_MAX:
        raise InvalidRequest(
            "bad_deadline", f"deadline_ms = {deadline}: must be 1 to {DEADLINE_MS_MAX} milliseconds.", "deadline_ms"
        )
    if request.session is not None and len(request.session) > NAME_CHARS_MAX:
        raise InvalidRequest("too_long", f"session is longer than {NAME_CHARS_MAX} characters.", "session")
    if request.tenant is not None and len(request.tenant) > NAME_CHARS_MAX:
        raise InvalidRequest("too_long", f"tenant is longer than {NAME_CHARS_MAX} characters.", "tenant")
    if request.parameters is not None:
        check_depth(bytes(request.parameters), limits.json_depth_max)
    parameters = b"null" if request.parameters is None else bytes(request.parameters)
    if parameters[:1] != b"{" and parameters != b"null":
        raise InvalidRequest("wrong_type", f"parameters must be {_EXPECTED['parameters']}.", "parameters")
