"""Where a replica is, by names: its worker and all its devices."""

from __future__ import annotations

Seat = tuple[str, ...]
"""(worker, device, further devices of a replica that spans several)."""
DeviceKey = tuple[str, str]
"""(worker, device)."""


def shown(seat: Seat) -> str:
    """`worker/device`, or `worker/device+device`."""
    return f"{seat[0]}/{'+'.join(seat[1:])}"


def devices_of(seat: Seat) -> tuple[DeviceKey, ...]:
    if len(seat) == 2:  # nearly all are
        return (seat,)
    return tuple((seat[0], device) for device in seat[1:])


def several(devices: tuple[str, ...]) -> tuple[str, ...]:
    """As `ReplicaState.devices` says it: nothing of a replica on one device."""
    return devices if len(devices) > 1 else ()
