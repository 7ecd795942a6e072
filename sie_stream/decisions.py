"""The record of one decision on sie.decisions: who asked, on which facts, what was chosen, what it moved, and why.

Every field is a function of sie.cluster alone, so that a refold gives the same bytes: a time that only one process
measured (how long a solver ran) does not belong here. New fields are optional: older records stay readable.
"""

from __future__ import annotations

import re

from msgspec import Struct

from sie_stream.ids import base_of


class Fact(Struct, frozen=True):
    """A record that the decision rests on."""

    topic: str
    partition: int
    offset: int
    kind: str


class Move(Struct, frozen=True):
    """Something that went from one place to another; an empty place is nowhere."""

    model: str
    what: str
    """`replica`, `partitions 0, 3`, or `service`: what a replica does that stays where it is."""
    source: str
    """`worker/device` of a replica, worker of partitions."""
    target: str


class MemoryChange(Struct, frozen=True):
    """Bytes promised to replicas on one device, before and after the decision."""

    worker: str
    device: str
    total_bytes: int
    before_bytes: int
    after_bytes: int


class SolverRun(Struct, frozen=True):
    """What a solver says about its answer. Costs are in the solver's own unit; lower is better."""

    solver: str
    """Name and version."""
    status: str
    """e.g. optimal, feasible."""
    objective: int
    terms: dict[str, int]
    """Parts of the objective, by name."""
    bound: int
    """No plan can cost less."""
    do_nothing: int | None
    """Cost of leaving everything as it was; None when that breaks a limit."""
    do_nothing_terms: dict[str, int] = {}


class Decision(Struct, frozen=True):
    """One decision of the scheduler, as logged on sie.decisions."""

    decision: str
    """d-OFFSET-N: offset of the sie.cluster record that caused it, and its place among that record's decisions."""
    kind: str
    """e.g. model_accepted, model_rejected, replica_placed, replica_unplaceable, worker_lost, partition_assigned ..."""
    subject: str
    """Model or worker it is about."""
    reason: str
    cause_offset: int
    at_ms: int
    chosen: dict[str, str | int]
    rejected: tuple[str, ...] = ()
    """Alternatives and why not, one sentence each."""
    do_nothing: str = ""
    """What would have happened without it."""
    asked_by: str = ""
    """The person, process or rule behind the record that caused it."""
    facts: tuple[Fact, ...] = ()
    """The record that caused it comes first."""
    moves: tuple[Move, ...] = ()
    memory: tuple[MemoryChange, ...] = ()
    took_ms: int | None = None
    """Log time that ended with it, e.g. from placed to ready; None where nothing was waited for."""
    solver: SolverRun | None = None
    """None: decided by a rule."""
    undoes: str = ""
    """The decision that this one takes back, or was asked to."""


_ID = re.compile(r"d-([0-9]{1,18})-([0-9]{1,9})")
"""Bounded: Python refuses to read a number of thousands of digits, and what the fold raises stops every scheduler."""


def place_of(decision: str) -> tuple[int, int] | None:
    """(offset, number) of an id `d-OFFSET-N`; None for any other text."""
    found = _ID.fullmatch(decision)
    return None if found is None else (int(found[1]), int(found[2]))


def concerns(decision: Decision, model: str) -> bool:
    """Whether it is about the model, one of its variants, or moved something of these."""
    return any(model in (name, base_of(name)) for name in about(decision))


def about(decision: Decision) -> frozenset[str]:
    """What it names: its subject, and the models and variants that it moved something of."""
    return frozenset((decision.subject, *(move.model for move in decision.moves)))
