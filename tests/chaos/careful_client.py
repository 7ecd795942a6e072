"""A client that loses nothing it was asked to send: each request counts as sent when Kafka has confirmed it."""

from __future__ import annotations

import time
from collections.abc import Iterable

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from sie_stream.records import LogWrite

SILENCE_S = 30.0
"""A producer that confirms nothing for so long is replaced: some never recover (see sie_stream/edge/kafka_pulse.py)."""
GIVE_UP_S = 10.0
"""How long one producer tries one record. Shorter than SILENCE_S, so that what it gave up is seen first."""


class CarefulClient:
    """Sends again whatever was not confirmed. Copies carry the same request id: ingress drops the second."""

    def __init__(self, bootstrap: str) -> None:
        self._bootstrap = bootstrap
        self._unconfirmed: dict[bytes, LogWrite] = {}
        """By key, which is the request id: handed to the producer, or waiting to be."""
        self._unsent: list[bytes] = []
        self._producer = self._new_producer()

    def _new_producer(self) -> Producer:
        self._confirmed_at = time.monotonic()
        settings = {"enable.idempotence": True, "linger.ms": 2, "message.timeout.ms": int(GIVE_UP_S * 1000)}
        return Producer({"bootstrap.servers": self._bootstrap, **settings, "on_delivery": self._delivered})

    @property
    def unconfirmed(self) -> int:
        return len(self._unconfirmed)

    def send(self, writes: Iterable[LogWrite]) -> None:
        """Never raises for what a broker that is away can cause."""
        for write in writes:
            assert write.key is not None
            self._unconfirmed[write.key] = write
            self._unsent.append(write.key)
        self.turn()

    def turn(self) -> None:
        """Takes reports of deliveries, and hands over what still has to be sent."""
        self._producer.poll(0)
        if not self._unconfirmed:
            self._confirmed_at = time.monotonic()
        elif time.monotonic() - self._confirmed_at > SILENCE_S:
            self._start_again()
        while self._unsent and self._handed_over(self._unconfirmed[self._unsent[0]]):
            del self._unsent[0]

    def _handed_over(self, write: LogWrite) -> bool:
        try:
            self._producer.produce(write.topic, write.value, write.key, headers=list(write.headers))
        except BufferError:
            return False
        except KafkaException as raised:
            error = raised.args[0]
            if isinstance(error, KafkaError) and error.fatal():
                self._start_again()
            return False
        return True

    def _start_again(self) -> None:
        self._producer.purge()
        self._producer.poll(0)
        self._producer = self._new_producer()
        self._unsent = list(self._unconfirmed)

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        name = message.key()
        assert isinstance(name, bytes)
        if error is None:
            self._unconfirmed.pop(name, None)
            self._confirmed_at = time.monotonic()
        elif name in self._unconfirmed and name not in self._unsent:
            self._unsent.append(name)
