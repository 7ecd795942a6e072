"""Engine processes as the host sees them: started when needed, spoken to over sockets, watched for their end."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from gpu_worker.backends.base import EngineInput
from gpu_worker.edge.cgroup import EngineGroup, EngineGroups
from gpu_worker.edge.device_arena import DeviceArena
from gpu_worker.edge.engine_ended import cause_of, oom_kills
from gpu_worker.edge.engine_events import event_of
from gpu_worker.edge.engine_models import ArenaOption
from gpu_worker.edge.engine_output import EngineOutput, join_all
from gpu_worker.edge.message_socket import HostSocket, PeerClosed
from gpu_worker.engine_messages import (
    Activate,
    Cancel,
    Deactivate,
    Export,
    Load,
    MoveImage,
    Run,
    ToEngine,
    Unload,
    decode_from_engine,
    encode_message,
)
from gpu_worker.engine_port import EngineDied, EngineEvent, EngineKey, ModelLoaded
from gpu_worker.isolation import EngineLimits, limits_on_trial
from gpu_worker.memory.slots import Below
from sie_stream.control import TRIAL, ModelLaunch
from sie_stream.edge.clock import SystemClock

MODULE = "gpu_worker.edge.engine_process"
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "RAYON_NUM_THREADS",
)
OUTPUT_WAIT_S = 1.0
"""For the last output of all engines together, when the worker ends."""


@dataclass(slots=True, eq=False)
class _Child:
    key: EngineKey
    process: subprocess.Popen[bytes]
    socket: HostSocket
    oom_kills: int = 0
    """Out-of-memory kills of this machine when the process became the engine."""
    group: EngineGroup | None = None


class EngineLinks:
    """Implements EnginePort. Used from one thread, except wake()."""

    def __init__(
        self,
        threads: int,
        limits: Mapping[str, EngineLimits] | None = None,
        environment: Mapping[str, str] | None = None,
        groups: EngineGroups | None = None,
        arenas: Mapping[str, DeviceArena] | None = None,
        kv_tier_bytes: int = 0,
        spares: Collection[str] = (),
    ) -> None:
        """`limits`: by device (see gpu_worker/isolation.py). `groups`: cgroups of engines, where there are any.
        `arenas`: by device, of those that have a budget. `kv_tier_bytes`: memory of each engine that outlives its
        process (setting kv_tier_mb). `spares`: backends whose engines have a second process that waits to take over
        (setting spare_engines)."""
        self._threads = threads
        self._arenas = arenas or {}
        self._limits = limits or {}
        self._groups = groups
        self._tier_bytes = kv_tier_bytes
        self._tiers: dict[EngineKey, int] = {}
        """File descriptors of that memory: ours, so that it is there as long as we are."""
        self._environment = {
            **os.environ,
            **dict.fromkeys(THREAD_VARIABLES, str(threads)),
            "TOKENIZERS_PARALLELISM": "false",
            **(environment or {}),
        }
        self._spare_backends = spares
        self._spares: dict[EngineKey, _Child] = {}
        self._children: dict[EngineKey, _Child] = {}
        self._by_fd: dict[int, _Child] = {}
        self._killed: list[subprocess.Popen[bytes]] = []
        self._outputs: list[EngineOutput] = []
        """Of all engines whose output has not ended."""
        self._emptying: list[EngineGroup] = []
        """Groups of engines that ended, until the kernel lets them go."""
        self._events: list[EngineEvent] = []
        self._epoll = select.epoll()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake_fd, select.EPOLLIN)

    def wake(self) -> None:
        """End the wait of poll() from another thread."""
        os.eventfd_write(self._wake_fd, 1)

    def pids(self) -> dict[EngineKey, int]:
        return {key: child.process.pid for key, child in self._children.items()}

    def start(self, engine: EngineKey) -> None:
        """Start its process unless there is one, or the end of the last one is still to be told: then models are loaded
        again anyway, and this process would be taken for the one that ended."""
        ended = any(isinstance(event, EngineDied) and event.engine == engine for event in self._events)
        if engine not in self._children and not ended:
            self._start(engine)

    # ------------------------------------------------------------ EnginePort

    def load(self, engine: EngineKey, slot: int, launch: ModelLaunch) -> None:
        self.start(engine)
        self._tell(engine, Load(slot, msgspec.json.encode(launch)))

    def unload(self, engine: EngineKey, slot: int) -> None:
        self._tell(engine, Unload(slot))

    def submit(
        self, engine: EngineKey, batch_id: int, slot: int, items: Sequence[EngineInput], image: bytes = b""
    ) -> None:
        self._tell(engine, Run(batch_id, slot, items if isinstance(items, list) else list(items), image))

    def export(self, engine: EngineKey, batch_ids: Sequence[int], bytes_max: int) -> None:
        self._tell(engine, Export(list(batch_ids), bytes_max))

    def cancel(self, engine: EngineKey, batch_id: int) -> None:
        self._tell(engine, Cancel(batch_id))

    def activate(self, engine: EngineKey, slot: int, pages: Sequence[int]) -> None:
        self._tell(engine, Activate(slot, list(pages)))

    def deactivate(self, engine: EngineKey, slot: int) -> None:
        self._tell(engine, Deactivate(slot))

    def move_image(self, engine: EngineKey, slot: int, to: Below) -> None:
        self._tell(engine, MoveImage(slot, to))

    def stop(self, engine: EngineKey) -> None:
        self._end_spare(engine)
        child = self._children.get(engine)
        if child is None:
            return
        self._forget(child)
        child.process.kill()
        if engine.device in self._arenas or self._tier_bytes:
            child.process.wait()  # its pages or blocks go to others now, and it may be just writing to them
        self._killed.append(child.process)

    def poll(self, wait_ms: float) -> list[EngineEvent]:
        for fd, mask in self._epoll.poll(0 if self._events else wait_ms / 1000.0):
            if fd == self._wake_fd:
                os.eventfd_read(fd)
                continue
            child = self._by_fd.get(fd)
            if child is not None:
                self._serve(child, mask)
        if self._killed:
            self._killed = [process for process in self._killed if process.poll() is None]
        if self._emptying:
            self._emptying = [group for group in self._emptying if not group.remove()]
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        for engine in list(self._spares):
            self._end_spare(engine)
        for child in self._children.values():
            child.process.kill()  # all of them first: the end of one with much memory takes a while
        for child in list(self._children.values()):
            self.stop(child.key)
        for process in self._killed:
            process.wait()
        self._killed.clear()
        join_all(self._outputs, OUTPUT_WAIT_S, SystemClock())
        for group in self._emptying:
            group.remove()
        for fd in self._tiers.values():
            os.close(fd)
        self._tiers.clear()
        self._epoll.close()
        os.close(self._wake_fd)

    # ------------------------------------------------------------ processes

    def _start(self, engine: EngineKey) -> None:
        spare = self._spares.get(engine)
        if spare is not None and spare.process.poll() is not None:
            self._end_spare(engine)  # nobody listened to it: it ended some time ago
        kills = oom_kills()
        child = self._spares.pop(engine, None) or self._launched(engine)
        child.oom_kills = kills
        self._children[engine] = child
        self._by_fd[child.socket.fileno()] = child
        self._epoll.register(child.socket.fileno(), select.EPOLLIN)

    def _keep_spare(self, engine: EngineKey) -> None:
        """Only now that a model is loaded: before, it would take processor time from the one that loads. None for
        versions on trial: they are gone soon, and their keys go back when their engine is away."""
        if engine.domain or engine.backend not in self._spare_backends or engine in self._spares:
            return
        try:
            self._spares[engine] = self._launched(engine)
        except OSError as error:  # the engine itself runs, and starts anew without one
            sys.stderr.write(f"engine {engine.name} on {engine.device}: no spare process: {error}\n")

    def _end_spare(self, engine: EngineKey) -> None:
        spare = self._spares.pop(engine, None)
        if spare is not None:
            spare.socket.close()
            self._kill(spare)

    def _kill(self, child: _Child) -> None:
        child.process.kill()
        self._killed.append(child.process)
        if child.group is not None:
            self._emptying.append(child.group)

    def _launched(self, engine: EngineKey) -> _Child:
        """A process that imports its backend and then waits; nobody listens to it yet."""
        ours, theirs = socket.socketpair()
        limits = self._limits.get(engine.device, EngineLimits())
        if engine.domain == TRIAL:
            limits = limits_on_trial(limits, self._threads)
        command = [
            *(sys.executable, "-m", MODULE),
            *("--fd", str(theirs.fileno()), "--parent", str(os.getpid())),
            *("--backend", engine.backend, "--device", engine.device),
            *("--limits", msgspec.json.encode(limits).decode()),
        ]
        inherited = [theirs.fileno()]
        if self._tier_bytes:
            inherited.append(self._tier(engine))
            command += ["--kv-tier", str(inherited[-1])]
        arena = self._arenas.get(engine.device)
        if arena is not None:
            option = ArenaOption(arena.file, arena.page_bytes, str(arena.folder))
            command += ["--arena", msgspec.json.encode(option).decode()]
            inherited.append(arena.file)
        with theirs:
            process = self._spawned(engine, command, inherited)
        # The kernel counts the tier where it was first written to: in the engine's group.
        memory_bytes = limits.memory_bytes and limits.memory_bytes + self._tier_bytes
        group = self._groups.hold(process.pid, memory_bytes) if self._groups else None
        return _Child(engine, process, HostSocket(ours), group=group)

    def _spawned(self, engine: EngineKey, command: Sequence[str], inherited: Sequence[int]) -> subprocess.Popen[bytes]:
        output = EngineOutput(f"engine {engine.name} on {engine.device}", sys.stderr.fileno(), SystemClock())
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output.write_fd,
                stderr=output.write_fd,
                env=self._environment,
                pass_fds=inherited,
                start_new_session=True,  # a terminal's Ctrl-C is for the host, also while the engine still imports
            )
        except OSError:
            output.give_up()
            raise
        output.start()
        self._outputs = [*(one for one in self._outputs if one.open), output]
        return process

    def _tier(self, engine: EngineKey) -> int:
        """Memory without a name: it is gone when this process and the engine are. Takes none until it is written to."""
        if engine not in self._tiers:
            self._tiers[engine] = os.memfd_create("sie-kv", os.MFD_CLOEXEC)
            os.ftruncate(self._tiers[engine], self._tier_bytes)
        return self._tiers[engine]

    def _tell(self, engine: EngineKey, message: ToEngine) -> None:
        child = self._children.get(engine)
        if child is None:
            return  # it died; the event that says so is on its way
        try:
            child.socket.send(encode_message(message))
        except PeerClosed:
            self._died(child)
            return
        if child.socket.wants_to_send:
            self._epoll.modify(child.socket.fileno(), select.EPOLLIN | select.EPOLLOUT)

    def _serve(self, child: _Child, mask: int) -> None:
        try:
            if mask & select.EPOLLOUT:
                child.socket.flush()
                if not child.socket.wants_to_send:
                    self._epoll.modify(child.socket.fileno(), select.EPOLLIN)
            if mask & ~select.EPOLLOUT:
                for message in child.socket.receive():
                    event = event_of(child.key, decode_from_engine(message))
                    self._events.append(event)
                    if isinstance(event, ModelLoaded):
                        self._keep_spare(child.key)
        except PeerClosed:
            self._died(child)

    def _died(self, child: _Child) -> None:
        self._forget(child)
        self._events.append(EngineDied(child.key, cause_of(child.process, lambda: self._out_of_memory(child))))

    def _out_of_memory(self, child: _Child) -> bool:
        return oom_kills() > child.oom_kills if child.group is None else child.group.oom_kills() > 0

    def _forget(self, child: _Child) -> None:
        del self._children[child.key]
        del self._by_fd[child.socket.fileno()]
        self._epoll.unregister(child.socket.fileno())
        child.socket.close()
        if child.group is not None:
            self._emptying.append(child.group)
