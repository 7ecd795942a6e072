"""What a rollout knows of the cluster at one moment; `rollout_fleet.py` makes it of the state."""

from __future__ import annotations

from msgspec import Struct


class Seen(Struct, frozen=True):
    """The cluster as far as this rollout is concerned."""

    ready: int
    """Replicas of the new version that serve its own topic."""
    wanted: int
    """Replicas that the next share needs."""
    given_up: bool
    """Its replicas failed more often than they are retried; while adopting, those of the model itself."""
    golden: str = ""
    """What golden requests found wrong; empty: nothing."""
    failure: str = ""
    """The last failure of a replica, for people."""
    no_room: str = ""
    """Why a replica of the new version has no place; empty: all have one."""
    deleted: bool = False
    """The model is being deleted."""
    adopted: bool = False
    """The model itself serves the new version with all its replicas."""
    old_ready: int = 0
    """Replicas of the version before that can take all keys back at once."""
    stable_ready: int = 0
    """Replicas that serve the model's own topic, of whatever generation. Not those whose engine is away."""
    away: str = ""
    """Why the engine of a replica of the new version is away, for people; empty: none is."""

    @property
    def lacking(self) -> str:
        """Why it lacks replicas, for people; empty: they load, or none are lacking."""
        return self.no_room or self.away
