"""What goes into the tables of an audit bundle: the records of a range, with personal data hidden."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
from msgspec.structs import replace

from schemas.codec import decode_deadletter, decode_decision, decode_result, decode_row, decode_work
from sie_stream.adapter_digests import own_and_base
from sie_stream.auditing.pii import hidden
from sie_stream.auditing.requests import Stretch
from sie_stream.cli.audit_requests import Cut, place_of_record, spans_of, tracked
from sie_stream.cli.audit_tables import (
    DEADLETTERS,
    DECISIONS,
    REQUESTS,
    RESULTS,
    WORK,
    TableFile,
    decision_row,
    letter_row,
    place_row,
    result_row,
    work_row,
)
from sie_stream.cli.output import tell
from sie_stream.cli.progress import progress_bars
from sie_stream.cli.trace_lookup import Routes
from sie_stream.cli.trace_reading import decoded, request_in
from sie_stream.control import ModelRow
from sie_stream.edge.connection import Connection
from sie_stream.edge.kafka_log import KafkaReader
from sie_stream.edge.spans import Span, partitions_of
from sie_stream.edge.tables import latest_rows
from sie_stream.errors import InvalidRequest, SieError
from sie_stream.ids import TopicNames, TopicPartition, base_of, derived_request_id
from sie_stream.input_schema import InputValidator, compile_schema
from sie_stream.ports import LogReader
from sie_stream.privacy.datakeys import KeyTable
from sie_stream.privacy.declared import DeclaredOutputs, Shreds
from sie_stream.privacy.rules import WITHHELD
from sie_stream.records import TRACEPARENT_HEADER, DeadLetter, InferenceRequest, LogRecord, Result, header
from sie_stream.spec.model import NAME_PATTERN

MODEL_NAME = re.compile(NAME_PATTERN)
NO_SCHEMA = "no schema of its model is there to say what is personal in it"
REFUSED = "it was refused, so its schema does not say what is personal in it"
UNFIT = "it does not fit the schema in force, which so does not say what is personal in it"
UNREADABLE = "it cannot be read"
GONE = "no declaration of its version is left to say what is personal in it"
REFERRED = "it is named by a reference: requests.parquet has its URL and SHA-256, the object itself is not here"
WORDS = "an engine's words about it may repeat personal data"


def declared_rows(reader: LogReader, topic: str, tell: Callable[[str], None]) -> dict[str, ModelRow]:
    """Declared models by name, as the scheduler writes them. Rows of other models than their key says, or whose name is
    none, are told and left out: names become names of files.
    """
    rows = latest_rows(reader, topic, lambda value: decode_row(value, ModelRow), tell)
    for name, row in list(rows.items()):
        if name != row.model or not MODEL_NAME.fullmatch(name):
            tell(f"{topic}, key {name!r}: left out, its row is of the model {row.model!r}")
            del rows[name]
        elif not bytes(row.spec).startswith(b"{"):
            tell(f"{topic}, key {name!r}: left out, its declaration is no object")
            del rows[name]
    return rows


class Payloads:
    """Hides personal data by the schemas that are in force. A payload that no schema is known for is left out."""

    def __init__(
        self,
        reader: LogReader,
        routes: Routes,
        names: TopicNames,
        key: bytes,
        keys: KeyTable,
        declared: DeclaredOutputs,
    ) -> None:
        self._routes = routes
        self._key = key
        self.left_out: dict[str, int] = {}
        self.shredded = 0
        """Results whose encrypted values can never be read."""
        self.answered: dict[tuple[str, str], int] = {}
        """Results by model and version."""
        self.bases: dict[tuple[str, str], set[str]] = {}
        """Likewise the digests of the weights that adapters lay over."""
        self._declared = declared
        self._shreds = Shreds(keys, self._declared)
        self._work = names.work("")
        self._inputs: dict[str, tuple[str, ...]] = {}
        self._outputs: dict[str, tuple[str, ...]] = {}
        self._checks: dict[str, Callable[[bytes], None]] = {}
        for row in declared_rows(reader, names.models, tell).values():
            try:
                given, told = _validators(msgspec.json.decode(row.spec))
            except SieError:
                continue  # of a later release: as if there were no schema
            self._inputs[row.model], self._outputs[row.model] = given.pii_fields, told.pii_fields
            self._checks[row.model] = given.check

    @property
    def pii_fields(self) -> dict[str, tuple[str, ...]]:
        """{model: marked fields of its inputs and outputs}, where there are any."""
        found = {
            model: (
                *(f"inputs.{field}" for field in self._inputs[model]),
                *(f"outputs.{f}" for f in self._outputs[model]),
            )
            for model in sorted(self._inputs)
        }
        return {model: fields for model, fields in found.items() if fields}

    def model_of(self, request: InferenceRequest | None, topic: str) -> str:
        wanted = "" if request is None else request.model or request.instance
        route = self._routes.of(wanted, topic)
        return wanted.partition("@")[0] if route is None else route.model

    def inputs(self, model: str, inputs: bytes, *, refused: bool) -> bytes | None:
        """None: left out. Of a model with marked fields a refused request may hold them anywhere, and so may one that
        nobody checked (a repeat, one that came too late) or that another version took."""
        fields = self._inputs.get(model)
        if fields is None or (fields and refused):
            return self._leave_out(NO_SCHEMA if fields is None else REFUSED)
        if not fields:
            return inputs
        try:
            self._checks[model](inputs)
        except InvalidRequest:
            return self._leave_out(UNFIT)
        return hidden(inputs, fields, self._key) or self._leave_out(UNREADABLE)

    def referred(self) -> None:
        """Inputs that a request names: the row has their URL and digest instead."""
        self._leave_out(REFERRED)

    def outputs(self, result: Result) -> bytes | None:
        """None: there are none, or they are left out. Hidden is what the schema in force or its version's marks."""
        version = (result.model, result.version)
        self.answered[version] = self.answered.get(version, 0) + 1
        if base := own_and_base(result.provenance.weights_digest)[1]:
            self.bases.setdefault(version, set()).add(base)
        if result.outputs is None:
            return None
        fields = self._outputs.get(result.model)
        if fields is None:
            return self._leave_out(NO_SCHEMA)
        self.shredded += self._shreds.reach(result)
        marks = self._declared.of(result.model, result.version)
        if marks is None:
            return self._leave_out(GONE) if fields else result.outputs
        if not (fields or marks.personal):
            return result.outputs
        return hidden(result.outputs, marks.personal.union(fields), self._key, marks.protected)

    def told(self, result: Result) -> Result:
        """Without what an engine said about the inputs of a model with marked fields."""
        error = result.error
        if error is None or result.status != "failed" or not self.personal(result.model):
            return result  # the other endings are told in our own words, which repeat no marked value
        self._leave_out(WORDS)
        return replace(result, error=replace(error, message=WITHHELD))

    def told_letter(self, letter: DeadLetter) -> DeadLetter:
        """The same of a dead letter."""
        if not letter.source_topic.startswith(self._work):
            return letter
        if not self.personal(base_of(letter.source_topic.removeprefix(self._work))):
            return letter
        return replace(letter, message=WITHHELD)

    def _leave_out(self, why: str) -> None:
        self.left_out[why] = self.left_out.get(why, 0) + 1

    def personal(self, model: str) -> bool:
        """Whether inputs or outputs have marked fields, or nobody can say."""
        return model not in self._inputs or bool(self._inputs[model] or self._outputs[model])


