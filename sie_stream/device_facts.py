"""Facts on sie.cluster about single devices of a worker that lives; `control` lists them with all others."""

from __future__ import annotations

from msgspec import Struct


class DeviceLost(Struct, frozen=True, tag=True):
    """One device of a live worker is gone; the others go on."""

    worker: str
    incarnation: str
    device: str
    cause: str
    """For people: what the driver said, e.g. `XID 79: the GPU has fallen off the bus`."""


class DeviceBack(Struct, frozen=True, tag=True):
    """A device that was reported lost is in order again."""

    worker: str
    incarnation: str
    device: str
