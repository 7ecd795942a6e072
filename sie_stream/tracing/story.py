"""From what the topics say about one request to its story: in causal order, with times and durations. Pure.

Times come from several clocks: the request record from its sender, ingress and the worker from their hosts, sie.cluster
from the broker. Where two clocks disagree a later link of the chain would stand before an earlier one; the order of the
chain wins there, and the times are shown as they were written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import Struct

from sie_stream.control import WorkerHeartbeat, WorkerLoad
from sie_stream.decisions import Decision, about
from sie_stream.ids import base_of
from sie_stream.records import Result, WorkItem
from sie_stream.touches import CameIn, KeptOut, Touch
from sie_stream.tracing.control_steps import control_steps, placed_step, takeovers
from sie_stream.tracing.evidence import ClusterFact, Evidence, Source, Step, Trace
from sie_stream.tracing.touch_steps import begun_again, kept_out_words, moving_ms, touch_steps

LANE_NAMES = ("P0", "P1", "P2")


class Opening(Struct, frozen=True):
    """How far a request without a terminal record has come."""

    state: str
    what: str


def tell(evidence: Evidence) -> Trace:
    """The story. A request that nobody knows gives state `unknown` and no steps."""
    work, result = evidence.work, evidence.result
    opening = None if result is not None else _opening(evidence)
    chain = [*_asked(evidence), *_routed(evidence), *_ran(evidence), *_ended(evidence, opening)]
    touched = [*control_steps(evidence, _started_ms(evidence)), *_repeated(evidence)]
    before = [] if evidence.placed is None or result is None else [placed_step(evidence.placed)]
    steps = _in_order(chain, touched)
    state = result.status if result is not None else opening.state if opening is not None else "unknown"
    model = result.model if result is not None else work.model if work is not None else _asked_model(evidence)
    origin = result.provenance if result is not None else None
    return Trace(
        request_id=evidence.request_id,
        state=state,
        verdict=_verdict(evidence, opening),
        model=model,
        version=result.version if result is not None else work.version if work is not None else "",
        worker=origin.worker if origin is not None else evidence.owner.worker if evidence.owner is not None else "",
        incarnation=origin.incarnation if origin is not None else "",
        device=origin.device if origin is not None else "",
        traceparent=_traceparent(evidence),
        attempts=_attempts(evidence),
        steps=(*before, *steps),
        neighbours=evidence.neighbours,
        batch_size=origin.batch_size if origin is not None else 0,
        durations_ms=_durations(result, evidence.touches) if result is not None else {},
        deadline_left_ms=_deadline_left(evidence),
        notes=_notes(evidence),
        touches=evidence.touches,
        origin=evidence.sources[0].origin if evidence.sources else None,
    )


def _asked_model(evidence: Evidence) -> str:
    request = evidence.sources[0].request if evidence.sources else None
    return "" if request is None else request.model or request.instance


def _traceparent(evidence: Evidence) -> str | None:
    if evidence.work is not None and evidence.work.traceparent is not None:
        return evidence.work.traceparent
    return next((source.traceparent for source in evidence.sources if source.traceparent), None)


# ---------------------------------------------------------------- the chain


def _asked(evidence: Evidence) -> Iterator[Step]:
    for source in evidence.sources[:1]:
        if source.origin is not None:
            carried = float(max(0, source.at.timestamp_ms - source.origin.written_ms))
            said = f"carried from another cluster: {source.origin}"
            yield Step("bridge", source.at.timestamp_ms, said, carried)
        yield Step("client", source.at.timestamp_ms, _request_words(source), where=str(source.at))
    if not evidence.sources and evidence.work is not None:
        work = evidence.work
        where = f"{work.source_topic}/{work.source_partition}@{work.source_offset}"
        yield Step("client", work.requested_at_ms, "request record (gone by retention)", where=where)


def _repeated(evidence: Evidence) -> Iterator[Step]:
    """Later records with the same id."""
    meant = "ingress drops a repeat within its window"
    if evidence.other_results:
        meant = "answered again: the first was no longer in the window of ingress"
    for source in evidence.sources[1:]:
        said = f"sent again ({_request_words(source)}); {meant}"
        yield Step("repeat", source.at.timestamp_ms, said, where=str(source.at))


def _request_words(source: Source) -> str:
    request = source.request
    said = f"request record, {source.size} bytes{' on a bound topic' if source.bound else ''}"
    if request is None:
        return said
    said += f", for {request.model or request.instance or 'the bound model'}"
    if request.inputs_ref is not None:
        said += f", its inputs at {request.inputs_ref.url}"
    return said + (f", deadline {request.deadline_ms} ms" if request.deadline_ms else "")


def _routed(evidence: Evidence) -> Iterator[Step]:
    work = evidence.work
    if work is None:
        return
    waited = float(max(0, work.received_at_ms - work.requested_at_ms))
    yield Step("ingress", work.received_at_ms, f"taken up; had waited {waited:.0f} ms on the request topic", waited)
    said = f"checked and routed: {work.model}@{work.version}, variant {work.variant}, route epoch {work.route_epoch}"
    said += f", lane {LANE_NAMES[work.priority]}"
    if work.token_ids is not None:
        said += f", {len(work.token_ids)} tokens"
    if work.deadline_at_ms:
        said += f", {work.deadline_at_ms - work.routed_at_ms} ms to its deadline"
    where = "" if evidence.work_at is None else str(evidence.work_at)
    yield Step("ingress", work.routed_at_ms, said, float(work.routed_at_ms - work.received_at_ms), where)


def _started_ms(evidence: Evidence) -> int:
    """When the engine took it, else when it ended, else now."""
    result, work = evidence.result, evidence.work
    if result is None:
        return evidence.now_ms
    if work is None or not result.provenance.batch_size:
        return result.finished_at
    return work.routed_at_ms + round(result.timings_ms.queue)


def _ran(evidence: Evidence) -> Iterator[Step]:
    result, work = evidence.result, evidence.work
    if result is None or not result.provenance.worker:
        return
    origin, timings = result.provenance, result.timings_ms
    who = f"{origin.worker} ({origin.incarnation})"
    before, after = touch_steps(result, evidence.touches)
    yield from before
    if not origin.batch_size:
        yield Step("queue", result.finished_at, f"ended in the queue of {who}; no engine ran it", timings.queue)
        return
    begun = _started_ms(evidence)
    if work is None:
        begun = round(result.finished_at - timings.postprocess - timings.inference)
    ran, moving = moving_ms(result, evidence.touches)
    elsewhere = f"; {ran + moving:.0f} ms of that time it ran elsewhere, or moved" if ran or moving else ""
    yield Step("queue", begun, f"left the queue of {who}{elsewhere}", timings.queue)
    yield from after
    said = f"in a batch of {origin.batch_size} on {origin.device}, {origin.engine}"
    if timings.first_token:
        said += f", first token after {timings.first_token:.1f} ms"
    if origin.seed is not None:
        said += f", seed {origin.seed}"
    ended = round(begun + timings.inference)
    yield Step("engine", ended, said, timings.inference)
    if timings.postprocess:
        yield Step("egress", result.finished_at, "output finished by the shared Stage 2", timings.postprocess)


def _ended(evidence: Evidence, opening: Opening | None) -> Iterator[Step]:
    result, letter = evidence.result, evidence.letter
    if letter is not None:
        said = f"{letter.reason}: {letter.message}; {letter.original_bytes} bytes kept by {letter.component}"
        where = "" if evidence.letter_at is None else str(evidence.letter_at)
        yield Step("deadletter", letter.at_ms, said, where=where)
    if result is not None:
        said = result.status
        if result.error is not None:
            field = f" (field {result.error.field})" if result.error.field else ""
            said += f": {result.error.code}: {result.error.message}{field}"
        written = evidence.result_at.timestamp_ms if evidence.result_at is not None else result.finished_at
        waited = written - result.finished_at
        if waited > 0:
            said += f"; waited {waited} ms for its transaction"
        where = "" if evidence.result_at is None else str(evidence.result_at)
        yield Step("result", result.finished_at, said, result.timings_ms.total, where)
    elif opening is not None and opening.state in ("open", "repeat"):
        for touch in evidence.touches:
            if isinstance(touch, KeptOut):
                yield Step("device", touch.at_ms, kept_out_words(touch))
        begun = evidence.sources[0].at.timestamp_ms if evidence.sources else evidence.now_ms
        yield Step("open", evidence.now_ms, opening.what, float(max(0, evidence.now_ms - begun)))


def _in_order(chain: list[Step], touched: list[Step]) -> tuple[Step, ...]:
    """The chain in its own order, and the steps of the control plane among it by time."""
    order: list[tuple[int, int, int, Step]] = []
    latest = 0
    for number, step in enumerate(chain):
        latest = max(latest, step.at_ms)
        order.append((latest, 1, number, step))
    order += [(step.at_ms, 0, number, step) for number, step in enumerate(touched)]
    return tuple(step for *_, step in sorted(order, key=lambda entry: entry[:3]))


# ---------------------------------------------------------------- questions


def _opening(evidence: Evidence) -> Opening:
    """Where a request without a terminal record is."""
    if not evidence.sources and evidence.work is None:
        return Opening("unknown", "no topic knows it")
    if evidence.work is None:
        return _before_work(evidence)
    if not evidence.work_finished:
        held = evidence.owner
        if held is None:
            return Opening("open", "waits on its work topic; no worker works the partition off now")
        ahead = ""
        if evidence.work_committed is not None and evidence.work_at is not None:
            gap = max(0, evidence.work_at.offset - evidence.work_committed.offset)
            ahead = f", at most {gap} records before it" if gap else ", it is the oldest"
        return Opening("open", f"with {held.worker} ({held.incarnation}) or waiting for it: {held.state}{ahead}")
    return Opening("open", "the worker is done with it; it waits for the shared Stage 2, or its transaction for others")


def _before_work(evidence: Evidence) -> Opening:
    first = evidence.sources[0]
    if evidence.ingress_committed is None or evidence.ingress_committed <= first.at.offset:
        ahead = first.at.offset - (evidence.ingress_committed or 0)
        return Opening("open", f"waits for ingress, at most {ahead} records before it")
    return Opening(
        "repeat",
        "ingress took it up and made nothing of it: a repeat of an id that was answered before, or its work record and "
        "result are gone by retention. `sie-stream audit verify` tells a loss from that",
    )


def _attempts(evidence: Evidence) -> int:
    """Counted by the worker where it gave up; else one, and one more for each time another took the partition over."""
    if evidence.letter is not None and evidence.letter.component == "worker":
        return evidence.letter.attempts
    result = evidence.result
    if evidence.work is None and (result is None or not result.provenance.worker):
        return 0
    if evidence.work is not None and evidence.owner is None and result is None:
        return 0
    return max(1, 1 + takeovers(evidence, _started_ms(evidence)) + begun_again(evidence.touches))


def _durations(result: Result, touches: Sequence[Touch]) -> dict[str, float]:
    timings = result.timings_ms
    ran, moving = moving_ms(result, touches)
    named = {
        "preprocess": timings.preprocess,
        "queue": timings.queue - ran - moving,
        **({"ran_elsewhere": ran, "moving": moving} if ran or moving else {}),
        "inference": timings.inference,
        "postprocess": timings.postprocess,
    }
    rest = timings.total - sum(named.values())
    return {**named, "waiting_for_ingress_and_commit": max(0.0, rest), "total": timings.total}


def _deadline_left(evidence: Evidence) -> int | None:
    work: WorkItem | None = evidence.work
    if work is None or not work.deadline_at_ms:
        return None
    ended = evidence.result.finished_at if evidence.result is not None else evidence.now_ms
    return work.deadline_at_ms - ended


def _verdict(evidence: Evidence, opening: Opening | None) -> str:
    result = evidence.result
    if result is None:
        assert opening is not None
        return f"{opening.state}: {opening.what}"
    total = result.timings_ms.total
    longest = _longest(result, evidence.touches)
    said = f"{result.status} after {total:.1f} ms"
    if result.error is not None:
        said += f" ({result.error.code})"
    if longest is not None:
        name, took = longest
        said += f"; {took:.1f} ms of it ({100 * took / total:.0f} %) {name}"
    devices = dict.fromkeys(touch.device for touch in evidence.touches if isinstance(touch, CameIn))
    if devices:
        said += f"; its model had to come to {', '.join(devices)} first"
    left = _deadline_left(evidence)
    if left is not None:
        said += f"; {left} ms before its deadline" if left >= 0 else f"; {-left} ms after its deadline"
    return said


WORDS = {
    "preprocess": "in ingress",
    "queue": "in the queue",
    "ran_elsewhere": "in engines of other workers",
    "moving": "moving between workers",
    "inference": "in the engine",
    "postprocess": "in Stage 2",
    "waiting_for_ingress_and_commit": "waiting for ingress",
}


def _longest(result: Result, touches: Sequence[Touch]) -> tuple[str, float] | None:
    durations = _durations(result, touches)
    total = durations.pop("total")
    name = max(durations, key=lambda key: durations[key])
    return (WORDS[name], durations[name]) if total > 0 and durations[name] > 0 else None


def _notes(evidence: Evidence) -> tuple[str, ...]:
    notes = list(evidence.notes)
    result = evidence.result
    if evidence.other_results:
        places = ", ".join(str(place) for place in evidence.other_results)
        notes.append(f"This id has {1 + len(evidence.other_results)} terminal records; the others: {places}.")
    if result is not None and result.provenance.batch_size > 1 + len(evidence.neighbours):
        missing = result.provenance.batch_size - 1 - len(evidence.neighbours)
        notes.append(
            f"{missing} others of its batch were not found near it: still open, gone, or asked again elsewhere."
        )
    if result is not None and evidence.placed is None and result.provenance.placement_epoch:
        epoch = result.provenance.placement_epoch
        notes.append(f"The decision about record {epoch} of sie.cluster, which placed it, is not on sie.decisions.")
    return tuple(notes)


def touches(decision: Decision, unit: str, worker: str) -> bool:
    """Whether a decision is about the unit, its model or the worker, or moved something of the unit or on the worker.

    What moved of other variants of the model touches nobody who asked this one.
    """
    if unit in about(decision) or decision.subject == base_of(unit) or (worker and decision.subject == worker):
        return True
    return bool(worker) and any(
        end.partition("/")[0] == worker for move in decision.moves for end in (move.source, move.target)
    )


def telling(fact: ClusterFact) -> bool:
    """Not one of the records that only say that time passes."""
    return not isinstance(fact.record, WorkerHeartbeat | WorkerLoad) and type(fact.record).__name__ != "Tick"
