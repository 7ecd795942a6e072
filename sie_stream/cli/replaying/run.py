"""One replay: results to the scratch, work items to the engines, answers to the tally. Memory stays bounded."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import msgspec
from msgspec import Struct

from gpu_worker.backends.base import EngineInput, EngineOutput
from processors.ingress.routes import CompiledRoute, RouteTable
from processors.tokenise import TextInputs, text_tokens
from schemas.codec import decode_result, decode_work
from schemas.registry_follower import SchemaTableFollower
from schemas.result_codec import RESULT_FRAME
from schemas.wire import CodecError
from sie_stream.cli.replaying.answers import Token, answer_again, place_of, refused_again
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
from sie_stream.replay.pace import Pace, Pacer
from sie_stream.replay.plan import Span, out_of_reach, segments
from sie_stream.replay.report import Place, Tally
from sie_stream.replay.versions import Declared, Unavailable, VersionBook
from sie_stream.rollout_records import SHADOW
from sie_stream.settings import Settings

COMPARED = ("ok", "failed")
HARMFUL = ("poison", "engine_timeout", "engine_died")
"""Inputs that no engine survived: tried again only on request, since they kill engines."""
SHADOW_COPY = "copy for a shadow"
"""Nobody was answered with what a shadow made of it; the request itself is on the work topic of its own variant."""
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


class Replay:
    """`tell` gets every answer, if anybody wants them one by one; `moved` how many offsets were passed."""

    def __init__(
        self,
        readers: Readers,
        settings: Settings,
        book: VersionBook,
        job: Job,
        scratch: Scratch,
        tally: Tally,
        tell: Answered | None,
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
        self._first_matched: dict[TopicPartition, int] = {}
        self._paces = bool(job.pace.per_s or job.pace.factor)
        self._pacer = Pacer(job.pace)
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
                value = record.value
                if value is not None and choice.needle not in value and value.startswith(RESULT_FRAME):
                    continue
                try:
                    result = decode_result(value)
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
        found = self._scratch.between(place, records[0].offset, records[-1].offset)
        matched = 0
        for record in records:
            original = found.get(record.offset)
            if original is None and not every:
                continue
            try:
                work = decode_work(record.value)
            except CodecError as error:
                self._tally.note(f"{place.topic}[{place.partition}] offset {record.offset}: no work item: {error}")
                continue
            if original is None and work.variant[:1] == SHADOW:
                self._tally.not_scored(SHADOW_COPY)
                continue
            if original is None:
                why = (
                    "no terminal record: not finished yet, deleted, behind an open transaction, or written after the "
                    "time that was looked at (--late)"
                )
                self._tally.absent(place_of(record), work.request_id, work.model, "missing", why)
                continue
            if not matched:
                self._first_matched.setdefault(place, record.offset)
            matched += 1
            self._one(Token(original, record, work))
            if self._stop:
                break
        self._matched[place] = self._matched.get(place, 0) + matched

    def _one(self, token: Token) -> None:
        original, work = token.original, token.work
        if original.status not in COMPARED:
            self._tally.not_scored(original.status)
            return
        if original.error_code in HARMFUL and not self._job.harmful:
            self._tally.not_scored(f"failed: {original.error_code}")
            return
        barrier = self._protection.barrier(original)
        if barrier is not None:
            self._tally.absent(token.place, original.request_id, original.model, *barrier)
            return
        key = (original.model, original.version, original.weights_digest)
        target = self._targets.get(key) or self._target(key, work)
        if isinstance(target, Unavailable):
            if not self._stop:  # else it was not waited for, which says nothing of its version
                self._tally.unavailable(original, token.place, target.reason)
            return
        token_ids = work.token_ids
        if self._pinned_route is not None:
            try:
                token_ids = self._admitted(work, self._pinned_route)
            except InvalidRequest as refusal:
                self._count(target, token, refused_again(target, token, refusal))
                return
        if self._paces:
            self._wait(token.record.timestamp_ms)
        self._submit(token, target, token_ids)

    def _submit(self, token: Token, target: Target, token_ids: tuple[int, ...] | None) -> None:
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

    def _target(self, key: tuple[str, str, str], work: WorkItem) -> Target | Unavailable:
        """What answers for (model, version, weights digest), loaded."""
        assert self.engines is not None
        declared = self._job.pinned or self._book.as_it_was(*key, work.routed_at_ms)
        if isinstance(declared, Declared) and declared.launch.model != key[0]:
            declared = Unavailable(f"{key[0]}: --model pins {declared.launch.model}, another model.")
        found = declared if isinstance(declared, Unavailable) else self.engines.target(declared.launch)
        self._targets[key] = found
        return found

    def _admitted(self, work: WorkItem, route: CompiledRoute) -> tuple[int, ...] | None:
        """What ingress would make of these inputs for the pinned version. Raises InvalidRequest."""
        if route.broken:
            raise InvalidRequest("model_unavailable", route.broken, "model")
        route.check(work.inputs)
        if route.tokeniser is None:
            return None
        return text_tokens(route.tokeniser, self._text_inputs.decode(work.inputs))

    def answered(
        self, target: Target, tokens: Sequence[object], outputs: Sequence[EngineOutput], inference_ms: float
    ) -> None:
        """An engine's answers, finished by the same Stage 2 as a worker's. The same bytes again are the common case."""
        same: list[Original] = []
        plain = self._tell is None and not self._protection.concerns(target.launch)
        for token, output in zip(tokens, outputs, strict=True):
            assert isinstance(token, Token)
            built = None
            if not output.error_code:
                built = build_outputs(target.stage2, output.outputs, output.token_ids, output.finish_reason or "")
                if plain and built == token.original.outputs and token.original.status == "ok":
                    same.append(token.original)
                    continue
            self._count(target, token, answer_again(target, token, output, built, inference_ms))
        self._tally.same(same, target.launch.version, inference_ms)

    def _count(self, target: Target, token: Token, again: Again) -> None:
        found, original, again = self._protection.judged(token.original, again, target.launch, self._job.tolerance)
        self._tally.answered(original, again, token.place, found)
        if self._tell is not None:
            self._tell(original, again, token.place, found, token.work)

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
            # What was read and is deleted since is not absent.
            gone_below = min(begins_at, self._first_matched.get(place, begins_at))
            gone, listed = self._scratch.below(place, gone_below, ABSENT_LISTED)
            for offset, request_id, model in listed:
                why = f"its work item is deleted: {place.topic}[{place.partition}] begins at {begins_at}"
                here = Place(place.topic, place.partition, offset)
                self._tally.absent(here, request_id, model, "retention", why if exists else "its work topic is deleted")
            self._tally.more("retention", gone - len(listed))
            rest = self._scratch.held(place) - gone - self._matched.get(place, 0)
            if rest > 0:
                self._tally.more("retention", rest)
                self._tally.note(
                    f"{place.topic}[{place.partition}]: {rest} results whose work item is not there, or cannot be "
                    "read, though the partition begins before it."
                )
        for request_id in sorted(choice.ids_left):
            self._tally.absent(
                Place("", -1, -1), request_id, "", "missing", "no terminal record with this id was found"
            )

    def _wait(self, at_ms: int) -> None:
        """Hold the next record back until its time has come; engines are attended to meanwhile."""
        due_s = self._pacer.start_ms(time.monotonic() * 1_000, at_ms) / 1_000
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
