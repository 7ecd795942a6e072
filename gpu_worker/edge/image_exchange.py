"""Images of running requests over TCP: a server for the next owners of our partitions, and a client to the last ones.

Both are bounded: in bytes by who asks them, in connections, and in time, because an image that comes late is worth
nothing. They end with the process.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import NamedTuple

from gpu_worker.sequence_images import (
    LENGTH_BYTES,
    Address,
    Found,
    ImagesFetched,
    ImagesTaken,
    SequenceImage,
    TransferBroken,
    Wanted,
    frame_length,
    framed,
    header_of,
    image_of,
    parse_address,
    read_found,
    read_header,
    read_wanted,
)
from sie_stream.errors import ConfigError
from sie_stream.ids import TopicPartition
from sie_stream.ports import Clock

CONNECT_S = 1.0
FETCH_S = 3.0
"""For all images of a partition."""
ASK_S = 1.0
"""For whoever connects to say what it wants."""
SERVE_S = 5.0
CONNECTIONS_MAX = 8
"""How many are given images at once."""
ASKING_MAX = 32
"""How many may be about to say what they want: of more, the oldest has to go."""
ACCEPT_AGAIN_S = 0.2
"""After a connection could not be taken: no file descriptor may be left for a while."""
UNREACHABLE_MS = 10_000.0
"""A host that did not answer is not asked again for so long: partitions wait for the answers."""
ANY_ADDRESS = ("", "0.0.0.0", "::", "[::]", "*")
READ_BYTES = 1024 * 1024


class _Order(NamedTuple):
    partition: TopicPartition
    placement_epoch: int
    images_at: str
    bytes_max: int


class ImageExchange:
    """Implements ImagesPort with two threads, and one for each connection.

    Raises ConfigError for a host that is none of this machine.
    """

    def __init__(self, host: str, clock: Clock) -> None:
        self._wake: Callable[[], None] | None = None
        self._clock = clock
        self._kept: dict[TopicPartition, list[SequenceImage]] = {}
        self._lock = threading.Lock()
        """Guards _kept."""
        self._happened: SimpleQueue[ImagesFetched | ImagesTaken] = SimpleQueue()
        self._orders: SimpleQueue[_Order | None] = SimpleQueue()
        self._unreachable: dict[tuple[str, int], float] = {}
        self._room = threading.BoundedSemaphore(CONNECTIONS_MAX)
        self._asking: dict[socket.socket, None] = {}
        """Those who connected and have not said yet what they want, in that order."""
        self._closed = threading.Event()
        if host.strip() in ANY_ADDRESS:
            raise ConfigError(
                f"setting sequence_images_host = {host!r}: others are told to fetch at this address, and it is none. "
                "Expected the address by which the other workers reach this machine."
            )
        try:
            self._server = socket.create_server((host, 0))
        except OSError as error:
            raise ConfigError(
                f"setting sequence_images_host = {host!r}: {error}. Expected an address of this machine, such as "
                "127.0.0.1, or one that the other workers reach."
            ) from error
        self._address = Address(host, self._server.getsockname()[1], secrets.token_hex(16))

    @property
    def address(self) -> str:
        """What others need to fetch; with the secret."""
        return str(self._address)

    def start(self, wake: Callable[[], None]) -> None:
        """`wake` ends the wait of the worker's loop."""
        self._wake = wake
        for name, work in (("images-server", self._serve), ("images-fetcher", self._fetch_all)):
            threading.Thread(target=work, name=name, daemon=True).start()

    def close(self) -> None:
        self._closed.set()
        self._wake = None
        self._orders.put(None)
        self._server.close()

    # ------------------------------------------------------------ ImagesPort

    def keep(self, partition: TopicPartition, image: SequenceImage) -> None:
        with self._lock:
            self._kept.setdefault(partition, []).append(image)

    def drop(self, partition: TopicPartition) -> None:
        with self._lock:
            self._kept.pop(partition, None)

    def fetch(self, partition: TopicPartition, placement_epoch: int, images_at: str, bytes_max: int) -> None:
        self._orders.put(_Order(partition, placement_epoch, images_at, bytes_max))

    def poll(self) -> list[ImagesFetched | ImagesTaken]:
        found: list[ImagesFetched | ImagesTaken] = []
        while not self._happened.empty():
            found.append(self._happened.get())
        return found

    def _tell(self, event: ImagesFetched | ImagesTaken) -> None:
        self._happened.put(event)
        wake = self._wake
        if wake is not None:
            wake()

    # ------------------------------------------------------------ server

    def _serve(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._server.accept()
            except OSError as error:  # closed, or no file descriptor is left
                if not self._closed.is_set():
                    sys.stderr.write(f"images of requests: nobody can be answered for a while: {error}\n")
                    self._closed.wait(ACCEPT_AGAIN_S)
                continue
            self._make_way(connection)
            try:
                threading.Thread(target=self._answer, args=(connection,), name="images-answer", daemon=True).start()
            except RuntimeError as error:  # no thread is left
                sys.stderr.write(f"images of requests: one who asked is not answered: {error}\n")
                self._has_asked(connection)
                connection.close()

    def _make_way(self, newest: socket.socket) -> None:
        """So that those who connect and say nothing keep nobody out."""
        with self._lock:
            self._asking[newest] = None
            over = list(self._asking)[:-ASKING_MAX]
        for connection in over:
            with suppress(OSError):  # it has ended by itself
                connection.shutdown(socket.SHUT_RDWR)

    def _answer(self, connection: socket.socket) -> None:
        """One partition's images, to one who knows the secret. They are given once: sent or lost, they are gone."""
        known = False
        try:
            with connection:
                wanted = read_wanted(_Wire(connection, self._clock, ASK_S).record())
                known = hmac.compare_digest(wanted.secret.encode(), self._address.secret.encode())
                self._has_asked(connection)
                if known:
                    with self._room:
                        self._give(_Wire(connection, self._clock, SERVE_S), wanted)
        except (OSError, TransferBroken) as error:
            if known:  # what others send must not fill the log
                sys.stderr.write(f"images of requests: whoever asked got none, or not all: {error}\n")
        finally:
            self._has_asked(connection)

    def _has_asked(self, connection: socket.socket) -> None:
        with self._lock:
            self._asking.pop(connection, None)

    def _give(self, wire: _Wire, wanted: Wanted) -> None:
        place = TopicPartition(wanted.topic, wanted.partition)
        with self._lock:
            images = self._kept.pop(place, [])
        if images:
            self._tell(ImagesTaken(place))
        wire.send(framed(Found(len(images))))
        for image in images:
            wire.send(framed(header_of(image)))
            wire.send(image.content)

    # ------------------------------------------------------------ client

    def _fetch_all(self) -> None:
        while (order := self._orders.get()) is not None:
            images: list[SequenceImage] = []
            message = ""
            try:
                self._fetch(order, images)
            except (OSError, TransferBroken, ValueError, MemoryError) as error:  # those that came whole are used
                message = f"{len(images)} images came whole: {error}"
            self._tell(ImagesFetched(order.partition, order.placement_epoch, images, message))

    def _fetch(self, order: _Order, images: list[SequenceImage]) -> None:
        """Appends what comes. Raises OSError, TransferBroken, ValueError (no name of a host) and MemoryError."""
        host, port, secret = parse_address(order.images_at)
        if self._clock.monotonic_ms() < self._unreachable.get((host, port), 0.0):
            raise TransferBroken(f"{host}:{port} did not answer a moment ago")
        try:
            connection = socket.create_connection((host, port), CONNECT_S)
        except OSError:
            self._unreachable[host, port] = self._clock.monotonic_ms() + UNREACHABLE_MS
            raise
        with connection:
            wire = _Wire(connection, self._clock, FETCH_S)
            wire.send(framed(Wanted(secret, *order.partition)))
            left = order.bytes_max
            for _ in range(self._found(wire, (host, port))):
                header = read_header(wire.record(), left)
                images.append(image_of(header, wire.exactly(header.size)))
                left -= header.size

    def _found(self, wire: _Wire, where: tuple[str, int]) -> int:
        """How many images come. Raises as _fetch."""
        try:
            return read_found(wire.record()).images
        except TimeoutError:  # its kernel takes connections, and the process stands still
            self._unreachable[where] = self._clock.monotonic_ms() + UNREACHABLE_MS
            raise


class _Wire:
    """One connection, for so long in all."""

    def __init__(self, connection: socket.socket, clock: Clock, seconds: float) -> None:
        self._connection = connection
        self._clock = clock
        self._ends_ms = clock.monotonic_ms() + seconds * 1000

    def _set_timeout(self) -> None:
        """Raises TimeoutError once the time is over."""
        left_ms = self._ends_ms - self._clock.monotonic_ms()
        if left_ms <= 0:
            raise TimeoutError("it took too long")
        self._connection.settimeout(left_ms / 1000)

    def send(self, content: bytes) -> None:
        self._set_timeout()
        self._connection.sendall(content)

    def record(self) -> bytes:
        return self.exactly(frame_length(self.exactly(LENGTH_BYTES)))

    def exactly(self, count: int) -> bytes:
        """Raises TransferBroken when the other end closes before."""
        buffer = bytearray(count)
        view = memoryview(buffer)
        while view:
            self._set_timeout()
            got = self._connection.recv_into(view, min(len(view), READ_BYTES))
            if not got:
                raise TransferBroken(f"the connection ended {len(view)} bytes too early")
            view = view[got:]
        return bytes(buffer)
