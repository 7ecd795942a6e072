"""Images of running requests over sockets of this machine: whole, cut off, altered, too large, refused."""

from __future__ import annotations

import re
import socket
import threading
import zlib
from collections.abc import Callable, Iterator

import msgspec
import pytest

from gpu_worker.edge import image_exchange
from gpu_worker.edge.image_exchange import ASKING_MAX, CONNECTIONS_MAX, ImageExchange
from gpu_worker.sequence_images import (
    FRAME_BYTES_MAX,
    Found,
    Header,
    ImagesFetched,
    ImagesTaken,
    Run,
    SequenceImage,
    TransferBroken,
    Wanted,
    framed,
    header_of,
    image_of,
    parse_address,
)
from sie_stream.edge.clock import SystemClock
from sie_stream.errors import ConfigError
from sie_stream.ids import TopicPartition
from sie_stream.touches import Moved
from tests.waiting import PATIENCE_S, wait_until

PLACE = TopicPartition("sie.work.m", 1)
PLENTY = 1 << 30
DEEP = b"\x92\x01" + b"\x91" * (FRAME_BYTES_MAX - 2)
"""An array with what a later release may put behind its first field, deeper than a decoder goes."""


def image(offset: int, size: int = 100_000) -> SequenceImage:
    return SequenceImage(offset, Run("w0", "w0-1", 1), 3, 1_700_000_000_000, bytes([offset]) * size)


@pytest.fixture
def exchange() -> Iterator[ImageExchange]:
    made = ImageExchange("127.0.0.1", SystemClock())
    made.start(lambda: None)
    yield made
    made.close()


def fetched(client: ImageExchange, images_at: str, bytes_max: int = PLENTY) -> ImagesFetched:
    client.fetch(PLACE, 7, images_at, bytes_max)
    found: list[ImagesFetched] = []

    def came() -> bool:
        found.extend(one for one in client.poll() if isinstance(one, ImagesFetched))
        return bool(found)

    wait_until(came, "the images")
    assert (found[0].partition, found[0].placement_epoch) == (PLACE, 7)
    return found[0]


def test_images_come_whole_and_once(exchange: ImageExchange) -> None:
    other = ImageExchange("127.0.0.1", SystemClock())
    woken = threading.Event()
    other.start(woken.set)
    images = [image(4), image(9, 0), image(11, 5_000_000)]
    for one in images:
        other.keep(PLACE, one)
    other.keep(TopicPartition("sie.work.m", 2), image(1))
    got = fetched(exchange, other.address)
    assert (list(got.images), got.message) == (images, "")
    assert list(other.poll()) == [ImagesTaken(PLACE)]
    assert woken.is_set()
    assert not fetched(exchange, other.address).images, "they are given once"
    other.drop(TopicPartition("sie.work.m", 2))
    other.close()


def test_one_who_does_not_know_the_secret_gets_nothing(exchange: ImageExchange) -> None:
    exchange.keep(PLACE, image(4))
    address = parse_address(exchange.address)
    wrong = fetched(exchange, str(address._replace(secret="0" * 32)))
    assert not wrong.images
    assert "too early" in wrong.message
    assert len(fetched(exchange, exchange.address).images) == 1, "they are still there"


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", " 0.0.0.0", "*"])
def test_an_address_that_others_cannot_fetch_at_is_refused(host: str) -> None:
    """A server listens there gladly, and every other worker would ask itself."""
    with pytest.raises(ConfigError, match="Expected the address by which the other workers reach this machine"):
        ImageExchange(host, SystemClock())


@pytest.mark.parametrize("text", ["", "here", "127.0.0.1:9", "127.0.0.1#x", ":9#x", "h:0#x", "h:70000#x", "h:a#x"])
def test_what_is_no_address_is_told_and_not_asked(exchange: ImageExchange, text: str) -> None:
    got = fetched(exchange, text)
    assert not got.images
    assert "host:port#secret" in got.message


