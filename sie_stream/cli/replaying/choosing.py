"""From what was asked (topic, offsets, time, ids, decision) to spans of sie.results and of the work topics."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from msgspec import Struct

from schemas.codec import decode_decision
from schemas.wire import CodecError
from sie_stream.cli.replaying.reading import Asked, Readers
from sie_stream.cli.since import since_ms
from sie_stream.decisions import Decision
from sie_stream.edge.stop import StopFlag
from sie_stream.edge.tables import read_to_end
from sie_stream.errors import ConfigError
from sie_stream.ids import TopicNames, TopicPartition, base_of
from sie_stream.records import Result
from sie_stream.replay.plan import Span, out_of_reach
from sie_stream.rollout_records import answering_unit

SLACK_MS = 60_000
"""Clocks of brokers and workers differ by less."""
AHEAD_MS = 3_600_000
"""Producers of requests choose the time on a record. Kafka takes what is an hour ahead of its own clock
(message.timestamp.after.max.ms), and whatever is behind it."""
LATE_MS = 600_000
"""How long after a range of work items its results are looked for, unless --late says."""


class Question(Struct, frozen=True):
    """The options of the command."""

    topic: str = ""
    first: str = ""
    until: str = ""
    partitions: tuple[int, ...] = ()
    request_ids: tuple[str, ...] = ()
    decision: str = ""
    model: str = ""
    late_ms: int | None = None
    """None: LATE_MS after work items. After requests as long as the log goes: their times may lie years back."""


class Choice(Struct):
    """What is read. `work` empty: the work items of the results that are found."""

    title: str
    results: list[Span]
    wanted: Callable[[Result], bool]
    work: list[Span] = []
    by_ids: bool = False
    ids_left: set[str] = set()
    """Request ids not found so far; reading results stops when none is left."""
    notes: tuple[str, ...] = ()
    needle: bytes = b""
    """Bytes that every wanted result holds: on a topic of many models nearly all results need not be decoded."""


def choose(readers: Readers, names: TopicNames, asked: Question, stop: StopFlag) -> Choice:
    """Raises ConfigError for options that contradict each other or name nothing."""
    if asked.request_ids and asked.decision:
        raise ConfigError("give --request-id or --decision, not both")
    if asked.request_ids:
        return _by_ids(readers, names, asked)
    if asked.decision:
        return _by_decision(readers, names, asked)
    topic = asked.topic or (names.work(asked.model) if asked.model else names.results)
    if topic == names.results:
        return _by_results(readers, names, asked)
    if topic.startswith(names.work("")):
        return _by_work(readers, names, asked, [topic, *_topics_of_variants(readers, names, asked)], stop)
    return _by_source(readers, names, asked, topic, stop)


def _bytes(name: str) -> bytes:
    """As a record holds it."""
    return name.encode("utf-8", "surrogatepass")


def limit(readers: Readers, places: Sequence[TopicPartition], option: str, text: str) -> Asked:
    """`120` is an offset in every partition; `10m`, `2h` or an ISO time the offset of that moment."""
    if not text:
        return lambda place: None
    if _is_offset(text):
        return lambda place: int(text)
    found = readers.records.offsets_at(places, moment(option, text))
    return lambda place: found[place]


def moment(option: str, text: str) -> int:
    try:
        return since_ms(text, round(time.time() * 1_000))
    except ConfigError as error:
        raise ConfigError(f"{option} {text!r}: allowed are an offset, 90s, 10m, 2h, 7d ago, or an ISO time") from error


def _of_model(model: str) -> Callable[[Result], bool]:
    return lambda result: not model or result.model == model


def _result_spans(readers: Readers, names: TopicNames, asked: Question) -> list[Span]:
    only = asked.partitions if asked.topic == names.results else ()
    places = readers.partitions(names.results, only)
    first = limit(readers, places, "--from", asked.first)
    return readers.spans(places, first, limit(readers, places, "--to", asked.until))


def _by_results(readers: Readers, names: TopicNames, asked: Question) -> Choice:
    of_model = _of_model(asked.model)
    results = _result_spans(readers, names, asked)
    return Choice(f"{names.results}{_range(asked)}", results, of_model, needle=_bytes(asked.model))


def _by_ids(readers: Readers, names: TopicNames, asked: Question) -> Choice:
    ids = set(asked.request_ids)
    return Choice(
        f"{len(ids)} request ids",
        _result_spans(readers, names, asked),
        lambda result: result.request_id in ids,
        by_ids=True,
        ids_left=set(ids),
        needle=_bytes(min(ids)) if len(ids) == 1 else b"",
    )


def _topics_of_variants(readers: Readers, names: TopicNames, asked: Question) -> list[str]:
    """Work topics of the versions that took a part of the keys of --model. An offset, or the number of a partition,
    is one of the model's own topic and says nothing about those."""
    if asked.topic or asked.partitions or _is_offset(asked.first) or _is_offset(asked.until):
        return []
    begin = len(names.work(""))
    topics = (topic for topic in readers.records.topics() if topic.startswith(names.work(asked.model)))
    return [topic for topic in topics if base_of(topic[begin:]) == asked.model != topic[begin:]]


