"""Windows of results, by model and variant: what each version answered in each span of time. Pure.

A window is [start, start + window_ms) of the timestamps of sie.results. It closes once time is `GRACE_MS` past its end,
because a result has its time before it is on the topic; the host waits for what is there and hidden by a transaction.
A window is complete when the book read it from before its start; what the book joined in the middle of is reported as
broken, and nobody judges by it.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from msgspec import Struct

from sie_stream.records import Headers, Result
from sie_stream.rollout_records import SHADOW, VariantStats, VariantWindow, pinned_in
from sie_stream.sketch import bucket_of

WINDOW_MS = 2_000
GRACE_MS = 1_000
FIELDS_MAX = 6
"""Numeric, and categorical, output fields that are followed, by name."""
LABELS_MAX = 32
LABEL_CHARS_MAX = 64
OTHER = "(other)"
STAGE2_CODES = frozenset({"output_schema_mismatch", "output_missing", "output_not_text"})
"""Failures that say that the model's answer does not fit its output_schema."""
COUNTED = frozenset({"ok", "failed", "expired"})
"""Endings that are samples of a version."""

_outputs_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_value_decoder = msgspec.json.Decoder(float | str | bool | None)


class _Tally(Struct):
    """The counts of one variant in one window, growing."""

    ok: int = 0
    failed: int = 0
    expired: int = 0
    schema_violations: int = 0
    busy_us: int = 0
    tokens: int = 0
    latency: dict[int, int] = msgspec.field(default_factory=dict)
    scores: dict[str, dict[int, int]] = msgspec.field(default_factory=dict)
    labels: dict[str, dict[str, int]] = msgspec.field(default_factory=dict)
    pinned: int = 0

    def add(self, result: Result) -> None:
        timings, provenance = result.timings_ms, result.provenance
        if result.status == "ok":
            self.ok += 1
            _count(self.latency, bucket_of(timings.total))
            self.busy_us += round(1_000 * timings.inference / max(1, provenance.batch_size))
            self.tokens += result.usage.prompt_tokens + result.usage.completion_tokens
        elif result.status == "expired":
            self.expired += 1
        elif result.status == "failed":
            self.failed += 1
            if result.error is not None and result.error.code in STAGE2_CODES:
                self.schema_violations += 1

    def add_outputs(self, outputs: bytes) -> None:
        """The scores and labels of one answer."""
        try:
            fields = _outputs_decoder.decode(outputs)
        except msgspec.MsgspecError:
            return  # its output_schema takes something else than an object: there is no score to follow
        for name, raw in fields.items():
            try:
                value = _value_decoder.decode(raw)
            except msgspec.MsgspecError:
                continue  # a list or an object
            if isinstance(value, bool):
                self._label(name, "true" if value else "false")
            elif isinstance(value, float):
                if name in self.scores or len(self.scores) < FIELDS_MAX:
                    _count(self.scores.setdefault(name, {}), bucket_of(value))
            elif isinstance(value, str) and len(value) <= LABEL_CHARS_MAX:
                self._label(name, value)

    def _label(self, name: str, value: str) -> None:
        if name not in self.labels and len(self.labels) >= FIELDS_MAX:
            return
        counts = self.labels.setdefault(name, {})
        known = value in counts or len(counts) < LABELS_MAX
        key = value if known else OTHER
        counts[key] = counts.get(key, 0) + 1

    def stats(self) -> VariantStats:
        """Keys ascending, so that equal windows have equal bytes."""
        return VariantStats(
            ok=self.ok,
            failed=self.failed,
            expired=self.expired,
            schema_violations=self.schema_violations,
            busy_us=self.busy_us,
            tokens=self.tokens,
            latency=dict(sorted(self.latency.items())),
            scores={name: dict(sorted(sketch.items())) for name, sketch in sorted(self.scores.items())},
            labels={
                name: dict(sorted(counts.items()))
                for name, counts in sorted(self.labels.items())
                if len(counts) < LABELS_MAX  # free text is no category
            },
            pinned=self.pinned,
        )


