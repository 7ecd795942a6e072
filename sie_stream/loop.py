"""The loop that runs every process: gather, decide, act, promise. Metrics and logs watch from the side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

EventT = TypeVar("EventT")
CommandT = TypeVar("CommandT")


class Inbox(Protocol[EventT]):
    def gather(self) -> Sequence[EventT]:
        """Everything that happened since the last turn, oldest first. The only place that waits."""
        ...


class Machine(Protocol[EventT, CommandT]):
    def decide(self, events: Sequence[EventT]) -> Sequence[CommandT]:
        """Pure: the same events in the same order give the same commands. Replay calls exactly this."""
        ...


class Effects(Protocol[CommandT]):
    def act(self, commands: Sequence[CommandT]) -> None:
        """Carry the commands out."""
        ...

    def promise(self) -> None:
        """Make what was done durable: outputs and offsets in one transaction, or nothing."""
        ...


class Observer(Protocol[EventT, CommandT]):
    def saw(self, events: Sequence[EventT], commands: Sequence[CommandT]) -> None: ...


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
