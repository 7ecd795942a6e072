"""Running requests on their way to another worker: what crosses between two hosts, and who is asked for it.

An image only saves work. A request whose image is lost, late or damaged is computed from its beginning by the next
owner of its partition, as it is where nothing is moved.

    wanted:  length (4) | Wanted
    answer:  length (4) | Found | for each image: length (4) | Header | its bytes

Numbers are big-endian, records are msgpack arrays to whose end fields may be added. The checksum of a header (CRC-32)
finds what went wrong on the way; the image itself has digests (decoding/image.py), which the engine compares.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from sie_stream.errors import SieError
from sie_stream.ids import TopicPartition
from sie_stream.touches import Touch, decode_touches, encode_touches

LENGTH_BYTES = 4
FRAME_BYTES_MAX = 4_096
"""Of a record; the bytes of images come between them."""
PORT_MAX = 65_535


class Run(NamedTuple):
    """Who numbers the token deltas of an answer: the worker where it was begun (see records.TokenDelta)."""

    worker: str
    incarnation: str
    attempt: int


class SequenceImage(Struct, frozen=True, gc=False):
    """A request that ran. It is the record at `offset` of its partition, whatever its request id is."""

    offset: int
    run: Run
    told: int
    """Token deltas written of it so far."""
    frozen_ms: int
    """When it was stopped (wall clock of the worker that did it)."""
    content: bytes
    """See decoding/image.py."""
    history: tuple[Touch, ...] = ()
    """What its result is to tell of where it was; the newest move has not ended."""


class ImagesFetched(Struct, frozen=True):
    """What was to be had of a partition's images; `message`: why it is not all, or nothing."""

    partition: TopicPartition
    placement_epoch: int
    """Of the assignment that they were fetched for."""
    images: Sequence[SequenceImage]
    message: str = ""


class ImagesTaken(Struct, frozen=True):
    """The images of a partition were sent to whoever asked, and are not kept any more."""

    partition: TopicPartition


class ImagesPort(Protocol):
    """Images that this worker keeps for others, and fetches from them. No method waits."""

    def keep(self, partition: TopicPartition, image: SequenceImage) -> None: ...

    def drop(self, partition: TopicPartition) -> None: ...

    def fetch(self, partition: TopicPartition, placement_epoch: int, images_at: str, bytes_max: int) -> None:
        """ImagesFetched answers, with images of `bytes_max` in all at most."""
        ...

    def poll(self) -> Sequence[ImagesFetched | ImagesTaken]:
        """What happened since the last call, oldest first."""
        ...


class NoImages:
    """Implements ImagesPort for a worker that keeps none: the machine asks it for nothing."""

    def keep(self, partition: TopicPartition, image: SequenceImage) -> None:
        raise AssertionError(f"no image of {partition} can be kept")

    def drop(self, partition: TopicPartition) -> None:
        raise AssertionError(f"no image of {partition} was kept")

    def fetch(self, partition: TopicPartition, placement_epoch: int, images_at: str, bytes_max: int) -> None:
        raise AssertionError(f"no image of {partition} can be fetched")

    def poll(self) -> Sequence[ImagesFetched | ImagesTaken]:
        return ()


# ---------------------------------------------------------------- what crosses the socket


class TransferBroken(SieError):
    """What came is no image of ours: cut off, altered, or larger than it may be."""


class Wanted(Struct, frozen=True, array_like=True):
    """The images of one partition, all of them."""

    secret: str
    topic: str
    partition: int


class Found(Struct, frozen=True, array_like=True):
    images: int


class Header(Struct, frozen=True, array_like=True):
    """Of one image; its bytes follow."""

    offset: int
    worker: str
    incarnation: str
    attempt: int
    told: int
    frozen_ms: int
    size: int
    checksum: int
    """Of all before it, and of the bytes."""
    history: bytes = b""
    """JSON (sie_stream/touches.py). It only goes into what `trace` shows, and has a checksum of its own: releases
    without this field read the others all the same."""
    history_checksum: int = 0


class Address(NamedTuple):
    """Where images can be fetched. The secret keeps others from reading them; whoever reads sie.placements has it."""

    host: str
    port: int
    secret: str

    def __str__(self) -> str:
        return f"{self.host}:{self.port}#{self.secret}"


def parse_address(text: str) -> Address:
    """Raises TransferBroken for what is none."""
    place, _, secret = text.rpartition("#")
    host, _, port = place.rpartition(":")
    if not host or not secret or not port.isdecimal() or not 0 < int(port) <= PORT_MAX:
        raise TransferBroken("images_at is no address of images: expected host:port#secret")
    return Address(host, int(port), secret)


def framed(record: Wanted | Found | Header) -> bytes:
    body = msgspec.msgpack.encode(record)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def frame_length(prefix: bytes) -> int:
    """Raises TransferBroken for more than any record has."""
    length = int.from_bytes(prefix, "big")
    if length > FRAME_BYTES_MAX:
        raise TransferBroken(f"a record of {length} bytes, allowed are {FRAME_BYTES_MAX}")
    return length


def read_wanted(body: bytes) -> Wanted:
    """Raises TransferBroken."""
    return _read(body, _wanted)


def read_found(body: bytes) -> Found:
    """Raises TransferBroken."""
    return _read(body, _found)


def read_header(body: bytes, bytes_max: int) -> Header:
    """Raises TransferBroken, also for an image above `bytes_max`."""
    header = _read(body, _header)
    if not 0 <= header.size <= bytes_max:
        raise TransferBroken(f"an image of {header.size} bytes, {bytes_max} may come (setting sequence_images_mb)")
    return header


def header_of(image: SequenceImage) -> Header:
    history = encode_touches(image.history) if image.history else b""
    bare = Header(image.offset, *image.run, image.told, image.frozen_ms, len(image.content), 0)
    checksum = _checksum(bare, image.content)
    return replace(bare, checksum=checksum, history=history, history_checksum=zlib.crc32(history))


def image_of(header: Header, content: bytes) -> SequenceImage:
    """Raises TransferBroken for one that was altered on its way."""
    if _checksum(header, content) != header.checksum or zlib.crc32(header.history) != header.history_checksum:
        raise TransferBroken(f"the image of offset {header.offset} does not have its checksum")
    run = Run(header.worker, header.incarnation, header.attempt)
    history = decode_touches(header.history) if header.history else ()
    return SequenceImage(header.offset, run, header.told, header.frozen_ms, content, history)


def _checksum(header: Header, content: bytes) -> int:
    """The same in every release: fields that were added later are not in it."""
    one = header
    first = (one.offset, one.worker, one.incarnation, one.attempt, one.told, one.frozen_ms, one.size, 0)
    return zlib.crc32(content, zlib.crc32(msgspec.msgpack.encode(first)))


_Record = TypeVar("_Record")
_wanted = msgspec.msgpack.Decoder(Wanted)
_found = msgspec.msgpack.Decoder(Found)
_header = msgspec.msgpack.Decoder(Header)


def _read(body: bytes, decoder: msgspec.msgpack.Decoder[_Record]) -> _Record:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:  # deep arrays where fields may follow
        raise TransferBroken(f"a record cannot be read: {error}") from error
