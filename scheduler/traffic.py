"""Traffic Director: which share of a model's traffic each of its ready replicas gets, in basis points.

`direct(state, reports)` is pure; time is that of the reports. Two parts:

- Relief, at once: a replica whose device is used for more than 85 % with more than 50 requests queued gives 30 % of its
  share to the others, or as much as brings none of them above 85 %: they get it in proportion to that room. Where there
  is no room, the fleet is too small, and moving load about would only make it swing. A replica is hot until its device
  is below 75 % or its queue below 25; there is at most one relief of a model in RELIEF_MS.
- Balance, slowly: the share wanted is proportional to the inverse of the expected response, p99 x (1 + queue / 50),
  times the room left on the device (1 when idle, 1/2 when full). Averages of the reports are used, and a replica counts
  as at most 4 times better or worse than the median. Shares follow with a time constant of SHARE_MS: much slower than a
  queue answers to its load, or the two would chase each other. As long as no share is off by more than an eighth of
  the even share, all are left alone.

No share ever is below a hundredth (less with more than 50 replicas), so that every replica is still measured; a new one
starts there and grows. Shares of replicas that are gone go to the rest at once, in proportion.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct, structs

from scheduler.shares import apportion

SHARES = 10_000
HOT_UTILISATION_BP, HOT_QUEUE = 8_500, 50
COOL_UTILISATION_BP, COOL_QUEUE = 7_500, 25
RELIEF_BP = 3_000
"""Part of a hot replica's share that moves."""
RELIEF_MS = 15_000
SHARE_MS = 15_000
AVERAGE_MS = 15_000
CLIP = 4.0
DEAD_BAND = 0.125
"""Of the even share."""
LEAST = 100


class ReplicaReport(Struct, frozen=True):
    """One ready replica at `at_ms`, in log time."""

    replica: str
    at_ms: int
    p99_ms: int
    """latency_99: from entering the replica's queue to the answer. 0: nothing answered yet; it counts as the median."""
    queue: int
    utilisation_bp: int
    """Of the device, whoever uses it."""


class ReplicaTraffic(Struct, frozen=True):
    """What is remembered of one replica."""

    share: int
    response_ms: float
    """Average of p99 x (1 + queue / 50); 0: not known yet."""
    utilisation: float
    """Average, 0 to 1."""
    hot: bool = False
    relieved_ms: int = 0
    """When it last gave traffic away."""


class TrafficState(Struct, frozen=True):
    """State of one model's director; a part of the scheduler's snapshot. Replicas in the order of their names."""

    seen_ms: int = 0
    replicas: dict[str, ReplicaTraffic] = {}


class TrafficDecision(Struct, frozen=True):
    at_ms: int
    shares: dict[str, int]
    """{replica: basis points}; they add up to 10,000. Empty without a ready replica."""
    changed: bool
    reason: str


def direct(state: TrafficState, reports: Sequence[ReplicaReport]) -> tuple[TrafficState, TrafficDecision]:
    """Shares after one more round of reports: one of every replica that is ready. Replicas without one are gone.

    Raises ValueError for two reports of one replica.
    """
    by_name = {report.replica: report for report in sorted(reports, key=lambda report: report.replica)}
    if len(by_name) != len(reports):
        raise ValueError(f"Two reports of one replica among {[report.replica for report in reports]}.")
    if not by_name:
        gone = bool(state.replicas)
        return TrafficState(state.seen_ms), TrafficDecision(state.seen_ms, {}, gone, "No replica is ready.")
    at_ms = max(report.at_ms for report in reports)
    members, joined = _members(state, by_name)
    known = {name: _averaged(members[name], report, at_ms - state.seen_ms) for name, report in by_name.items()}
    said = [joined] if joined else []
    known, relief = _relieved(known, by_name, at_ms)
    if relief:
        said.append(relief)
    else:
        known, balance = _balanced(known, at_ms - state.seen_ms)
        said.extend([balance] if balance else [])
    shares = {name: replica.share for name, replica in known.items()}
    before = {name: replica.share for name, replica in state.replicas.items()}
    reason = " ".join(said) or "Shares are close to what latency, queue and utilisation ask for."
    return TrafficState(at_ms, known), TrafficDecision(at_ms, shares, shares != before, reason)