def _validators(spec: dict[str, Any]) -> Iterator[InputValidator]:
    """Of inputs and of outputs. Raises SpecError."""
    return (compile_schema(spec.get(side) or {}) for side in ("input_schema", "output_schema"))


def write_tables(
    folder: Path, connection: Connection, reader: KafkaReader, routes: Routes, cut: Cut, payloads: Payloads
) -> dict[str, int]:
    """Writes the Parquet files; {name: rows}. Results first: what was refused is known from them."""
    names = connection.settings.topics
    stretches = {stream.place: stretch for stream, stretch in cut.streams.items()}
    refused: set[tuple[TopicPartition, int]] = set()
    rows: dict[str, int] = {}

    def table(name: str, schema: pa.Schema) -> TableFile:
        return TableFile(folder / name, schema)

    with progress_bars() as progress:
        with table("results.parquet", RESULTS) as file:
            for record, result in decoded(tracked(reader, cut.results, progress, "writing results"), decode_result):
                source = _source_of(result)
                if _inside(stretches, *source) or source[0] in cut.works:
                    if result.status == "rejected":
                        refused.add(source)
                    file.add(result_row(record, payloads.told(result), payloads.outputs(result)))
        rows["results.parquet"] = file.rows
        with table("requests.parquet", REQUESTS) as file:
            spans = {place: Span(stretch.audited, stretch.end) for place, stretch in stretches.items()}
            for record in tracked(reader, spans, progress, "writing requests"):
                at = (place_of_record(record), record.offset)
                file.add(request_row(record, routes, payloads, refused=at in refused))
        rows["requests.parquet"] = file.rows
        with table("work.parquet", WORK) as file:
            for record, work in decoded(tracked(reader, spans_of(cut.works), progress, "writing work"), decode_work):
                if _inside(stretches, TopicPartition(work.source_topic, work.source_partition), work.source_offset):
                    file.add(work_row(record, work))
        rows["work.parquet"] = file.rows
        with table("decisions.parquet", DECISIONS) as file:
            whole = tracked(reader, _whole(reader, names.decisions), progress, "writing decisions")
            for record, decision in decoded(whole, decode_decision):
                file.add(decision_row(record, decision))
        rows["decisions.parquet"] = file.rows
        with table("deadletters.parquet", DEADLETTERS) as file:
            whole = tracked(reader, _whole(reader, names.deadletter), progress, "writing dead letters")
            for record, letter in decoded(whole, decode_deadletter):
                place = TopicPartition(letter.source_topic, letter.source_partition)
                if place in cut.works or _inside(stretches, place, letter.source_offset):
                    file.add(letter_row(record, payloads.told_letter(letter)))
        rows["deadletters.parquet"] = file.rows
    return rows