def _by_work(readers: Readers, names: TopicNames, asked: Question, topics: Sequence[str], stop: StopFlag) -> Choice:
    """`topics`: that of a model, and those of its variants."""
    places = [place for topic in topics for place in readers.partitions(topic, asked.partitions)]
    work = readers.spans(
        places, limit(readers, places, "--from", asked.first), limit(readers, places, "--to", asked.until)
    )
    ranges = {span.place: (span.start - span.gone, span.end) for span in work}

    def wanted(result: Result) -> bool:
        origin = result.provenance
        first, until = ranges.get(TopicPartition(origin.work_topic, origin.work_partition), (0, 0))
        return first <= origin.work_offset < until

    times = [] if any(span.gone for span in work) else readers.first_times(work, stop)
    end_ms = _end_ms(readers, work, asked, stop)
    late_ms = LATE_MS if asked.late_ms is None else asked.late_ms
    results = _results_between(readers, names, min(times) - SLACK_MS if times else None, end_ms, late_ms)
    title = f"{topics[0]}{f' and {len(topics) - 1} of variants' if len(topics) > 1 else ''}{_range(asked)}"
    # The topics of variants begin with the name of the model's own.
    return Choice(title, results, wanted, work, needle=_bytes(topics[0]))


def _by_source(readers: Readers, names: TopicNames, asked: Question, topic: str, stop: StopFlag) -> Choice:
    """A topic of requests: the results that name its records as their source."""
    places = readers.partitions(topic, asked.partitions)
    source = readers.spans(
        places, limit(readers, places, "--from", asked.first), limit(readers, places, "--to", asked.until)
    )
    ranges = {span.partition: (span.start - span.gone, span.end) for span in source}
    of_model = _of_model(asked.model)
    from_ms, to_ms = _time_of("--from", asked.first), _time_of("--to", asked.until)

    def wanted(result: Result) -> bool:
        origin = result.provenance
        if origin.source_topic != topic or not of_model(result):
            return False
        first, until = ranges.get(origin.source_partition, (0, 0))
        at_ms = result.finished_at - result.timings_ms.total
        if origin.source_offset >= until or (to_ms is not None and at_ms > to_ms):
            return False
        # Kafka found the first request of that time that is there still. Compaction may have removed some before it.
        return origin.source_offset >= first or (from_ms is not None and at_ms >= from_ms)

    begun_ms = readers.written_from(source, stop) if from_ms is None else from_ms
    first_ms = None if begun_ms is None or any(span.gone for span in source) else begun_ms - AHEAD_MS - SLACK_MS
    end_ms = None if asked.late_ms is None else _end_ms(readers, source, asked, stop)
    results = _results_between(readers, names, first_ms, end_ms, asked.late_ms or 0)
    notes = (*out_of_reach(source), f"Requests on {topic} without any result are not looked for: `audit verify` does.")
    return Choice(f"{topic}{_range(asked)}", results, wanted, notes=notes, needle=_bytes(topic))