def test_a_host_that_can_have_no_such_name_is_told(exchange: ImageExchange) -> None:
    assert fetched(exchange, f"{'x' * 70}.example:9#secret").message
    assert fetched(exchange, "a\0b:9#secret").message
    exchange.keep(PLACE, image(4))
    assert len(fetched(exchange, exchange.address).images) == 1, "it still works"


def test_a_worker_that_is_gone_is_told_and_not_asked_again_for_a_while(exchange: ImageExchange) -> None:
    gone = ImageExchange("127.0.0.1", SystemClock())
    gone.close()
    first, second = fetched(exchange, gone.address), fetched(exchange, gone.address)
    assert not first.images
    assert "refused" in first.message
    assert "a moment ago" in second.message


def test_more_than_there_is_room_for_is_left(exchange: ImageExchange) -> None:
    for number in range(3):
        exchange.keep(PLACE, image(number, 1_000))
    got = fetched(exchange, exchange.address, 2_500)
    assert [one.offset for one in got.images] == [0, 1]
    assert "500 may come" in got.message
    assert "sequence_images_mb" in got.message


def test_a_host_that_is_none_of_this_machine_is_named() -> None:
    with pytest.raises(ConfigError, match=re.escape("sequence_images_host = '192.0.2.1'")):
        ImageExchange("192.0.2.1", SystemClock())


# ---------------------------------------------------------------- a peer that is not in order