def least_share(replicas: int) -> int:
    """Every one of `replicas` keeps at least this."""
    return min(LEAST, SHARES // (2 * replicas))


def _members(state: TrafficState, reports: Mapping[str, ReplicaReport]) -> tuple[dict[str, ReplicaTraffic], str]:
    """Those that report, with shares that add up; and in words who came and who went."""
    if reports.keys() == state.replicas.keys():
        return dict(state.replicas), ""
    stay = [name for name in reports if name in state.replicas]
    new = [name for name in reports if name not in state.replicas]
    gone = [name for name in state.replicas if name not in reports]
    least = least_share(len(reports))
    wanted = [state.replicas[name].share if name in state.replicas else (0 if stay else 1) for name in reports]
    found: dict[str, ReplicaTraffic] = {}
    for name, share in zip(reports, _with_floor(wanted, least), strict=True):
        old = state.replicas.get(name, ReplicaTraffic(0, 0.0, 0.0))
        found[name] = structs.replace(old, share=share)
    words = [f"{', '.join(new)} joined." if new else "", f"{', '.join(gone)} left." if gone else ""]
    return found, " ".join(word for word in words if word)


def _with_floor(wanted: Sequence[float], least: int, total: int = SHARES) -> tuple[int, ...]:
    """Shares of `total` in proportion to `wanted`, none below `least`, which must fit."""
    shares_of_all = apportion(wanted, total)
    if not wanted or min(shares_of_all) >= least:  # nearly always
        return shares_of_all
    low: list[int] = []
    while True:
        rest = total - least * len(low)
        free = [place for place in range(len(wanted)) if place not in low]
        shares = dict(zip(free, apportion([wanted[place] for place in free], rest), strict=True))
        below = [place for place in free if shares[place] < least]
        if not below:
            return tuple(shares.get(place, least) for place in range(len(wanted)))
        low.extend(below)


def _averaged(replica: ReplicaTraffic, report: ReplicaReport, since_ms: int) -> ReplicaTraffic:
    response_ms = report.p99_ms * (1 + report.queue / HOT_QUEUE)
    utilisation = report.utilisation_bp / 10_000
    if replica.response_ms == 0:
        return structs.replace(replica, response_ms=response_ms, utilisation=utilisation)
    part = _part(since_ms, AVERAGE_MS)
    if response_ms == 0:
        response_ms = replica.response_ms
    response_ms = replica.response_ms + (response_ms - replica.response_ms) * part
    utilisation = replica.utilisation + (utilisation - replica.utilisation) * part
    return ReplicaTraffic(replica.share, response_ms, utilisation, replica.hot, replica.relieved_ms)


def _part(since_ms: int, constant_ms: int) -> float:
    """Of the way that an average with this time constant goes (implicit Euler step)."""
    return since_ms / (constant_ms + since_ms)


# ---------------------------------------------------------------- relief


def _relieved(
    known: dict[str, ReplicaTraffic], reports: Mapping[str, ReplicaReport], at_ms: int
) -> tuple[dict[str, ReplicaTraffic], str]:
    """Moves 30 % of the share of those that are hot and due; the words are empty when nothing moves."""
    known = {name: _noted(replica, _hot(replica.hot, reports[name])) for name, replica in known.items()}
    last_ms = max(replica.relieved_ms for replica in known.values())
    rested = last_ms == 0 or at_ms - last_ms >= RELIEF_MS
    due = [name for name, replica in known.items() if rested and replica.hot and _over(reports[name])]
    if not due:
        return known, ""
    room = {name: _room(replica) for name, replica in known.items() if not replica.hot}
    least = least_share(len(known))
    moved = {name: min(known[name].share * RELIEF_BP // 10_000, known[name].share - least) for name in due}
    shares = {name: known[name].share for name in due}
    asked, free = sum(moved.values()), sum(room.values())
    if free == 0:
        return known, ""
    if free < asked:
        moved = dict(zip(due, apportion(list(moved.values()), free), strict=True))
    for name in due:
        known[name] = structs.replace(known[name], share=known[name].share - moved[name], relieved_ms=at_ms)
    taken = apportion(list(room.values()), min(asked, free))
    for name, more in zip(room, taken, strict=True):
        known[name] = structs.replace(known[name], share=known[name].share + more)
    return known, " ".join(_relief_words(reports[name], moved[name], shares[name]) for name in due)


def _noted(replica: ReplicaTraffic, hot: bool) -> ReplicaTraffic:
    return replica if replica.hot == hot else structs.replace(replica, hot=hot)


def _room(replica: ReplicaTraffic) -> int:
    """Share that would bring the device from its average use to 85 %."""
    limit = HOT_UTILISATION_BP / 10_000
    used = max(replica.utilisation, replica.share / SHARES / 10)
    return max(int(replica.share * (limit / used - 1)), 0)


def _over(report: ReplicaReport) -> bool:
    return report.utilisation_bp > HOT_UTILISATION_BP and report.queue > HOT_QUEUE


def _hot(was: bool, report: ReplicaReport) -> bool:
    if was:
        return report.utilisation_bp >= COOL_UTILISATION_BP and report.queue >= COOL_QUEUE
    return _over(report)


def _relief_words(report: ReplicaReport, moved: int, share: int) -> str:
    return (
        f"{report.replica}: device at {report.utilisation_bp / 100:.0f} % with {report.queue} queued "
        f"(limits {HOT_UTILISATION_BP // 100} % and {HOT_QUEUE}), so {moved} of its {share} go to others."
    )


# ---------------------------------------------------------------- balance


def _balanced(known: dict[str, ReplicaTraffic], since_ms: int) -> tuple[dict[str, ReplicaTraffic], str]:
    """A part of the way to the shares that responses and room ask for; the hot get nothing back yet, unless all are."""
    even = SHARES / len(known)
    targets = dict(zip(known, _targets(list(known.values())), strict=True))
    gaps = {name: targets[name] - known[name].share for name in known}
    if max(abs(gap) for gap in gaps.values()) <= even * DEAD_BAND:
        return known, ""
    least = least_share(len(known))
    wanted = {name: known[name].share + _part(since_ms, SHARE_MS) * gaps[name] for name in known}
    hot = [name for name in known if known[name].hot]
    # Where all are hot none has room, and the longest queue would be the last to end; it gives way to the others.
    hot = hot if len(hot) < len(known) else []
    held = {name: max(min(int(wanted[name]), known[name].share), least) for name in hot}
    cool = [name for name in known if name not in held]
    rest = _with_floor([wanted[name] for name in cool], least, SHARES - sum(held.values()))
    shares = held | dict(zip(cool, rest, strict=True))
    changed = {name: structs.replace(known[name], share=shares[name]) for name in known}
    if changed == known:
        return known, ""
    words = ", ".join(
        f"{name} {known[name].share} -> {changed[name].share} (towards {targets[name]}: "
        f"{known[name].response_ms:.0f} ms, device at {known[name].utilisation * 100:.0f} %)"
        for name in known
    )
    return changed, f"Balanced: {words}."


def _targets(replicas: Sequence[ReplicaTraffic]) -> tuple[int, ...]:
    known = sorted(replica.response_ms for replica in replicas if replica.response_ms > 0)
    median = known[len(known) // 2] if known else 1.0
    scores: list[float] = []
    for replica in replicas:
        response = replica.response_ms or median
        clipped = min(max(response, median / CLIP), median * CLIP)
        scores.append((1 - replica.utilisation / 2) / clipped)
    return _with_floor(scores, least_share(len(replicas)))
