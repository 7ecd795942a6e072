"""A report as one HTML file: no script, nothing loaded from elsewhere, plots as inline SVG."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from sie_stream.cli.replaying.show import versions
from sie_stream.replay.compare import CAUSES
from sie_stream.replay.drift import Histogram
from sie_stream.replay.report import Difference, ModelReport, Report, Spread

WIDTH, HEIGHT, MARGIN = 520, 190, 34
BEFORE, AFTER = "#3b6ea5", "#d9822b"
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 68rem; padding: 0 1rem; color: #1c2430;
  background: #fff }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2.2rem }
table { border-collapse: collapse; width: 100%; margin: .6rem 0 } th, td { text-align: left; padding: .3rem .6rem;
  border-bottom: 1px solid #dde2e8; vertical-align: top; overflow-wrap: anywhere } th { font-weight: 600 }
.same { color: #23713f } .partial, .differs { color: #a33 } .plots { display: flex; flex-wrap: wrap; gap: 1.5rem }
figure { margin: 0 } figcaption { font-size: .9rem; color: #526070 } svg { max-width: 100%; height: auto }
code { font-size: .85rem }
"""


def report_page(report: Report) -> str:
    """The whole document."""
    title = f"Replay of {escape(report.title)}{' (partial)' if report.partial else ''}"
    return "\n".join(
        (
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">',
            f"<title>{title}</title><style>{STYLE}</style></head><body>",
            f"<h1>{title}</h1>",
            *_headline(report),
            *_causes(report),
            *(line for model in report.models for line in _model(model)),
            *_differences(report.differences),
            *_notes(report),
            "</body></html>",
        )
    )


def _headline(report: Report) -> Iterable[str]:
    if report.partial:
        yield '<p class="partial"><strong>Partial</strong>: stopped before its end; absences are not counted.</p>'
    word = (
        '<strong class="same">All the same.</strong>'
        if report.same
        else '<strong class="partial">All the same so far.</strong>'
        if report.partial and report.replayed and report.no_difference
        else '<strong class="partial">Nothing compared.</strong>'
        if not (report.replayed or report.causes)
        else '<strong class="differs">Not all the same.</strong>'
    )
    yield (
        f"<p>{word} {report.replayed} answered again in {report.seconds:.1f} s ({report.per_second:.0f} a second): "
        f"{report.equal} equal, {report.within} within tolerance, {report.different} different.</p>"
    )
    if report.unscored:
        parts = ", ".join(f"{count} {escape(status)}" for status, count in report.unscored.items())
        yield f"<p>Not compared, because nobody was answered from an engine then: {parts}.</p>"


def _rows(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _causes(report: Report) -> Iterable[str]:
    if report.causes:
        yield "<h2>Differences by cause</h2>"
        meanings = dict[str, str](**CAUSES)
        rows = ((cause, str(count), meanings[cause]) for cause, count in report.causes.items())
        yield _rows(("cause", "records", "meaning"), rows)


def _model(model: ModelReport) -> Iterable[str]:
    yield f"<h2>{escape(model.model)} <code>{escape(versions(model))}</code></h2>"
    yield (
        f"<p>{model.replayed} replayed, {model.equal} equal, {model.within} within tolerance, {model.different} "
        f"different; {model.labels_changed} decisions change. Shift of the scores: PSI {model.psi:.4f}, "
        f"KS {model.ks:.4f}.</p>"
    )
    yield '<div class="plots">'
    if model.scores is not None:
        yield _plot("score", model.scores, "")
    if model.latency is not None:
        yield _plot("time of a batch in the engine", model.latency, "ms")
    yield "</div>"
    if model.changes:
        rows = ((change.before, change.after, str(change.count)) for change in model.changes)
        yield _rows(("decision before", "decision after", "records"), rows)


def _plot(title: str, found: Spread, unit: str) -> str:
    """Two histograms over one axis, as steps."""
    bins = found.histogram
    peak = max((*bins.before, *bins.after, 1))
    right, bottom = WIDTH - MARGIN, HEIGHT - MARGIN
    label = f"{escape(title)}: before p50 {_number(found.before_p50)}, after p50 {_number(found.after_p50)}"
    return "".join(
        (
            f'<figure><svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" aria-label="{label}">',
            f'<line x1="{MARGIN}" y1="{bottom}" x2="{right}" y2="{bottom}" stroke="#8895a5"/>',
            f'<path d="{_steps(bins.before, peak)}" fill="{BEFORE}" fill-opacity=".35" stroke="{BEFORE}"/>',
            f'<path d="{_steps(bins.after, peak)}" fill="none" stroke="{AFTER}" stroke-width="2"/>',
            *(_text(x, bottom + 18, anchor, text) for x, anchor, text in _ticks(bins, right, unit)),
            _text(MARGIN, 14, "start", f"{peak} records"),
            f'<rect x="{right - 130}" y="6" width="10" height="10" fill="{BEFORE}" fill-opacity=".5"/>',
            _text(right - 116, 15, "start", "before"),
            f'<line x1="{right - 62}" y1="11" x2="{right - 50}" y2="11" stroke="{AFTER}" stroke-width="2"/>',
            _text(right - 46, 15, "start", "after"),
            f"</svg><figcaption>{label}</figcaption></figure>",
        )
    )


def _steps(counts: tuple[int, ...], peak: int) -> str:
    """Outline of a histogram, from the left foot to the right one."""
    width = (WIDTH - 2 * MARGIN) / len(counts)
    bottom = HEIGHT - MARGIN
    points = [f"M{MARGIN} {bottom}"]
    for number, count in enumerate(counts):
        top = bottom - count / peak * (bottom - 22)
        points.append(f"V{top:.1f}H{MARGIN + width * (number + 1):.1f}")
    return "".join(points) + f"V{bottom}"


def _ticks(bins: Histogram, right: int, unit: str) -> Iterable[tuple[float, str, str]]:
    middle = (bins.low + bins.high) / 2
    yield MARGIN, "start", _number(bins.low)
    yield (MARGIN + right) / 2, "middle", f"{_number(middle)} {unit}".strip()
    yield right, "end", _number(bins.high)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _text(x: float, y: float, anchor: str, text: str) -> str:
    return f'<text x="{x:.0f}" y="{y}" text-anchor="{anchor}" font-size="11" fill="#526070">{escape(text)}</text>'


def _differences(found: tuple[Difference, ...]) -> Iterable[str]:
    if not found:
        return
    yield f"<h2>First {len(found)} differences</h2>"
    rows = (
        (
            one.request_id,
            f"{one.place.topic}[{one.place.partition}]@{one.place.offset}" if one.place.topic else "-",
            one.cause,
            one.decision or ", ".join(one.fields),
            one.before,
            one.after,
        )
        for one in found
    )
    yield _rows(("request", "place", "cause", "decision or fields", "before", "after"), rows)


def _notes(report: Report) -> Iterable[str]:
    yield "<h2>Notes</h2><ul>"
    for reason, count in report.reasons.items():
        yield f"<li>{count} x {escape(reason)}</li>"
    for note in (*report.notes, f"Exact: {report.exact}"):
        yield f"<li>{escape(note)}</li>"
    yield "</ul>"
