"""What a worker told of a request beside its result, in words: models that came in for it, moves, retries. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from sie_stream.records import Result
from sie_stream.touches import CameIn, KeptOut, Moved, Retried, Touch
from sie_stream.tracing.evidence import Step

MIB = 1024 * 1024


def touch_steps(result: Result, touches: Sequence[Touch]) -> tuple[list[Step], list[Step]]:
    """Steps before the engine that answered took the request, and those after. `touches` are in causal order."""
    origin = result.provenance
    ends = [(one.worker, one.incarnation) for one in touches if isinstance(one, Moved)][1:]
    ends.append((origin.worker, origin.incarnation))
    before: list[Step] = []
    after: list[Step] = []
    for touch in touches:
        match touch:
            case CameIn():
                before.append(Step("device", touch.at_ms, came_in_words(touch), touch.took_ms))
            case KeptOut():
                before.append(Step("device", touch.at_ms, kept_out_words(touch)))
            case Retried():
                # What went on from an image did so before its engine failed.
                before += after
                after = []
                said = f"attempt {touch.attempt} failed on {touch.worker} ({touch.code}); tried again"
                before.append(Step("retried", touch.at_ms, said))
            case Moved():
                before += after
                after = []
                who = f"{touch.worker} ({touch.incarnation})"
                said = f"ran on {who}, which stopped it to be moved: an image of {_size(touch.size_bytes)}"
                before.append(Step("moved", touch.stopped_ms, said, touch.ran_ms))
                after += _resumed(touch, *ends.pop(0))
            case _:
                assert_never(touch)
    return before, after


def _resumed(move: Moved, worker: str, incarnation: str) -> list[Step]:
    if not move.at_ms:
        return []
    said = f"went on from its image on {worker} ({incarnation})"
    if move.refused:
        said = f"{worker} ({incarnation}) did not take its image ({move.refused}): computed from the beginning"
    return [Step("moved", move.at_ms, said, move.pause_ms)]


def came_in_words(came: CameIn) -> str:
    source = "host memory" if came.came_from == "host" else came.came_from
    said = f"{came.model} came to {came.device} from {source}: {_size(came.size_bytes)}"
    if came.gave_way:
        more = f" and {came.gave_way_more} more" if came.gave_way_more else ""
        said += f"; {', '.join(came.gave_way)}{more} gave way"
    else:
        said += "; there was room"
    if came.waited_ms >= 1:
        said += f", after {came.waited_ms:.0f} ms of waiting for its turn"
    if came.left_for:
        said += f". It had left for {came.left_for} {came.away_ms:.0f} ms before"
    return said


def kept_out_words(kept: KeptOut) -> str:
    place = {"coming": "on its way there", "host": "in host memory"}.get(kept.place, f"on the {kept.place}")
    said = f"{kept.model} was not on {kept.device}, but {place}"
    return f"{said}; there were {', '.join(kept.held_by)}" if kept.held_by else said


def moving_ms(result: Result, touches: Sequence[Touch]) -> tuple[float, float]:
    """(in engines of other workers, between workers), as parts of the time in the queue, where it is counted."""
    moves = [one for one in touches if isinstance(one, Moved)]
    queue = result.timings_ms.queue
    ran = min(queue, sum(one.ran_ms for one in moves))
    return ran, min(queue - ran, sum(one.pause_ms for one in moves))


def begun_again(touches: Sequence[Touch]) -> int:
    """How often an engine failed while it held the request, less the takeovers after which nothing was begun again."""
    retries = sum(isinstance(one, Retried) for one in touches)
    went_on = sum(isinstance(one, Moved) and bool(one.at_ms) and not one.refused for one in touches)
    return retries - went_on


def touch_traits(touches: Sequence[Touch]) -> tuple[str, ...]:
    """What a request may share with other slow ones."""
    found: dict[str, None] = {}
    for touch in touches:
        match touch:
            case CameIn():
                found[f"waited for {touch.model} to come to {touch.worker}/{touch.device} from {touch.came_from}"] = (
                    None
                )
                for name in touch.gave_way:
                    found[f"waited for {name} to give way on {touch.worker}/{touch.device}"] = None
            case KeptOut():
                found[f"ended while {touch.model} was not on {touch.worker}/{touch.device}"] = None
            case Moved():
                found[f"moved from {touch.worker} while it ran"] = None
            case Retried():
                found[f"tried again after {touch.code} on {touch.worker}"] = None
            case _:
                assert_never(touch)
    return tuple(found)


def _size(size_bytes: int) -> str:
    return f"{size_bytes / MIB:.1f} MiB" if size_bytes >= MIB else f"{size_bytes / 1024:.1f} KiB"
