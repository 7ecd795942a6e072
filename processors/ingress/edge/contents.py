"""How an ingress reads the inputs that requests name."""

from __future__ import annotations

from processors.ingress.decode import Limits
from processors.ingress.references import check_inputs
from sie_stream.edge.reference_reader import ReferenceReader
from sie_stream.edge.reference_store import read
from sie_stream.ports import Clock
from sie_stream.records import InputsRef
from sie_stream.settings import Settings


def read_inputs(ref: InputsRef, settings: Settings) -> bytes:
    """The inputs, a JSON object. Raises InvalidRequest."""
    content = read(ref, settings.reference_places, settings.reference_bytes_max)
    check_inputs(content, Limits(settings.reference_bytes_max, settings.json_depth_max))
    return content


def reference_reader(settings: Settings, clock: Clock) -> ReferenceReader:
    return ReferenceReader(
        lambda ref: read_inputs(ref, settings),
        clock,
        settings.reference_timeout_ms,
        settings.references_at_once,
        settings.reference_bytes_max,
    )