def _results_between(
    readers: Readers, names: TopicNames, first_ms: int | None, end_ms: int | None, late_ms: int
) -> list[Span]:
    """Terminal records written from `first_ms` to `late_ms` after `end_ms`; None: from the first one, to the last.

    Where the topic itself begins later than that, the span says so: what is before its beginning is gone.
    """
    places = readers.partitions(names.results)
    first: dict[TopicPartition, int] = {}
    if first_ms is not None:
        bounds = readers.bounds(places)
        found = readers.records.offsets_at(places, first_ms)
        first = {place: offset for place, offset in found.items() if offset > bounds[place].beginning}
    ends = {} if end_ms is None else readers.records.offsets_at(places, end_ms + late_ms)
    return readers.spans(places, first.get, ends.get)


def _end_ms(readers: Readers, spans: Sequence[Span], asked: Question, stop: StopFlag) -> int | None:
    """A moment after which no record of the range was written; None when that is now."""
    if not asked.until:
        return None
    if not _is_offset(asked.until):
        return moment("--to", asked.until)
    filled = [span for span in spans if span.size]
    stable = readers.bounds([span.place for span in filled])
    after = [Span(span.topic, span.partition, span.end, stable[span.place].stable) for span in filled]
    times = readers.first_times(after, stop)
    return max(times) if times and len(times) == len(filled) else None


def _time_of(option: str, text: str) -> int | None:
    """None for an offset, and for nothing."""
    return None if not text or _is_offset(text) else moment(option, text)


def _is_offset(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _by_decision(readers: Readers, names: TopicNames, asked: Question) -> Choice:
    """The results a decision is behind: of its placement or its route where it made one, else of its version."""
    decision, next_ms = find_decision(readers, names, asked.decision)
    model, chosen = decision.subject, decision.chosen
    after_ms = decision.at_ms - SLACK_MS
    if "placement_epoch" in chosen:
        epoch = int(chosen["placement_epoch"])
        said = f"placement epoch {epoch}"

        def wanted(result: Result) -> bool:
            return _unit(result) == model and result.provenance.placement_epoch == epoch
    elif "route_epoch" in chosen:
        epoch = int(chosen["route_epoch"])
        said = f"route epoch {epoch}"

        def wanted(result: Result) -> bool:
            return result.model == model and result.provenance.route_epoch == epoch
    else:
        version = str(chosen.get("version", ""))
        said = f"version {version or 'any'}, until the next decision of its kind"

        def wanted(result: Result) -> bool:
            in_time = decision.at_ms <= result.finished_at and (next_ms is None or result.finished_at < next_ms)
            return model in (result.model, _unit(result)) and in_time and version in ("", result.version)

    places = readers.partitions(names.results)
    first = readers.records.offsets_at(places, after_ms)
    results = readers.spans(places, first.get, lambda place: None)
    title = f"{decision.decision} ({decision.kind} of {model}: {said})"
    return Choice(title, results, wanted, needle=_bytes(base_of(model)))


def _unit(result: Result) -> str:
    """What decisions about placements name."""
    return answering_unit(result.model, result.variant)


def find_decision(readers: Readers, names: TopicNames, wanted: str) -> tuple[Decision, int | None]:
    """The decision, and when the next one of its kind and subject came. Raises ConfigError."""
    found: Decision | None = None
    for record in read_to_end(readers.records, names.decisions):
        try:
            decision = decode_decision(record.value)
        except CodecError:
            continue  # `sie-stream audit decisions` is about those
        if decision.decision == wanted:
            found = decision
        elif found is not None and (decision.kind, decision.subject) == (found.kind, found.subject):
            return found, decision.at_ms
    if found is None:
        raise ConfigError(f"--decision {wanted!r}: not on {names.decisions}. `sie-stream decisions` lists them.")
    return found, None


def _range(asked: Question) -> str:
    first = f" from {asked.first}" if asked.first else ""
    return first + (f" to {asked.until}" if asked.until else "")
