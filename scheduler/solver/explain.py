"""Why a replica is where it is, and why not elsewhere: one verdict per device, as a record and as a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct, structs

from scheduler.counts import counted
from scheduler.solver.classes import Folded, Seat, fold, place_of
from scheduler.solver.constraints import Refusal, forbids
from scheduler.solver.greedy import best_in_group
from scheduler.solver.groupings import CPU
from scheduler.solver.ledger import Ledger
from scheduler.solver.model import Place, Plan, Problem
from scheduler.solver.objective import evaluate, total

Verdict = Literal["chosen", "forbidden", "full", "costlier", "equal", "cheaper"]
SHOWN_MAX = 3
"""Devices named per reason; the rest is counted."""
REASONS_MAX = 16
_NEAR = ("its NVLink island", "its NUMA node", "its worker", "its worker")
"""By place in SPANS, and last for cpu devices: where the devices of a replica have to be."""


class DeviceVerdict(Struct, frozen=True):
    """forbidden: by what the device is; full: by what else is placed; the others: how the cost would change."""

    server: str
    worker: str
    device: str
    verdict: Verdict
    constraint: str | None
    sentence: str
    extra_terms: dict[str, int] = {}
    """Terms of the objective that would change if the replica were here."""


class Explanation(Struct, frozen=True):
    """One replica. `place` None: nothing was found."""

    model: str
    generation: int
    replica: int
    place: Place | None
    sentence: str
    devices: tuple[DeviceVerdict, ...]


def explain(problem: Problem, plan: Plan, model: str) -> tuple[Explanation, ...]:
    """Every replica of the model in the plan, in the order of the problem."""
    folded = fold(problem)
    seats = seats_of(folded, plan)
    return tuple(
        _explanation(folded, seats, number) for number, demand in enumerate(problem.demands) if demand.model == model
    )


def seats_of(folded: Folded, plan: Plan) -> list[Seat | None]:
    """The plan in the indices of the folded problem it was made of."""
    devices = {device.key: number for number, device in enumerate(folded.problem.devices)}
    places = {(found.model, found.generation, found.replica): found.place for found in plan.assignments}
    seats: list[Seat | None] = []
    for demand in folded.problem.demands:
        place = places.get(demand.key)
        if place is None:
            seats.append(None)
            continue
        options = [option.precision for option in demand.options]
        seat = tuple(sorted(devices[place.worker, name] for name in place.devices)), options.index(place.precision)
        seats.append(seat)
    return seats


def why_not(folded: Folded, ledger: Ledger, number: int) -> tuple[str, ...]:
    """Why an unplaced replica fits nowhere: devices with the same reason in one sentence, the commonest first."""
    if not folded.usable:
        return ("no live worker offers a device.",)
    by_reason: dict[str, list[str]] = {}
    for device, offer in enumerate(folded.problem.devices):
        refusal = _refusal(folded, ledger, number, device)
        sentence = "fits, but leaving it out costs less."
        if refusal is not None:
            sentence = f"{refusal.sentence}{_in_service_too(ledger, number, device)}"
        by_reason.setdefault(sentence, []).append(offer.shown)
    reasons = sorted(by_reason.items(), key=lambda item: -len(item[1]))
    sentences = [f"{named(names)}: {sentence}" for sentence, names in reasons[:REASONS_MAX]]
    if len(reasons) > REASONS_MAX:
        sentences.append(f"... and {len(reasons) - REASONS_MAX} more reasons.")
    return tuple(sentences)


def named(names: Sequence[str]) -> str:
    more = len(names) - SHOWN_MAX
    return ", ".join(names[:SHOWN_MAX]) + (f" and {more} more" if more > 0 else "")


def _explanation(folded: Folded, seats: Sequence[Seat | None], number: int) -> Explanation:
    demand, seat = folded.problem.demands[number], seats[number]
    without = [None if other == number else taken for other, taken in enumerate(seats)]
    ledger, now = Ledger(folded, without), evaluate(folded, seats)
    verdicts = tuple(_verdict(folded, ledger, seats, now, number, device) for device in range(len(folded.usable)))
    return Explanation(
        *demand.key,
        None if seat is None else place_of(folded, number, seat),
        _why_here(folded, number, seat, verdicts),
        verdicts,
    )


def _verdict(
    folded: Folded, ledger: Ledger, seats: Sequence[Seat | None], now: dict[str, int], number: int, device: int
) -> DeviceVerdict:
    offer, seat = folded.problem.devices[device], seats[number]
    named = (offer.server, offer.worker, offer.name)
    if seat is not None and device in seat[0]:
        return DeviceVerdict(*named, "chosen", None, f"{offer.shown}: chosen.")
    option = _options(folded, number, device)
    static = not option and _refusal(folded, ledger, number, device)
    if static:
        words = f"{offer.shown}: {static.sentence}{_in_service_too(ledger, number, device)}"
        return DeviceVerdict(*named, "forbidden", static.constraint, words)
    other = seat_on(ledger, number, device)
    if isinstance(other, Refusal):
        return DeviceVerdict(*named, "full", other.constraint, f"{offer.shown}: {other.sentence}")
    moved = evaluate(folded, [other if place == number else taken for place, taken in enumerate(seats)])
    extra = {term: moved[term] - now[term] for term in moved if moved[term] != now[term]}
    more = total(moved) - total(now)
    verdict: Verdict = "costlier" if more > 0 else "equal" if more == 0 else "cheaper"
    return DeviceVerdict(*named, verdict, None, f"{offer.shown}: {compared(more, extra)}", extra)


def compared(more: int, extra: dict[str, int]) -> str:
    terms = ", ".join(f"{term} {change:+d}" for term, change in extra.items())
    if more > 0:
        return f"fits, and costs {more} more ({terms})."
    if more == 0:
        return "fits, and costs the same." if not terms else f"fits, and costs the same ({terms})."
    return f"fits, and would cost {-more} less ({terms}): beyond what was free to move, or what the limit let be found."


def _why_here(folded: Folded, number: int, seat: Seat | None, verdicts: Sequence[DeviceVerdict]) -> str:
    demand = folded.problem.demands[number]
    counts = {name: sum(verdict.verdict == name for verdict in verdicts) for name in Verdict.__args__}
    said = [
        counted(counts["forbidden"], "device is forbidden", "devices are forbidden"),
        counted(counts["full"], "has no room", "have no room"),
        counted(counts["costlier"], "costs more", "cost more"),
        counted(counts["equal"], "costs the same", "cost the same"),
        counted(counts["cheaper"], "costs less", "cost less"),
    ]
    rest = f"{', '.join(said)}."
    if seat is None:
        return f"{demand.shown} has no place: {rest}"
    place = place_of(folded, number, seat).shown + _spanning_words(folded, number, seat)
    if seat == folded.current[number]:
        stays = "stays on" if folded.may_stay[number] else "is held, until there is a better place, on"
        return f"{demand.shown} {stays} {place}: {rest}"
    return f"{demand.shown} goes to {place}: {rest}"


def _spanning_words(folded: Folded, number: int, seat: Seat) -> str:
    """How the devices of a replica reach each other; nothing for one device."""
    first = folded.problem.devices[seat[0][0]]
    if len(seat[0]) == 1:
        return ""
    if first.kind == CPU:
        return f" ({len(seat[0])} devices of one worker)"
    nearest, nodes = (len({of[device] for device in seat[0]}) for of in folded.group_at[:2])
    if nearest == 1:
        return f" ({len(seat[0])} devices of NVLink island {first.island} on {first.server})"
    level = folded.kinds[folded.kind[number]].level
    return f" ({len(seat[0])} devices over PCIe, {'of one NUMA node' if level and nodes == 1 else 'across NUMA nodes'})"


def _options(folded: Folded, number: int, device: int) -> tuple[int, ...]:
    return folded.kinds[folded.kind[number]].fits[folded.device_class[device]]


def _refusal(folded: Folded, ledger: Ledger, number: int, device: int) -> Refusal | None:
    """What forbids the device, or what fills it; None when the replica could start there now."""
    demand = folded.problem.demands[number]
    if not _options(folded, number, device):
        refusals = [forbids(demand, option, folded.problem.devices[device]) for option in demand.options]
        return refusals[-1]
    found = seat_on(ledger, number, device)
    return found if isinstance(found, Refusal) else None


def _in_service_too(ledger: Ledger, number: int, device: int) -> str:
    """Of a device out of service: what would keep the replica away in service as well, as one more sentence."""
    folded = ledger.folded
    demand, offer = folded.problem.demands[number], folded.problem.devices[device]
    if not (offer.cordoned or offer.draining):
        return ""
    back = structs.replace(offer, cordoned=False, draining=False)
    found: list[Refusal] = []
    for option, precision in enumerate(demand.options):
        refusal = forbids(demand, precision, back) or ledger.refusal(number, option, device)
        if refusal is None:
            return ""
        found.append(refusal)
    return f" In service it would not do, either: {found[-1].sentence}"


def seat_on(ledger: Ledger, number: int, device: int) -> Seat | Refusal:
    """The best seat with this device in it, or why there is none."""
    folded = ledger.folded
    refusals: list[Refusal] = []
    for option in _options(folded, number, device):
        refusal = ledger.refusal(number, option, device)
        if refusal is None:
            break
        refusals.append(refusal)
    else:
        return refusals[-1]
    size = folded.problem.demands[number].tensor_parallel_size
    kind = folded.kind[number]
    group = folded.groups[folded.group_of(kind, device)]
    found = best_in_group(ledger, number, group, size, device)
    if found is None:
        where = _NEAR[folded.kinds[kind].level if folded.problem.devices[device].kind != CPU else -1]
        if len(group) < size:
            return Refusal("tensor_parallel", f"needs {size} devices, {where} has {len(group)}.")
        return Refusal("tensor_parallel", f"{where} has {len(group)} devices, but no {size} with room together.")
    return found
