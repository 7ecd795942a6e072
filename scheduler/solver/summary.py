"""Why not elsewhere, in a few sentences whatever the size of the fleet: what a decision keeps of an explanation.

Devices that the objective and the constraints cannot tell apart share a verdict, so that the work grows with what
differs, not with the fleet. `explain` is the long form, device by device.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from msgspec import Struct

from scheduler.solver.added import added_terms
from scheduler.solver.classes import Folded, Seat
from scheduler.solver.constraints import Refusal, forbids
from scheduler.solver.explain import compared, named, seat_on
from scheduler.solver.ledger import Ledger

SENTENCES_MAX = 16
"""Per replica."""
TOLD_ONE_BY_ONE = 64
"""Devices of a fleet up to which each full one says what fills it; of more, one example says it."""
FULL = "full"


class Reason(Struct):
    """Devices with one reason. `constraint` empty: they fit, and cost `more`."""

    sentence: str
    constraint: str
    more: int
    devices: list[int]


def why_not_elsewhere(folded: Folded, ledger: Ledger, number: int, seat: Seat) -> tuple[str, ...]:
    """One sentence per reason, the devices that would do first. `ledger` holds everything of the plan, and is left
    as it was."""
    ledger.remove(number, seat)
    here = added_terms(ledger, number, seat)
    verdicts: dict[Hashable, Reason] = {}
    sorts = Sorts(ledger, number)
    for device in range(len(folded.usable)):
        if device in seat[0]:
            continue
        key = sorts.of(device)
        known = verdicts.get(key)
        if known is None:
            verdicts[key] = _reason(folded, ledger, number, device, here)
            continue
        known.devices.append(device)
        if key is FULL and len(known.devices) == 2:
            known.sentence = f"e.g. {known.sentence}"
    ledger.add(number, seat)
    return _sentences(folded, _merged(list(verdicts.values())))


class Sorts:
    """Devices of one sort have one verdict. What does not depend on the device is looked up once."""

    def __init__(self, ledger: Ledger, number: int) -> None:
        folded = ledger.folded
        self._ledger = ledger
        self._number = number
        self._index = folded.kind[number]
        self._kind = folded.kinds[self._index]
        self._shares_kv = folded.kv[number] >= 0
        self._home = (folded.current[number] or ((), 0))[0]
        self._large = len(folded.usable) > TOLD_ONE_BY_ONE

    def of(self, device: int) -> Hashable:
        ledger, folded, kind = self._ledger, self._ledger.folded, self._kind
        group = folded.device_class[device]
        options = kind.fits[group]
        if not options:
            return group
        beside = ledger.beside(self._number, device)
        if beside:
            return beside
        free = ledger.free[device]
        fitting = tuple(folded.weight(self._index, option, device) <= free for option in options)
        if True not in fitting:  # of a large fleet one example is told
            return FULL if self._large else ledger.refusal(self._number, options[-1], device)
        if kind.demand.tensor_parallel_size > 1:
            return "group", folded.group_of(self._index, device), device
        island = folded.island[device]
        used, size = (ledger.island_used[island] > 0, len(folded.islands[island])) if island >= 0 else (False, 0)
        return (
            (group, ledger.count[device], ledger.on_server.get((kind.version, folded.server[device]), 0) > 0),
            (island >= 0, used, size, device in self._home, fitting),
            (folded.worker[device] in kind.warm_workers, device in kind.failed_devices),
            ledger.apart(self._number, (device,)) if self._shares_kv else 0,
            ledger.load_cost(self._index, device) if kind.load else 0,
        )


def _reason(folded: Folded, ledger: Ledger, number: int, device: int, here: dict[str, int]) -> Reason:
    kind = folded.kinds[folded.kind[number]]
    if not kind.fits[folded.device_class[device]]:
        demand = folded.problem.demands[number]
        refusals = [forbids(demand, option, folded.problem.devices[device]) for option in demand.options]
        refusal = refusals[-1]
        assert refusal is not None, "a class in which nothing fits is forbidden"
        return Reason(refusal.sentence, refusal.constraint, 0, [device])
    other = seat_on(ledger, number, device)
    if isinstance(other, Refusal):
        return Reason(other.sentence, other.constraint, 0, [device])
    there = added_terms(ledger, number, other)
    extra = {term: there[term] - here[term] for term in there if there[term] != here[term]}
    more = sum(extra.values())
    return Reason(compared(more, extra), "", more, [device])


def _merged(reasons: Sequence[Reason]) -> list[Reason]:
    """Equal sentences are one. When there are too many, those of one constraint are one, told by an example."""
    by_sentence: dict[str, Reason] = {}
    for reason in reasons:
        _join(by_sentence, reason.sentence, reason)
    found = list(by_sentence.values())
    if len(found) > SENTENCES_MAX:
        by_constraint: dict[str, Reason] = {}
        for reason in found:
            _join(by_constraint, reason.constraint or reason.sentence, reason)
        found = list(by_constraint.values())
    return sorted(found, key=lambda reason: (reason.constraint != "", reason.more, min(reason.devices)))


def _join(by: dict[str, Reason], key: str, reason: Reason) -> None:
    known = by.get(key)
    if known is None:
        by[key] = reason
        return
    known.devices.extend(reason.devices)
    if known.sentence != reason.sentence and not known.sentence.startswith("e.g. "):
        known.sentence = f"e.g. {known.sentence}"


def _sentences(folded: Folded, reasons: Sequence[Reason]) -> tuple[str, ...]:
    devices = folded.problem.devices
    sentences = [
        f"{named([devices[device].shown for device in sorted(reason.devices)])}: {reason.sentence}"
        for reason in reasons[:SENTENCES_MAX]
    ]
    if len(reasons) > SENTENCES_MAX:
        more = sum(len(reason.devices) for reason in reasons[SENTENCES_MAX:])
        sentences.append(f"... and {more} more devices.")
    return tuple(sentences)
