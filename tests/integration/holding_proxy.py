"""A TCP proxy before a broker that can keep Produce requests back, as a broker does that stands still in the middle."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from types import TracebackType
from typing import Self

PRODUCE = 0
HOST = "127.0.0.1"


class HoldingProxy:
    """Forwards every connection. While `hold` is set, Produce requests (and what follows them on their connection) wait
    here: their client may give the connection up, the broker gets them at `release`."""

    def __init__(self) -> None:
        self._listener = socket.create_server((HOST, 0))
        self.port: int = self._listener.getsockname()[1]
        self._broker_port = 0
        self._free = threading.Event()
        self._free.set()
        self.holds = threading.Event()
        """A request is being kept back."""

    def forward_to(self, broker_port: int) -> None:
        self._broker_port = broker_port
        threading.Thread(target=self._accept, daemon=True).start()

    def hold(self) -> None:
        self._free.clear()

    def release(self) -> None:
        self._free.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                broker = socket.create_connection((HOST, self._broker_port))
                threading.Thread(target=self._requests, args=(client, broker), daemon=True).start()
                threading.Thread(target=self._answers, args=(broker, client), daemon=True).start()

    def _requests(self, client: socket.socket, broker: socket.socket) -> None:
        with contextlib.suppress(OSError), client, broker, client.makefile("rb") as stream:
            while len(head := stream.read(4)) == 4:
                body = stream.read(struct.unpack(">i", head)[0])
                if struct.unpack(">h", body[:2])[0] == PRODUCE and not self._free.is_set():
                    self.holds.set()
                    self._free.wait()
                broker.sendall(head + body)

    def _answers(self, broker: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := broker.recv(65_536):
                with contextlib.suppress(OSError):  # the client gave up; what it had asked for is still carried out
                    client.sendall(data)
            client.shutdown(socket.SHUT_RDWR)
