"""Framing of Avro records on the log, and the error of everything that cannot be decoded.

Confluent framing: one zero byte, the schema id as four bytes big-endian, then the Avro binary encoding.
"""

from __future__ import annotations

from typing import Literal

from sie_stream.errors import Disposition, SieError

MAGIC = 0
HEADER_BYTES = 5

CodecErrorCode = Literal["bad_avro", "unknown_schema_id", "empty_record"]


class CodecError(SieError):
    """Bytes that are not the record they should be, or a value that does not fit its schema."""

    disposition = Disposition.DEAD_LETTER

    def __init__(self, code: CodecErrorCode, message: str) -> None:
        super().__init__(message)
        self.code: CodecErrorCode = code
        self.message = message


def frame(schema_id: int) -> bytes:
    """The five bytes in front of a record written with this schema."""
    return b"\x00" + schema_id.to_bytes(4, "big")


def schema_id_of(value: bytes | None) -> int:
    """Schema id in the frame. Raises CodecError when there is no frame."""
    if not value:
        raise CodecError("empty_record", "the record is empty")
    if value[0] != MAGIC:
        raise CodecError("bad_avro", f"the first byte is {value[0]:#04x}, not the 0x00 of Confluent framing")
    if len(value) < HEADER_BYTES:
        raise CodecError("bad_avro", f"{len(value)} bytes: too short for a schema id")
    return int.from_bytes(value[1:HEADER_BYTES], "big")