def answered(answer: Callable[[socket.socket], object], client: ImageExchange) -> ImagesFetched:
    """What the client makes of a server that writes something of its own."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(FRAME_BYTES_MAX)
            answer(connection)

    thread = threading.Thread(target=serve)
    thread.start()
    got = fetched(client, f"127.0.0.1:{server.getsockname()[1]}#secret")
    thread.join(PATIENCE_S)
    server.close()
    return got


def whole(*images: SequenceImage) -> bytes:
    return framed(Found(len(images))) + b"".join(framed(header_of(one)) + one.content for one in images)


@pytest.mark.parametrize("cut", [1, 3, 5, 40, 1_200, 1_850])
def test_what_was_cut_off_is_not_used_and_what_came_whole_is(exchange: ImageExchange, cut: int) -> None:
    sent = whole(image(1, 900), image(2, 900))
    got = answered(lambda peer: peer.sendall(sent[: len(sent) - cut]), exchange)
    assert [one.offset for one in got.images] == ([1] if cut < 990 else [])
    assert "too early" in got.message


def test_every_altered_byte_is_noticed() -> None:
    one = image(3, 50)
    header = header_of(one)
    assert image_of(header, one.content) == one
    for place in range(50):
        altered = bytearray(one.content)
        altered[place] ^= 16
        with pytest.raises(TransferBroken, match="checksum"):
            image_of(header, bytes(altered))
    for name, value in (("offset", 4), ("worker", "w9"), ("incarnation", "x"), ("attempt", 0), ("told", 4)):
        with pytest.raises(TransferBroken, match="checksum"):
            image_of(msgspec.structs.replace(header, **{name: value}), one.content)


def test_the_history_comes_along_and_other_releases_read_what_they_know() -> None:
    moved = Moved("w0", "w0-1", 1_000, 2_000, 50)
    one = msgspec.structs.replace(image(3, 50), history=(moved,))
    header = header_of(one)
    assert image_of(header, one.content) == one
    before = msgspec.msgpack.decode(framed(header)[4:])[:8]
    older = msgspec.msgpack.decode(msgspec.msgpack.encode(before), type=Header)
    assert image_of(older, one.content) == image(3, 50), "an older release has no history"
    assert header.checksum == zlib.crc32(one.content, zlib.crc32(msgspec.msgpack.encode([*before[:7], 0])))
    assert header.checksum == header_of(image(3, 50)).checksum, "nor looks at it"
    with pytest.raises(TransferBroken, match="checksum"):
        image_of(msgspec.structs.replace(header, history=header.history + b" "), one.content)
    many = msgspec.structs.replace(one, history=(moved,) * 400)
    assert len(framed(header_of(many))) < FRAME_BYTES_MAX


def test_an_altered_image_is_not_used(exchange: ImageExchange) -> None:
    sent = bytearray(whole(image(1, 900), image(2, 900)))
    sent[-1] ^= 1
    got = answered(lambda peer: peer.sendall(sent), exchange)
    assert [one.offset for one in got.images] == [1]
    assert "checksum" in got.message


@pytest.mark.parametrize(
    "sent",
    [
        b"\xff\xff\xff\xff" + b"x" * 100,
        b"\x00\x00\x00\x04nope",
        framed(Wanted("a", "b", 1)),
        framed(Found(1)) + b"\x00\x00\x00\x01\x90",
        framed(Found(1)) + framed(Header(1, "w", "i", 0, 0, 0, -5, 0)),
        framed(Found(1)) + framed(Header(1, "w", "i", 0, 0, 0, 1 << 60, 0)),
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        len(DEEP).to_bytes(4, "big") + DEEP,
    ],
)
def test_garbage_is_told_and_not_used(exchange: ImageExchange, sent: bytes) -> None:
    got = answered(lambda peer: peer.sendall(sent), exchange)
    assert not got.images
    assert got.message
    exchange.keep(PLACE, image(4))
    assert len(fetched(exchange, exchange.address).images) == 1, "it still fetches"


def test_a_peer_that_says_nothing_is_left_in_time(exchange: ImageExchange, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_exchange, "FETCH_S", 0.1)
    got = answered(lambda peer: peer.recv(1), exchange)
    assert not got.images
    assert "timed out" in got.message


def test_a_peer_that_stands_still_is_waited_for_once(exchange: ImageExchange, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel goes on taking connections. Every partition that came from it would wait as long as the first."""
    monkeypatch.setattr(image_exchange, "FETCH_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        images_at = f"127.0.0.1:{stopped.getsockname()[1]}#secret"
        assert "timed out" in fetched(exchange, images_at).message
        assert "a moment ago" in fetched(exchange, images_at).message


def test_whoever_connects_and_says_nothing_keeps_nobody_out(exchange: ImageExchange) -> None:
    exchange.keep(PLACE, image(4))
    host, port, _ = parse_address(exchange.address)
    peers = [socket.create_connection((host, port)) for _ in range(ASKING_MAX + 8)]
    assert len(fetched(exchange, exchange.address).images) == 1
    assert peers[0].recv(1) == b"", "the oldest had to go"
    for peer in peers:
        peer.close()


def test_a_server_that_could_not_take_a_connection_takes_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    made = ImageExchange("127.0.0.1", SystemClock())
    server, failures = made._server, [OSError(24, "Too many open files")] * 2

    class Short:
        """A server socket in a process without file descriptors, for a while."""

        def accept(self) -> tuple[socket.socket, object]:
            if failures:
                raise failures.pop()
            return server.accept()

        def close(self) -> None:
            server.close()

    monkeypatch.setattr(image_exchange, "ACCEPT_AGAIN_S", 0.01)
    monkeypatch.setattr(made, "_server", Short())
    made.start(lambda: None)
    made.keep(PLACE, image(4))
    assert len(fetched(made, made.address).images) == 1
    made.close()


@pytest.mark.parametrize("sent", [b"", b"\xff\xff\xff\xff", b"GET / HTTP/1.1\r\n\r\n", b"\x00\x00\x00\x02xx"])
def test_whoever_asks_for_something_else_gets_nothing_and_holds_nobody_up(exchange: ImageExchange, sent: bytes) -> None:
    exchange.keep(PLACE, image(4))
    host, port, _ = parse_address(exchange.address)
    peers = [socket.create_connection((host, port)) for _ in range(CONNECTIONS_MAX - 1)]
    for peer in peers:
        peer.sendall(sent)
    assert len(fetched(exchange, exchange.address).images) == 1
    for peer in peers:
        peer.close()