def _count(sketch: dict[int, int], bucket: int) -> None:
    sketch[bucket] = sketch.get(bucket, 0) + 1


class _Window(Struct):
    complete: bool
    tallies: dict[tuple[str, str, str], _Tally] = msgspec.field(default_factory=dict)
    """By (model, variant, version)."""
    offsets: dict[int, list[int]] = msgspec.field(default_factory=dict)
    """{partition: [first, next]} of sie.results."""


class WindowBook:
    """The windows that are open. `since_ms`: it reads everything with timestamps from then on."""

    def __init__(self, since_ms: int, reporter: str, window_ms: int = WINDOW_MS) -> None:
        self._since_ms = since_ms
        self._reporter = reporter
        self._window_ms = window_ms
        self._closed_to_ms = since_ms - since_ms % window_ms
        self._windows: dict[int, _Window] = {}
        self._joined_ms: dict[str, int] = {}
        """{model: since when its results are added}, of those that came later than the book."""
        self.late = 0
        """Results of windows that were closed before they came."""

    def joined(self, model: str, at_ms: int) -> None:
        """Results of this model are added from now on; earlier ones were passed over, with timestamps below `at_ms`."""
        self._joined_ms[model] = at_ms

    def lost(self, at_ms: int) -> None:
        """The reader lost its place: windows that are open, and the one of `at_ms`, are not complete."""
        self._since_ms = max(self._since_ms, at_ms)
        for window in self._windows.values():
            window.complete = False

    def add(self, result: Result, timestamp_ms: int, partition: int, offset: int, headers: Headers = ()) -> None:
        """One terminal record (or, of a shadow, what would have been one) that reached a variant.

        Whoever pins requests chooses which: that they fail or are slow says something of the version, what is answered
        to them says nothing of how it would answer all others.
        """
        if not result.variant:
            return  # refused by ingress: no variant saw it
        start_ms = timestamp_ms - timestamp_ms % self._window_ms
        if start_ms < self._closed_to_ms:
            self.late += 1
            return
        window = self._windows.get(start_ms)
        if window is None:
            window = self._windows[start_ms] = _Window(complete=start_ms >= self._since_ms)
        variant = result.variant.removeprefix(SHADOW)
        key = (result.model, variant, result.version)
        tally = window.tallies.get(key)
        if tally is None:
            tally = window.tallies[key] = _Tally()
        tally.add(result)
        if pinned_in(headers):
            tally.pinned += result.status in COUNTED
        elif result.outputs is not None:
            tally.add_outputs(result.outputs)
        if result.variant[:1] != SHADOW:
            span = window.offsets.setdefault(partition, [offset, offset + 1])
            span[0], span[1] = min(span[0], offset), max(span[1], offset + 1)

    def is_due(self, now_ms: int) -> bool:
        """Whether `close` would close a window."""
        end_ms = self._end_ms(now_ms)
        return any(start < end_ms for start in self._windows)

    def _end_ms(self, now_ms: int) -> int:
        end_ms = now_ms - GRACE_MS
        return end_ms - end_ms % self._window_ms

    def close(self, now_ms: int) -> Iterator[VariantWindow]:
        """Every window that ended `GRACE_MS` before `now_ms` or earlier, oldest first, stable variants first."""
        end_ms = self._end_ms(now_ms)
        for start_ms in sorted(start for start in self._windows if start < end_ms):
            window = self._windows.pop(start_ms)
            offsets = tuple((number, span[0], span[1]) for number, span in sorted(window.offsets.items()))
            for key in sorted(window.tallies, key=lambda one: (one[0], one[1] != "stable", one[1], one[2])):
                model, variant, version = key
                yield VariantWindow(
                    model,
                    variant,
                    version,
                    start_ms,
                    start_ms + self._window_ms,
                    window.complete and start_ms >= self._joined_ms.get(model, 0),
                    window.tallies[key].stats(),
                    self._reporter,
                    offsets,
                )
        self._closed_to_ms = max(self._closed_to_ms, end_ms)
