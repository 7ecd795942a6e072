"""Images of running requests over sockets of this machine: whole, cut off, altered, too large, refused."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable, Iterator

import msgspec
import pytest

from gpu_worker.edge import image_exchange
from gpu_worker.edge.image_exchange import CONNECTIONS_MAX, ImageExchange
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
from tests.waiting import PATIENCE_S, wait_until

PLACE = TopicPartition("sie.work.m", 1)
PLENTY = 1 << 30


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


@pytest.mark.parametrize("text", ["", "here", "127.0.0.1:9", "127.0.0.1#x", ":9#x", "h:0#x", "h:70000#x", "h:a#x"])
def test_what_is_no_address_is_told_and_not_asked(exchange: ImageExchange, text: str) -> None:
    got = fetched(exchange, text)
    assert not got.images
    assert "host:port#secret" in got.message


def test_a_host_that_can_have_no_such_name_is_told(exchange: ImageExchange) -> None:
    assert fetched(exchange, f"{'x' * 70}.example:9#secret").message
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
    ],
)
def test_garbage_is_told_and_not_used(exchange: ImageExchange, sent: bytes) -> None:
    got = answered(lambda peer: peer.sendall(sent), exchange)
    assert not got.images
    assert got.message


def test_a_peer_that_says_nothing_is_left_in_time(exchange: ImageExchange, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_exchange, "FETCH_S", 0.1)
    got = answered(lambda peer: peer.recv(1), exchange)
    assert not got.images
    assert "timed out" in got.message


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
