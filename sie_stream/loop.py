"""The loop that runs every process: gather, decide, act, promise. Metrics and logs watch from the side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

EventT = TypeVar("EventT")
CommandT = TypeVar("CommandT")
GatheredT = TypeVar("GatheredT", covariant=True)
SeenT = TypeVar("SeenT", contravariant=True)
DecidedT = TypeVar("DecidedT", covariant=True)
ActedT = TypeVar("ActedT", contravariant=True)


class Inbox(Protocol[GatheredT]):
    def gather(self) -> Sequence[GatheredT]:
        """Everything that happened since the last turn, oldest first. The only place that waits."""
        ...


class Machine(Protocol[SeenT, DecidedT]):
    def decide(self, events: Sequence[SeenT]) -> Sequence[DecidedT]:
        """Pure: the same events in the same order give the same commands. Replay calls exactly this."""
        ...


class Effects(Protocol[ActedT]):
    def act(self, commands: Sequence[ActedT]) -> None:
        """Carry the commands out."""
        ...

    def promise(self) -> None:
        """Make what was done durable: outputs and offsets in one transaction, or nothing."""
        ...


class Observer(Protocol[SeenT, ActedT]):
    def saw(self, events: Sequence[SeenT], commands: Sequence[ActedT]) -> None: ...


def turn(
    machine: Machine[EventT, CommandT],
    inbox: Inbox[EventT],
    effects: Effects[CommandT],
    observers: Iterable[Observer[EventT, CommandT]] = (),
) -> None:
    """One turn of a process. A crash between act and promise repeats work and never loses it."""
    events = inbox.gather()
    commands = machine.decide(events)
    for observer in observers:
        observer.saw(events, commands)
    effects.act(commands)
    effects.promise()
