"""What processes tell the scheduler about work: what is done, and what waits. Facts on sie.cluster."""

from __future__ import annotations

from msgspec import Struct


class ModelLoad(Struct, frozen=True):
    """What one model had to do on one worker."""

    model: str
    arrivals: int
    completions: int
    waiting: int
    """Admitted, not yet with an engine."""
    running: int
    busy_ms: int
    """Engine time of the completed batches."""
    p99_ms: int | None
    """From the request's timestamp to its result; None when none was completed."""


class DeviceLoad(Struct, frozen=True):
    """How much of a device's time its engines were busy with batches, whichever model's."""

    device: str
    busy_bp: int
    """0 to 10,000."""


class WorkerLoad(Struct, frozen=True, tag=True):
    """What a worker's models had to do in the last `window_ms`; those that had nothing are left out."""

    worker: str
    incarnation: str
    window_ms: int
    models: tuple[ModelLoad, ...]
    devices: tuple[DeviceLoad, ...] = ()
    """Devices that did nothing are left out."""


class WorkWaiting(Struct, frozen=True, tag=True):
    """An ingress found requests in the topic of a model that sleeps. Repeated as long as it is found asleep."""

    model: str
    route_epoch: int
    """Of the row that says so."""
    waiting: int
    """At least so many."""
    reporter: str = ""
