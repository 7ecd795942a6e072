"""One replay: results to the scratch, work items to the engines, answers to the tally. Memory stays bounded."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import msgspec
from msgspec import Struct

from gpu_worker.backends.base import EngineInput, EngineOutput
from processors.ingress.routes import CompiledRoute, RouteTable
from processors.tokenise import TextInputs, text_tokens
from schemas.codec import decode_result, decode_work
from schemas.registry_follower import SchemaTableFollower
from schemas.wire import CodecError
from sie_stream.cli.replaying.choosing import Choice
from sie_stream.cli.replaying.engines import Engines, Target
from sie_stream.cli.replaying.ingress import IngressAgain, Refusals, decide_again
from sie_stream.cli.replaying.protected import Protection
from sie_stream.cli.replaying.reading import Moved, Readers
from sie_stream.cli.replaying.scratch import Scratch
from sie_stream.edge.clock import SystemClock
from sie_stream.edge.stop import StopFlag
from sie_stream.edge.tokenizer import TokenizerStore
from sie_stream.errors import InvalidRequest
from sie_stream.ids import TopicNames, TopicPartition
from sie_stream.postprocess import build_outputs
from sie_stream.records import LogRecord, Result, WorkItem
from sie_stream.replay.compare import Again, Original, Verdict
from sie_stream.replay.pace import Pace
from sie_stream.replay.plan import Span, out_of_reach, segments
from sie_stream.replay.report import Place, Tally
from sie_stream.replay.versions import Declared, Unavailable, VersionBook
from sie_stream.settings import Settings

COMPARED = ("ok", "failed")
HARMFUL = ("poison", "engine_timeout", "engine_died")
"""Inputs that no engine survived: tried again only on request, since they kill engines."""
PACE_STEP_S = 0.02
PREPARED_MAX = 2
ABSENT_LISTED = 50

Answered = Callable[[Original, Again, Place, Verdict, WorkItem], None]
"""Told every answer, e.g. to write it to a file or a topic."""


class Job(Struct, frozen=True):
    """How to replay what was chosen. `pinned` None: as it was."""

    pinned: Declared | None
    tolerance: float
    pace: Pace
    harmful: bool = False


class _Token(Struct, frozen=True, gc=False):
    """Goes along with an input, and comes back with its answer."""

    original: Original
    place: Place
    work: WorkItem


class Replay:
    """`tell` gets every answer; `moved` how many offsets were passed."""

    def __init__(
        self,
        readers: Readers,
        settings: Settings,
        book: VersionBook,
        job: Job,
        scratch: Scratch,
        tally: Tally,
        tell: Answered,
        stop: StopFlag,
        protection: Protection,
    ) -> None:
        self._protection = protection
        self._readers = readers
        self._settings = settings
        self._book = book
        self._job = job
        self._scratch = scratch
        self._tally = tally
        self._tell = tell
        self._stop = stop
        self._pinned_route = None if job.pinned is None else _compiled(settings.topics, job.pinned)
        self._text_inputs = msgspec.json.Decoder(TextInputs)
        self._refusals = Refusals()
        self._targets: dict[tuple[str, str, str], Target | Unavailable] = {}
        self._lanes: dict[int, tuple[Target, list[EngineInput], list[object]]] = {}
        self._matched: dict[TopicPartition, int] = {}
        self._started_s = 0.0
        self._first_at_ms: int | None = None
        self._paced = 0
        self._prepared = 0
        self._topic = ""
        self.engines: Engines | None = None

    # ------------------------------------------------------------ first pass: results

    def find_results(self, choice: Choice, engines: Engines, moved: Moved) -> None:
        """Terminal records that are wanted go to the scratch, those without a work item to the tally.

        The first versions that are seen begin to load meanwhile.
        """
        for records in self._readers.read(choice.results, moved, self._stop):
            kept = []
            for record in records:
                try:
                    result = decode_result(record.value)
                except CodecError as error:
                    self._tally.note(f"{record.topic}[{record.partition}] offset {record.offset}: no result: {error}")
                    continue
                if not choice.wanted(result):
                    continue
                choice.ids_left.discard(result.request_id)
                if result.provenance.work_offset < 0:
                    if result.status != "rejected" or not self._refusals.add(result):
                        self._tally.not_scored(f"{result.status} at ingress")
                else:
                    kept.append(result)
            if kept and self._prepared < PREPARED_MAX:
                self._prepare(kept[0], engines)
            self._scratch.add(kept)
            if choice.by_ids and not choice.ids_left:
                return

    def _prepare(self, result: Result, engines: Engines) -> None:
        """An engine takes seconds to start; the results that are read meanwhile take as long."""
        self._prepared += 1
        key = (result.model, result.version, result.provenance.weights_digest)
        declared = self._job.pinned or self._book.as_it_was(*key, result.finished_at)
        if isinstance(declared, Declared) and declared.launch.model == result.model:
            engines.prepare(declared.launch)

    # ------------------------------------------------------------ second pass: work

    def run(self, choice: Choice, engines: Engines, moved: Moved) -> None:
        """Every work item of the range, or of the results that were found, in the order of its partition."""
        self.engines = engines
        self._started_s = time.monotonic()
        for spans in [choice.work] if choice.work else self._rounds():
            self._next_topic(spans[0].topic, engines)
            for records in self._readers.read(spans, moved, self._stop):
                for run in _by_partition(records):
                    self._take(run, every=bool(choice.work))
                engines.tend()
            if self._stop:
                break
        if not self._stop:
            self._flush()
            engines.finish()
        if not self._stop:
            self._ingress_again()
        if not self._stop:
            self._absences(choice)
        for sentence in (*choice.notes, *out_of_reach(choice.work), *out_of_reach(choice.results), *self._readers.lost):
            self._tally.note(sentence)
        if self._scratch.repeated:
            self._tally.note(f"{self._scratch.repeated} terminal records came more than once: see `audit verify`.")

    def _next_topic(self, topic: str, engines: Engines) -> None:
        """One topic is one model: the engines need not hold those of the topics before."""
        if self._topic and topic != self._topic and not self._stop:
            self._flush()
            self._targets.clear()
            engines.unload_all()
        self._topic = topic

    def size(self, choice: Choice) -> int:
        """Offsets that the second pass goes over."""
        if choice.work:
            return sum(span.size for span in choice.work)
        return sum(
            end - start for place in self._scratch.places() for start, end in segments(self._scratch.offsets(place))
        )

    def _rounds(self) -> Iterator[list[Span]]:
        """Where the work items of the results are: one stretch after another, topic by topic."""
        for place in self._scratch.places():
            if not self._readers.records.partitions_of(place.topic):
                continue  # deleted with its model: told as absences
            bounds = self._readers.bounds([place])[place]
            for start, end in segments(self._scratch.offsets(place)):
                first, last = max(start, bounds.beginning), min(end, bounds.stable)
                if first < last:
                    yield [Span(place.topic, place.partition, first, last)]

    def _take(self, records: list[LogRecord], *, every: bool) -> None:
        """Records of one partition in their order."""
        place = TopicPartition(records[0].topic, records[0].partition)
        originals = self._scratch.between(place, records[0].offset, records[-1].offset)
        for record in records:
            original = originals.get(record.offset)
            if original is None and not every:
                continue
            here = Place(record.topic, record.partition, record.offset)
            try:
                work = decode_work(record.value)
            except CodecError as error:
                self._tally.note(f"{here.topic}[{here.partition}] offset {here.offset}: no work item: {error}")
                continue
            if original is None:
                why = "no terminal record: not finished yet, or written after the time that was looked at (--late)"
                self._tally.absent(here, work.request_id, work.model, "missing", why)
                continue
            self._matched[place] = self._matched.get(place, 0) + 1
            self._one(original, here, work, record.timestamp_ms)
            if self._stop:
                return

    def _one(self, original: Original, place: Place, work: WorkItem, at_ms: int) -> None:
        if original.status not in COMPARED:
            self._tally.not_scored(original.status)
            return
        if original.error_code in HARMFUL and not self._job.harmful:
            self._tally.not_scored(f"failed: {original.error_code}")
            return
        barrier = self._protection.barrier(original)
        if barrier is not None:
            self._tally.absent(place, original.request_id, original.model, *barrier)
            return
        target = self._target(original, work)
        if isinstance(target, Unavailable):
            self._tally.unavailable(original, place, target.reason)
            return
        token_ids = work.token_ids
        if self._pinned_route is not None:
            try:
                token_ids = self._admitted(work, self._pinned_route)
            except InvalidRequest as refusal:
                self._refused(original, place, work, target, refusal)
                return
        if self._job.pace.per_s or self._job.pace.factor:
            self._wait(at_ms)
        self._submit(_Token(original, place, work), target, token_ids)

    def _submit(self, token: _Token, target: Target, token_ids: tuple[int, ...] | None) -> None:
        work = token.work
        lane = self._lanes.get(target.slot)
        if lane is None:
            lane = self._lanes[target.slot] = (target, [], [])
        ids = None if token_ids is None else list(token_ids)
        lane[1].append(EngineInput(work.request_id, work.inputs, ids, work.parameters, work.seed))
        lane[2].append(token)
        if len(lane[1]) >= target.batch_rows:
            del self._lanes[target.slot]
            assert self.engines is not None
            self.engines.submit(*lane)

    def _flush(self) -> None:
        """Batches that are not full."""
        assert self.engines is not None
        for lane in self._lanes.values():
            self.engines.submit(*lane)
        self._lanes.clear()

    def _target(self, original: Original, work: WorkItem) -> Target | Unavailable:
        key = (original.model, original.version, original.weights_digest)
        found = self._targets.get(key)
        if found is None:
            assert self.engines is not None
            declared = self._job.pinned or self._book.as_it_was(*key, work.routed_at_ms)
            if isinstance(declared, Declared) and declared.launch.model != original.model:
                declared = Unavailable(f"{original.model}: --model pins {declared.launch.model}, another model.")
            loaded = declared if isinstance(declared, Unavailable) else self.engines.target(declared.launch)
            found = self._targets[key] = loaded
        return found

    def _admitted(self, work: WorkItem, route: CompiledRoute) -> tuple[int, ...] | None:
        """What ingress would make of these inputs for the pinned version. Raises InvalidRequest."""
        if route.broken:
            raise InvalidRequest("model_unavailable", route.broken, "model")
        route.check(work.inputs)
        if route.tokeniser is None:
            return None
        return text_tokens(route.tokeniser, self._text_inputs.decode(work.inputs))

    def _refused(
        self, original: Original, place: Place, work: WorkItem, target: Target, refusal: InvalidRequest
    ) -> None:
        again = Again(
            "rejected",
            target.launch.version,
            target.weights_digest,
            target.engine,
            None,
            refusal.code,
            f"{refusal.field}: {refusal.message}" if refusal.field else refusal.message,
            work.seed,
            schema_refused=True,
        )
        self._count(original, again, place, work, target)

    def answered(self, target: Target, token: object, output: EngineOutput, inference_ms: float) -> None:
        """An engine's answer, finished by the same Stage 2 as a worker's."""
        assert isinstance(token, _Token)
        status, outputs, code, message, schema = "ok", None, output.error_code or "", output.error_message or "", False
        if not code:
            built = build_outputs(target.stage2, output.outputs, output.token_ids, output.finish_reason or "")
            if isinstance(built, bytes):
                outputs = built
            else:
                code, message, schema = built.code, built.message, built.code == "output_schema_mismatch"
        if code:
            status = "failed"
        again = Again(
            status,
            target.launch.version,
            target.weights_digest,
            target.engine,
            outputs,
            code,
            message,
            token.work.seed,
            schema,
            inference_ms,
        )
        self._count(token.original, again, token.place, token.work, target)

    def _count(self, original: Original, again: Again, place: Place, work: WorkItem, target: Target) -> None:
        found, original, again = self._protection.judged(original, again, target.launch, self._job.tolerance)
        self._tally.answered(original, again, place, found)
        self._tell(original, again, place, found, work)

    def _ingress_again(self) -> None:
        """Those that ingress refused, by its own decisions and the routes of then, or of the pinned version."""
        if self._refusals.count:
            schemas = SchemaTableFollower(self._readers.schemas(), self._settings.topics.schemas, SystemClock())
            again = IngressAgain(self._settings, self._book.history, self._job.pinned, schemas)
            decide_again(self._refusals, again, self._readers, self._tally, self._stop)

    # ------------------------------------------------------------ the rest

    def _absences(self, choice: Choice) -> None:
        """Results whose work item was not there."""
        for place in self._scratch.places():
            exists = self._readers.records.partitions_of(place.topic) > place.partition
            begins_at = self._readers.bounds([place])[place].beginning if exists else 1 << 62
            gone, listed = self._scratch.below(place, begins_at, ABSENT_LISTED)
            for offset, request_id, model in listed:
                why = f"its work item is deleted: {place.topic}[{place.partition}] begins at {begins_at}"
                here = Place(place.topic, place.partition, offset)
                self._tally.absent(here, request_id, model, "retention", why if exists else "its work topic is deleted")
            self._tally.more("retention", gone - len(listed))
            rest = self._scratch.held(place) - gone - self._matched.get(place, 0)
            if rest > 0:
                self._tally.more("missing", rest)
                self._tally.note(f"{place.topic}[{place.partition}]: {rest} results whose work item is not readable.")
        for request_id in sorted(choice.ids_left):
            self._tally.absent(
                Place("", -1, -1), request_id, "", "missing", "no terminal record with this id was found"
            )

    def _wait(self, at_ms: int) -> None:
        """Hold the next record back until its time has come; engines are attended to meanwhile."""
        if self._first_at_ms is None:
            self._first_at_ms = at_ms
        due_s = self._started_s + self._job.pace.due_ms(self._paced, self._first_at_ms, at_ms) / 1_000
        self._paced += 1
        while not self._stop and (left := due_s - time.monotonic()) > 0:
            assert self.engines is not None
            if left > PACE_STEP_S:
                self._flush()
            self.engines.tend()
            time.sleep(min(left, PACE_STEP_S))


def _compiled(names: TopicNames, declared: Declared) -> CompiledRoute | None:
    """The route of a pinned version as ingress would have it."""
    routes = RouteTable(names, TokenizerStore())
    routes.change([(declared.launch.model, declared.route)])
    return routes.by_model(declared.launch.model)


def _by_partition(records: list[LogRecord]) -> list[list[LogRecord]]:
    """In the order of each partition."""
    found: dict[tuple[str, int], list[LogRecord]] = {}
    for record in records:
        run = found.get((record.topic, record.partition))
        if run is None:
            run = found[record.topic, record.partition] = []
        run.append(record)
    return list(found.values())
