"""What the scheduler knows of workers, their devices and engines, and what people ordered: parts of the state."""

from __future__ import annotations

from typing import Literal

from msgspec import Raw, Struct

from scheduler.fleet import WorkerStatus
from scheduler.limits import NEVER_MS
from scheduler.places import DevicePlace
from sie_stream.control import Device, Taint


class Cordon(Struct, frozen=True):
    """A worker taken out of service by a person (see maintenance.py)."""

    phase: Literal["cordoned", "draining", "drained"]
    since_ms: int
    actor: str


class Hold(Struct, frozen=True):
    """A topic of which nothing may be removed (see holds.py)."""

    reason: str
    actor: str
    since_ms: int
    offset: int
    """Of its HoldTopic."""


class LostDevice(Struct, frozen=True):
    """A device that its worker reported gone (see devices.py)."""

    cause: str
    since_ms: int
    offset: int
    """Of its DeviceLost."""


class LostAt(Struct, frozen=True):
    """The record that took a serving place from a model."""

    offset: int
    kind: str


class EngineDeath(Struct, frozen=True):
    """One end of an engine process (see engines.py)."""

    at_ms: int
    offset: int
    """Of its EngineLost."""
    suspects: tuple[str, ...]


class EngineState(Struct, frozen=True):
    """An engine that ended at least once."""

    deaths: tuple[EngineDeath, ...] = ()
    """The newest ones that nothing explains."""
    down_since_ms: int = 0
    """When the newest interruption began."""
    down_offset: int = -1
    """Of the EngineLost that began it."""


class Down(Struct, frozen=True):
    """A replica whose engine ended; the worker loads it again."""

    since_ms: int
    newest_ms: int
    """Of the newest end: the engine may end again before the replica is back."""
    offset: int
    """Of that EngineLost."""
    cause: str


class WorkerState(Struct):
    """The present incarnation of one worker, and the incarnations it replaced."""

    worker: str
    incarnation: str
    host: str
    pid: int
    devices: tuple[Device, ...]
    backends: tuple[str, ...]
    versions: dict[str, str]
    joined_ms: int
    last_heard_ms: int
    labels: dict[str, str] = {}
    taints: tuple[Taint, ...] = ()
    tier: str = ""
    topology: Raw = Raw(b"{}")
    """Its server, as it reported it."""
    places: dict[str, DevicePlace] = {}
    """By device: how near it is to others, out of the topology."""
    status: WorkerStatus = "live"
    ended_ms: int = 0
    """When it became lost, fenced or left."""
    fence_due_ms: int = NEVER_MS
    """When FenceWorker is emitted (again), as long as no WorkerFenced answers it."""
    progress_ms: int = 0
    """When it last said how a load ended: loads queue up there, one after another."""
    stopping: bool = False
    """It gives partitions back unasked, so it is on its way out: it gets no work any more."""
    past: tuple[str, ...] = ()
    """Incarnations that this one, or its predecessors, replaced; the newest last."""
    joined_offset: int = -1
    """Offset of its WorkerJoined."""
    heard_offset: int = -1
    """Offset of its last heartbeat; -1: none yet."""
    lost_devices: dict[str, LostDevice] = {}
    """By device. Of this incarnation: the next one reports anew what it has."""
    busy_bp: dict[str, int] = {}
    """By device, as of its newest WorkerLoad."""
    load_ms: int = 0
    """When that came."""
    engines: dict[str, EngineState] = {}
    """Those that ended, by `device/backend`. Of this incarnation."""
    lost_by: LostAt | None = None
    """The record at which it was declared lost."""
