"""From a decoded, routed request to its work item, or to the reason why there is none. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec
from msgspec import Struct

from processors.ingress.decode import HEADER_BYTES_MAX, check_depth
from processors.ingress.routes import CompiledRoute, RouteTable
from processors.ingress.rules import Content
from processors.tokenise import TextInputs, check_context, check_length, text_tokens
from schemas import codec
from sie_stream.admission import Quotas
from sie_stream.control import RouteRow, VariantRow
from sie_stream.errors import InvalidRequest
from sie_stream.ids import keyed_hash
from sie_stream.provenance import KEY_BYTES_MAX
from sie_stream.records import TRACEPARENT_HEADER, Headers, InferenceRequest, LogRecord, LogWrite, WorkItem, header
from sie_stream.rollout_records import PINNED, SHADOW
from sie_stream.routing import PRIORITY_LANES, bucket_of, partition_of, sticky_key
from sie_stream.settings import Settings

TOPIC_NAME = re.compile(r"[a-zA-Z0-9._-]{1,249}")
SEED_BITS = 53
"""A derived seed fits a double, so that JavaScript reads it from a JSON result unchanged."""
WORK_OVERHEAD_BYTES = 1_024
NO_PARAMETERS = b"null"
NO_HEADERS: Headers = ()


class _Parameters(Struct, frozen=True, gc=False):
    """The one parameter that ingress reads."""

    seed: int | None = None


class WorkBuilder:
    """Makes work items. Holds the quotas, the only thing here that remembers."""

    def __init__(self, settings: Settings, routes: RouteTable, topic_exists: Callable[[str], bool]) -> None:
        self.share = 1.0
        """Part of every quota that belongs to this process."""
        self.copies: list[LogWrite] = []
        """For shadow variants, of the items made since somebody took them."""
        self.verify_topics = False
        """Look for the work topic before writing to it; set once a transaction was aborted."""
        self.work_bytes_max = settings.work_bytes_max - WORK_OVERHEAD_BYTES
        self._prefix = settings.topic_prefix
        self._json_depth_max = settings.json_depth_max
        self._routes = routes
        self._topic_exists = topic_exists
        self._quotas = Quotas()
        self._parameters = msgspec.json.Decoder(_Parameters)
        self._text_inputs = msgspec.json.Decoder(TextInputs)

    def work(
        self,
        record: LogRecord,
        request_id: str,
        request: InferenceRequest,
        schema_id: int,
        route: CompiledRoute,
        version: str,
        now_ms: int,
    ) -> LogWrite:
        """The work item of a good request. Raises InvalidRequest for every other one."""
        row = route.row
        key = record.key or b""
        variant, headers = route.only, NO_HEADERS
        if version or variant is None:
            variant, headers = _chosen(record, request_id, request, route, version)
        deadline_at_ms = check_deadline(record, request, row, now_ms)
        token_ids = parameters = seed = None
        inputs = bytes(request.inputs)
        if not route.plain or self.verify_topics or request.parameters is not None:
            token_ids, parameters, seed = self._inspect(request_id, request, inputs, route, now_ms)
        else:
            self._check(inputs, route)
        lane = row.priority if request.priority is None else PRIORITY_LANES[request.priority]
        item = WorkItem(
            request_id,
            row.instance,
            row.model,
            variant.version,
            variant.variant,
            row.route_epoch,
            lane,
            inputs,
            key if len(key) <= KEY_BYTES_MAX else b"",
            record.topic,
            record.partition,
            record.offset,
            record.timestamp_ms,
            now_ms,
            now_ms,
            schema_id,
            deadline_at_ms,
            parameters,
            token_ids,
            seed,
            request.session,
            request.tenant,
            request.stream,
            self.reply_topic(request.reply_topic) if request.reply_topic else None,
            route.output_topic,
            _traceparent(record) if record.headers else None,
        )
        value = codec.encode_work(item)
        if len(value) > self.work_bytes_max:
            raise _too_large(len(value), self.work_bytes_max)
        if route.shadows:
            self._copy(item, record, route, variant, headers)
        return _placed(item, value, record, variant, route, headers)

    def _copy(
        self, item: WorkItem, record: LogRecord, route: CompiledRoute, variant: VariantRow, headers: Headers
    ) -> None:
        """Copies for shadow variants; `copies` is taken by whoever writes the item itself."""
        for shadow in route.copied_to(sticky_key(item.session, record.key or b"", item.request_id), variant):
            copy = msgspec.structs.replace(
                item, version=shadow.version, variant=SHADOW + shadow.variant, reply_topic=None, output_topic=None
            )
            self.copies.append(_placed(copy, codec.encode_work(copy), record, shadow, route, headers))

    def _inspect(
        self, request_id: str, request: InferenceRequest, inputs: bytes, route: CompiledRoute, now_ms: int
    ) -> tuple[tuple[int, ...] | None, bytes | None, int | None]:
        """Token ids, parameters and seed, after everything that looks into the request agreed."""
        row = route.row
        if route.broken:
            raise InvalidRequest("model_unavailable", f"model {row.model!r} cannot be served: {route.broken}", "model")
        if self.verify_topics and not self._topic_exists(row.topic):
            raise InvalidRequest("model_unavailable", f"the work topic {row.topic!r} does not exist.", "model")
        self._check(inputs, route)
        if row.quota_per_s:
            self._admit(row, request.tenant, now_ms)
        parameters = None if request.parameters is None else bytes(request.parameters)
        if parameters == NO_PARAMETERS:
            parameters = None
        token_ids = self._tokens(inputs, route) if route.tokeniser else None
        seed = self._seed(request_id, parameters) if route.generates else None
        return token_ids, parameters, seed

    def _check(self, inputs: bytes, route: CompiledRoute) -> None:
        """Hold the inputs against the input_schema."""
        try:
            route.check(inputs)
        except InvalidRequest as refusal:
            check_depth(inputs, self._json_depth_max)
            field = f"inputs.{refusal.field}" if refusal.field else "inputs"
            raise InvalidRequest(refusal.code, refusal.message, field) from refusal

    def _admit(self, row: RouteRow, tenant: str | None, now_ms: int) -> None:
        rate = row.quota_per_s * self.share
        burst = max(1.0, (row.quota_burst or row.quota_per_s) * self.share)
        if not self._quotas.admit(row.model, tenant or "", rate, burst, now_ms):
            who = f"tenant {tenant!r}" if tenant else "requests without a tenant"
            raise InvalidRequest(
                "quota_exceeded",
                f"{who} may send {row.quota_per_s:g} requests/s to model {row.model!r}. Send them again more slowly, "
                "each with a new request_id.",
            )

    def _tokens(self, inputs: bytes, route: CompiledRoute) -> tuple[int, ...] | None:
        tokeniser = route.tokeniser
        assert tokeniser is not None
        try:
            texts = self._text_inputs.decode(inputs)
        except msgspec.ValidationError as refusal:
            raise InvalidRequest("wrong_type", f"the text inputs cannot be read: {refusal}.", "inputs") from refusal
        if texts.prompt is None and texts.messages is None and texts.text is None:
            fields = ", ".join(TextInputs.__struct_fields__)
            raise InvalidRequest(
                "missing_field", f"inputs have no text for model {route.row.model!r}: give one of {fields}.", "inputs"
            )
        field = "inputs.messages" if texts.messages else f"inputs.{route.text_field}"
        if route.generates:
            check_length(texts, route.row.context_tokens_max, field)
        token_ids = text_tokens(tokeniser, texts)
        if token_ids is not None:
            check_context(token_ids, route.row.context_tokens_max, route.generates, field)
        return token_ids

    def _seed(self, request_id: str, parameters: bytes | None) -> int:
        """The seed asked for, else one that follows from the request id, so that a replay can repeat the answer."""
        if parameters is not None:
            try:
                given = self._parameters.decode(parameters).seed
            except msgspec.ValidationError as refusal:
                raise InvalidRequest("wrong_type", f"parameters.seed: {refusal}.", "parameters.seed") from refusal
            if given is not None:
                if not 0 <= given < 2**63:
                    raise InvalidRequest(
                        "out_of_range", f"parameters.seed = {given}: must be 0 to {2**63 - 1}.", "parameters.seed"
                    )
                return given
        return keyed_hash(request_id.encode(), b"seed") >> (64 - SEED_BITS)

    def reply_topic(self, topic: str) -> str:
        """Raises InvalidRequest (`bad_reply_topic`) for a topic that results may not or cannot go to."""
        if not TOPIC_NAME.fullmatch(topic):
            problem = "is not a topic name"
        elif topic.startswith(self._prefix):
            problem = f"starts with {self._prefix!r}, which SIE-Stream keeps for itself"
        elif self._routes.is_input(topic):
            problem = "is bound as the input of a model, so results would come back as requests"
        elif not self._topic_exists(topic):
            problem = "does not exist; create it first"
        else:
            return topic
        raise InvalidRequest("bad_reply_topic", f"reply_topic {topic[:256]!r} {problem}.", "reply_topic")


def _chosen(
    record: LogRecord, request_id: str, request: InferenceRequest, route: CompiledRoute, version: str
) -> tuple[VariantRow, Headers]:
    """The variant that answers, and a mark when something else than the key chose it. Raises InvalidRequest."""
    pinned = route.pinned(version, Content(record.headers, request.tenant, bytes(request.inputs)))
    if pinned is None:
        return route.by_key(sticky_key(request.session, record.key or b"", request_id)), NO_HEADERS
    return pinned, PINNED if len(route.row.variants) > 1 else NO_HEADERS  # else there is nothing to compare


def _placed(
    item: WorkItem, value: bytes, record: LogRecord, variant: VariantRow, route: CompiledRoute, headers: Headers
) -> LogWrite:
    """The record of a work item: in the topic of its variant, by lane and bucket."""
    lane, session = item.priority, item.session
    topic, width, spill = route.row.topic, route.row.width, route.spill
    if variant.topic:
        topic, width, spill = variant.topic, variant.width, None
    partition = lane
    if width != 1:
        key = sticky_key(session, record.key or b"", item.request_id)
        partition = partition_of(lane, bucket_of(key, width, spill), width)
    return LogWrite(topic, value, session.encode() if session else record.key, partition, headers)


def check_deadline(record: LogRecord, request: InferenceRequest, row: RouteRow, now_ms: int) -> int:
    """When it is, 0: none. Raises InvalidRequest (`deadline_exceeded`) when it has passed already."""
    deadline_ms = request.deadline_ms or row.deadline_ms
    if not deadline_ms:
        return 0
    at_ms = record.timestamp_ms + deadline_ms
    if now_ms >= at_ms:
        raise InvalidRequest(
            "deadline_exceeded", f"the deadline of {deadline_ms} ms had passed when the request was taken up."
        )
    return at_ms


def _too_large(size: int, allowed: int) -> InvalidRequest:
    return InvalidRequest("payload_too_large", f"the request has {size} bytes with its tokens, allowed are {allowed}.")


def _traceparent(record: LogRecord) -> str | None:
    given = header(record.headers, TRACEPARENT_HEADER)
    if not given or len(given) > HEADER_BYTES_MAX or not given.isascii():
        return None
    return given.decode("ascii")
