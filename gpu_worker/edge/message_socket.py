"""Length-prefixed messages over a stream socket. The host's end never blocks: a hanging engine must not hang it."""

from __future__ import annotations

import select
import socket
from collections import deque

LENGTH_BYTES = 4
READ_BYTES = 256 * 1024
BUFFER_BYTES = 4 * 1024 * 1024


class PeerClosed(Exception):
    """The other process is gone."""


class HostSocket:
    """The host's end: what cannot be sent at once waits in memory."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        self._socket = end
        self._unsent: deque[memoryview] = deque()
        self._received = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: bytes) -> None:
        """Raises PeerClosed."""
        self._unsent.append(memoryview(len(message).to_bytes(LENGTH_BYTES, "big") + message))
        self.flush()

    @property
    def wants_to_send(self) -> bool:
        return bool(self._unsent)

    def flush(self) -> None:
        """Send what the socket takes. Raises PeerClosed."""
        while self._unsent:
            view = self._unsent[0]
            try:
                sent = self._socket.send(view)
            except BlockingIOError:
                return
            except (BrokenPipeError, ConnectionResetError) as error:
                raise PeerClosed(str(error)) from error
            if sent == len(view):
                self._unsent.popleft()
            else:
                self._unsent[0] = view[sent:]

    def receive(self) -> list[bytes]:
        """All complete messages that are there. Raises PeerClosed once nothing more will come."""
        try:
            chunk = self._socket.recv(READ_BYTES)
        except BlockingIOError:
            return []
        except ConnectionResetError as error:
            raise PeerClosed(str(error)) from error
        if not chunk:
            raise PeerClosed("end of stream")
        buffer = self._received
        buffer += chunk
        messages: list[bytes] = []
        start = 0
        while len(buffer) - start >= LENGTH_BYTES:
            length = int.from_bytes(buffer[start : start + LENGTH_BYTES], "big")
            end = start + LENGTH_BYTES + length
            if end > len(buffer):
                break
            messages.append(bytes(buffer[start + LENGTH_BYTES : end]))
            start = end
        del buffer[:start]
        return messages

    def close(self) -> None:
        self._socket.close()


class EngineSocket:
    """The engine's end: plain blocking calls."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(True)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        self._socket = end

    def send(self, message: bytes) -> None:
        """Raises PeerClosed."""
        try:
            self._socket.sendall(len(message).to_bytes(LENGTH_BYTES, "big") + message)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise PeerClosed(str(error)) from error

    def readable(self) -> bool:
        """Whether receive() has something to read now; it may still wait for the rest of a message."""
        return bool(select.select([self._socket], [], [], 0)[0])

    def receive(self) -> bytes:
        """The next message. Raises PeerClosed."""
        return self._exactly(int.from_bytes(self._exactly(LENGTH_BYTES), "big"))

    def _exactly(self, count: int) -> bytes:
        buffer = bytearray(count)
        view = memoryview(buffer)
        while view:
            try:
                got = self._socket.recv_into(view)
            except ConnectionResetError as error:
                raise PeerClosed(str(error)) from error
            if not got:
                raise PeerClosed("end of stream")
            view = view[got:]
        return bytes(buffer)