def _whole(reader: KafkaReader, topic: str) -> dict[TopicPartition, Span]:
    places = partitions_of(reader, topic)
    begins, ends = reader.beginning_offsets(places), reader.end_offsets(places)
    return {place: Span(begins[place], ends[place]) for place in places}


def _source_of(result: Result) -> tuple[TopicPartition, int]:
    origin = result.provenance
    return TopicPartition(origin.source_topic, origin.source_partition), origin.source_offset


def _inside(stretches: dict[TopicPartition, Stretch], place: TopicPartition, offset: int) -> bool:
    stretch = stretches.get(place)
    return stretch is not None and stretch.audited <= offset < stretch.end


def request_row(record: LogRecord, routes: Routes, payloads: Payloads, *, refused: bool = False) -> dict[str, object]:
    """A row of requests.parquet."""
    request = request_in(record.value)
    model = payloads.model_of(request, record.topic)
    if request is None:
        inputs = None
    elif request.inputs_ref is not None:
        inputs = payloads.referred()
    else:
        inputs = payloads.inputs(model, bytes(request.inputs), refused=refused)
    parameters = None if request is None or payloads.personal(model) else request.parameters
    traceparent = header(record.headers, TRACEPARENT_HEADER)
    made = derived_request_id(record.topic, record.partition, record.offset)
    ref = None if request is None else request.inputs_ref
    return {
        **place_row(record),
        "request_id": routes.source_id(record) or made,
        "model": model,
        "size": len(record.value or b""),
        "inputs": None if inputs is None else inputs.decode(),
        "parameters": None if parameters is None else bytes(parameters).decode(),
        "traceparent": None if traceparent is None else traceparent.decode("ascii", "replace"),
        "inputs_url": None if ref is None else ref.url,
        "inputs_sha256": None if ref is None else ref.sha256,
    }
