"""Adds verdicts up and says what came of a replay. Bounded: counts, samples of scores, and the first differences."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct, field

from sie_stream.replay.compare import Again, Cause, Original, Verdict
from sie_stream.replay.drift import Histogram, Sample, histogram, ks, psi, quantile, score_and_label

EXAMPLES_MAX = 100
"""Differences listed one by one, those that change a decision first; --parquet has every record."""
CHANGES_MAX = 1_000
"""Different (label before, label after) pairs that are counted."""
CHANGES_SHOWN = 20
REASONS_MAX = 100
NOTES_MAX = 200
TEXT_MAX = 400
LATENCY_TAIL = 0.01
HARMLESS = frozenset({"shredded"})
"""Causes that say nothing about the answers."""
NO_MODEL = "(no model)"
"""Requests that ingress refused before it knew whom they were for."""


class Place(Struct, frozen=True, gc=False):
    topic: str
    partition: int
    offset: int


class Difference(Struct, frozen=True):
    """One record whose answer is not what it was, or that has none."""

    request_id: str
    place: Place
    cause: Cause
    model: str
    before_version: str
    after_version: str
    before: str
    after: str
    fields: tuple[str, ...] = ()
    distance: float | None = None
    """None: not a matter of numbers."""
    decision: str = ""
    """`before -> after` where the decision (label, or how it ended) is another one."""


class Change(Struct, frozen=True):
    before: str
    after: str
    count: int


class Spread(Struct, frozen=True):
    """One number before and after. Quantiles are None of nothing."""

    seen: int
    before_p50: float | None
    after_p50: float | None
    before_p99: float | None
    after_p99: float | None
    histogram: Histogram


class ModelReport(Struct, frozen=True):
    model: str
    before_versions: tuple[str, ...]
    after_versions: tuple[str, ...]
    replayed: int
    equal: int
    within: int
    different: int
    labels_changed: int
    """Answers whose decision (label) is another one: what would change for users."""
    changes: tuple[Change, ...]
    scores: Spread | None
    psi: float
    ks: float
    latency: Spread | None
    """Milliseconds in the engine of the batch that answered; live batches and replay batches differ in size."""


class Report(Struct, frozen=True):
    """`partial`: stopped before the end, so absences are not counted."""

    title: str
    partial: bool
    replayed: int
    equal: int
    within: int
    different: int
    causes: dict[str, int]
    unscored: dict[str, int]
    """Nobody was answered from an engine then (expired, shed, copies for shadows ...): not compared."""
    models: tuple[ModelReport, ...]
    differences: tuple[Difference, ...]
    """The first of each kind: those that change a decision stand before the others."""
    reasons: dict[str, int]
    """Why a version was not to be had, or an engine refused."""
    notes: tuple[str, ...]
    exact: str
    seconds: float
    per_second: float
    to_topic: str = ""

    @property
    def same(self) -> bool:
        """Something was looked at, and it is what it was."""
        return self.no_difference and not (self.empty or self.partial)

    @property
    def no_difference(self) -> bool:
        """None was found, in however much was looked at."""
        return not (self.different or self.causes.keys() - HARMLESS)

    @property
    def empty(self) -> bool:
        """There was nothing to compare, and so it is neither the same nor different."""
        return not (self.replayed or self.causes or self.partial)


class _Model(Struct):
    before_versions: dict[str, None] = field(default_factory=dict)
    after_versions: dict[str, None] = field(default_factory=dict)
    equal: int = 0
    within: int = 0
    different: int = 0
    labels_changed: int = 0
    changes: dict[tuple[str, str], int] = field(default_factory=dict)
    scores: Sample = field(default_factory=Sample)
    latency: Sample = field(default_factory=Sample)


class Tally:
    """What has been seen so far."""

    def __init__(self) -> None:
        self.causes: dict[Cause, int] = {}
        self.unscored: dict[str, int] = {}
        self.reasons: dict[str, int] = {}
        self.notes: list[str] = []
        self._decided: list[Difference] = []
        self._others: list[Difference] = []
        self._models: dict[str, _Model] = {}

    def answered(self, original: Original, again: Again, place: Place, found: Verdict) -> None:
        """One request that was answered again."""
        if found.outcome == "equal":
            self.same([original], again.version, again.inference_ms)
            return
        model = self._model(original.model)
        model.before_versions.setdefault(original.version)
        model.after_versions.setdefault(again.version)
        score, after, decision = self._moved(model, original, again)
        if score is not None and after is not None:
            model.scores.add(score, after)
        if again.inference_ms:
            model.latency.add(original.inference_ms, again.inference_ms)
        if found.outcome == "within":
            model.within += 1
        elif found.cause is not None:
            model.different += 1
            distance = found.distance if found.distance < float("inf") else None
            self._count(found.cause)
            self._list(original, again, place, found.cause, found.fields, distance, decision)

    def same(self, originals: Iterable[Original], version: str, inference_ms: float) -> None:
        """Requests whose answers are equal, by `version` in one batch of `inference_ms`."""
        for original in originals:
            model = self._models.get(original.model) or self._model(original.model)
            model.equal += 1
            if original.version not in model.before_versions:
                model.before_versions[original.version] = None
            if version not in model.after_versions:
                model.after_versions[version] = None
            score, _ = score_and_label(original.outputs)
            if score is not None:
                model.scores.add(score, score)
            if inference_ms:
                model.latency.add(original.inference_ms, inference_ms)

    def _model(self, name: str) -> _Model:
        return self._models.setdefault(name or NO_MODEL, _Model())

    def _moved(self, model: _Model, original: Original, again: Again) -> tuple[float | None, float | None, str]:
        """Both scores, and how the decision changed."""
        before, label = score_and_label(original.outputs)
        after, other = score_and_label(again.outputs)
        ended, other_ended = label or original.status, other or again.status
        if ended == other_ended:
            return before, after, ""
        model.labels_changed += 1
        pair = (ended[:TEXT_MAX], other_ended[:TEXT_MAX])
        if pair in model.changes or len(model.changes) < CHANGES_MAX:
            model.changes[pair] = model.changes.get(pair, 0) + 1
        return before, after, " -> ".join(pair)

    def unavailable(self, original: Original, place: Place, reason: str) -> None:
        """The version that answered is not to be had any more."""
        self.reason(reason)
        self._count("version")
        self._list(original, Again("failed", "", "", "", None, "unavailable", reason), place, "version", (), None)

    def absent(self, place: Place, request_id: str, model: str, cause: Cause, why: str) -> None:
        """A request without its result (missing), or a result without its work item (retention)."""
        self._count(cause)
        if len(self._others) < EXAMPLES_MAX:
            self._others.append(Difference(request_id, place, cause, model, "", "", "", why))

    def more(self, cause: Cause, count: int) -> None:
        """Absences beyond those that are listed one by one."""
        if count > 0:
            self.causes[cause] = self.causes.get(cause, 0) + count

    def not_scored(self, status: str) -> None:
        self.unscored[status] = self.unscored.get(status, 0) + 1

    def reason(self, text: str) -> None:
        if text in self.reasons or len(self.reasons) < REASONS_MAX:
            self.reasons[text] = self.reasons.get(text, 0) + 1

    def note(self, text: str) -> None:
        if text not in self.notes and len(self.notes) < NOTES_MAX:
            self.notes.append(text)

    @property
    def answers(self) -> int:
        return sum(one.equal + one.within + one.different for one in self._models.values())

    def _count(self, cause: Cause) -> None:
        self.causes[cause] = self.causes.get(cause, 0) + 1

    def _list(
        self,
        original: Original,
        again: Again,
        place: Place,
        cause: Cause,
        fields: tuple[str, ...],
        distance: float | None,
        decision: str = "",
    ) -> None:
        listed = self._decided if decision else self._others
        if len(listed) < EXAMPLES_MAX:
            before, after = said(original.outputs, original.error_code, ""), said(again.outputs, again.error_code, "")
            if again.error_message:
                after = said(None, again.error_code, again.error_message)
            listed.append(
                Difference(
                    original.request_id,
                    place,
                    cause,
                    original.model,
                    original.version,
                    again.version,
                    before,
                    after,
                    fields,
                    distance,
                    decision,
                )
            )

    def finish(self, title: str, exact: str, seconds: float, *, partial: bool, to_topic: str = "") -> Report:
        models = tuple(_model_report(name, self._models[name]) for name in sorted(self._models))
        answers = self.answers
        return Report(
            title=title,
            partial=partial,
            replayed=answers,
            equal=sum(one.equal for one in models),
            within=sum(one.within for one in models),
            different=sum(one.different for one in models),
            causes={cause: self.causes[cause] for cause in sorted(self.causes)},
            unscored=dict(sorted(self.unscored.items())),
            models=models,
            differences=tuple([*self._decided, *self._others][:EXAMPLES_MAX]),
            reasons=self.reasons,
            notes=tuple(self.notes),
            exact=exact,
            seconds=round(seconds, 3),
            per_second=round(answers / seconds, 1) if seconds else 0.0,
            to_topic=to_topic,
        )


def said(outputs: bytes | None, code: str, message: str) -> str:
    """An answer as short text."""
    text = f"{code}: {message}" if message else code
    if outputs is not None:
        text = outputs.decode("utf-8", "replace")
    return text if len(text) <= TEXT_MAX else text[: TEXT_MAX - 3] + "..."


def _model_report(name: str, model: _Model) -> ModelReport:
    scores = model.scores
    changes = sorted(model.changes.items(), key=lambda one: (-one[1], one[0]))[:CHANGES_SHOWN]
    return ModelReport(
        model=name,
        before_versions=tuple(sorted(model.before_versions)),
        after_versions=tuple(sorted(model.after_versions)),
        replayed=model.equal + model.within + model.different,
        equal=model.equal,
        within=model.within,
        different=model.different,
        labels_changed=model.labels_changed,
        changes=tuple(Change(before, after, count) for (before, after), count in changes),
        scores=_spread(scores, 0.0),
        psi=round(psi(scores.before, scores.after), 6),
        ks=round(ks(scores.before, scores.after), 6),
        latency=_spread(model.latency, LATENCY_TAIL),
    )


def _spread(sample: Sample, tail: float) -> Spread | None:
    if not sample.seen:
        return None
    return Spread(
        sample.seen,
        quantile(sample.before, 0.5),
        quantile(sample.after, 0.5),
        quantile(sample.before, 0.99),
        quantile(sample.after, 0.99),
        histogram(sample.before, sample.after, tail=tail),
    )


EXACT_BACKENDS = ("sklearn", "onnx")


def what_is_exact(backends: Iterable[str]) -> str:
    """What a replay of these backends promises, on the same libraries and the same kind of processor."""
    found = sorted(set(backends))
    parts = []
    if exact := [name for name in found if name in EXACT_BACKENDS]:
        parts.append(
            f"{', '.join(exact)}: scikit-learn models and ONNX linear models, trees and networks answer the same bits "
            "in any batch, with the same weights, libraries and kind of processor; ONNX support vector machines, naive "
            "Bayes and embeddings may differ in their last digits"
        )
    if "torch" in found:
        parts.append(
            "torch: sampling is seeded per request; another batch may change the last digits of a logit, and a token "
            "where two are nearly equal"
        )
    if others := [name for name in found if name not in (*EXACT_BACKENDS, "torch")]:
        parts.append(f"{', '.join(others)}: nothing is promised")
    return "; ".join(parts) + "." if parts else "Nothing was run."
