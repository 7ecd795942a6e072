"""Requests that name their inputs instead of carrying them: what ingress makes of them. Pure.

Ingress takes the bytes into the work item, once they are there and are those that were meant: the model's schema, its
tokenizer and its content rules need them, and what the log holds can be computed again after the object is gone. While
they are read, the partition of the request waits before it; all others go on.
"""

from __future__ import annotations

from msgspec import Raw
from msgspec.structs import replace

from processors.ingress.decode import Limits, check_json_text
from sie_stream.errors import InvalidRequest
from sie_stream.ports import Contents
from sie_stream.records import InferenceRequest, InputsRef
from sie_stream.references import FIELD, check_reference
from sie_stream.settings import Settings

BATCH_BYTES_MAX = 32 * 1024 * 1024
"""Inputs behind references in one transaction; one more may begin below it."""
AHEAD_MAX = 256
"""Records behind waiting ones that are looked at in one turn: they come again with the next, and cost each time."""
EMPTY = (b"{}", b"null", b"")


class NotYet(Exception):
    """The inputs of this request are not there yet."""


class NoContents:
    """Implements ports.Contents where nothing is read, in simulations for one."""

    def prepare(self, ref: InputsRef) -> None:
        return None

    def ask(self, ref: InputsRef) -> InvalidRequest:
        return InvalidRequest("reference_unavailable", "this process reads no references.", FIELD)

    def wait(self, wait_ms: int) -> None:
        return None

    def settled(self) -> None:
        return None


class References:
    """Resolves the references of one ingress. `taken` counts the bytes of the current batch."""

    def __init__(self, settings: Settings, contents: Contents) -> None:
        self._places = settings.reference_places
        self._bytes_max = settings.reference_bytes_max
        self._contents = contents
        self._taken = 0
        self._looked = 0

    def begin_batch(self) -> None:
        self._taken = self._looked = 0

    def resolved(self, request: InferenceRequest) -> InferenceRequest:
        """The request with its inputs. Raises NotYet, or InvalidRequest when they are not to be had."""
        ref = request.inputs_ref
        assert ref is not None
        if bytes(request.inputs) not in EMPTY:
            raise InvalidRequest("ambiguous_inputs", "the request has both `inputs` and `inputs_ref`.", FIELD)
        check_reference(ref, self._places, self._bytes_max)
        found = None if self._taken >= BATCH_BYTES_MAX else self._contents.ask(ref)
        if found is None:
            raise NotYet
        if isinstance(found, InvalidRequest):
            raise InvalidRequest(found.code, found.message, found.field)
        self._taken += len(found)
        return replace(request, inputs=Raw(found))

    def look_ahead(self) -> bool:
        """Whether one more record behind a waiting one is to be looked at."""
        self._looked += 1
        return self._looked <= AHEAD_MAX

    def prepare(self, request: InferenceRequest) -> None:
        """Begin to read what a request needs that stands behind a waiting one."""
        ref = request.inputs_ref
        if ref is None or bytes(request.inputs) not in EMPTY:
            return
        try:
            check_reference(ref, self._places, self._bytes_max)
        except InvalidRequest:
            return  # said when its turn comes
        self._contents.prepare(ref)


def check_inputs(content: bytes, limits: Limits) -> None:
    """Whether the bytes behind a reference are a JSON object. Raises InvalidRequest."""
    check_json_text(content, FIELD, limits)
    if content.lstrip(b" \t\r\n")[:1] != b"{":
        raise InvalidRequest("wrong_type", "the inputs behind the reference are no JSON object.", FIELD)
