"""Avro's binary encoding by hand, the Confluent frame around it, and the error of everything that cannot be decoded.

Confluent framing: one zero byte, the schema id as four bytes big-endian, then the Avro binary encoding, in which a
record is the concatenation of its fields. So a run of fields that many records share is encoded once and joined in,
and decoded once and recognised by its bytes. That, and tables of small numbers, make this several times faster than a
general Avro library in Python; tests demand that both agree byte for byte (tests/unit/schemas/test_codec.py).

Source of the encoding: Apache Avro specification 1.12, "Binary Encoding".
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

from sie_stream.errors import Disposition, SieError

MAGIC = 0
HEADER_BYTES = 5
LONG_MIN, LONG_MAX = -(1 << 63), (1 << 63) - 1

CodecErrorCode = Literal["bad_avro", "unknown_schema_id", "empty_record"]


class CodecError(SieError):
    """Bytes that are not the record they should be, or a value that does not fit its schema."""

    disposition = Disposition.DEAD_LETTER

    def __init__(self, code: CodecErrorCode, message: str) -> None:
        super().__init__(message)
        self.code: CodecErrorCode = code
        self.message = message


def bad_avro(message: str) -> CodecError:
    return CodecError("bad_avro", message)


# ---------------------------------------------------------------- frame


def frame(schema_id: int) -> bytes:
    """The five bytes in front of a record written with this schema."""
    return b"\x00" + schema_id.to_bytes(4, "big")


def schema_id_of(value: bytes | None) -> int:
    """Schema id in the frame. Raises CodecError when there is no frame."""
    if not value:
        raise CodecError("empty_record", "the record is empty")
    if value[0] != MAGIC:
        raise bad_avro(f"the first byte is {value[0]:#04x}, not the 0x00 of Confluent framing")
    if len(value) < HEADER_BYTES:
        raise bad_avro(f"{len(value)} bytes: too short for a schema id")
    return int.from_bytes(value[1:HEADER_BYTES], "big")


# ---------------------------------------------------------------- encoding


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


_LOW = (1 << 14) - 1
_LAST = tuple(_varint(number) for number in range(1 << 14))
"""Varints of 14-bit numbers: the whole number, or its highest bits."""
_MORE = tuple(bytes((number & 0x7F | 0x80, number >> 7 | 0x80)) for number in range(1 << 14))
"""The lower 14 bits of a longer number: two bytes that say more follows."""


def long_bytes(number: int) -> bytes:
    """An int or long (zigzag varint). Raises CodecError beyond 64 bits."""
    zigzag = number << 1 if number >= 0 else (-number << 1) - 1
    if zigzag <= _LOW:
        return _LAST[zigzag]
    if zigzag < 1 << 28:
        return _MORE[zigzag & _LOW] + _LAST[zigzag >> 14]
    if zigzag < 1 << 42:
        return _MORE[zigzag & _LOW] + _MORE[zigzag >> 14 & _LOW] + _LAST[zigzag >> 28]
    if not LONG_MIN <= number <= LONG_MAX:
        raise bad_avro(f"{number} does not fit into 64 bits")
    return _varint(zigzag)


class _Encoded(dict[int, bytes]):
    """Numbers seen lately, encoded: timestamps of one batch, token ids. Emptied when full."""

    def __missing__(self, number: int) -> bytes:
        if len(self) >= MEMO_MAX:
            self.clear()
        found = self[number] = long_bytes(number)
        return found


MEMO_MAX = 1 << 15
"""Entries of each memo of this package; about 4 MB when full."""
ENCODED = _Encoded()


def blob_bytes(value: bytes) -> bytes:
    return long_bytes(len(value)) + value


def text_bytes(text: str) -> bytes:
    try:
        value = text.encode()
    except UnicodeEncodeError as error:
        raise bad_avro(f"not a valid text: {error}") from error
    return long_bytes(len(value)) + value


def json_bytes(value: bytes) -> bytes:
    """A string that we hold as bytes. Raises CodecError when it is not UTF-8."""
    if not value.isascii():
        check_utf8(value)
    return long_bytes(len(value)) + value


def check_utf8(value: bytes) -> None:
    """Raises CodecError when the bytes are not UTF-8."""
    try:
        value.decode()
    except UnicodeDecodeError as error:
        raise bad_avro(f"not UTF-8: {error}") from error


def ints_bytes(numbers: Iterable[int]) -> bytes:
    """An array of ints, in one block."""
    items = [*map(ENCODED.__getitem__, numbers)]
    if not items:
        return b"\x00"
    return b"".join((long_bytes(len(items)), *items, b"\x00"))


NULL, SOME = b"\x00", b"\x02"
"""Branches of a union of null and something."""
FALSE, TRUE = b"\x00", b"\x01"


def optional_text(text: str | None) -> bytes:
    return NULL if text is None else SOME + text_bytes(text)


def optional_json(value: bytes | None) -> bytes:
    return NULL if value is None else SOME + json_bytes(value)


def optional_long(number: int | None) -> bytes:
    return NULL if number is None else SOME + long_bytes(number)


def optional_ints(numbers: Iterable[int] | None) -> bytes:
    return NULL if numbers is None else SOME + ints_bytes(numbers)


# ---------------------------------------------------------------- decoding


def read_long(value: bytes, at: int) -> tuple[int, int]:
    """The number at `at`, and where the next field starts. IndexError past the end, CodecError beyond 64 bits."""
    first = value[at]
    if first < 0x80:
        return (first >> 1) ^ -(first & 1), at + 1
    second = value[at + 1]
    if second < 0x80:
        zigzag = first + (second << 7) - 0x80
        return (zigzag >> 1) ^ -(zigzag & 1), at + 2
    third = value[at + 2]
    if third < 0x80:
        zigzag = first + (second << 7) + (third << 14) - 0x4080
        return (zigzag >> 1) ^ -(zigzag & 1), at + 3
    fourth = value[at + 3]
    zigzag = first + (second << 7) + (third << 14) + (fourth << 21) - 0x204080
    if fourth < 0x80:
        return (zigzag >> 1) ^ -(zigzag & 1), at + 4
    return _read_rest(value, at, zigzag - 0x10000000)


def _read_rest(value: bytes, start: int, zigzag: int) -> tuple[int, int]:
    """The fifth to tenth byte of a number that starts at `start`."""
    at, shift = start + 4, 28
    while True:
        byte = value[at]
        at += 1
        zigzag |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
        shift += 7
        if shift > 63:
            raise bad_avro(f"a number longer than ten bytes at byte {start}")
    if zigzag >> 64:
        raise bad_avro(f"a number beyond 64 bits at byte {start}")
    return (zigzag >> 1) ^ -(zigzag & 1), at


def read_span(value: bytes, at: int) -> tuple[int, int]:
    """Start and end of a text or bytes. Checked against what is there, so nothing is allocated for a false length."""
    length, start = read_long(value, at)
    if not 0 <= length <= len(value) - start:
        raise bad_avro(f"a length of {length} before byte {start}, but {len(value) - start} bytes are left")
    return start, start + length


STAMP_BYTES = 6


def read_stamp(value: bytes, at: int) -> tuple[int, int]:
    """Like read_long, for milliseconds since the epoch: neighbours in the log often share them.

    Sound because no varint is the beginning of another: six bytes that once were one number always are.
    """
    piece = value[at : at + STAMP_BYTES]
    found = STAMPS.get(piece)
    if found is not None:
        return found, at + STAMP_BYTES
    found, end = read_long(value, at)
    if end - at == STAMP_BYTES:
        if len(STAMPS) >= MEMO_MAX:
            STAMPS.clear()
        STAMPS[piece] = found
    return found, end


STAMPS: dict[bytes, int] = {}
_VARINT = re.compile(rb"[\x80-\xff]{0,9}[\x00-\x7f]")
_INT_BYTES_MAX = 5


class _Decoded(dict[bytes, int]):
    """The inverse of ENCODED."""

    def __missing__(self, piece: bytes) -> int:
        if len(self) >= MEMO_MAX:
            self.clear()
        found = self[piece] = read_long(piece, 0)[0]
        return found


DECODED = _Decoded()


class Cursor:
    """Reads one field after another. For the less frequent fields and records; the rest is written out in place.

    Methods raise IndexError past the end, and CodecError.
    """

    __slots__ = ("at", "value")

    def __init__(self, value: bytes, at: int = HEADER_BYTES) -> None:
        self.value = value
        self.at = at

    def long(self) -> int:
        number, self.at = read_long(self.value, self.at)
        return number

    def blob(self) -> bytes:
        start, self.at = read_span(self.value, self.at)
        return self.value[start : self.at]

    def text(self) -> str:
        try:
            return self.blob().decode()
        except UnicodeDecodeError as error:
            raise bad_avro(f"not UTF-8 before byte {self.at}: {error}") from error

    def json(self) -> bytes:
        """A string that we keep as bytes."""
        found = self.blob()
        if not found.isascii():
            check_utf8(found)
        return found

    def flag(self) -> bool:
        byte = self.value[self.at]
        if byte > 1:
            raise bad_avro(f"a boolean of {byte} at byte {self.at}")
        self.at += 1
        return byte == 1

    def some(self) -> bool:
        """Branch of a union of null and something: True when there is something."""
        branch = self.long()
        if branch not in (0, 1):
            raise bad_avro(f"union branch {branch} at byte {self.at}: allowed 0 and 1")
        return branch == 1

    def index(self, symbols: int) -> int:
        """An enum of so many symbols."""
        index = self.long()
        if not 0 <= index < symbols:
            raise bad_avro(f"enum index {index} before byte {self.at}: allowed 0 to {symbols - 1}")
        return index

    def optional_text(self) -> str | None:
        return self.text() if self.some() else None

    def optional_json(self) -> bytes | None:
        return self.json() if self.some() else None

    def optional_long(self) -> int | None:
        return self.long() if self.some() else None

    def optional_ints(self) -> tuple[int, ...] | None:
        return self.ints() if self.some() else None

    def ints(self) -> tuple[int, ...]:
        """An array of ints in any number of blocks."""
        out: list[int] = []
        while count := self.long():
            if count < 0:  # a negative count is followed by the block's length in bytes
                count = -count
                self.long()
            if count > len(self.value) - self.at:
                raise bad_avro(f"an array block of {count} before byte {self.at} goes past the end")
            pieces = _VARINT.findall(self.value, self.at, self.at + _INT_BYTES_MAX * count)[:count]
            start, self.at = self.at, self.at + sum(map(len, pieces))
            if len(pieces) < count or b"".join(pieces) != self.value[start : self.at]:
                raise bad_avro(f"an array block of {count} at byte {start} that does not hold as many numbers")
            out.extend(map(DECODED.__getitem__, pieces))
        return tuple(out)

    def end(self) -> None:
        """Raises CodecError when anything is left."""
        if self.at != len(self.value):
            raise bad_avro(f"{len(self.value) - self.at} bytes after the end of the record")
