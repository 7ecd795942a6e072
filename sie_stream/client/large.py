"""Inputs that are too large for a request go to a store, and the request names them."""

from __future__ import annotations

from msgspec.structs import replace

from sie_stream.client.requests import Request, inputs_json, to_write
from sie_stream.edge.reference_store import put
from sie_stream.records import LogWrite

HOW_TO_SEND_LARGE = (
    "Name a store from which ingress may read large inputs: Client(reference_store=...), `produce --store`, or the "
    "setting reference_store"
)


def written(request: Request, request_id: str, topic: str, bytes_max: int, store: str) -> LogWrite:
    """The record of a request. One above `bytes_max` puts its inputs into the store, named by their digest, so sending
    it again writes nothing. `store` empty: it is sent as it is, and ingress refuses it in its terminal record.

    Raises ConfigError for a malformed request, StoreUnavailable.
    """
    write = to_write(request, request_id, topic)
    size = len(write.value or b"") + len(write.key or b"")
    if not store or request.inputs_ref is not None or size <= bytes_max:
        return write
    ref = put(store, bytes(inputs_json(request)))
    return to_write(replace(request, inputs={}, inputs_ref=ref), request_id, topic)
